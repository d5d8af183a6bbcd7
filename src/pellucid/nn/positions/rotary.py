"""Rotary positions: pairs of query and key features are turned by an angle, so that scores see distances."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from pellucid.errors import ShapeError, UnsupportedError
from pellucid.nn.positions.frequencies import host_layout, refuse_misplaced
from pellucid.nn.positions.scaling import Scaling
from pellucid.shapes import Float, Tensor
from pellucid.visibility import Coordinates, Layout


class Rotary(nn.Module):
    """Rotary position embedding (RoPE; Su et al. 2021): turns pairs of query and key features by an angle.

    ``pairing="half"`` turns features (i, i + R/2) together, as llama's checkpoints do; ``"interleaved"`` turns
    (2i, 2i + 1), as the paper does. Only the first ``rotated`` = R features of a head are turned (all of them if it
    is left out): pairs and exponents are those of R, and the rest of the head stays as it is (GPT-J, GPT-NeoX).
    ``scaling`` stretches the angles; where it depends on a document's length, a pass that goes on from tokens turned
    by other angles is refused.
    """

    def __init__(
        self,
        head_size: int,
        *,
        base: float = 10000.0,
        pairing: Literal["half", "interleaved"] = "half",
        rotated: int | None = None,
        scaling: Scaling | None = None,
    ) -> None:
        super().__init__()
        self.head_size = head_size
        self.base = base
        self.pairing = pairing
        self.rotated = head_size if rotated is None else rotated
        self.scaling = Scaling() if scaling is None else scaling
        if self.rotated % 2:
            what = f"head size is {head_size}" if rotated is None else f"rotated is {rotated}"
            raise ShapeError(f"rotary positions turn pairs of features, but the {what}; make it even")
        if not 0 < self.rotated <= head_size:
            raise ShapeError(f"rotated is {rotated}, but a head of {head_size} features can turn 2 to {head_size}")
        self.scaling.check(self.rotated, base)

    def angles(self, coordinates: Coordinates) -> Float[Tensor, "B T pairs"]:
        """The angle of each pair at each position, in float64."""
        return coordinates.positions[:, :, None] * self.scaling.frequencies(self.rotated, self.base, coordinates)

    def crosses(self, before: int, after: int) -> bool:
        """Whether a document of ``before`` tokens and one of ``after`` are turned by different angles.

        Where this is true a cache must not go on (or be cropped) from one to the other: run the document again.
        """
        return self.scaling.crosses(before, after)

    def forward(self, x_BTNH: Float[Tensor, "B T N H"], coordinates: Coordinates) -> Float[Tensor, "B T N H"]:
        """``x`` turned to its positions.

        Raises:
            ShapeError: a head of another size, or not one place a token.
            UnsupportedError: a document that goes on from tokens which were turned by other angles.
        """
        if x_BTNH.shape[-1] != self.head_size:
            raise ShapeError(
                f"the heads have {x_BTNH.shape[-1]} features, but this Rotary turns heads of {self.head_size}; "
                f"make it Rotary({x_BTNH.shape[-1]})"
            )
        refuse_misplaced(x_BTNH, coordinates)
        key = ("rotary", self.base, self.rotated, self.scaling, x_BTNH.dtype)
        cos, sin = coordinates.cached(key, lambda: self._table(coordinates, x_BTNH.dtype))
        if self.rotated == self.head_size:
            return self._turned(x_BTNH, cos, sin)
        turning, rest = x_BTNH.split([self.rotated, self.head_size - self.rotated], -1)
        return torch.cat([self._turned(turning, cos, sin), rest], -1)

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.pairing == "half":
            first, second = x.chunk(2, -1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        first, second = x[..., 0::2], x[..., 1::2]
        return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)

    def _table(self, coordinates: Coordinates, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if self.scaling.by_length:
            self._refuse_mixing(coordinates)
        angles, multiplier = self.angles(coordinates), self.scaling.multiplier(coordinates)
        cos, sin = (angles.cos() * multiplier).unsqueeze(2), (angles.sin() * multiplier).unsqueeze(2)
        return cos.to(dtype), sin.to(dtype)

    def _refuse_mixing(self, coordinates: Coordinates) -> None:
        """Tokens that came before these coordinates begin are keys somewhere else; they must share the angles."""
        layout = host_layout(coordinates)
        for before, after in _grown(layout) if layout is not None else ():
            if self.scaling.crosses(before, after):
                raise UnsupportedError(
                    f"{type(self.scaling).__name__} turns a document of {after} tokens by other angles than its first "
                    f"{before}, which are not in this pass; run all {after} tokens again, with an empty cache or none"
                )

    def extra_repr(self) -> str:
        parts = [f"head_size={self.head_size}, base={self.base}, pairing={self.pairing!r}"]
        parts += [f"rotated={self.rotated}"] if self.rotated != self.head_size else []
        parts += [f"scaling={self.scaling}"] if self.scaling != Scaling() else []
        return ", ".join(parts)


def _grown(layout: Layout) -> list[tuple[int, int]]:
    """For each document its first position here (how many tokens came before) and its length after."""
    grown: dict[tuple[int, int], tuple[int, int]] = {}
    for run in layout.runs:
        stop = run.first + run.stop - run.start
        before, after = grown.get((run.row, run.segment), (run.first, stop))
        grown[run.row, run.segment] = min(before, run.first), max(after, stop)
    return list(grown.values())
