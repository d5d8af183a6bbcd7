"""Models through which information flows where it must not: future, padding, packing, batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from broken_models.catalog import caught_by
from pellucid.audits.broken import NoIsolation
from pellucid.audits.broken.tiny_decoder import Slots, TinyCache, TinyDecoder
from pellucid.batch import Batch


def _back(queries: Slots, keys: Slots) -> Tensor:
    return queries.positions[:, :, None] - keys.positions[:, None, :]


def _together(queries: Slots, keys: Slots) -> Tensor:
    same = queries.segments[:, :, None] == keys.segments[:, None, :]
    return same & (keys.segments[:, None, :] != 0)


class LastLayerOpen(TinyDecoder):
    """The last layer was built without the causal flag."""

    def sees(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        return _together(queries, keys) if layer == len(self.layers) - 1 else super().sees(queries, keys, layer)


class UpsideDown(TinyDecoder):
    """``True`` was taken to mean hidden: everyone sees the future only."""

    def sees(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        return _together(queries, keys) & (_back(queries, keys) < 0)


class AddsSmallMask(TinyDecoder):
    """The mask adds -4 to hidden scores where it should select: hidden content still counts a little."""

    def weights(self, scores_BTS: Tensor, sees_BTS: Tensor) -> Tensor:
        return torch.where(sees_BTS, scores_BTS, scores_BTS - 4.0).softmax(-1)


class CentredOverTime(TinyDecoder):
    """A normalisation takes its mean over the whole sequence, the future included."""

    def mixed(self, x_BTD: Tensor, queries: Slots) -> Tensor:
        return x_BTD - 0.1 * x_BTD.mean(1, keepdim=True)


class CausalOnlyBesidePadding(TinyDecoder):
    """The causal flag is a hint: the mask is made where padding calls for one, and full rows go without."""

    def sees(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        padded = bool((queries.segments == 0).any())
        return super().sees(queries, keys, layer) if padded else _together(queries, keys)


class OpenChunk(TinyDecoder):
    """A cached chunk sees all of itself: causal up to the cache's end only. Without a cache all is well."""

    def sees(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        inside = (keys.numbers >= queries.first) & (queries.first > 0)
        return super().sees(queries, keys, layer) | (_together(queries, keys) & inside[:, None, :])


class SeesPads(TinyDecoder):
    """The padding mask was built and never handed on."""

    def sees(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        at = torch.where(queries.segments != 0, queries.positions, queries.numbers)
        held = torch.where(keys.segments != 0, keys.positions, 0)
        other = (keys.segments[:, None, :] != 0) & (queries.segments[:, :, None] != keys.segments[:, None, :])
        return (at[:, :, None] >= held[:, None, :]) & ~other

    def entry(self, x_BTD: Tensor, queries: Slots, batch: Batch) -> Tensor:
        return x_BTD


class CausalOnlyWithoutPadding(TinyDecoder):
    """A padding mask takes the place of the causal one: in padded rows everyone sees everyone."""

    def sees(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        padded = bool((queries.segments == 0).any())
        return _together(queries, keys) if padded else super().sees(queries, keys, layer)


class AddsWhereItShouldSelect(TinyDecoder):
    """-100 is added to hidden scores, which are not bounded: a pad that scores higher is seen."""

    def entry(self, x_BTD: Tensor, queries: Slots, batch: Batch) -> Tensor:
        return x_BTD

    def weights(self, scores_BTS: Tensor, sees_BTS: Tensor) -> Tensor:
        return torch.where(sees_BTS, scores_BTS, scores_BTS - 100.0).softmax(-1)

    def block(
        self,
        layer: nn.ModuleDict,
        number: int,
        x_BTD: Tensor,
        queries: Slots,
        keys: Slots,
        places_BT: Tensor,
        cache: TinyCache | None = None,
    ) -> Tensor:
        return x_BTD + self.attention(layer, number, x_BTD, queries, keys, places_BT, cache)


class ShortensTheRows(TinyDecoder):
    """Where every row ends in padding the answer is cut there: its shape is not that of the request."""

    def forward(self, batch: Batch, cache: TinyCache | None = None) -> Tensor:
        logits_BTV = super().forward(batch, cache)
        last = int(batch.token_mask.any(0).nonzero().max())
        return logits_BTV[:, : last + 1] if cache is None else logits_BTV


class CountsSlots(TinyDecoder):
    """Learned positions count slots, so a left-padded row starts somewhere in the middle."""

    def counted_positions(self, queries: Slots) -> Tensor:
        single = queries.segments.amax() <= 1
        return queries.numbers.expand_as(queries.positions) if single else queries.positions


class PadsById(TinyDecoder):
    """Padding is recognised by token 0 in place of the mask: other ids in pads become text."""

    def entry(self, x_BTD: Tensor, queries: Slots, batch: Batch) -> Tensor:
        self._by_id = torch.where(batch.tokens == 0, 0, queries.segments.clamp(min=1))
        return x_BTD

    def sees(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        if keys.positions.shape != self._by_id.shape:
            return super().sees(queries, keys, layer)
        guessed = Slots(keys.numbers.expand_as(keys.positions), self._by_id)
        return super().sees(guessed, guessed, layer)


class PoisonedByPads(TinyDecoder):
    """Hidden values are multiplied by 0, which does not stop NaN: fragile, not a leak."""

    def entry(self, x_BTD: Tensor, queries: Slots, batch: Batch) -> Tensor:
        return x_BTD


class LastLayerTogether(NoIsolation):
    """Only one kind of layer forgot the boundaries."""

    def sees(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        return (
            super().sees(queries, keys, layer)
            if layer == len(self.layers) - 1
            else TinyDecoder.sees(self, queries, keys, layer)
        )


class RunningPositions(TinyDecoder):
    """Documents are apart, but learned positions run on through the row."""

    def counted_positions(self, queries: Slots) -> Tensor:
        real = queries.segments != 0
        return torch.where(real, queries.positions[:, :1] + real.cumsum(1) - real[:, :1].long(), 0)


class BoundaryByToken(TinyDecoder):
    """A new document is guessed after each token 0, where the segments say it."""

    def entry(self, x_BTD: Tensor, queries: Slots, batch: Batch) -> Tensor:
        ended_BT = (batch.tokens == 0).cumsum(1) - (batch.tokens == 0).long()
        self._guessed = torch.where(queries.segments != 0, 1 + ended_BT, 0)
        self._running = queries.numbers.expand_as(queries.positions)
        return super().entry(x_BTD, queries, batch)

    def sees(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        guessed = Slots(self._running, self._guessed)
        return super().sees(guessed, guessed, layer)


class CentredOverBatch(TinyDecoder):
    """A normalisation takes its mean over the rows of the batch."""

    def mixed(self, x_BTD: Tensor, queries: Slots) -> Tensor:
        return x_BTD - 0.5 * x_BTD.mean(0, keepdim=True)


class FirstRowsMask(TinyDecoder):
    """The mask of row 0 is used for every row: right for a batch of one."""

    def sees(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        return super().sees(queries, keys, layer)[:1].expand(queries.positions.shape[0], -1, -1)


class ScaledByBatch(TinyDecoder):
    """Activations are scaled by the largest of the whole batch, as in careless quantization."""

    def mixed(self, x_BTD: Tensor, queries: Slots) -> Tensor:
        top = x_BTD.abs().amax()
        return (x_BTD / top * 15).round() * top / 15


BROKEN_MODELS = (
    *caught_by("future", LastLayerOpen, UpsideDown, AddsSmallMask, CentredOverTime, OpenChunk, CausalOnlyBesidePadding),
    *caught_by("padding", SeesPads, CountsSlots, PadsById, CausalOnlyWithoutPadding, AddsWhereItShouldSelect),
    *caught_by("padding", PoisonedByPads, verdict="fragile"),
    *caught_by("padding", ShortensTheRows, verdict="error"),
    *caught_by("packing", LastLayerTogether, RunningPositions, BoundaryByToken),
    *caught_by("batch", CentredOverBatch, FirstRowsMask, ScaledByBatch),
)
