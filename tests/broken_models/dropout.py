"""Models whose dropout does not follow the mode, or never happens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from broken_models.catalog import caught_by
from broken_models.hf_style import HFStyleDecoder, Layer
from broken_models.train_eval import Recurrent


class DefaultIsTraining(Recurrent):
    """``functional.dropout(x, p)`` drops in eval mode too: training is its default."""

    def final_hidden(self, x_BTD: Tensor) -> Tensor:
        return functional.dropout(x_BTD, 0.2)


class OwnDropout(nn.Module):
    """A dropout of one's own."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x_BTD: Tensor) -> Tensor:
        kept = torch.rand_like(x_BTD) >= self.p
        return x_BTD * kept / (1 - self.p)


class OwnDropoutForgetsTheMode(Recurrent):
    """A dropout written by hand never asks for the mode; its probability is too small to be noticed."""

    def __init__(self) -> None:
        super().__init__()
        self.own = OwnDropout(1e-5)

    def final_hidden(self, x_BTD: Tensor) -> Tensor:
        result: Tensor = self.own(x_BTD)
        return result


class SkipsABranchNowAndThen(Recurrent):
    """Stochastic depth is on in eval mode, once in twenty requests."""

    def final_hidden(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + (float(torch.rand(())) < 0.05)


class DropsOnceConfigured(HFStyleDecoder):
    """Attention is handed its probability in every mode; only because that is 0 does nobody notice."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)

    def attend(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor, visible_B1TT: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, visible_B1TT, layer.attention_dropout)


class NeverDrops(Recurrent):
    """Dropout is configured and built, and never called."""

    def final_hidden(self, x_BTD: Tensor) -> Tensor:
        return x_BTD


class ScaledAsIfDropping(Recurrent):
    """In eval mode nothing is dropped, but what is kept is still made larger."""

    def final_hidden(self, x_BTD: Tensor) -> Tensor:
        return self.drop(x_BTD) if self.training else x_BTD / (1 - self.drop.p)


BROKEN_MODELS = (
    *caught_by("dropout", DefaultIsTraining, OwnDropoutForgetsTheMode, SkipsABranchNowAndThen, DropsOnceConfigured),
    *caught_by("dropout", NeverDrops, ScaledAsIfDropping, verdict="fragile"),
)
