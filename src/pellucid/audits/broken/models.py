"""Ten broken models, each a healthy one with one part wrong, as seen in public code.

Every check has to catch the models that are broken in its way; ``BROKEN_MODELS`` says which. To see an audit fail::

    audit(broken.SeesOneAhead(), checks=["future"])
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from pellucid.audits.broken.tiny_decoder import Slots, TinyDecoder, token_losses
from pellucid.audits.broken.tiny_encoder_decoder import TinyEncoderDecoder
from pellucid.batch import Batch
from pellucid.probe import Probe
from pellucid.records import Status


@dataclass(frozen=True)
class BrokenModel:
    """A faulty model, the check that has to catch it, and the verdict that it deserves."""

    make: Callable[[], nn.Module]
    check: str
    verdict: Status = "leak"

    @property
    def name(self) -> str:
        return getattr(self.make, "__name__", str(self.make))

    @property
    def fault(self) -> str:
        """What is wrong with it."""
        return " ".join((self.make.__doc__ or "").split())

    def probe(self) -> Probe:
        probe: Probe = self.make().probe()  # type: ignore[operator]
        return probe


def _distance(queries: Slots, keys: Slots) -> Tensor:
    return queries.positions[:, :, None] - keys.positions[:, None, :]


def _same_document(queries: Slots, keys: Slots) -> Tensor:
    same = queries.segments[:, :, None] == keys.segments[:, None, :]
    return same & (keys.segments[:, None, :] != 0)


class SeesOneAhead(TinyDecoder):
    """The mask is cut one diagonal too late: every token sees its own answer."""

    def sees(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        return _same_document(queries, keys) & (_distance(queries, keys) >= -1)


class WindowOneTooWide(TinyDecoder):
    """A window of w was handed to a kernel that counts w keys besides the query itself."""

    def __init__(self, window: int = 3, layers: int = 1) -> None:
        super().__init__(window=window, layers=layers)

    def sees(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        assert self.window is not None
        distance = _distance(queries, keys)
        return _same_document(queries, keys) & (distance >= 0) & (distance <= self.window)


class MeanOverPads(TinyDecoder):
    """A running mean over time divides by slots, pads included."""

    def mixed(self, x_BTD: Tensor, queries: Slots) -> Tensor:
        return x_BTD + x_BTD.cumsum(1) / (queries.numbers + 1)[:, :, None]


class NoIsolation(TinyDecoder):
    """Packed documents see each other."""

    def sees(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        real = (queries.segments[:, :, None] != 0) & (keys.segments[:, None, :] != 0)
        later = queries.segments[:, :, None] > keys.segments[:, None, :]
        return (real & later) | super().sees(queries, keys, layer)


class SharedCounter(TinyDecoder):
    """Chunks after the first take the cache's length as position of every row, padded or not."""

    def counted_positions(self, queries: Slots) -> Tensor:
        return queries.numbers.expand_as(queries.positions) if queries.first else queries.positions


class DropsOutInEval(TinyDecoder):
    """Functional dropout without the training flag."""

    def mixed(self, x_BTD: Tensor, queries: Slots) -> Tensor:
        return functional.dropout(x_BTD, 0.1, training=True)


class WindowLostByOneKernel(TinyDecoder):
    """The kernel that knows no windows sees everything before it."""

    def __init__(self) -> None:
        super().__init__(window=3)

    def sees(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        if self.kernel == "plain":
            return super().sees(queries, keys, layer)
        return _same_document(queries, keys) & (_distance(queries, keys) >= 0)


class ShiftedTwice(TinyDecoder):
    """Labels are shifted by the data and again by the model: token t + 2 is learnt at t."""

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        learnt = batch.loss_mask[:, 2:] & (batch.positions[:, 2:] > 1)
        losses = token_losses(self(batch)[:, :-2], batch.tokens[:, 2:])
        return torch.where(learnt, losses, 0.0).sum(), learnt.sum()


class InvertedMask(TinyDecoder):
    """Keys are kept where they are padding."""

    def sees(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        past_BTS = queries.numbers[:, :, None] >= keys.numbers[:, None, :]
        if bool((keys.segments != 0).all()):
            return super().sees(queries, keys, layer)
        return past_BTS & (keys.segments == 0)[:, None, :]


class CrossIsCausal(TinyEncoderDecoder):
    """The decoder's causal mask was handed to cross-attention too: query 0 sees the first source token only."""

    def memory_mask(self, targets: int, sources: int) -> Tensor:
        return torch.ones(targets, sources, dtype=torch.bool).triu(1)


BROKEN_MODELS = (
    BrokenModel(SeesOneAhead, "future"),
    BrokenModel(WindowOneTooWide, "window"),
    BrokenModel(MeanOverPads, "padding"),
    BrokenModel(NoIsolation, "packing"),
    BrokenModel(SharedCounter, "cache"),
    BrokenModel(DropsOutInEval, "dropout"),
    BrokenModel(WindowLostByOneKernel, "kernels"),
    BrokenModel(ShiftedTwice, "loss"),
    BrokenModel(InvertedMask, "polarity"),
    BrokenModel(CrossIsCausal, "cross"),
)
"""The broken models of the package, each with the check that has to catch it."""
