"""Position and type vectors that are added to the stream on entry."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from pellucid.errors import ArgumentError, LengthError, ShapeError
from pellucid.nn.embedding import init_table
from pellucid.nn.positions.rotary import frequencies, refuse_misplaced
from pellucid.shapes import Float, Int, Tensor
from pellucid.visibility import Coordinates


class LearnedPositions(nn.Module):
    """A table of position vectors, added on entry. Past its end there is an error, never a clamp.

    ``length`` positions can be used. The table has ``offset`` rows more in front of them, which no position reads
    (2 in BART's and OPT's checkpoints, the padding id plus one in RoBERTa's).
    """

    def __init__(self, max_position_embeddings: int, hidden_size: int, *, offset: int = 0) -> None:
        super().__init__()
        if offset < 0:
            raise ShapeError(
                f"offset is {offset}, but a table can have 0 or more rows in front of its {max_position_embeddings}"
            )
        self.max_position_embeddings = max_position_embeddings
        self.offset = offset
        self.weight = nn.Parameter(init_table(max_position_embeddings + offset, hidden_size))

    def forward(self, x_BTD: Float[Tensor, "B T D"], coordinates: Coordinates) -> Float[Tensor, "B T D"]:
        """``x`` plus the vectors of its positions.

        Raises:
            ShapeError: not one place a token.
            LengthError: a real token's position is not in the table.
        """
        refuse_misplaced(x_BTD, coordinates)
        first, last = _range(coordinates)
        if last >= self.max_position_embeddings:
            raise LengthError(
                f"position {last} is past the table of {self.max_position_embeddings} learned positions; "
                f"shorten the sequence to {self.max_position_embeddings} tokens"
            )
        if first < 0:
            raise LengthError(
                f"position {first} is before the first of {self.max_position_embeddings} learned positions; count "
                "from 0"
            )
        real_positions = torch.where(coordinates.real, coordinates.positions, 0)
        return x_BTD + nn.functional.embedding(real_positions + self.offset, self.weight).to(x_BTD.dtype)

    def extra_repr(self) -> str:
        return f"{self.max_position_embeddings}, {self.weight.shape[1]}, offset={self.offset}"


def _range(coordinates: Coordinates) -> tuple[int, int]:
    """The first and last position of real tokens; (0, -1) for none."""
    layout = coordinates.read_layout()
    if layout is None:
        return 0, -1
    return min((run.first for run in layout.runs), default=0), layout.max_position


class SinusoidalPositions(nn.Module):
    """Fixed sines and cosines, added on entry (Vaswani et al. 2017 §3.5); any length, any size, odd ones too.

    ``layout="interleaved"`` puts sine and cosine of a pair side by side (the paper); ``"half"`` puts all sines first
    (Marian, Pegasus). ``"tensor2tensor"`` is what the paper's own code ran (``get_timing_signal_1d``), and fairseq,
    M2M-100 and Whisper after it: all sines first, exponents ``i / (pairs − 1)`` so that the slowest pair turns once in
    ``2π · base`` positions, and a last feature of 0 where the size is odd. ``offset`` is added to each position (2 in
    M2M-100).
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        base: float = 10000.0,
        layout: Literal["interleaved", "half", "tensor2tensor"] = "interleaved",
        offset: int = 0,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.base = base
        self.layout = layout
        self.offset = offset

    def table(self, coordinates: Coordinates) -> Float[Tensor, "B T D"]:
        """The vectors of these positions, in float64."""
        positions_BT1 = (coordinates.positions + self.offset)[:, :, None]
        if self.layout == "tensor2tensor":
            pairs = torch.arange(self.hidden_size // 2, dtype=torch.float64, device=positions_BT1.device)
            angles = positions_BT1 * self.base ** (-pairs / max(len(pairs) - 1, 1))
            return nn.functional.pad(torch.cat([angles.sin(), angles.cos()], -1), (0, self.hidden_size % 2))
        angles = positions_BT1 * frequencies(self.hidden_size, self.base, positions_BT1.device)
        if self.layout == "half":
            return torch.cat([angles.sin(), angles[..., : self.hidden_size // 2].cos()], -1)
        return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[..., : self.hidden_size]

    def forward(self, x_BTD: Float[Tensor, "B T D"], coordinates: Coordinates) -> Float[Tensor, "B T D"]:
        """``x`` plus the vectors of its positions.

        Raises:
            ShapeError: not one place a token.
        """
        refuse_misplaced(x_BTD, coordinates)
        return x_BTD + self.table(coordinates).to(x_BTD.dtype)

    def extra_repr(self) -> str:
        return f"size={self.hidden_size}, base={self.base}, layout={self.layout!r}, offset={self.offset}"


class TokenTypeEmbedding(nn.Embedding):
    """A vector for each *type* of token, added on entry: first or second sentence (Devlin et al. 2019 §3.2).

    Types are only features; they hide nothing, unlike the segments of coordinates. A table of
    ``types`` vectors; ``types_BT`` left out is type 0 everywhere.
    """

    def __init__(self, type_vocab_size: int, hidden_size: int) -> None:
        super().__init__(type_vocab_size, hidden_size, _weight=init_table(type_vocab_size, hidden_size))

    def forward(  # type: ignore[override]
        self, x_BTD: Float[Tensor, "B T D"], types_BT: Int[Tensor, "B T"] | None, coordinates: Coordinates
    ) -> Float[Tensor, "B T D"]:
        """``x`` plus the vectors of its types; the types of padding are not looked at.

        Raises:
            ShapeError: not one type a slot.
            ArgumentError: a type outside the table (seen on a CPU, where looking costs nothing).
        """
        refuse_misplaced(x_BTD, coordinates)
        if types_BT is None:
            return x_BTD + self.weight[0].to(x_BTD.dtype)
        if types_BT.shape != coordinates.shape:
            raise ShapeError(f"token types have shape {tuple(types_BT.shape)}, but the tokens {coordinates.shape}")
        real_types = torch.where(coordinates.real, types_BT, 0)
        if real_types.device.type == "cpu" and real_types.numel() and not torch.compiler.is_compiling():
            low, high = (int(x) for x in real_types.aminmax())
            if low < 0 or high >= self.num_embeddings:
                wrong = low if low < 0 else high
                raise ArgumentError(
                    f"token type {wrong} is outside the table of {self.num_embeddings} types; "
                    f"use 0 to {self.num_embeddings - 1}"
                )
        return x_BTD + super().forward(real_types).to(x_BTD.dtype)
