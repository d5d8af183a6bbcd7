"""``Loader``: batches without end, shuffled by a seed, shared out by rank, and resumed at any batch exactly.

The stream is one sequence of rows: epoch after epoch, each a new shuffle of all rows. Batch i takes the next
``world_size · batch_size`` rows and rank r the r-th ``batch_size`` of them, so all batches are full and have
one shape (an objective that rewrites rows, as span corruption does, may return others), ranks never share a
row, each row comes once an epoch, and one number is the position in the stream.
What an objective draws follows from the seed, that number and the rank, so it is resumed exactly too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pellucid.batch import Batch
from pellucid.data.corpus import Corpus
from pellucid.data.examples import Examples, Progress, TokenStore
from pellucid.data.objectives import Objective, causal
from pellucid.data.objectives.causal_lm import describe, overlap_of
from pellucid.data.packing import DocumentSlice, assemble_rows, concat_ranges, pack_split, pack_whole
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import ArgumentError, DataError

_SHUFFLED, _IN_ORDER = 0, 1
"""What a batch is drawn for: the endless stream, or one pass."""


class Loader:
    """An iterator of :class:`Batch`: ``next(loader)`` for ever, or :meth:`one_epoch` for one pass in order.

    ``documents`` are lists of ids, a :class:`TokenStore`, or :class:`Examples`, whose labels, targets and sources
    stay with their documents. Rows have ``length`` slots, and those of sources ``source_length``.
    """

    def __init__(
        self,
        documents: TokenStore | Examples | Iterable[Sequence[int]],
        *,
        batch_size: int,
        length: int,
        source_length: int | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        objective: Objective = causal,
        join: bool = True,
    ) -> None:
        _check(batch_size, seed, rank, world_size)
        data = documents if isinstance(documents, TokenStore | Examples) else TokenStore.of(documents)
        self.examples = data if isinstance(data, Examples) else Examples(data, whole=False)
        self.store = store = self.examples.store
        self._shape = (batch_size, length)
        self._source_shape = (batch_size, length if source_length is None else source_length)
        rows = list(self._plan(join, overlap_of(objective)))
        if not rows:
            raise DataError(f"the {len(store)} documents hold no token; give documents that are not empty")
        self.batch_size, self.length, self.seed = batch_size, length, seed
        self.rank, self.world_size, self.objective = rank, world_size, objective
        pieces = np.array([piece for row in rows for piece in row], dtype=np.int64)
        self._document = pieces[:, 0]
        self._start = store.bounds[pieces[:, 0]] + pieces[:, 1]
        self._size = pieces[:, 2] - pieces[:, 1]
        self._row = np.cumsum([0, *map(len, rows)])
        self._orders: dict[int, np.ndarray] = {}
        self._batch = 0
        stream = f"{data.digest()} {length} {join}"
        if self.examples.source is not None:
            stream += f" {self._source_shape[1]}"
        if objective is not causal:
            stream += f" {describe(objective)}"
        self._data = hashlib.sha256(stream.encode()).hexdigest()

    def _plan(self, join: bool, overlap: int) -> Iterator[list[DocumentSlice]]:
        """Which pieces lie in which row."""
        examples, (_, length) = self.examples, self._shape
        if not examples.whole:
            return pack_split(examples.store.lengths.tolist(), length, join=join, overlap=overlap)
        stores, room = [examples.store], [length]
        if examples.source is not None:
            stores.append(examples.source)
            room.append(self._source_shape[1])
        sizes = list(zip(*(store.lengths.tolist() for store in stores), strict=True))
        return pack_whole(sizes, tuple(room), join=join, together=examples.together)

    @classmethod
    def from_corpus(
        cls,
        corpus: Corpus,
        tokenizer: Tokenizer,
        split: str = "train",
        *,
        ends: bool = True,
        progress: Progress | None = None,
        **settings: Any,
    ) -> Loader:
        """Tokenise one side of ``corpus``, with begin and end tokens or without; ``settings`` are the constructor's."""
        return cls(TokenStore.from_corpus(corpus, tokenizer, split, ends=ends, progress=progress), **settings)

    # ---- facts

    @property
    def rows(self) -> int:
        """Rows in an epoch, over all ranks."""
        return len(self._row) - 1

    @property
    def tokens(self) -> int:
        """Tokens of all documents, each counted once."""
        return len(self.store.tokens)

    @property
    def num_token_pairs(self) -> int:
        """Pairs (token, next token) in an epoch, over all ranks: what the causal objective counts."""
        return int(np.maximum(self.store.lengths - 1, 0).sum())

    @property
    def bytes(self) -> int:
        """Bytes of the documents' text (0 where only ids were given)."""
        return self.store.size

    @property
    def batches(self) -> int:
        """Batches returned so far, which is the number of the next."""
        return self._batch

    @property
    def epoch(self) -> float:
        """Epochs returned so far."""
        return self._batch * self.world_size * self.batch_size / self.rows

    # ---- batches

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        batch = self.batch(self._batch)
        self.advance()
        return batch

    def advance(self) -> None:
        """Count the next batch as given: for a caller that has it from :meth:`batch` already."""
        self._batch += 1

    def batch(self, number: int) -> Batch:
        """Batch ``number`` of this rank's stream, wherever the stream is now."""
        return self._assemble(self._rows_of(number), (_SHUFFLED, number))

    def names(self, number: int | None = None) -> list[str]:
        """The documents in a batch (default: the last one returned), in order, each once."""
        last = max(self._batch - 1, 0) if number is None else number
        pieces = np.concatenate([np.arange(self._row[r], self._row[r + 1]) for r in self._rows_of(last)])
        return [self.store.name(document) for document in dict.fromkeys(self._document[pieces].tolist())]

    def one_epoch(self) -> Iterator[Batch]:
        """Each row of all ranks once, in order and unshuffled; the stream stays where it is.

        Every rank gives the same number of batches of one shape: rows missing at the end are padding.
        """
        together = self.world_size * self.batch_size
        for number, first in enumerate(range(0, self.rows, together)):
            begin = first + self.rank * self.batch_size
            rows = np.arange(begin, max(begin, min(begin + self.batch_size, self.rows)))
            yield self._assemble(rows, (_IN_ORDER, number))

    def _rows_of(self, number: int) -> np.ndarray:
        begin = (number * self.world_size + self.rank) * self.batch_size
        epochs, places = np.divmod(np.arange(begin, begin + self.batch_size), self.rows)
        return np.array([self._order(epoch)[place] for epoch, place in zip(epochs.tolist(), places, strict=True)])

    def _order(self, epoch: int) -> np.ndarray:
        """The shuffle of an epoch: rows sorted by raw random bits, which no numpy changes."""
        if epoch not in self._orders:
            if len(self._orders) >= 2:
                del self._orders[next(iter(self._orders))]
            bits = np.random.PCG64(np.random.SeedSequence([self.seed, epoch])).random_raw(self.rows)
            self._orders[epoch] = np.argsort(bits, kind="stable")
        return self._orders[epoch]

    def _assemble(self, rows: np.ndarray, draw: tuple[int, int]) -> Batch:
        """These rows, then rows of padding, as a labelled batch."""
        examples = self.examples
        num_pieces = self._row[rows + 1] - self._row[rows]
        pieces, _ = concat_ranges(self._row[rows], num_pieces)
        document = self._document[pieces]
        batch = assemble_rows(
            self.store.tokens, examples.columns, self._start[pieces], self._size[pieces], num_pieces, self._shape
        )
        if examples.source is not None:
            begins, sizes = examples.source.bounds[document], examples.source.lengths[document]
            batch = replace(
                batch, source=assemble_rows(examples.source.tokens, {}, begins, sizes, num_pieces, self._source_shape)
            )
        if examples.targets is not None:
            batch = replace(batch, targets=torch.from_numpy(examples.targets[document]))
        seed = np.random.SeedSequence([self.seed, *draw, self.rank]).generate_state(1, np.uint64)
        return self.objective(batch, torch.Generator().manual_seed(int(seed[0])))

    # ---- state

    def _identity(self) -> dict[str, Any]:
        return {
            "data": self._data,
            "rows": self.rows,
            "length": self.length,
            "seed": self.seed,
            "world_size": self.world_size,
            "batch_size": self.batch_size,
        }

    def state_dict(self) -> dict[str, Any]:
        """The position in the stream, and which stream it is; plain values, the same on every rank."""
        return {"batch": self._batch, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where ``state`` was saved; the state of another stream is refused."""
        own = self._identity()
        if set(state) != {"batch", *own}:
            wanted = ", ".join(sorted({"batch", *own}))
            raise DataError(f"this is not a loader's state: it has {sorted(map(str, state))}, not {wanted}")
        for name, value in own.items():
            if state[name] != value:
                raise DataError(
                    f"the state was saved with {name} {state[name]!r}, but this loader has {value!r}; "
                    "resume with the same data and settings, or start a new run"
                )
        batch = state["batch"]
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < 0:
            raise DataError(f"the state's batch is {batch!r}; it should be a number of batches, 0 or more")
        self._batch = batch


class Prefetcher:
    """Micro-batches of ``loader``, on ``device``.

    Off the CPU the next one is assembled in a thread, and pinned where the device is a GPU, while the device works on
    this one. ``loader`` counts only those that were given, so a checkpoint never skips one.
    """

    def __init__(self, loader: Loader, device: torch.device | str) -> None:
        self._loader, self._device = loader, torch.device(device)
        self._pool = None if self._device.type == "cpu" else ThreadPoolExecutor(1, "prefetch")
        self._ahead: tuple[int, Future[Batch]] | None = None

    def next(self) -> Batch:
        """The next micro-batch."""
        if self._pool is None:
            return next(self._loader).to(self._device)
        number = self._loader.batches
        ready, self._ahead = self._ahead, None
        batch = ready[1].result() if ready is not None and ready[0] == number else self._assemble(number)
        self._loader.advance()
        self._ahead = number + 1, self._pool.submit(self._assemble, number + 1)
        return batch.to(self._device)

    def _assemble(self, number: int) -> Batch:
        batch = self._loader.batch(number)
        return batch.pin_memory() if self._device.type == "cuda" else batch

    def close(self) -> None:
        """End the thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def _check(batch_size: int, seed: int, rank: int, world_size: int) -> None:
    if batch_size < 1:
        raise ArgumentError(f"batch_size is {batch_size}; give 1 row or more")
    if seed < 0:
        raise ArgumentError(f"seed is {seed}; give 0 or a positive number")
    if not 0 <= rank < world_size:
        raise ArgumentError(f"rank is {rank} and world_size {world_size}; ranks are 0 … world_size-1")
