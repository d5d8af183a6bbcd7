"""What a run reports: results of evaluations, events in the order in which they happen, and the result of the run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pellucid.training.routing import RoutingStats
from pellucid.training.state import TrainerState


class MetricValue(NamedTuple):
    """A metric, and its ``baseline``: the value that a constant answer, taken from the training data, reaches."""

    name: str
    value: float
    baseline: float | None = None

    def __str__(self) -> str:
        beside = "" if self.baseline is None else f" (baseline {self.baseline:.4f})"
        return f"{self.name} {self.value:.4f}{beside}"


class Validation(NamedTuple):
    """The result of an evaluation: sums over documents, and what follows from them."""

    nats: float
    """The loss of all items together (of a regression: squared errors)."""
    tokens: int
    """The items that were counted: tokens, or documents where each has one target."""
    bytes: int
    """Of the text; 0 where not all of it is predicted, so that bits per byte would mean nothing."""
    documents: int
    item: str = "token"
    metrics: tuple[MetricValue, ...] = ()
    """The first is the loss of an item."""
    baseline: str = ""
    """What the baselines are, in words."""

    @property
    def bits_per_byte(self) -> float:
        """Total bits over total bytes."""
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan

    @property
    def loss(self) -> float:
        """Of one item."""
        return self.nats / self.tokens

    @property
    def measure(self) -> float:
        """What is compared between evaluations of a run; lower is better."""
        return self.bits_per_byte if self.bytes else self.loss

    def __str__(self) -> str:
        if self.bytes:
            return f"{self.bits_per_byte:.4f} bits/byte"
        return ", ".join(map(str, self.metrics)) or f"{self.loss:.4f} a {self.item}"

    def to_dict(self) -> dict[str, Any]:
        """Item, metrics and baseline as plain data; empty for bits per byte."""
        if self.bytes:
            return {}
        metrics = {metric.name: {"value": metric.value, "baseline": metric.baseline} for metric in self.metrics}
        return {"item": self.item, "metrics": metrics, "baseline": self.baseline}


def parse_validation(line: dict[str, Any]) -> Validation | None:
    """The evaluation in a line of the log; None where the line does not hold one."""
    nats, counts = line.get("nats"), [line.get(name) for name in ("tokens", "bytes", "documents")]
    if type(nats) is not float or not all(type(count) is int and count >= 0 for count in counts):
        return None
    tokens, size, documents = (int(str(count)) for count in counts)
    if not tokens or not documents:
        return None
    if size:
        return Validation(nats, tokens, size, documents)
    item, baseline, metrics = line.get("item"), line.get("baseline"), line.get("metrics")
    if not isinstance(item, str) or not isinstance(baseline, str) or not isinstance(metrics, dict):
        return None
    found = [_metric(name, value) for name, value in metrics.items()]
    known = tuple(metric for metric in found if metric is not None)
    return Validation(nats, tokens, 0, documents, item, known, baseline) if len(known) == len(found) else None


def _metric(name: str, to_dict: Any) -> MetricValue | None:
    if not isinstance(to_dict, dict):
        return None
    value, baseline = to_dict.get("value"), to_dict.get("baseline")
    if type(value) is not float or (baseline is not None and type(baseline) is not float):
        return None
    return MetricValue(name, value, baseline)


@dataclass(frozen=True)
class Prepared:
    """Data, tokenizer and model are ready; the first step comes next."""

    run: Path
    parameters: int
    documents: int
    tokens: int
    """Tokens of the training documents."""
    rows: int
    """Rows in an epoch."""


@dataclass(frozen=True)
class Resumed:
    """The run continues after ``step``, as if it had never stopped; 0: there was no checkpoint yet."""

    run: Path
    step: int


@dataclass(frozen=True)
class Finished:
    """The run was finished before; nothing is left to do."""

    run: Path
    step: int


@dataclass(frozen=True)
class Stepped:
    """A step is done. ``tokens`` counts the targets of the run so far; padding and first tokens are none."""

    step: int
    tokens: int
    num_targets: int
    """Targets of this step."""
    loss: float
    """Nats a target (of a regression: the squared error), over the whole step."""
    learning_rate: float
    """The learning rate that was used."""
    grad_norm: float
    """Before clipping."""
    epoch: float
    seconds: float
    """What this step took."""
    progress: float
    """The fraction of the run that is over, 0 … 1."""
    minutes: float
    item: str = "token"
    """What is predicted: a token, or whatever the objective counts."""
    routing: RoutingStats | None = None
    """Where experts are: how evenly the step's tokens were spread over them."""

    @property
    def minutes_left(self) -> float:
        """Minutes until the end of the run, at the pace so far."""
        return self.minutes * (1 - self.progress) / self.progress if self.progress else 0.0


@dataclass(frozen=True)
class Validated:
    """An evaluation on held-out documents after ``step``; ``final``: on all of them."""

    step: int
    result: Validation
    final: bool
    best: bool
    seconds: float


@dataclass(frozen=True)
class Saved:
    """A checkpoint is complete."""

    step: int
    path: Path


@dataclass(frozen=True)
class Interrupted:
    """A signal asked the run to stop; the step is finished, evaluated if that is due, and saved first."""

    signal: str


@dataclass(frozen=True)
class Warned:
    """A warning of one line; the run continues."""

    message: str


Event = Prepared | Resumed | Finished | Stepped | Validated | Saved | Interrupted | Warned
Listener = Callable[[Event], None]


@dataclass(frozen=True)
class TrainResult:
    """The result of a run."""

    run: Path
    checkpoint: Path
    steps: int
    tokens: int
    """Targets that were trained on: tokens, or documents where each has one target."""
    tokens_per_second: float
    """While stepping: evaluation and saving are left out."""
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
        trainer_state: TrainerState,
        validation: Validation | None,
        *,
        signal: str = "",
    ) -> TrainResult:
        """The result of a run that is at ``trainer_state``."""
        speed = trainer_state.tokens / trainer_state.training_seconds if trainer_state.training_seconds else 0.0
        return cls(run, checkpoint, trainer_state.step, trainer_state.tokens, speed, validation, bool(signal), signal)

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
            **({} if found is None else {f"heldout_{name}": value for name, value in found.to_dict().items()}),
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
