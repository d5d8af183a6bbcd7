"""Models that answer otherwise by mode, by random numbers, or from one time to the next."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from broken_models.catalog import caught_by
from broken_models.hf_style import HFStyleDecoder
from pellucid.audits.probes.tokens_probe import TokensProbe


class Recurrent(nn.Module):
    """A healthy recurrent model of tokens."""

    def __init__(self, vocab_size: int = 23) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.table, self.out = nn.Embedding(vocab_size, 12), nn.Linear(12, vocab_size)
            self.rnn = nn.GRU(12, 12, batch_first=True)
            self.norm = nn.BatchNorm1d(12)
        self.drop = nn.Dropout(0.1)

    def mixed(self, x_BTD: Tensor) -> Tensor:
        """What goes to the head."""
        return self.drop(x_BTD)

    def run(self, x_BTD: Tensor) -> Tensor:
        """The recurrence, from nothing."""
        result: Tensor = self.rnn(x_BTD)[0]
        return result

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.out(self.mixed(self.run(self.table(tokens))))
        return result

    def probe(self) -> TokensProbe:
        """How an audit calls this model."""
        return TokensProbe(self)


# ---------------------------------------------------------------------------------------------------------- modes


class MaskedOnlyInTraining(HFStyleDecoder):
    """A shorter way in eval mode leaves the padding mask out."""

    def visible(self, mask_BT: Tensor) -> Tensor:
        return super().visible(mask_BT.flip(1) if self.training else mask_BT)


class ScaledOnlyInEval(HFStyleDecoder):
    """Training calls a kernel that does not scale its scores."""

    def scale(self) -> float:
        return 1.0 if self.training else super().scale()


class FastWithoutGradients(HFStyleDecoder):
    """Without gradients another path is taken, which forgets who is padding."""

    def visible(self, mask_BT: Tensor) -> Tensor:
        return super().visible(mask_BT if torch.is_grad_enabled() else mask_BT.flip(1))


class OtherInInference(HFStyleDecoder):
    """Inference mode switches on an approximation that nobody asked for."""

    def leave(self, x_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        return x_BTD.bfloat16().to(x_BTD) if torch.is_inference_mode_enabled() else x_BTD


class CheckpointLosesTheMask(HFStyleDecoder):
    """The recomputed layer is called without its mask."""

    def recomputed(self, step: Callable[..., Tensor], x_BTD: Tensor, *rest: Tensor) -> Tensor:
        visible_B1TT, *others = rest
        return super().recomputed(step, x_BTD, torch.ones_like(visible_B1TT), *others)


class CheckpointCutsTheGradient(HFStyleDecoder):
    """Layers are recomputed from a detached input: outputs agree, and what lies before learns nothing."""

    def recomputed(self, step: Callable[..., Tensor], x_BTD: Tensor, *rest: Tensor) -> Tensor:
        result: Tensor = checkpoint(step, x_BTD.detach(), *rest, use_reentrant=False)
        return result


class NormalisesOverTheBatch(Recurrent):
    """Batch statistics: in train mode every row moves with its mates."""

    def mixed(self, x_BTD: Tensor) -> Tensor:
        result: Tensor = self.norm(x_BTD.mT).mT
        return result


# -------------------------------------------------------------------------------------------------------- dropout


# ---------------------------------------------------------------------------------------------------- determinism


class CarriesItsState(Recurrent):
    """The recurrence goes on where the last request left it."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Tensor | None = None

    def run(self, x_BTD: Tensor) -> Tensor:
        state = self.state if self.state is not None and self.state.shape[1] == len(x_BTD) else None
        result, last = self.rnn(x_BTD, None if state is None else state.to(x_BTD))
        self.state = last.detach()
        y_BTD: Tensor = result
        return y_BTD


class RandomFeatures(HFStyleDecoder):
    """Random features of the attention are drawn anew for every answer."""

    def leave(self, x_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        directions_DF = torch.randn(x_BTD.shape[-1], 64, dtype=x_BTD.dtype)
        return x_BTD + (x_BTD @ directions_DF).relu() @ directions_DF.mT / 64


class NumbersItsRows(HFStyleDecoder):
    """The number of a row in its batch gets into the embedding."""

    def entry(self, x_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        return x_BTD * (1 + torch.arange(len(x_BTD))[:, None, None].to(x_BTD) / 10)


class RemembersTheLongest(HFStyleDecoder):
    """Angles are stretched to the longest request ever seen, and stay so."""

    def __init__(self) -> None:
        super().__init__()
        self.longest = 8

    def angles(self, position_ids: Tensor) -> Tensor:
        self.longest = max(self.longest, position_ids.shape[1])
        return super().angles(position_ids) * 8 / self.longest


BROKEN_MODELS = (
    *caught_by(
        "modes",
        MaskedOnlyInTraining,
        ScaledOnlyInEval,
        FastWithoutGradients,
        OtherInInference,
        CheckpointLosesTheMask,
        CheckpointCutsTheGradient,
    ),
    *caught_by("modes", NormalisesOverTheBatch, verdict="fragile"),
    *caught_by("determinism", CarriesItsState, RandomFeatures, NumbersItsRows, RemembersTheLongest),
)
