"""Where a token is, told to the model: learned and sinusoidal tables added on entry, rotary angles inside attention.

All of them read positions from coordinates. Angles are computed in float64 and cast last: 16-bit numbers cannot
hold position 257, and no ``model.half()`` can reach a frequency here, because none is a parameter or a buffer.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from pellucid.errors import LengthError, ShapeError
from pellucid.shapes import Float, Tensor
from pellucid.visibility import Coordinates


def frequencies(size: int, base: float, device: torch.device | None = None) -> Float[Tensor, "pairs"]:
    """``base ** (-2i / size)`` for each pair i, in float64 (Vaswani et al. 2017 §3.5; Su et al. 2021 §3.2.2)."""
    pairs = torch.arange((size + 1) // 2, dtype=torch.float64, device=device)
    return base ** (-2 * pairs / size)


class Rotary(nn.Module):
    """Rotary position embedding (RoPE; Su et al. 2021): turns pairs of query and key features by an angle.

    ``pairing="half"`` turns features (i, i + H/2) together, as llama's checkpoints do; ``"interleaved"`` turns
    (2i, 2i + 1), as the paper does.
    """

    def __init__(
        self, head_size: int, *, base: float = 10000.0, pairing: Literal["half", "interleaved"] = "half"
    ) -> None:
        super().__init__()
        if head_size % 2:
            raise ShapeError(f"rotary positions turn pairs of features, but the head size is {head_size}; make it even")
        self.head_size = head_size
        self.base = base
        self.pairing = pairing

    def angles(self, coordinates: Coordinates) -> Float[Tensor, "B T pairs"]:
        """The angle of each pair at each position, in float64."""
        inverse = frequencies(self.head_size, self.base, coordinates.positions.device)
        return coordinates.positions[:, :, None] * inverse

    def forward(self, x_BTNH: Float[Tensor, "B T N H"], coordinates: Coordinates) -> Float[Tensor, "B T N H"]:
        cos, sin = coordinates.once(
            ("rotary", self.base, self.head_size, x_BTNH.dtype), lambda: self._table(coordinates, x_BTNH.dtype)
        )
        if self.pairing == "half":
            first, second = x_BTNH.chunk(2, -1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        first, second = x_BTNH[..., 0::2], x_BTNH[..., 1::2]
        return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)

    def _table(self, coordinates: Coordinates, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = self.angles(coordinates).unsqueeze(2)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def extra_repr(self) -> str:
        return f"head_size={self.head_size}, base={self.base}, pairing={self.pairing!r}"


class LearnedPositions(nn.Module):
    """A table of position vectors, added on entry. Past its end there is an error, never a clamp."""

    def __init__(self, length: int, size: int) -> None:
        super().__init__()
        self.length = length
        self.weight = nn.Parameter(torch.empty(length, size))

    def forward(self, x_BTD: Float[Tensor, "B T D"], coordinates: Coordinates) -> Float[Tensor, "B T D"]:
        layout = coordinates.layout
        if layout is not None and layout.max_position >= self.length:
            raise LengthError(
                f"position {layout.max_position} is past the table of {self.length} learned positions; "
                f"shorten the sequence to {self.length} tokens"
            )
        real_positions = torch.where(coordinates.real, coordinates.positions, 0)
        return x_BTD + nn.functional.embedding(real_positions, self.weight).to(x_BTD.dtype)


class SinusoidalPositions(nn.Module):
    """Fixed sines and cosines, added on entry (Vaswani et al. 2017 §3.5); any length, any size, odd ones too.

    ``layout="interleaved"`` puts sine and cosine of a pair side by side (the paper); ``"half"`` puts all sines first.
    """

    def __init__(
        self, size: int, *, base: float = 10000.0, layout: Literal["interleaved", "half"] = "interleaved"
    ) -> None:
        super().__init__()
        self.size = size
        self.base = base
        self.layout = layout

    def table(self, coordinates: Coordinates) -> Float[Tensor, "B T D"]:
        """The vectors of these positions, in float64."""
        angles = coordinates.positions[:, :, None] * frequencies(self.size, self.base, coordinates.positions.device)
        if self.layout == "half":
            return torch.cat([angles.sin(), angles[..., : self.size // 2].cos()], -1)
        return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[..., : self.size]

    def forward(self, x_BTD: Float[Tensor, "B T D"], coordinates: Coordinates) -> Float[Tensor, "B T D"]:
        return x_BTD + self.table(coordinates).to(x_BTD.dtype)

    def extra_repr(self) -> str:
        return f"size={self.size}, base={self.base}, layout={self.layout!r}"


class NoPositions(nn.Module):
    """Nothing is added: attention alone must tell tokens apart."""

    def forward(self, x_BTD: Float[Tensor, "B T D"], coordinates: Coordinates) -> Float[Tensor, "B T D"]:
        return x_BTD
