"""Token ids to vectors. Padding enters the stream as exactly 0, whatever its id, table row or position is."""

from __future__ import annotations

import torch
from torch import nn

from pellucid.errors import ArgumentError
from pellucid.shapes import Float, Int, Tensor
from pellucid.visibility import Coordinates


def init_table(rows: int, size: int) -> Tensor:
    """A table as torch draws those of ``nn.Embedding``; on the meta device, where that loads a compiler, nothing is."""
    table = torch.empty(rows, size)
    return table if table.is_meta else nn.init.normal_(table)


class TokenEmbedding(nn.Embedding):
    """A table of token vectors that refuses ids outside it (on a CPU, where looking costs nothing)."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__(vocab_size, hidden_size, _weight=init_table(vocab_size, hidden_size))

    def forward(self, tokens_BT: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        if tokens_BT.device.type == "cpu" and tokens_BT.numel() and not torch.compiler.is_compiling():
            low, high = (int(x) for x in tokens_BT.aminmax())
            if low < 0 or high >= self.num_embeddings:
                wrong = low if low < 0 else high
                raise ArgumentError(
                    f"token id {wrong} is outside the vocabulary of {self.num_embeddings}; "
                    "was the text encoded with another model's tokenizer?"
                )
        return super().forward(tokens_BT)


def zero_padding(x_BTD: Float[Tensor, "B T D"], coordinates: Coordinates) -> Float[Tensor, "B T D"]:
    """``x`` with exactly 0 (and gradient 0) at segment 0, so that no padding, not even NaN, enters the model."""
    layout = coordinates.layout
    if not torch.compiler.is_compiling() and layout is not None and layout.tokens == layout.rows * layout.slots:
        return x_BTD
    return torch.where(coordinates.real[:, :, None], x_BTD, torch.zeros((), dtype=x_BTD.dtype, device=x_BTD.device))
