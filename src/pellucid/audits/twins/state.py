"""Twins with a faulty cache, or that remember what they should not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pellucid.audits.twins.lm import Answer, Lm
from pellucid.audits.twins.toy import Slots, Toy, ToyCache
from pellucid.audits.twins.twin import Twin
from pellucid.batch import Batch


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


class CountsCalls(Toy):
    """A buffer counts the calls."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def entry(self, x_BTD: Tensor, queries: Slots, batch: Batch) -> Tensor:
        self.calls += 1
        return super().entry(x_BTD, queries, batch)


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

    def entry(self, x_BTD: Tensor, queries: Slots, batch: Batch) -> Tensor:
        batch.tokens[batch.segments == 0] = 1
        return super().entry(x_BTD, queries, batch)


class WritesIntoTheMask(Lm):
    """The caller's mask is inverted in place on its way to a bias."""

    def leave(self, x_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        mask_BT.sub_(1)
        return x_BTD


class GrowsItsTable(Toy):
    """Places are looked up in a table that the first request builds; a longer one grows it from one too far."""

    def __init__(self) -> None:
        super().__init__()
        self.known = torch.zeros(0, dtype=torch.int64)

    def counted_positions(self, queries: Slots) -> Tensor:
        have, need = len(self.known), int(queries.positions.max()) + 1
        if need > have:
            more = torch.arange(have, need) + (have > 0)
            self.known = torch.cat([self.known, more.clamp(max=self.max_length - 1)])
        return self.known[queries.positions]


@dataclass
class _WithWhole(Answer):
    pooler_output: Tensor


class PoolsOverPads(Lm):
    """Beside its scores it gives the mean of each row, over its padding too."""

    def leave(self, x_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        self._whole_BD = x_BTD.mean(1).detach()
        return x_BTD

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Answer:
        answer = super().forward(input_ids, attention_mask, position_ids)
        return _WithWhole(answer.logits, self._whole_BD)


class RemembersTheLast(Toy):
    """Something of the last request, kept in an attribute, tints the next answer."""

    _last: float = 0.0

    def mixed(self, x_BTD: Tensor, queries: Slots) -> Tensor:
        before, self._last = self._last, float(x_BTD[0, 0, 0].detach())
        return x_BTD + before * torch.linspace(-1, 1, x_BTD.shape[-1]).to(x_BTD)


TWINS = (
    *(
        Twin(make, "cache")
        for make in (
            TopLeftAnchor,
            SharedCounter,
            ForgetsToReorder,
            CropOfZeroKeepsAll,
            SnapshotAliases,
            SeesUnusedSlots,
        )
    ),
    *(Twin(make, "trace") for make in (CountsCalls, WritesIntoTokens, WritesIntoTheMask, RemembersTheLast)),
    Twin(GrowsItsTable, "determinism"),
    Twin(PoolsOverPads, "hidden_rows"),
)
