"""Documents into rows of one length, with no token pair lost and none trained twice.

Rows are filled in the order of the stream. A document that does not fit into the rest of a row continues
in the next one, as a document of its own whose positions start at 0. For the next token, the piece there begins
with the last token of the piece before, so that every pair (token, next token) of a document is trained exactly
once; other objectives say by ``overlap`` how many tokens the pieces share. What has one answer a document, or
comes in pairs, is never cut: :func:`pack_whole`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from pellucid.batch import IGNORED, Batch
from pellucid.errors import DataError
from pellucid.visibility import Layout, Run


class DocumentSlice(NamedTuple):
    """Tokens ``start … stop-1`` of one document."""

    document: int
    start: int
    stop: int


def pack_split(
    lengths: Iterable[int], length: int, *, join: bool = True, overlap: int = 1
) -> Iterator[list[DocumentSlice]]:
    """Rows of at most ``length`` tokens, as pieces of documents of these ``lengths``.

    Neighbouring pieces of a document share ``overlap`` tokens. ``join=False`` puts no two documents into one row.
    Empty documents have no piece.
    """
    if length < overlap + 1:
        what = "pair to learn from" if overlap == 1 else f"token beside the {overlap} that pieces share"
        raise DataError(f"rows of {length} tokens hold no {what}; set length to {overlap + 1} or more")
    return _cut(lengths, length, join, overlap)


def _cut(lengths: Iterable[int], length: int, join: bool, overlap: int) -> Iterator[list[DocumentSlice]]:
    row: list[DocumentSlice] = []
    room = length
    for document, size in enumerate(lengths):
        start = 0
        while start < size:
            nothing_new_fits = room < min(overlap + 1, size - start)
            if row and (nothing_new_fits or not join):
                yield row
                row, room = [], length
            stop = min(size, start + room)
            row.append(DocumentSlice(document, start, stop))
            room -= stop - start
            start = stop if stop == size else stop - overlap
    if row:
        yield row


def pack_whole(
    sizes: Sequence[tuple[int, ...]], length: tuple[int, ...], *, join: bool = True, together: int = 1
) -> Iterator[list[DocumentSlice]]:
    """Rows of whole documents. ``sizes[d]`` are the tokens of document d, or of both halves of pair d.

    ``length`` is a row's capacity for each. ``together`` neighbours always share a row; ``join=False`` gives
    each such group a row of its own.

    >>> [[piece.document for piece in row] for row in whole([(3,), (4,), (2,)], (6,))]
    [[0], [1, 2]]
    """
    row: list[DocumentSlice] = []
    room = length
    for first in range(0, len(sizes), together):
        group = range(first, min(first + together, len(sizes)))
        needed = tuple(sum(sizes[document][half] for document in group) for half in range(len(length)))
        if any(need > most for need, most in zip(needed, length, strict=True)):
            raise DataError(
                f"document {first} needs {' and '.join(map(str, needed))} slots, but a row has "
                f"{' and '.join(map(str, length))} and it must not be cut; raise length, or cut it before"
            )
        if row and (not join or any(need > left for need, left in zip(needed, room, strict=True))):
            yield row
            row, room = [], length
        row += [DocumentSlice(document, 0, sizes[document][0]) for document in group]
        room = tuple(left - need for left, need in zip(room, needed, strict=True))
    if row:
        yield row


def pack(documents: Iterable[Sequence[int]], length: int, *, join: bool = True) -> Iterator[list[list[int]]]:
    """Rows of documents for :meth:`Batch.from_documents`, as :func:`pack_split` lays them out; streams.

    >>> list(pack([[1, 2, 3], [4, 5, 6, 7]], length=5))
    [[[1, 2, 3], [4, 5]], [[5, 6, 7]]]
    """
    pending: dict[int, Sequence[int]] = {}

    def lengths() -> Iterator[int]:
        for number, document in enumerate(documents):
            pending[number] = document
            yield len(document)

    return _gather(pack_split(lengths(), length, join=join), pending)


def _gather(rows: Iterator[list[DocumentSlice]], pending: dict[int, Sequence[int]]) -> Iterator[list[list[int]]]:
    """The tokens of the pieces; documents that the stream has passed are released."""
    for row in rows:
        yield [list(pending[piece.document][piece.start : piece.stop]) for piece in row]
        for number in [number for number in pending if number < row[-1].document]:
            del pending[number]


_EMPTY = {"labels": IGNORED, "groups": 0, "types": 0}


def assemble_rows(
    tokens: np.ndarray,
    columns: Mapping[str, np.ndarray],
    starts: np.ndarray,
    sizes: np.ndarray,
    num_pieces: np.ndarray,
    shape: tuple[int, int],
) -> Batch:
    """Rows of ``num_pieces[r]`` pieces each, then rows of padding, up to ``shape``.

    Piece i is ``tokens[starts[i] : starts[i] + sizes[i]]``; pieces are segments 1, 2, … of their row, empty ones too.
    ``columns`` (labels, groups, types) have an entry a token and travel with it.
    """
    taken, position = concat_ranges(starts, sizes)
    _, number = concat_ranges(np.zeros_like(num_pieces), num_pieces)
    before = np.cumsum(sizes) - sizes
    row = np.repeat(np.arange(len(num_pieces)), num_pieces)
    first = before[np.cumsum(num_pieces) - num_pieces]  # tokens before each row's first piece
    begins = before - first[row]
    slots = np.repeat(row * shape[1] + begins, sizes) + position
    fields = {"tokens": tokens[taken], "positions": position, "segments": np.repeat(number + 1, sizes)}
    fields |= {name: column[taken] for name, column in columns.items()}
    runs = zip(*(c.tolist() for c in (row, begins, begins + sizes, number + 1, np.zeros_like(row))), strict=True)
    layout = Layout(*shape, tuple(run for run in map(Run._make, runs) if run.stop > run.start))
    spread: dict[str, Any] = {name: _spread(name, values, slots, shape) for name, values in fields.items()}
    return replace(
        Batch(spread.pop("tokens"), spread.pop("positions"), spread.pop("segments"), layout=layout), **spread
    )


def _spread(name: str, values: np.ndarray, slots: np.ndarray, shape: tuple[int, int]) -> torch.Tensor:
    field = np.full(shape[0] * shape[1], _EMPTY.get(name, 0), dtype=np.int64)
    field[slots] = values
    return torch.from_numpy(field).view(shape)


def concat_ranges(starts: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ranges ``starts … starts + sizes - 1`` end to end, and the place of each element in its range."""
    begins = np.cumsum(sizes) - sizes
    place = np.arange(int(sizes.sum())) - np.repeat(begins, sizes)
    return np.repeat(starts, sizes) + place, place
