"""Models whose cache stores, hides or counts otherwise than the whole row does."""

from __future__ import annotations

import torch
from torch import Tensor

from broken_models.catalog import caught_by
from pellucid.audits.broken.tiny_decoder import Slots, TinyCache, TinyDecoder


def _cached(queries: Slots, keys: Slots) -> bool:
    """Whether the keys are those of a cache: without one, queries are their own keys."""
    return keys is not queries


class _Windowed(TinyDecoder):
    def __init__(self) -> None:
        super().__init__(window=3)


class CachedWindowOneWider(_Windowed):
    """The mask shows w keys of a whole row, the cache keeps w besides the query: prompt and decoding disagree."""

    def visible(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        seen_BTS = super().visible(queries, keys, layer)
        back_BTS = queries.positions[:, :, None] - keys.positions[:, None, :]
        same_BTS = queries.segments[:, :, None] == keys.segments[:, None, :]
        return seen_BTS | (same_BTS & (back_BTS == 3)) if _cached(queries, keys) else seen_BTS


class ChunkOverrunsTheRing(_Windowed):
    """A chunk is written into a ring of w slots before it is read: its first queries find their keys gone."""

    def visible(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        seen_BTS = super().visible(queries, keys, layer)
        end = queries.first + queries.positions.shape[1]
        return seen_BTS & (keys.indices >= end - 3)[:, None, :] if _cached(queries, keys) else seen_BTS


class EvictsTheNewest(_Windowed):
    """A full window drops what came last and keeps the first w tokens for ever."""

    def visible(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        seen_BTS = super().visible(queries, keys, layer)
        if not _cached(queries, keys):
            return seen_BTS
        same_BTS = queries.segments[:, :, None] == keys.segments[:, None, :]
        held_1S, own_1S = keys.indices < 3, keys.indices >= queries.first
        return torch.where(own_1S[:, None, :], seen_BTS, same_BTS & held_1S[:, None, :])


class MaskOfTheFirstStep(TinyDecoder):
    """The caller's mask is used for the prompt only: every later step sees the padding too."""

    def visible(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        pads_BS = (keys.segments == 0) & (keys.indices < queries.first)
        return super().visible(queries, keys, layer) | pads_BS[:, None, :]


class PoisonedByUnusedSlots(TinyDecoder):
    """Unwritten slots are multiplied by 0, which does not stop NaN that lies in fresh memory."""

    def append_coordinates(self, cache: TinyCache, queries: Slots) -> Slots:
        keys = super().append_coordinates(cache, queries)
        unused_1S = keys.indices >= queries.first + queries.positions.shape[1]
        return Slots(keys.positions, torch.where(unused_1S, -1, keys.segments))


class _WrappedCrop(TinyCache):
    def crop(self, keep: int) -> None:
        super().crop(abs(self.length + keep) if keep < 0 else keep)


class CropWrapsRound(TinyDecoder):
    """More is taken back than there is, and the length comes out positive again."""

    cache_class = _WrappedCrop


class _Biased(TinyDecoder):
    """Scores fall with the distance."""

    def distances(self, queries: Slots, keys: Slots) -> Tensor:
        return queries.positions[:, :, None] - keys.positions[:, None, :]

    def visible(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        self._back_BTS = self.distances(queries, keys)
        return super().visible(queries, keys, layer)

    def attention_weights(self, scores_BTS: Tensor, visible_BTS: Tensor) -> Tensor:
        return super().attention_weights(scores_BTS - 0.3 * self._back_BTS, visible_BTS)


class BiasLostInCache(_Biased):
    """The relative bias is left out as soon as there is something in the cache."""

    def distances(self, queries: Slots, keys: Slots) -> Tensor:
        return super().distances(queries, keys) * (queries.first == 0)


class AlibiBySlots(_Biased):
    """The bias is computed from slot numbers: padding between a prompt and what follows counts as distance."""

    def distances(self, queries: Slots, keys: Slots) -> Tensor:
        return queries.indices[:, :, None] - keys.indices[:, None, :]


class CountsTheChunkTwice(TinyDecoder):
    """The offset is read after the cache has counted the new chunk: its positions are too large by its length."""

    def position_ids(self, queries: Slots) -> Tensor:
        return queries.positions + (queries.positions.shape[1] if queries.first else 0)


class KeysUnderAnotherTable(TinyDecoder):
    """Past eight tokens the angles of long text are used; keys already in the cache keep those of short text."""

    def __init__(self) -> None:
        super().__init__(rotary=True)

    def position_ids(self, queries: Slots) -> Tensor:
        return queries.positions * (0.5 if queries.first + queries.positions.shape[1] > 8 else 1.0)


class CacheInHalf(TinyDecoder):
    """Keys are rounded to bfloat16 as they go into the cache."""

    def attention(
        self, layer: int, x_BTD: Tensor, queries: Slots, keys: Slots, cache: TinyCache | None = None
    ) -> Tensor:
        mixed_BTD = super().attention(layer, x_BTD, queries, keys, cache)
        if cache is not None:
            cache.k[layer] = cache.k[layer].bfloat16().to(cache.k)
        return mixed_BTD


class TopLeftAnchor(TinyDecoder):
    """The causal mask of a chunk starts at key 0: the first new query sees one key."""

    def visible(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        from_zero = Slots(queries.positions - queries.first, queries.segments)
        return super().visible(from_zero, keys, layer)


class _HalfReordered(TinyCache):
    def reorder(self, index_B: Tensor) -> None:
        v = self.v
        super().reorder(index_B)
        self.v = v


class ForgetsToReorder(TinyDecoder):
    """Keys change places with their beams, values stay."""

    cache_class = _HalfReordered


class _Uncropped(TinyCache):
    def crop(self, keep: int) -> None:
        super().crop(keep or self.length)


class CropOfZeroKeepsAll(TinyDecoder):
    """``crop(0)`` is read as "no crop"."""

    cache_class = _Uncropped


class _Aliased(TinyCache):
    def snapshot(self) -> TinyCache:
        copy = object.__new__(type(self))
        copy.__dict__ = dict(self.__dict__)
        return copy


class SnapshotAliases(TinyDecoder):
    """A snapshot shares its tensors with the cache that goes on."""

    cache_class = _Aliased


class SeesUnusedSlots(TinyDecoder):
    """Slots that were never written are hidden by a small number in place of a selection."""

    def visible(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        spare = (keys.segments == 0) & (keys.indices >= queries.first + queries.positions.shape[1])
        return super().visible(queries, keys, layer) | spare[:, None, :]


BROKEN_MODELS = (
    *caught_by(
        "cache",
        CachedWindowOneWider,
        ChunkOverrunsTheRing,
        EvictsTheNewest,
        MaskOfTheFirstStep,
        CropWrapsRound,
        BiasLostInCache,
        AlibiBySlots,
        CountsTheChunkTwice,
        KeysUnderAnotherTable,
        CacheInHalf,
        TopLeftAnchor,
        ForgetsToReorder,
        CropOfZeroKeepsAll,
        SnapshotAliases,
        SeesUnusedSlots,
    ),
    *caught_by("cache", PoisonedByUnusedSlots, verdict="fragile"),
)
