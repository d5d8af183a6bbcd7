"""A model that is a table: the next token depends on the last two of the row.

It obeys what decoding asks of a model (``config.vocab_size``, ``max_length``, ``new_cache``, ``head``, calls
with a cache) and nothing else, so that the loop is tested apart from attention.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from pellucid.batch import Batch
from pellucid.visibility import causal, prefix


@dataclass
class TableCache:
    capacity: int
    rows: list[list[int]]
    length: int = 0
    memory: list[int] | None = None
    prefixes: list[int] = field(default_factory=list)

    def reorder(self, index: Tensor) -> None:
        chosen = index.tolist()
        self.rows = [list(self.rows[row]) for row in chosen]
        self.memory = None if self.memory is None else [self.memory[row] for row in chosen]
        self.prefixes = [self.prefixes[row] for row in chosen]


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
        return TableCache(capacity, [[] for _ in range(rows)], prefixes=[0] * rows)

    def head(self, hidden_BTD: Tensor) -> Tensor:
        return hidden_BTD

    def forward(self, batch: Batch, *, cache: TableCache | None = None, want: str = "logits") -> SimpleNamespace:
        assert want == "hidden"
        tokens, rows = batch.tokens, batch.shape[0]
        self.slots_run.append(batch.shape)
        cache = self.new_cache(rows, tokens.shape[1]) if cache is None else cache
        assert len(cache.rows) == rows
        self._read(batch, cache)
        hidden = torch.zeros(*tokens.shape, self.config.vocab_size, dtype=self.table.dtype)
        for row, held in enumerate(cache.rows):
            for slot in batch.segments[row].nonzero()[:, 0].tolist():
                held.append(int(tokens[row, slot]))
                hidden[row, slot] = self.after(held, cache, row)
        cache.length += tokens.shape[1]
        assert cache.length <= cache.capacity
        return SimpleNamespace(hidden=hidden)

    def after(self, held: list[int], cache: TableCache, row: int) -> Tensor:
        return self.table[held[-2] if len(held) > 1 else 0, held[-1]]

    def _read(self, batch: Batch, cache: TableCache) -> None:
        assert batch.source is None
        assert batch.groups is None


class SourceTableModel(TableModel):
    """An encoder–decoder: ``previous`` is moved on by a number that depends on every token of the source."""

    max_source_length: int | None = None

    def after(self, held: list[int], cache: TableCache, row: int) -> Tensor:
        assert cache.memory is not None
        previous = held[-2] if len(held) > 1 else 0
        return self.table[(previous + cache.memory[row]) % self.config.vocab_size, held[-1]]

    def _read(self, batch: Batch, cache: TableCache) -> None:
        assert batch.groups is None
        assert (batch.source is None) == (cache.memory is not None)  # read at the first pass, and only there
        if batch.source is not None:
            place = batch.source.positions + 1
            cache.memory = (batch.source.tokens * place * (batch.source.segments != 0)).sum(1).tolist()


class PrefixTableModel(TableModel):
    """A prefix-LM: ``previous`` is moved on by the number of tokens in the prefix, which must come in one chunk."""

    rules = (causal() | prefix(),)

    def after(self, held: list[int], cache: TableCache, row: int) -> Tensor:
        previous = held[-2] if len(held) > 1 else 0
        return self.table[(previous + cache.prefixes[row]) % self.config.vocab_size, held[-1]]

    def _read(self, batch: Batch, cache: TableCache) -> None:
        assert batch.groups is not None
        assert not bool(batch.groups[batch.segments == 0].any())
        sizes = batch.groups.sum(1).tolist()
        assert cache.length == 0 or not any(sizes)
        cache.prefixes = [held + size for held, size in zip(cache.prefixes, sizes, strict=True)]


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
