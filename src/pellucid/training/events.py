"""The events of a run, in the order in which they happen, as plain values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pellucid.training.results import Validation
from pellucid.training.step import RoutingStats


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
    bits_per_byte: float | None
    """None for objectives that do not predict every byte."""
    nats: float
    """Over all items: tokens, or whatever the objective counts."""
    loss: float
    tokens: int
    bytes: int
    documents: int
    final: bool
    best: bool
    seconds: float
    found: Validation | None = None
    """The same with its metrics and baselines, where it is not in bits per byte."""

    @classmethod
    def of(cls, found: Validation, step: int, *, best: bool, final: bool, seconds: float) -> Validated:
        """What ``found`` says, as an event."""
        return cls(
            step=step,
            bits_per_byte=found.bits_per_byte if found.bytes else None,
            nats=found.nats,
            loss=found.loss,
            tokens=found.tokens,
            bytes=found.bytes,
            documents=found.documents,
            final=final,
            best=best,
            seconds=seconds,
            found=None if found.bytes else found,
        )


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
