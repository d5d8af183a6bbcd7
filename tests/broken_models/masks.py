"""Models whose masks are ignored, read upside down, or leave queries with nothing to see."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from broken_models.catalog import caught_by
from broken_models.hf_style import Answer, HFStyleDecoder
from pellucid.batch import Batch
from pellucid.probe import Capability, Probe, Visibility, embeddings_replaced
from pellucid.visibility import full


class Encoder(nn.Module):
    """A healthy bidirectional encoder of stock layers, told which slots are padding: ``True`` hides."""

    def __init__(self, vocab_size: int = 23) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.table, self.places = nn.Embedding(vocab_size, 16), nn.Embedding(32, 16)
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True) for _ in range(2)
            )
            self.out = nn.Linear(16, vocab_size)

    def pads(self, real_BT: Tensor, layer: int) -> Tensor | None:
        """``Bool[B, T]``: what a layer hides; in a row that is all padding, nothing."""
        return ~real_BT & real_BT.any(1, keepdim=True)

    def forward(self, tokens: Tensor, places: Tensor, real_BT: Tensor) -> Tensor:
        x_BTD = self.table(tokens) + self.places(places)
        for number, layer in enumerate(self.layers):
            x_BTD = layer(x_BTD, src_key_padding_mask=self.pads(real_BT, number))
        result: Tensor = self.out(x_BTD)
        return result

    def probe(self) -> EncoderProbe:
        """How an audit calls this model."""
        return EncoderProbe(self)


class EncoderProbe(Probe):
    """Tokens, places and which slots are real."""

    capabilities: frozenset[Capability] = frozenset({"padding", "embeddings"})

    def __init__(self, model: Encoder) -> None:
        self.model, self.module, self.name = model, model, type(model).__name__
        self.vocab_size, self.max_length = model.table.num_embeddings, model.places.num_embeddings
        self.rules: tuple[Visibility, ...] = (full(),) * len(model.layers)

    def logits(self, batch: Batch) -> Tensor:
        with embeddings_replaced(self.model.table, batch.inputs_embeds):
            result: Tensor = self.model(batch.tokens, batch.positions, batch.token_mask)
        return result

    def embed(self, batch: Batch) -> Tensor:
        result: Tensor = self.model.table(batch.tokens)
        return result

    def with_module(self, module: nn.Module) -> EncoderProbe:
        assert isinstance(module, Encoder)
        return EncoderProbe(module)


class ConvolvesOverPads(HFStyleDecoder):
    """A short convolution before the layers is told nothing of padding: the first token beside a pad reads it."""

    def entry(self, x_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        return x_BTD + 0.5 * functional.pad(x_BTD, (0, 0, 1, 0))[:, :-1]


# ------------------------------------------------------------------------------------------------------- ignored


class AnswersFromAMemo(HFStyleDecoder):
    """Answers are kept under the ids alone: the same ids with another mask get the old answer."""

    def __init__(self) -> None:
        super().__init__()
        self.memo: dict[tuple[object, ...], Tensor] = {}

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Answer:
        key = (self.table.weight.dtype, *map(tuple, input_ids.tolist()))
        if key not in self.memo:
            self.memo[key] = super().forward(input_ids, attention_mask, position_ids).logits.detach()
        return Answer(self.memo[key])


class DiscardsTheFill(HFStyleDecoder):
    """``masked_fill`` returns a new tensor, and nobody takes it: the padding mask does nothing."""

    def visible(self, mask_BT: Tensor) -> Tensor:
        visible_B1TT = super().visible(torch.ones_like(mask_BT))
        visible_B1TT.masked_fill(mask_BT[:, None, None, :] == 0, False)
        return visible_B1TT


class LooksAtTheLastColumn(HFStyleDecoder):
    """That there is no padding is decided by the last column, so that left pads and holes are never hidden."""

    def visible(self, mask_BT: Tensor) -> Tensor:
        return super().visible(torch.ones_like(mask_BT) if bool(mask_BT[:, -1].all()) else mask_BT)


class LengthsFromTheMask(HFStyleDecoder):
    """The mask is summed up to lengths: right for padding on the right, wrong for any other."""

    def visible(self, mask_BT: Tensor) -> Tensor:
        slots = torch.arange(mask_BT.shape[1])
        return super().visible(slots < mask_BT.sum(1, keepdim=True))


class SecondLayerUnmasked(Encoder):
    """Only the first layer is told of padding."""

    def pads(self, real_BT: Tensor, layer: int) -> Tensor | None:
        return None if layer else super().pads(real_BT, layer)


class NoLayerMasked(Encoder):
    """The encoder takes a padding mask and hands it to no layer."""

    def pads(self, real_BT: Tensor, layer: int) -> Tensor | None:
        return None


# --------------------------------------------------------------------------------------------------- upside down


class OnesWereHidden(Encoder):
    """A mask of ones for real tokens went to a layer in which ``True`` hides."""

    def pads(self, real_BT: Tensor, layer: int) -> Tensor | None:
        return real_BT & ~real_BT.all(1, keepdim=True)


class PaddingUpsideDown(HFStyleDecoder):
    """The padding plane is turned round where it meets the causal one."""

    def visible(self, mask_BT: Tensor) -> Tensor:
        padded = bool((mask_BT == 0).any())
        return super().visible(1 - mask_BT if padded else mask_BT)


class TriangleUpsideDown(HFStyleDecoder):
    """``triu`` where ``tril`` was meant: every token sees itself and the future."""

    def visible(self, mask_BT: Tensor) -> Tensor:
        slots = mask_BT.shape[1]
        return torch.ones(slots, slots, dtype=torch.bool).triu() & mask_BT.bool()[:, None, None, :]


# ------------------------------------------------------------------------------------------- nothing to look at


class SoftmaxOverNothing(HFStyleDecoder):
    """Hidden scores are minus infinity: a query that sees nothing is NaN, and one layer on so is everyone."""

    def hide(self, scores_BNTT: Tensor, visible_B1TT: Tensor) -> Tensor:
        return scores_BNTT.masked_fill(~visible_B1TT, -math.inf)


class CleansNaNForward(HFStyleDecoder):
    """NaN of empty queries is replaced after the softmax; on the way back it is still there."""

    def hide(self, scores_BNTT: Tensor, visible_B1TT: Tensor) -> Tensor:
        return scores_BNTT + torch.where(visible_B1TT, 0.0, -math.inf).to(scores_BNTT)

    def probabilities(self, scores_BNTT: Tensor) -> Tensor:
        return scores_BNTT.softmax(-1).nan_to_num(0.0)


class TwoSmallestNumbers(HFStyleDecoder):
    """Two planes of the smallest number are added up to minus infinity, which a whole row of is NaN."""

    def hide(self, scores_BNTT: Tensor, visible_B1TT: Tensor) -> Tensor:
        least = torch.finfo(scores_BNTT.dtype).min
        plane = torch.zeros_like(scores_BNTT).masked_fill(~visible_B1TT, least)
        nothing = ~visible_B1TT.any(-1, keepdim=True)
        return scores_BNTT + plane + plane.masked_fill(~nothing, 0.0)


class DropsEmptyRows(HFStyleDecoder):
    """Rows without tokens are taken out and put back at the end: the rows behind them move up."""

    def leave(self, x_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        held = mask_BT.any(1)
        return torch.cat([x_BTD[held], torch.zeros_like(x_BTD[~held])])


class MeanOfNothing(HFStyleDecoder):
    """What is answered at pads is divided by the number of real tokens: 0 / 0 in a row without any."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Answer:
        logits_BTV = super().forward(input_ids, attention_mask, position_ids).logits
        if attention_mask is None:
            return Answer(logits_BTV)
        real_BT1 = attention_mask[:, :, None].bool()
        sums_B1V = torch.where(real_BT1, logits_BTV, 0.0).sum(1, keepdim=True).detach()
        return Answer(torch.where(real_BT1, logits_BTV, sums_B1V / real_BT1.sum(1, keepdim=True)))


@dataclass
class _WithWhole(Answer):
    pooler_output: Tensor


class PoolsOverPads(HFStyleDecoder):
    """Beside its scores it gives the mean of each row, over its padding too."""

    def leave(self, x_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        self._whole_BD = x_BTD.mean(1).detach()
        return x_BTD

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Answer:
        answer = super().forward(input_ids, attention_mask, position_ids)
        return _WithWhole(answer.logits, self._whole_BD)


BROKEN_MODELS = (
    *caught_by("padding", ConvolvesOverPads),
    *caught_by(
        "mask_ignored",
        DiscardsTheFill,
        LooksAtTheLastColumn,
        LengthsFromTheMask,
        SecondLayerUnmasked,
        NoLayerMasked,
        AnswersFromAMemo,
    ),
    *caught_by("polarity", OnesWereHidden, PaddingUpsideDown, TriangleUpsideDown),
    *caught_by("hidden_rows", SoftmaxOverNothing, CleansNaNForward, TwoSmallestNumbers, DropsEmptyRows, PoolsOverPads),
    *caught_by("hidden_rows", MeanOfNothing, verdict="fragile"),
)
