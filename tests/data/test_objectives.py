"""The shift, at its only place."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.data import IGNORED, Batch, causal


def labels(batch: Batch) -> list[list[int]]:
    return causal(batch).labels.tolist()


X = IGNORED


def test_each_position_predicts_the_next_token_and_no_other() -> None:
    """B76: shifted once, n-1 targets, not the token after the next."""
    assert labels(Batch.from_rows([[1, 2, 3, 4]])) == [[2, 3, 4, X]]


def test_a_single_token_predicts_nothing() -> None:
    """B77."""
    assert labels(Batch.from_rows([[5], []])) == [[X], [X]]
    assert causal(Batch.from_rows([[5]])).counted.tolist() == []
    assert labels(Batch.from_rows([[], []])) == [[], []]


def test_document_ends_predict_nothing() -> None:
    """B44: lengths 3, 5, 1 give 2 + 4 + 0 = 6 targets of 9; none crosses a border."""
    batch = causal(Batch.packed([[1, 2, 3], [4, 5, 6, 7, 8], [9]]))
    assert batch.labels.tolist() == [[2, 3, X, 5, 6, 7, 8, X, X]]
    assert batch.counted.tolist() == [0, 1, 3, 4, 5, 6]


@pytest.mark.parametrize("side", ["right", "left", "both"])
def test_the_true_end_counts_though_padding_has_its_id(side: str) -> None:
    """B80, B34: pad = eos = 2; the targets are 7 and the first 2, wherever the padding lies."""
    batch = causal(Batch.from_rows([[5, 7, 2]], side=side, length=5))
    tokens = torch.where(batch.segments == 0, 2, batch.tokens)
    batch = causal(Batch(tokens, batch.positions, batch.segments))
    assert batch.labels[batch.labels != X].tolist() == [7, 2]
    assert (batch.labels[batch.segments == 0] == X).all()


def test_the_end_token_inside_a_text_is_a_token() -> None:
    """B34: ids [5, 2, 7, 2] with eos 2 twice."""
    assert labels(Batch.from_rows([[5, 2, 7, 2]], length=6)) == [[2, 7, 2, X, X, X]]


def test_label_zero_counts() -> None:
    """B83."""
    assert causal(Batch.from_rows([[3, 0, 0]])).counted.tolist() == [0, 1]


def test_given_labels_stay() -> None:
    """B82: the very same batch comes back, ignored labels and all."""
    batch = Batch.from_rows([[1, 2, 3]]).with_labels(torch.tensor([[X, 7, X]]))
    assert causal(batch) is batch


def test_a_gap_in_positions_is_not_a_next_token() -> None:
    """B50's kind: the neighbour in the buffer is not the next position."""
    one = torch.ones(1, 4, dtype=torch.int64)
    batch = Batch(torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 1, 3, 0]]), one)
    assert labels(batch) == [[6, X, X, X]]


def test_padding_predicts_nothing_whatever_its_positions_and_ids() -> None:
    """B80: positions that run on through the padding, as a mask's cumulative sum gives them."""
    segments = torch.tensor([[1, 1, 0, 0, 0]])
    batch = Batch(torch.tensor([[5, 7, 2, 2, 2]]), torch.arange(5)[None], segments)
    assert labels(batch) == [[7, X, X, X, X]]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=4), min_size=1, max_size=3),
    st.sampled_from(["right", "left", "both"]),
)
def test_as_a_loop_would_do_it(rows: list[list[list[int]]], side: str) -> None:
    length = max(sum(map(len, row)) for row in rows) + 2
    batch = causal(Batch.from_documents(rows, side=side, length=length))
    flat = [label for row in batch.labels.tolist() for label in row if label != X]
    assert flat == [token for row in rows for document in row for token in document[1:]]
    for row, segments, positions in zip(batch.labels, batch.segments, batch.positions, strict=True):
        for slot in range(length):
            counts = slot + 1 < length and segments[slot] == segments[slot + 1] != 0
            assert (row[slot] != X) == counts
            assert not counts or positions[slot + 1] == positions[slot] + 1
