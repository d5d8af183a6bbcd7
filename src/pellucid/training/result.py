"""``TrainResult``: what a run came to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pellucid.training.results import Validation
from pellucid.training.state import TrainerState


@dataclass(frozen=True)
class TrainResult:
    """What a run came to."""

    run: Path
    checkpoint: Path
    steps: int
    tokens: int
    """Predictions that were learnt from: tokens, or documents where each is asked one thing."""
    tokens_per_second: float
    """While stepping: validation and saving left out."""
    validation: Validation | None
    """Over all held-out documents; None when the run was interrupted."""
    interrupted: bool
    signal: str = ""
    """The name of the signal that interrupted it."""

    @classmethod
    def of(
        cls,
        run: Path,
        checkpoint: Path,
        counters: TrainerState,
        validation: Validation | None,
        *,
        signal: str = "",
    ) -> TrainResult:
        """What ``counters`` say, in the words of a result."""
        speed = counters.tokens / counters.training_seconds if counters.training_seconds else 0.0
        return cls(run, checkpoint, counters.step, counters.tokens, speed, validation, bool(signal), signal)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        found = self.validation
        return {
            "run": str(self.run),
            "checkpoint": str(self.checkpoint),
            "steps": self.steps,
            "tokens_trained": self.tokens,
            "train_tokens_per_second": self.tokens_per_second,
            "heldout_bits_per_byte": found.bits_per_byte if found is not None and found.bytes else None,
            "heldout_bytes": None if found is None else found.bytes,
            "heldout_documents": None if found is None else found.documents,
            "heldout_loss": None if found is None else found.loss,
            **({} if found is None else {f"heldout_{name}": value for name, value in found.said().items()}),
            "interrupted": self.interrupted,
            "signal": self.signal or None,
        }

    def __str__(self) -> str:
        found = self.validation
        end = "interrupted" if found is None else f"{found} held out"
        items = "tokens" if found is None else f"{found.item}s"
        return (
            f"{self.checkpoint}: {self.steps:,} steps, {self.tokens:,} {items}, "
            f"{self.tokens_per_second:,.0f} {items}/s, {end}"
        )
