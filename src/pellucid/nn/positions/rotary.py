"""Rotary positions: pairs of query and key features are rotated by an angle, so that scores see distances."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from pellucid.errors import ShapeError, UnsupportedError
from pellucid.shapes import Float, Tensor
from pellucid.visibility import Coordinates, Layout


def frequencies(size: int, base: float, device: torch.device | None = None) -> Float[Tensor, "pairs"]:
    """``base ** (-2i / size)`` for each pair i, in float64 (Vaswani et al. 2017 §3.5; Su et al. 2021 §3.2.2)."""
    pairs = torch.arange((size + 1) // 2, dtype=torch.float64, device=device)
    return base ** (-2 * pairs / size)


def refuse_misplaced(x_BT: Tensor, coordinates: Coordinates) -> None:
    """Raises ShapeError where ``x`` has not one place a token: either would be spread over the other."""
    if tuple(x_BT.shape[:2]) != coordinates.shape:
        raise ShapeError(
            f"x has {tuple(x_BT.shape[:2])} rows and tokens, but its coordinates are {coordinates.shape}; give one "
            "place a token"
        )


@dataclass(frozen=True)
class RopeScaling:
    """No scaling; the others derive from this."""

    def check(self, size: int, base: float) -> None:
        """Raises ShapeError or InputError where this cannot be used for ``size`` features rotated from ``base``."""

    def frequencies(self, size: int, base: float, coordinates: Coordinates) -> Float[Tensor, "*BT pairs"]:
        """Radians a position for each pair: one list for all slots (``[pairs]``) or one each (``[B, T, pairs]``)."""
        return frequencies(size, base, coordinates.positions.device)

    def multiplier(self, coordinates: Coordinates) -> float | Float[Tensor, "B T 1"]:
        """What cosines and sines are multiplied by."""
        return 1.0

    def changes_angles(self, before: int, after: int) -> bool:
        """Whether documents of these two lengths (in tokens) are rotated by different angles.

        Where this is true, a cache must not grow from ``before`` tokens to ``after``, nor be cropped: its keys are
        wrong, and the document has to be run again. 0 tokens have no keys.
        """
        return before > 0 and after > 0 and self.table(before) != self.table(after)

    def table(self, length: int) -> int:
        """A number that two lengths share exactly if their documents are rotated by the same angles."""
        return 0

    @property
    def score_multiplier(self) -> float:
        """What latent attention multiplies its softmax scale by."""
        return 1.0

    @property
    def by_length(self) -> bool:
        """Whether the angles depend on how long a document is."""
        return type(self).table is not RopeScaling.table


class Rotary(nn.Module):
    """Rotary position embedding (RoPE; Su et al. 2021): rotates pairs of query and key features by an angle.

    Features (i, i + R/2) are rotated together, as in Llama's checkpoints; with ``interleaved``, features
    (2i, 2i + 1), as in the paper. Only the first ``rotary_dim`` = R features of a head are rotated (all of them if it
    is left out): pairs and exponents are those of R, and the rest of the head stays as it is (GPT-J, GPT-NeoX).
    ``scaling`` changes the angles; where it depends on a document's length, a pass that continues tokens rotated
    by other angles is refused.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        rope_theta: float = 10000.0,
        interleaved: bool = False,
        rotary_dim: int | None = None,
        scaling: RopeScaling | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.rope_theta = rope_theta
        self.interleaved = interleaved
        self.rotary_dim = head_dim if rotary_dim is None else rotary_dim
        self.scaling = RopeScaling() if scaling is None else scaling
        if self.rotary_dim % 2:
            what = f"head_dim is {head_dim}" if rotary_dim is None else f"rotary_dim is {rotary_dim}"
            raise ShapeError(f"rotary positions rotate pairs of features, but the {what}; make it even")
        if not 0 < self.rotary_dim <= head_dim:
            raise ShapeError(f"rotary_dim is {rotary_dim}, but must be 2 to the {head_dim} features of a head")
        self.scaling.check(self.rotary_dim, rope_theta)

    def angles(self, coordinates: Coordinates) -> Float[Tensor, "B T pairs"]:
        """The angle of each pair at each position, in float64."""
        return coordinates.positions[:, :, None] * self.scaling.frequencies(
            self.rotary_dim, self.rope_theta, coordinates
        )

    def forward(self, x_BTNH: Float[Tensor, "B T N H"], coordinates: Coordinates) -> Float[Tensor, "B T N H"]:
        """``x`` rotated to its positions.

        Raises:
            ShapeError: a head of another size, or not one place a token.
            UnsupportedError: a document that continues tokens which were rotated by other angles.
        """
        if x_BTNH.shape[-1] != self.head_dim:
            raise ShapeError(
                f"the heads have {x_BTNH.shape[-1]} features, but this Rotary rotates heads of {self.head_dim}; "
                f"make it Rotary({x_BTNH.shape[-1]})"
            )
        refuse_misplaced(x_BTNH, coordinates)
        key = ("rotary", self.rope_theta, self.rotary_dim, self.scaling, x_BTNH.dtype)
        cos, sin = coordinates.cached(key, lambda: self._table(coordinates, x_BTNH.dtype))
        if self.rotary_dim == self.head_dim:
            return self._rotate(x_BTNH, cos, sin)
        rotated, rest = x_BTNH.split([self.rotary_dim, self.head_dim - self.rotary_dim], -1)
        return torch.cat([self._rotate(rotated, cos, sin), rest], -1)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if not self.interleaved:
            first, second = x.chunk(2, -1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        first, second = x[..., 0::2], x[..., 1::2]
        return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)

    def _table(self, coordinates: Coordinates, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if self.scaling.by_length:
            compiling = torch.compiler.is_compiling()
            (torch.compiler.disable(self._refuse_mixing) if compiling else self._refuse_mixing)(coordinates)
        angles, multiplier = self.angles(coordinates), self.scaling.multiplier(coordinates)
        cos, sin = (angles.cos() * multiplier).unsqueeze(2), (angles.sin() * multiplier).unsqueeze(2)
        return cos.to(dtype), sin.to(dtype)

    def _refuse_mixing(self, coordinates: Coordinates) -> None:
        """Earlier tokens of these documents are cached keys; they must share the angles."""
        layout = coordinates.read_layout()
        for before, after in _grown(layout) if layout is not None else ():
            if self.scaling.changes_angles(before, after):
                raise UnsupportedError(
                    f"{type(self.scaling).__name__} rotates a document of {after} tokens by other angles than "
                    f"its first {before}, which are not in this pass; run all {after} tokens again, with an empty "
                    "cache or none"
                )

    def extra_repr(self) -> str:
        parts = [f"head_dim={self.head_dim}, rope_theta={self.rope_theta}, interleaved={self.interleaved}"]
        parts += [f"rotary_dim={self.rotary_dim}"] if self.rotary_dim != self.head_dim else []
        parts += [f"scaling={self.scaling}"] if self.scaling != RopeScaling() else []
        return ", ".join(parts)


def _grown(layout: Layout) -> list[tuple[int, int]]:
    """For each document its first position here (how many tokens came before) and its length after."""
    grown: dict[tuple[int, int], tuple[int, int]] = {}
    for run in layout.runs:
        stop = run.first + run.stop - run.start
        before, after = grown.get((run.row, run.segment), (run.first, stop))
        grown[run.row, run.segment] = min(before, run.first), max(after, stop)
    return list(grown.values())
