"""Models whose loss is not the sum that it should be."""

from __future__ import annotations

import torch
from torch import Tensor

from broken_models.catalog import caught_by
from pellucid.audits.broken.tiny_decoder import TinyDecoder, TinyProbe, token_losses
from pellucid.batch import Batch


class NotShifted(TinyDecoder):
    """Each side left the shift to the other: a token learns to predict itself."""

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        learnt = batch.loss_mask
        return torch.where(learnt, token_losses(self(batch), batch.tokens), 0.0).sum(), learnt.sum()


class MeansOfMeans(TinyDecoder):
    """Rows are averaged first, so tokens of short rows weigh more."""

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        learnt = batch.loss_mask[:, 1:]
        losses = torch.where(learnt, token_losses(self(batch)[:, :-1], batch.tokens[:, 1:]), 0.0)
        rows = losses.sum(1) / learnt.sum(1).clamp(min=1)
        busy = learnt.any(1).sum().clamp(min=1)
        return rows.sum() / busy * learnt.sum(), learnt.sum()


class TimesTheRows(TinyDecoder):
    """The mean was repaired twice: the sum comes out multiplied by the number of rows."""

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        total, count = super().loss(batch)
        return total * batch.shape[0], count


class IgnoresTokenZero(TinyDecoder):
    """Pads are found by id 0, so a true token 0 (an end token, say) is never learnt."""

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return super().loss(batch.replace(target_mask=batch.loss_mask & (batch.tokens > 0)))


class LearnsPads(TinyDecoder):
    """Pads behind the text are counted as targets."""

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        learnt = batch.loss_mask[:, 1:] | (batch.segments[:, 1:] == 0)
        losses = token_losses(self(batch)[:, :-1], batch.tokens[:, 1:])
        return torch.where(learnt, losses, 0.0).sum(), learnt.sum()


class CrossesBorders(TinyDecoder):
    """The last token of a document is trained to predict the first of the next."""

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        real = (batch.segments[:, 1:] != 0) & (batch.segments[:, :-1] != 0)
        learnt = real if batch.target_mask is None else real & batch.target_mask[:, 1:]
        losses = token_losses(self(batch)[:, :-1], batch.tokens[:, 1:])
        return torch.where(learnt, losses, 0.0).sum(), learnt.sum()


class EndsArePads(TinyDecoder):
    """Pads have the id of the end token, and whatever has it is no target: true ends are never learnt."""

    end = 12

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return super().loss(batch.replace(target_mask=batch.loss_mask & (batch.tokens != self.end)))

    def probe(self) -> TinyProbe:
        probe = super().probe()
        probe.end_tokens = (self.end,)
        return probe


class LosesChunkBorders(TinyDecoder):
    """The loss is taken in chunks of eight slots, and each loses its last prediction."""

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        border_T = torch.arange(batch.shape[1]) % 8 == 0
        return super().loss(batch.replace(target_mask=batch.loss_mask & ~border_T))


class ForgetsTheLastDocument(TinyDecoder):
    """The last of several documents in a row is never learnt."""

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        last_B1 = batch.segments.amax(1, keepdim=True)
        behind = (batch.segments == last_B1) & (last_B1 > 1)
        return super().loss(batch.replace(target_mask=batch.loss_mask & ~behind))


class NothingIsNaN(TinyDecoder):
    """A mean over nothing is taken on the way: 0 / 0."""

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        total, count = super().loss(batch)
        return total / count * count, count


BROKEN_MODELS = (
    *caught_by(
        "loss",
        NotShifted,
        MeansOfMeans,
        TimesTheRows,
        IgnoresTokenZero,
        LearnsPads,
        CrossesBorders,
        EndsArePads,
        LosesChunkBorders,
        ForgetsTheLastDocument,
        NothingIsNaN,
    ),
)
