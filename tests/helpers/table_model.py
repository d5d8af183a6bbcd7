"""A model that is a table: the next token depends on the last two of the row.

It obeys what decoding asks of a model (``config.vocab_size``, ``max_length``, ``new_cache``, ``head``, calls
with a cache) and nothing else, so that the loop is tested apart from attention.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor, nn


@dataclass
class TableCache:
    capacity: int
    rows: list[list[int]]
    length: int = 0


class TableModel(nn.Module):
    """Logits are ``table_VVV[previous, current]``; at a row's first token ``previous`` is 0."""

    def __init__(self, table_VVV: Tensor, max_length: int | None = None) -> None:
        super().__init__()
        self.table = nn.Parameter(table_VVV, requires_grad=False)
        self.max_length = max_length
        self.config = SimpleNamespace(vocab_size=table_VVV.shape[-1])
        self.slots_run: list[tuple[int, int]] = []
        self.eval()

    @classmethod
    def random(cls, vocab_size: int, *, seed: int = 0, max_length: int | None = None) -> TableModel:
        generator = torch.Generator().manual_seed(seed)
        shape = (vocab_size, vocab_size, vocab_size)
        return cls(3 * torch.randn(shape, generator=generator, dtype=torch.float64), max_length)

    @classmethod
    def chain(cls, following: dict[int, int], vocab_size: int) -> TableModel:
        """After ``token`` comes ``following[token]``, whatever came before."""
        table = torch.zeros(vocab_size, vocab_size, vocab_size, dtype=torch.float64)
        for token, after in following.items():
            table[:, token, after] = 10.0
        return cls(table)

    def new_cache(self, rows: int, capacity: int) -> TableCache:
        return TableCache(capacity, [[] for _ in range(rows)])

    def head(self, hidden_BTD: Tensor) -> Tensor:
        return hidden_BTD

    def forward(self, batch: object, *, cache: TableCache | None = None, want: str = "logits") -> SimpleNamespace:
        assert want == "hidden"
        tokens, segments = batch.tokens, batch.segments  # type: ignore[attr-defined]
        self.slots_run.append(tuple(tokens.shape))
        hidden = torch.zeros(*tokens.shape, self.config.vocab_size, dtype=torch.float64)
        for row in range(tokens.shape[0]):
            held = [] if cache is None else cache.rows[row]
            for slot in segments[row].nonzero()[:, 0].tolist():
                held.append(int(tokens[row, slot]))
                hidden[row, slot] = self.table[held[-2] if len(held) > 1 else 0, held[-1]]
        if cache is not None:
            cache.length += tokens.shape[1]
            assert cache.length <= cache.capacity
        return SimpleNamespace(hidden=hidden)


@dataclass
class PieceTokenizer:
    """Tokens are given pieces; a text is cut greedily into the longest."""

    pieces: list[bytes]
    bos_id: int | None = None
    eos_id: int | None = None
    vocab_size: int = field(init=False)

    def __post_init__(self) -> None:
        self.vocab_size = len(self.pieces)

    def encode(self, text: str) -> list[int]:
        data, ids = text.encode(), []
        while data:
            held = [piece for piece in self.pieces if piece and data.startswith(piece)]
            best = max(held, key=len)
            ids.append(self.pieces.index(best))
            data = data[len(best) :]
        return ids

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]
