"""Normalisation of each token's features. LayerNorm centres and scales; RMSNorm only scales."""

import torch
from torch import nn

from pellucid.shapes import Float, Tensor


class RMSNorm(nn.Module):
    """``x / rms(x) · weight`` (Zhang & Sennrich 2019), computed in float32 at least."""

    def __init__(self, size: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        exact = x if x.dtype == torch.float64 else x.float()
        scaled = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.eps)
        return (scaled * self.weight).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"


class LayerNorm(nn.LayerNorm):
    """``(x - mean(x)) / std(x) · weight + bias`` (Ba et al. 2016), as torch computes it."""

    def __init__(self, size: int, *, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__(size, eps=eps, bias=bias)

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        return super().forward(x).to(x.dtype)
