"""Objectives that predict what comes later in the same document; and what all objectives have in common."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from pellucid.batch import IGNORED, Batch
from pellucid.data.tokenizer import with_begin
from pellucid.errors import ArgumentError
from pellucid.shapes import Int, Tensor


class Objective(Protocol):
    """Says what a batch has to predict; ``generator`` is all that it draws from."""

    def __call__(self, batch: Batch, generator: torch.Generator | None = None, /) -> Batch: ...


def overlap_of(objective: Objective) -> int:
    """Tokens that pieces of a long document share, so that the objective counts each thing exactly once.

    That is its attribute ``overlap``; the default is that of the next token: 1.
    """
    return int(getattr(objective, "overlap", 1))


def describe(objective: Objective) -> str:
    """Stable text that identifies an objective in the state of a loader."""
    if hasattr(objective, "__dataclass_fields__"):
        return repr(objective)
    return str(getattr(objective, "__qualname__", type(objective).__qualname__))


def require_generator(generator: torch.Generator | None, what: str) -> torch.Generator:
    """``generator``, which drawing needs."""
    if generator is None:
        raise ArgumentError(f"{what} draws at random, but generator is None; call it with a torch.Generator")
    return generator


def check_fraction(name: str, value: float) -> None:
    """Refuse what does not lie in (0, 1]."""
    if not 0 < value <= 1:
        raise ArgumentError(f"{name} is {value!r}; give a fraction above 0 and at most 1")


def causal(batch: Batch, generator: torch.Generator | None = None) -> Batch:
    """``batch`` with the next token as each position's label; ``generator`` is not needed.

    ``labels[b, t]`` is the token in slot t+1 where that is the next position of the same document, and
    :data:`IGNORED` elsewhere: at a document's last token and at padding. What is padding, segments say and
    ids do not, so a true end token counts even where padding has the same id. Labels already given stay.

    >>> causal(Batch.packed([[5, 8, 2], [7, 9]], length=6)).labels.tolist()
    [[8, 2, -100, 9, -100, -100]]
    """
    return batch if batch.labels is not None else batch.with_labels(_shifted_labels(batch, 1))


@dataclass(frozen=True)
class MultiStepTarget:
    """Each position predicts the token ``steps`` later in its document; :func:`causal` is one step.

    >>> MultiStepTarget(2)(Batch.packed([[5, 8, 2], [7, 9]])).labels.tolist()
    [[2, -100, -100, -100, -100]]
    """

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ArgumentError(f"steps is {self.steps}; predict 1 or more steps ahead")

    @property
    def overlap(self) -> int:
        """Tokens that pieces of a document share, so that each pair is trained once."""
        return self.steps

    def __call__(self, batch: Batch, generator: torch.Generator | None = None) -> Batch:
        return batch if batch.labels is not None else batch.with_labels(_shifted_labels(batch, self.steps))


@dataclass(frozen=True)
class PrefixLM:
    """Each document's beginning is given whole, and only what follows it is predicted.

    The prefix has group 1, which the rule ``prefix()`` lets every position of the document see; the rest has 0.
    A batch with groups keeps them. Else the prefix is ``prefix_fraction`` of the document, or ends at a random token
    (uniform), and always leaves a token to predict. The last token of the prefix predicts the first after it.
    (T5, section 3.2.3.)
    """

    prefix_fraction: float | None = None
    overlap = 1

    def __post_init__(self) -> None:
        if self.prefix_fraction is not None:
            check_fraction("prefix_fraction", self.prefix_fraction)

    def __call__(self, batch: Batch, generator: torch.Generator | None = None) -> Batch:
        if batch.labels is not None:
            return batch
        groups = self._split(batch, generator) if batch.groups is None else batch.groups
        labels, inside = _shifted_labels(batch, 1), torch.zeros_like(groups, dtype=torch.bool)
        inside[:, :-1] = groups[:, 1:] != 0
        return replace(batch, groups=groups, labels=labels.masked_fill(inside, IGNORED))

    def _split(self, batch: Batch, generator: torch.Generator | None) -> Int[Tensor, "B T"]:
        slots, document = batch.document_slots
        lengths = np.bincount(document)
        if self.prefix_fraction is None:
            generator = require_generator(generator, "PrefixLM without a prefix_fraction")
            drawn = torch.rand(len(lengths), generator=generator, dtype=torch.float64).numpy()
            sizes = 1 + (drawn * (lengths - 1)).astype(np.int64)
        else:
            sizes = np.maximum(1, np.minimum(np.round(self.prefix_fraction * lengths), lengths - 1))
        groups = np.zeros(batch.tokens.numel(), dtype=np.int64)
        groups[slots] = batch.positions.numpy().reshape(-1)[slots] < sizes[document]
        return torch.from_numpy(groups).view(batch.shape)


@dataclass(frozen=True)
class SequenceToSequence:
    """Teacher forcing: the decoder reads ``start_id`` and the target, and predicts the target.

    A document that already begins with ``start_id`` gets no second one. The batch needs a ``source``.

    >>> batch = SequenceToSequence(0)(Batch.from_pairs([[5, 8]], [[7, 2]]))
    >>> batch.tokens.tolist(), batch.labels.tolist()
    ([[0, 7, 2]], [[7, 2, -100]])
    """

    start_id: int
    overlap = 0

    def __call__(self, batch: Batch, generator: torch.Generator | None = None) -> Batch:
        if batch.labels is not None:
            return batch
        if batch.source is None:
            raise ArgumentError(
                "SequenceToSequence needs batch.source, and it is None; make pairs with Batch.from_pairs"
            )
        return causal(self._started(batch))

    def _started(self, batch: Batch) -> Batch:
        """The batch with the start token before each document, in as many slots as before where that is enough."""
        first = (batch.positions == 0) & (batch.segments != 0)
        missing = first & (batch.tokens != self.start_id)
        if not missing.any():
            return batch
        for name in ("groups", "types", "targets"):
            if getattr(batch, name) is not None:
                raise ArgumentError(
                    f"a start token would have to be put before documents with {name}; begin each with "
                    f"start_id {self.start_id} when they are made"
                )
        slots, document = batch.document_slots
        parts = iter(np.split(batch.tokens.numpy().reshape(-1)[slots], np.cumsum(np.bincount(document))[:-1]))
        rows = [
            [(segment, with_begin(self.start_id, next(parts).tolist())) for segment in lengths]
            for lengths in batch.document_lengths
        ]
        longest = max(sum(len(ids) for _, ids in row) for row in rows)
        return replace(Batch.from_numbered(rows, length=max(longest, batch.shape[1])), source=batch.source)


def _shifted_labels(batch: Batch, steps: int) -> Int[Tensor, "B T"]:
    """The token ``steps`` positions later in the same document, or :data:`IGNORED`."""
    labels = torch.full_like(batch.tokens, IGNORED)
    here, there = slice(None, -steps), slice(steps, None)
    segments, positions = batch.segments, batch.positions
    continues = (segments[:, here] == segments[:, there]) & (segments[:, here] != 0)
    continues &= positions[:, there] == positions[:, here] + steps
    labels[:, here] = torch.where(continues, batch.tokens[:, there], IGNORED)
    return labels
