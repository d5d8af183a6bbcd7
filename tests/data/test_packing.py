"""Packing: rows of one length, documents apart, every pair of neighbours trained exactly once."""

from collections import Counter
from itertools import count, islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.data import IGNORED, Batch, causal, pack
from pellucid.errors import DataError

DOCUMENTS = st.lists(st.lists(st.integers(0, 5), max_size=17), max_size=9)


def test_positions_restart_and_fields_have_one_length() -> None:
    """B41, B47: lengths 3, 5, 1 in a row of 16."""
    (row,) = pack([[1, 2, 3], [4, 5, 6, 7, 8], [9]], length=16)
    batch = causal(Batch.from_documents([row], length=16))
    assert batch.positions[0, :9].tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0]
    assert batch.segments.tolist() == [[1, 1, 1, 2, 2, 2, 2, 2, 3] + [0] * 7]
    assert batch.labels[0, 9:].tolist() == [IGNORED] * 7
    assert {batch.tokens.shape, batch.positions.shape, batch.labels.shape} == {(1, 16)}


def test_a_long_document_goes_on_with_one_token_of_overlap() -> None:
    assert list(pack([[1, 2, 3, 4, 5, 6]], length=3)) == [[[1, 2, 3]], [[3, 4, 5]], [[5, 6]]]
    assert list(pack([[1, 2, 3], [4, 5, 6, 7]], length=5)) == [[[1, 2, 3], [4, 5]], [[5, 6, 7]]]


def test_one_slot_left_is_no_place_for_a_pair() -> None:
    assert list(pack([[1, 2], [3, 4]], length=3)) == [[[1, 2]], [[3, 4]]]
    assert list(pack([[1, 2], [3]], length=3)) == [[[1, 2], [3]]]


def test_one_document_a_row() -> None:
    assert list(pack([[1, 2], [], [3], [4, 5, 6, 7]], length=3, join=False)) == [
        [[1, 2]],
        [[3]],
        [[4, 5, 6]],
        [[6, 7]],
    ]


def test_empty_documents_leave_no_trace() -> None:
    """B49: lengths 0, 1, 0, 1 equal lengths 1, 1."""
    assert list(pack([[], [1], [], [2]], length=4)) == list(pack([[1], [2]], length=4)) == [[[1], [2]]]
    assert list(pack([[], []], length=4)) == list(pack([], length=4)) == []


def test_an_endless_stream_is_packed_as_it_comes() -> None:
    rows = pack(([n, n] for n in count()), length=4)
    assert list(islice(rows, 2)) == [[[0, 0], [1, 1]], [[2, 2], [3, 3]]]


@pytest.mark.parametrize("length", [1, 0, -3])
def test_rows_too_short_for_a_pair_are_refused(length: int) -> None:
    with pytest.raises(DataError, match=f"rows of {length} tokens .* set length to 2 or more"):
        pack([[1]], length=length)


@settings(deadline=None, max_examples=60)
@given(DOCUMENTS, st.integers(2, 12), st.booleans())
def test_every_pair_once_and_no_token_lost(documents: list[list[int]], length: int, join: bool) -> None:
    tagged = [[100 * (n + 1) + 20 * (t % 5) + token for t, token in enumerate(d)] for n, d in enumerate(documents)]
    rows = list(pack(tagged, length, join=join))
    pieces = [piece for row in rows for piece in row]
    assert all(pieces)
    assert all(sum(map(len, row)) <= length for row in rows)
    assert Counter(p for piece in pieces for p in pairwise(piece)) == Counter(p for d in tagged for p in pairwise(d))
    joined: list[int] = []
    for piece in pieces:  # neighbours overlap exactly where a document goes on
        goes_on = joined and piece[0] == joined[-1] and len(piece) > 1
        joined += piece[1:] if goes_on else piece
    assert joined == [token for d in tagged for token in d]
    if join:  # a row is closed only when no pair fits any more
        assert all(sum(map(len, row)) >= length - 1 for row in rows[:-1])
    else:
        assert all(len(row) == 1 for row in rows)


@settings(deadline=None, max_examples=60)
@given(DOCUMENTS, st.integers(2, 12))
def test_packed_rows_count_each_pair_once(documents: list[list[int]], length: int) -> None:
    rows = list(pack(documents, length))
    if rows:
        batch = causal(Batch.from_documents(rows, length=length))
        assert len(batch.label_indices) == sum(max(len(d) - 1, 0) for d in documents)
