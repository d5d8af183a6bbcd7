"""Documents into rows of one length, with nothing lost and nothing learnt twice.

Rows are filled in the order of the stream. A document that does not fit into what is left of a row goes on
in the next one, as a document of its own whose positions start at 0. The piece there begins with the last
token of the piece before, so that every pair (token, next token) of a document is trained exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pellucid.errors import DataError


class Piece(NamedTuple):
    """Tokens ``start … stop-1`` of one document."""

    document: int
    start: int
    stop: int


def cut(lengths: Iterable[int], length: int, *, join: bool = True) -> Iterator[list[Piece]]:
    """Rows of at most ``length`` tokens, as pieces of documents of these ``lengths``.

    ``join=False`` puts no two documents into one row. Empty documents have no piece.
    """
    if length < 2:
        raise DataError(f"rows of {length} tokens hold no pair to learn from; set length to 2 or more")
    return _cut(lengths, length, join)


def _cut(lengths: Iterable[int], length: int, join: bool) -> Iterator[list[Piece]]:
    row: list[Piece] = []
    room = length
    for document, size in enumerate(lengths):
        start = 0
        while start < size:
            no_pair_fits = room < min(2, size - start)
            if row and (no_pair_fits or not join):
                yield row
                row, room = [], length
            stop = min(size, start + room)
            row.append(Piece(document, start, stop))
            room -= stop - start
            start = stop if stop == size else stop - 1
    if row:
        yield row


def pack(documents: Iterable[Sequence[int]], length: int, *, join: bool = True) -> Iterator[list[list[int]]]:
    """Rows of documents for :meth:`Batch.from_documents`, as :func:`cut` lays them out; streams.

    >>> list(pack([[1, 2, 3], [4, 5, 6, 7]], length=5))
    [[[1, 2, 3], [4, 5]], [[5, 6, 7]]]
    """
    held: dict[int, Sequence[int]] = {}

    def lengths() -> Iterator[int]:
        for number, document in enumerate(documents):
            held[number] = document
            yield len(document)

    return _gather(cut(lengths(), length, join=join), held)


def _gather(rows: Iterator[list[Piece]], held: dict[int, Sequence[int]]) -> Iterator[list[list[int]]]:
    """The tokens of the pieces; documents that the stream has passed are let go."""
    for row in rows:
        yield [list(held[piece.document][piece.start : piece.stop]) for piece in row]
        for number in [number for number in held if number < row[-1].document]:
            del held[number]
