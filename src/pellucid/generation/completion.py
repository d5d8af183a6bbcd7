"""What came of a prompt, as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pellucid.generation.decode import FinishReason


@dataclass(frozen=True)
class Completion:
    """``tokens`` are all that were drawn, a stop id included; ``text`` is what came before the stop."""

    text: str
    tokens: list[int]
    logprobs: list[float]
    finish_reason: FinishReason

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class ScoredCompletion(Completion):
    """A completion that a beam search found; ``score`` is what it was compared by."""

    score: float
