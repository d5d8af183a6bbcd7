"""Twins whose loss is not the sum that it should be."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pellucid.audits.twins.toy import Toy, ToyProbe
from pellucid.audits.twins.twin import Twin
from pellucid.batch import Batch


def _losses(scores_BTV: Tensor, tokens_BT: Tensor) -> Tensor:
    return functional.cross_entropy(scores_BTV.flatten(0, 1), tokens_BT.flatten(), reduction="none").view(
        tokens_BT.shape
    )


class ShiftedTwice(Toy):
    """Labels are shifted by the data and again by the model: token t + 2 is learnt at t."""

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        learnt = batch.loss_mask[:, 2:] & (batch.positions[:, 2:] > 1)
        losses = _losses(self(batch)[:, :-2], batch.tokens[:, 2:])
        return torch.where(learnt, losses, 0.0).sum(), learnt.sum()


class NotShifted(Toy):
    """Each side left the shift to the other: a token learns to predict itself."""

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        learnt = batch.loss_mask
        return torch.where(learnt, _losses(self(batch), batch.tokens), 0.0).sum(), learnt.sum()


class MeansOfMeans(Toy):
    """Rows are averaged first, so tokens of short rows weigh more."""

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        learnt = batch.loss_mask[:, 1:]
        losses = torch.where(learnt, _losses(self(batch)[:, :-1], batch.tokens[:, 1:]), 0.0)
        rows = losses.sum(1) / learnt.sum(1).clamp(min=1)
        busy = learnt.any(1).sum().clamp(min=1)
        return rows.sum() / busy * learnt.sum(), learnt.sum()


class TimesTheRows(Toy):
    """The mean was repaired twice: the sum comes out multiplied by the number of rows."""

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        total, count = super().loss(batch)
        return total * batch.shape[0], count


class IgnoresTokenZero(Toy):
    """Pads are found by id 0, so a true token 0 (an end token, say) is never learnt."""

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return super().loss(batch.replace(target_mask=batch.loss_mask & (batch.tokens > 0)))


class LearnsPads(Toy):
    """Pads behind the text are counted as targets."""

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        learnt = batch.loss_mask[:, 1:] | (batch.segments[:, 1:] == 0)
        losses = _losses(self(batch)[:, :-1], batch.tokens[:, 1:])
        return torch.where(learnt, losses, 0.0).sum(), learnt.sum()


class CrossesBorders(Toy):
    """The last token of a document is trained to predict the first of the next."""

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        real = (batch.segments[:, 1:] != 0) & (batch.segments[:, :-1] != 0)
        learnt = real if batch.target_mask is None else real & batch.target_mask[:, 1:]
        losses = _losses(self(batch)[:, :-1], batch.tokens[:, 1:])
        return torch.where(learnt, losses, 0.0).sum(), learnt.sum()


class EndsArePads(Toy):
    """Pads have the id of the end token, and whatever has it is no target: true ends are never learnt."""

    end = 12

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return super().loss(batch.replace(target_mask=batch.loss_mask & (batch.tokens != self.end)))

    def probe(self) -> ToyProbe:
        probe = super().probe()
        probe.end_tokens = (self.end,)
        return probe


class LosesChunkBorders(Toy):
    """The loss is taken in chunks of eight slots, and each loses its last prediction."""

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        border_T = torch.arange(batch.shape[1]) % 8 == 0
        return super().loss(batch.replace(target_mask=batch.loss_mask & ~border_T))


class ForgetsTheLastDocument(Toy):
    """The last of several documents in a row is never learnt."""

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        last_B1 = batch.segments.amax(1, keepdim=True)
        behind = (batch.segments == last_B1) & (last_B1 > 1)
        return super().loss(batch.replace(target_mask=batch.loss_mask & ~behind))


class NothingIsNaN(Toy):
    """A mean over nothing is taken on the way: 0 / 0."""

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        total, count = super().loss(batch)
        return total / count * count, count


TWINS = tuple(
    Twin(make, "loss")
    for make in (
        ShiftedTwice,
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
    )
)
