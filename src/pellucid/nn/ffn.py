"""The feed-forward half of a block: each token by itself, across its features."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.nn import functional as F

from pellucid.shapes import Float, Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "silu": F.silu,
}
"""By the names that configs use; ``relu_squared`` is So et al. 2021 (Primer)."""


class DenseFFN(nn.Module):
    """``W₂ · act(W₁ x)`` (Vaswani et al. 2017 §3.3)."""

    def __init__(self, size: int, inner: int, *, activation: str, bias: bool, dropout: float) -> None:
        super().__init__()
        self.up_proj = nn.Linear(size, inner, bias=bias)
        self.activation = ACTIVATIONS[activation]
        self.inner_dropout = nn.Dropout(dropout)
        self.down_proj = nn.Linear(inner, size, bias=bias)

    def forward(self, x_BTD: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return self.down_proj(self.inner_dropout(self.activation(self.up_proj(x_BTD))))


class GatedFFN(nn.Module):
    """``W₂ · (act(W₁ x) ⊙ W₃ x)``: SwiGLU with ``silu``, GEGLU with ``gelu`` (Shazeer 2020)."""

    def __init__(self, size: int, inner: int, *, activation: str, bias: bool, dropout: float) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=bias)
        self.up_proj = nn.Linear(size, inner, bias=bias)
        self.activation = ACTIVATIONS[activation]
        self.inner_dropout = nn.Dropout(dropout)
        self.down_proj = nn.Linear(inner, size, bias=bias)

    def forward(self, x_BTD: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        gated = self.activation(self.gate_proj(x_BTD)) * self.up_proj(x_BTD)
        return self.down_proj(self.inner_dropout(gated))
