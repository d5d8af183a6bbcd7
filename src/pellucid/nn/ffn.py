"""The feed-forward half of a block: each token by itself, across its features."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from pellucid.errors import ArgumentError
from pellucid.shapes import Float, Tensor


def quick_gelu(x: Tensor) -> Tensor:
    """``x · σ(1.702 x)``, the sigmoid approximation of GELU (Hendrycks & Gimpel 2016 §2)."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
}
"""By the names that configs use; ``gelu`` is exact (erf), ``relu_squared`` is So et al. 2021 (Primer)."""


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function called ``name``.

    Raises:
        ArgumentError: there is none.
    """
    if name not in ACTIVATIONS:
        raise ArgumentError(f"there is no activation {name!r}; choose one of {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]


class Activation(nn.Module):
    """The function called ``name``, as a part."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.function = activation(name)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def extra_repr(self) -> str:
        return self.name


def clamped_gate(gate: Tensor, up: Tensor, *, limit: float, alpha: float) -> Tensor:
    """``(up + 1) ⊙ gate · σ(alpha · gate)``, gate at most ``limit`` and up within ±``limit`` (gpt-oss's SwiGLU)."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


class DenseFFN(nn.Module):
    """``W₂ · act(W₁ x)`` (Vaswani et al. 2017 §3.3)."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, activation: str, bias: bool, dropout: float
    ) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.activation = _named(activation)
        self.inner_dropout = nn.Dropout(dropout)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x_BTD: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        return self.down_proj(self.inner_dropout(self.activation(self.up_proj(x_BTD))))


class GatedFFN(nn.Module):
    """``W₂ · (act(W₁ x) ⊙ W₃ x)`` (Shazeer 2020 §2): GLU with ``sigmoid``, SwiGLU ``silu``, GEGLU ``gelu``."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, activation: str, bias: bool, dropout: float
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.activation = _named(activation)
        self.inner_dropout = nn.Dropout(dropout)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x_BTD: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        gated = self.activation(self.gate_proj(x_BTD)) * self.up_proj(x_BTD)
        return self.down_proj(self.inner_dropout(gated))


class ClampedGatedFFN(nn.Module):
    """``W₂ · clamped_gate(W₁ x, W₃ x)``: gates that cannot grow past ``limit`` (gpt-oss)."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        bias: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.limit = limit
        self.alpha = alpha
        self.inner_dropout = nn.Dropout(dropout)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x_BTD: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        gated = clamped_gate(self.gate_proj(x_BTD), self.up_proj(x_BTD), limit=self.limit, alpha=self.alpha)
        return self.down_proj(self.inner_dropout(gated))


_named = activation  # where a parameter has that name too
