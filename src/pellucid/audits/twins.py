"""Faulty twins: each is the healthy :class:`~pellucid.audits.toy.Toy` with one part wrong, as seen in public.

Every check has to catch its twins; ``TWINS`` says which twin belongs to which. To see an audit bite::

    audit(twins.SeesOneAhead(), checks=["future"])
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pellucid.audits.toy import Slots, Toy, ToyCache, ToyProbe
from pellucid.probe import Request
from pellucid.records import Status


def _back(queries: Slots, keys: Slots) -> Tensor:
    return queries.positions[:, :, None] - keys.positions[:, None, :]


def _together(queries: Slots, keys: Slots) -> Tensor:
    same = queries.segments[:, :, None] == keys.segments[:, None, :]
    return same & (keys.segments[:, None, :] != 0)


# -- future ------------------------------------------------------------------------------------------------------


class SeesOneAhead(Toy):
    """The mask is cut one diagonal too late: every token sees its own answer."""

    def sees(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        return _together(queries, keys) & (_back(queries, keys) >= -1)


class LastLayerOpen(Toy):
    """The last layer was built without the causal flag."""

    def sees(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        return (
            _together(queries, keys) if layer == len(self.layers) - 1 else super().sees(queries, keys, layer)
        )


class UpsideDown(Toy):
    """``True`` was taken to mean hidden: everyone sees the future only."""

    def sees(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        return _together(queries, keys) & (_back(queries, keys) < 0)


class AddsSmallMask(Toy):
    """The mask adds -4 to hidden scores where it should select: hidden content still counts a little."""

    def weights(self, scores_BTS: Tensor, sees_BTS: Tensor) -> Tensor:
        return torch.where(sees_BTS, scores_BTS, scores_BTS - 4.0).softmax(-1)


class CentredOverTime(Toy):
    """A normalisation takes its mean over the whole sequence, the future included."""

    def mixed(self, x_BTD: Tensor, queries: Slots) -> Tensor:
        return x_BTD - 0.1 * x_BTD.mean(1, keepdim=True)


class WindowOneTooWide(Toy):
    """A window of w was handed to a kernel that counts w keys besides the query itself."""

    def __init__(self, window: int = 3, layers: int = 1) -> None:
        super().__init__(window=window, layers=layers)

    def sees(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        assert self.window is not None
        back = _back(queries, keys)
        return _together(queries, keys) & (back >= 0) & (back <= self.window)


class OpenChunk(Toy):
    """A cached chunk sees all of itself: causal from the cache's end on only. Without a cache nothing is wrong."""

    def sees(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        inside = (keys.numbers >= queries.first) & (queries.first > 0)
        return super().sees(queries, keys, layer) | (_together(queries, keys) & inside[:, None, :])


# -- padding -----------------------------------------------------------------------------------------------------


class SeesPads(Toy):
    """The padding mask was built and never handed on."""

    def sees(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        at = torch.where(queries.segments != 0, queries.positions, queries.numbers)
        held = torch.where(keys.segments != 0, keys.positions, 0)
        other = (keys.segments[:, None, :] != 0) & (queries.segments[:, :, None] != keys.segments[:, None, :])
        return (at[:, :, None] >= held[:, None, :]) & ~other

    def entry(self, x_BTD: Tensor, queries: Slots, request: Request) -> Tensor:
        return x_BTD


class CountsSlots(Toy):
    """Learned positions count slots, so a left-padded row starts somewhere in the middle."""

    def counted_positions(self, queries: Slots) -> Tensor:
        single = queries.segments.amax() <= 1
        return queries.numbers.expand_as(queries.positions) if single else queries.positions


class PadsById(Toy):
    """Padding is recognised by token 0 in place of the mask: other ids in pads become text."""

    def entry(self, x_BTD: Tensor, queries: Slots, request: Request) -> Tensor:
        self._by_id = torch.where(request.tokens == 0, 0, queries.segments.clamp(min=1))
        return x_BTD

    def sees(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        if keys.positions.shape != self._by_id.shape:
            return super().sees(queries, keys, layer)
        guessed = Slots(keys.numbers.expand_as(keys.positions), self._by_id)
        return super().sees(guessed, guessed, layer)


class MeanOverPads(Toy):
    """A running mean over time divides by slots, pads included."""

    def mixed(self, x_BTD: Tensor, queries: Slots) -> Tensor:
        return x_BTD + x_BTD.cumsum(1) / (queries.numbers + 1)[:, :, None]


class PoisonedByPads(Toy):
    """Hidden values are multiplied by 0, which does not stop NaN: fragile, not a leak."""

    def entry(self, x_BTD: Tensor, queries: Slots, request: Request) -> Tensor:
        return x_BTD


# -- packing -----------------------------------------------------------------------------------------------------


class NoIsolation(Toy):
    """Packed documents see each other."""

    def sees(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        real = (queries.segments[:, :, None] != 0) & (keys.segments[:, None, :] != 0)
        later = queries.segments[:, :, None] > keys.segments[:, None, :]
        return (real & later) | super().sees(queries, keys, layer)


class LastLayerTogether(NoIsolation):
    """Only one kind of layer forgot the boundaries."""

    def sees(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        return (
            super().sees(queries, keys, layer)
            if layer == len(self.layers) - 1
            else Toy.sees(self, queries, keys, layer)
        )


class RunningPositions(Toy):
    """Documents are apart, but learned positions run on through the row."""

    def counted_positions(self, queries: Slots) -> Tensor:
        real = queries.segments != 0
        return torch.where(real, queries.positions[:, :1] + real.cumsum(1) - real[:, :1].long(), 0)


class BoundaryByToken(Toy):
    """A new document is guessed after each token 0, where the segments say it."""

    def entry(self, x_BTD: Tensor, queries: Slots, request: Request) -> Tensor:
        ended_BT = (request.tokens == 0).cumsum(1) - (request.tokens == 0).long()
        self._guessed = torch.where(queries.segments != 0, 1 + ended_BT, 0)
        self._running = queries.numbers.expand_as(queries.positions)
        return super().entry(x_BTD, queries, request)

    def sees(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        guessed = Slots(self._running, self._guessed)
        return super().sees(guessed, guessed, layer)


# -- batch -------------------------------------------------------------------------------------------------------


class CentredOverBatch(Toy):
    """A normalisation takes its mean over the rows of the batch."""

    def mixed(self, x_BTD: Tensor, queries: Slots) -> Tensor:
        return x_BTD - 0.5 * x_BTD.mean(0, keepdim=True)


class FirstRowsMask(Toy):
    """The mask of row 0 is used for every row: right for a batch of one."""

    def sees(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        return super().sees(queries, keys, layer)[:1].expand(queries.positions.shape[0], -1, -1)


class ScaledByBatch(Toy):
    """Activations are scaled by the largest of the whole batch, as in careless quantization."""

    def mixed(self, x_BTD: Tensor, queries: Slots) -> Tensor:
        top = x_BTD.abs().amax()
        return (x_BTD / top * 15).round() * top / 15


# -- loss --------------------------------------------------------------------------------------------------------


def _losses(scores_BTV: Tensor, tokens_BT: Tensor) -> Tensor:
    return functional.cross_entropy(scores_BTV.flatten(0, 1), tokens_BT.flatten(), reduction="none").view(
        tokens_BT.shape
    )


class ShiftedTwice(Toy):
    """Labels are shifted by the data and again by the model: token t + 2 is learnt at t."""

    def loss(self, request: Request) -> tuple[Tensor, Tensor]:
        learnt = request.learnt[:, 2:] & (request.positions[:, 2:] > 1)
        losses = _losses(self(request)[:, :-2], request.tokens[:, 2:])
        return torch.where(learnt, losses, 0.0).sum(), learnt.sum()


class NotShifted(Toy):
    """Each side left the shift to the other: a token learns to predict itself."""

    def loss(self, request: Request) -> tuple[Tensor, Tensor]:
        learnt = request.learnt
        return torch.where(learnt, _losses(self(request), request.tokens), 0.0).sum(), learnt.sum()


class MeansOfMeans(Toy):
    """Rows are averaged first, so tokens of short rows weigh more."""

    def loss(self, request: Request) -> tuple[Tensor, Tensor]:
        learnt = request.learnt[:, 1:]
        losses = torch.where(learnt, _losses(self(request)[:, :-1], request.tokens[:, 1:]), 0.0)
        rows = losses.sum(1) / learnt.sum(1).clamp(min=1)
        busy = learnt.any(1).sum().clamp(min=1)
        return rows.sum() / busy * learnt.sum(), learnt.sum()


class IgnoresTokenZero(Toy):
    """Pads are found by id 0, so a true token 0 (an end token, say) is never learnt."""

    def loss(self, request: Request) -> tuple[Tensor, Tensor]:
        return super().loss(request.with_targets(request.learnt & (request.tokens > 0)))


class LearnsPads(Toy):
    """Pads behind the text are counted as targets."""

    def loss(self, request: Request) -> tuple[Tensor, Tensor]:
        learnt = request.learnt[:, 1:] | (request.segments[:, 1:] == 0)
        losses = _losses(self(request)[:, :-1], request.tokens[:, 1:])
        return torch.where(learnt, losses, 0.0).sum(), learnt.sum()


class CrossesBorders(Toy):
    """The last token of a document is trained to predict the first of the next."""

    def loss(self, request: Request) -> tuple[Tensor, Tensor]:
        real = (request.segments[:, 1:] != 0) & (request.segments[:, :-1] != 0)
        learnt = real if request.targets is None else real & request.targets[:, 1:]
        losses = _losses(self(request)[:, :-1], request.tokens[:, 1:])
        return torch.where(learnt, losses, 0.0).sum(), learnt.sum()


class NothingIsNaN(Toy):
    """A mean over nothing is taken on the way: 0 / 0."""

    def loss(self, request: Request) -> tuple[Tensor, Tensor]:
        total, count = super().loss(request)
        return total / count * count, count


# -- cache -------------------------------------------------------------------------------------------------------


class TopLeftAnchor(Toy):
    """The causal mask of a chunk starts at key 0: the first new query sees one key."""

    def sees(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        from_zero = Slots(queries.positions - queries.first, queries.segments)
        return super().sees(from_zero, keys, layer)


class SharedCounter(Toy):
    """Chunks after the first take the cache's length as position of every row, padded or not."""

    def counted_positions(self, queries: Slots) -> Tensor:
        return queries.numbers.expand_as(queries.positions) if queries.first else queries.positions


class _HalfReordered(ToyCache):
    def reorder(self, index_B: Tensor) -> None:
        v = self.v
        super().reorder(index_B)
        self.v = v


class ForgetsToReorder(Toy):
    """Keys change places with their beams, values stay."""

    cache_class = _HalfReordered


class _Uncropped(ToyCache):
    def crop(self, keep: int) -> None:
        super().crop(keep or self.length)


class CropOfZeroKeepsAll(Toy):
    """``crop(0)`` is read as "no crop"."""

    cache_class = _Uncropped


class _Aliased(ToyCache):
    def snapshot(self) -> ToyCache:
        copy = object.__new__(type(self))
        copy.__dict__ = dict(self.__dict__)
        return copy


class SnapshotAliases(Toy):
    """A snapshot shares its tensors with the cache that goes on."""

    cache_class = _Aliased


class SeesUnusedSlots(Toy):
    """Slots that were never written are hidden by a small number in place of a selection."""

    def sees(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        spare = (keys.segments == 0) & (keys.numbers >= queries.first + queries.positions.shape[1])
        return super().sees(queries, keys, layer) | spare[:, None, :]


# -- trace -------------------------------------------------------------------------------------------------------


class CountsCalls(Toy):
    """A buffer counts the calls."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def entry(self, x_BTD: Tensor, queries: Slots, request: Request) -> Tensor:
        self.calls += 1
        return super().entry(x_BTD, queries, request)


class DropsOutInEval(Toy):
    """Functional dropout without the training flag."""

    def mixed(self, x_BTD: Tensor, queries: Slots) -> Tensor:
        return functional.dropout(x_BTD, 0.1, training=True)


class DrawsNumbers(Toy):
    """Random numbers are drawn and not used: the caller's generator still moves."""

    def mixed(self, x_BTD: Tensor, queries: Slots) -> Tensor:
        return x_BTD + 0 * torch.rand(())


class WritesIntoTokens(Toy):
    """Padding is overwritten in place, in the caller's own tensor."""

    def entry(self, x_BTD: Tensor, queries: Slots, request: Request) -> Tensor:
        request.tokens[request.segments == 0] = 1
        return super().entry(x_BTD, queries, request)


class RemembersTheLast(Toy):
    """Something of the last request, kept in an attribute, tints the next answer."""

    _last: float = 0.0

    def mixed(self, x_BTD: Tensor, queries: Slots) -> Tensor:
        before, self._last = self._last, float(x_BTD[0, 0, 0])
        return x_BTD + before * torch.linspace(-1, 1, x_BTD.shape[-1]).to(x_BTD)


@dataclass(frozen=True)
class Twin:
    """A faulty model, the check that has to catch it, and the verdict that it deserves."""

    make: Callable[[], Toy]
    check: str
    verdict: Status = "leak"

    @property
    def name(self) -> str:
        return getattr(self.make, "__name__", str(self.make))

    @property
    def fault(self) -> str:
        """What is wrong with it."""
        return " ".join((self.make.__doc__ or "").split())

    def probe(self) -> ToyProbe:
        return self.make().probe()


_OF_CHECK: dict[str, tuple[Callable[[], Toy], ...]] = {
    "future": (
        SeesOneAhead, LastLayerOpen, UpsideDown, AddsSmallMask, CentredOverTime, WindowOneTooWide, OpenChunk,
    ),
    "padding": (SeesPads, CountsSlots, PadsById, MeanOverPads),
    "packing": (NoIsolation, LastLayerTogether, RunningPositions, BoundaryByToken),
    "batch": (CentredOverBatch, FirstRowsMask, ScaledByBatch),
    "loss": (ShiftedTwice, NotShifted, MeansOfMeans, IgnoresTokenZero, LearnsPads, CrossesBorders, NothingIsNaN),
    "cache": (TopLeftAnchor, SharedCounter, ForgetsToReorder, CropOfZeroKeepsAll, SnapshotAliases, SeesUnusedSlots),
    "trace": (CountsCalls, DropsOutInEval, DrawsNumbers, WritesIntoTokens, RemembersTheLast),
}  # fmt: skip

TWINS: tuple[Twin, ...] = (
    *(Twin(make, check) for check, makes in _OF_CHECK.items() for make in makes),
    Twin(PoisonedByPads, "padding", "fragile"),
)
"""Every shipped twin."""
