"""Small steps on the way between a stream and its branches."""

from __future__ import annotations

import torch
from torch import nn

from pellucid.shapes import Tensor


class Scale(nn.Module):
    """``factor · x``."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x

    def extra_repr(self) -> str:
        return f"{self.factor:g}"


class Upcast(nn.Module):
    """``x`` in a type, or in its own where that is wider."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.promote_types(x.dtype, self.dtype))

    def extra_repr(self) -> str:
        return str(self.dtype)


class CastLike(nn.Module):
    """``x`` in the type that the first weight of ``part`` has when it is asked; the way from a stream into a matrix."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self._part = (part,)  # in a tuple, because it is no child: its weights have a home already

    def forward(self, x: Tensor) -> Tensor:
        return x.to(next(self._part[0].parameters(), x).dtype)
