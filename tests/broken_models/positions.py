"""Models that count positions wrongly, ignore them, or run past their end."""

from __future__ import annotations

import torch
from torch import Tensor

from broken_models.catalog import caught_by
from broken_models.hf_style import HFStyleDecoder, Layer, turned
from broken_models.masks import Encoder
from pellucid.audits.broken.tiny_decoder import Slots, TinyDecoder


class SumsAngles(HFStyleDecoder):
    """Rotary angles are summed over the batch: right for one row only."""

    def angles(self, position_ids: Tensor) -> Tensor:
        return super().angles(position_ids).sum(0, keepdim=True)


class FirstRowsAngles(HFStyleDecoder):
    """The positions of row 0 are used for every row: right when all rows are equally long."""

    def angles(self, position_ids: Tensor) -> Tensor:
        return super().angles(position_ids[:1])


class IgnoresPositions(HFStyleDecoder):
    """Position ids are accepted, and counted anew from the slots."""

    def angles(self, position_ids: Tensor) -> Tensor:
        return super().angles(torch.arange(position_ids.shape[1]).expand_as(position_ids))


class AnglesInHalf(HFStyleDecoder):
    """Angles are built in bfloat16, which cannot hold position 257: far from the start, distances blur."""

    def angles(self, position_ids: Tensor) -> Tensor:
        return super().angles(position_ids.bfloat16()).bfloat16().double()


class AnglesFromOne(HFStyleDecoder):
    """Angles grow with the square of the position: equal distances turn by other angles further on."""

    def angles(self, position_ids: Tensor) -> Tensor:
        return super().angles(position_ids * (1 + position_ids * 2.0**-7))


class PairsMixed(HFStyleDecoder):
    """Queries are turned in halves, keys in neighbours: only at position 0 do the pairs fit."""

    def step(self, layer: Layer, x_BTD: Tensor, visible_B1TT: Tensor, angles_BTP: Tensor) -> Tensor:
        h_BTD = layer.norm_1(x_BTD)
        q, k = turned(layer.heads(layer.q(h_BTD)), angles_BTP), layer.heads(layer.k(h_BTD))
        in_halves = torch.cat([k[..., 0::2], k[..., 1::2]], -1)
        k = torch.stack(turned(in_halves, angles_BTP).chunk(2, -1), -1).flatten(-2)
        mixed = self.attend(layer, q, k, layer.heads(layer.v(h_BTD)), visible_B1TT)
        return x_BTD + layer.o(mixed.transpose(1, 2).flatten(-2))


class EncoderCountsSlots(Encoder):
    """An encoder numbers its slots itself, from the first of the row: left padding moves every token."""

    def forward(self, tokens: Tensor, places: Tensor, real_BT: Tensor) -> Tensor:
        return super().forward(tokens, torch.arange(tokens.shape[1]).expand_as(places), real_BT)


class ClampsPositions(TinyDecoder):
    """Positions past the table are clamped to its last row, in silence."""

    def check_positions(self, positions_BT: Tensor) -> None:
        return

    def position_ids(self, queries: Slots) -> Tensor:
        return queries.positions.clamp(max=self.max_length - 1)


class WrapsPositions(ClampsPositions):
    """Positions past the table start again at its first row, in silence."""

    def position_ids(self, queries: Slots) -> Tensor:
        return queries.positions % self.max_length


class ChecksTheChunkOnly(TinyDecoder):
    """The bound is held against the length of the chunk, so that decoding runs past the table and is clamped there."""

    def check_positions(self, positions_BT: Tensor) -> None:
        if positions_BT.shape[1] > self.max_length:
            raise ValueError(f"{positions_BT.shape[1]} tokens are too many")

    def position_ids(self, queries: Slots) -> Tensor:
        return queries.positions.clamp(max=self.max_length - 1)


class CutsTheRow(TinyDecoder):
    """A row that is too long is cut without an error."""

    def forward(self, batch: object, cache: object = None) -> Tensor:
        part = batch.part(0, self.max_length)  # type: ignore[attr-defined]
        return super().forward(part, cache)  # type: ignore[arg-type]


class OneCounterForAllRows(TinyDecoder):
    """Decoding takes the position of the longest row for every row: shorter ones jump ahead."""

    def position_ids(self, queries: Slots) -> Tensor:
        shared = queries.positions.amax(0, keepdim=True).expand_as(queries.positions)
        return shared if queries.first else queries.positions


class DocumentsStartLate(TinyDecoder):
    """Documents after the first of a row start at position 1."""

    def position_ids(self, queries: Slots) -> Tensor:
        return queries.positions + (queries.segments > 1).long()


class LeftPadsCount(TinyDecoder):
    """Positions count from the row's first slot, padded or not, unless several documents are in it."""

    def position_ids(self, queries: Slots) -> Tensor:
        single_B1 = queries.segments.amax(1, keepdim=True) <= 1
        slot_BT = queries.indices.expand_as(queries.positions)
        starts_BT = (queries.segments[:, :1] == 0) & single_B1
        return torch.where(starts_BT, slot_BT, queries.positions)


BROKEN_MODELS = (
    *caught_by(
        "positions",
        SumsAngles,
        FirstRowsAngles,
        IgnoresPositions,
        AnglesInHalf,
        AnglesFromOne,
        PairsMixed,
        EncoderCountsSlots,
        ClampsPositions,
        WrapsPositions,
        ChecksTheChunkOnly,
        CutsTheRow,
        OneCounterForAllRows,
        DocumentsStartLate,
        LeftPadsCount,
    ),
)
