"""Normalisation of each token's features. LayerNorm centres and scales; RMSNorm only scales.

Each norm computes in float32 at least and gives back the type of its input; each knows its first weights
(``reset_parameters``), because "no change yet" is 1 for some and 0 for others.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from pellucid.shapes import Float, Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """``x``, in float32 where it is narrower."""
    return x if x.dtype == torch.float64 else x.float()


class RMSNorm(nn.Module):
    """``x / rms(x) · (offset + weight)`` (Zhang & Sennrich 2019 eq. 4), computed in float32 at least.

    ``offset=1.0`` stores w − 1, as Gemma's checkpoints do: weights start at 0, and the sum is made in float32, so
    that a narrow type keeps small differences from 1.
    """

    def __init__(self, head_dim: int, *, eps: float = 1e-6, offset: float = 0.0) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The weight that scales by 1."""
        nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        exact = at_least_float32(x)
        scaled = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.eps)
        weight_D = at_least_float32(self.weight) + self.offset if self.offset else self.weight
        return (scaled * weight_D).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}" + (f", offset={self.offset}" if self.offset else "")


class BareRMSNorm(nn.Module):
    """``x / rms(x)`` without weights, of any size; on queries and keys this is Llama 4's "L2 norm" (√H · x / ‖x‖)."""

    def __init__(self, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        exact = at_least_float32(x)
        return (exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"


class L2Norm(nn.Module):
    """``x / ‖x‖``: unit vectors (Henry et al. 2020, on queries and keys). ``eps`` is added to ‖x‖²: 0 stays 0."""

    def __init__(self, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        exact = at_least_float32(x)
        return (exact * torch.rsqrt(exact.pow(2).sum(-1, keepdim=True) + self.eps)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"


class LayerNorm(nn.LayerNorm):
    """``(x - mean(x)) / std(x) · weight + bias`` (Ba et al. 2016 §3), as torch computes it.

    ``bias=False`` still subtracts the mean (Cohere, ModernBERT).
    """

    def __init__(self, head_dim: int, *, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__(head_dim, eps=eps, bias=bias)

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        wide = torch.promote_types(x.dtype, self.weight.dtype)  # a float32 stream may meet narrower weights
        bias_D = None if self.bias is None else self.bias.to(wide)
        return F.layer_norm(x, self.normalized_shape, self.weight.to(wide), bias_D, self.eps).to(x.dtype)


class BareLayerNorm(nn.Module):
    """``(x - mean(x)) / std(x)`` without weights (OLMo)."""

    def __init__(self, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        return F.layer_norm(at_least_float32(x), x.shape[-1:], eps=self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"


class HeadLayerNorm(nn.Module):
    """LayerNorm of each head's features with weights of its own for each head and no bias (Cohere's, StableLM's)."""

    def __init__(self, num_heads: int, head_dim: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_heads, head_dim))

    def reset_parameters(self) -> None:
        """The weight that scales by 1."""
        nn.init.ones_(self.weight)

    def forward(self, x_BTNH: Float[Tensor, "... N H"]) -> Float[Tensor, "... N H"]:
        exact = F.layer_norm(at_least_float32(x_BTNH), x_BTNH.shape[-1:], eps=self.eps)
        return (exact * self.weight).to(x_BTNH.dtype)

    def extra_repr(self) -> str:
        heads, size = self.weight.shape
        return f"{heads}, {size}, eps={self.eps}"
