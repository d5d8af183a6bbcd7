"""The shift, at its only place."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.data import (
    IGNORED,
    Batch,
    Classification,
    Contrastive,
    MaskedLM,
    MultiStepTarget,
    PrefixLM,
    Regression,
    SequenceToSequence,
    Span,
    SpanCorruption,
    TokenClassification,
    causal,
)
from pellucid.errors import ArgumentError, DataError, InputError


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def labels(batch: Batch) -> list[list[int]]:
    return causal(batch).labels.tolist()


X = IGNORED


def test_each_position_predicts_the_next_token_and_no_other() -> None:
    """B76: shifted once, n-1 targets, not the token after the next."""
    assert labels(Batch.from_rows([[1, 2, 3, 4]])) == [[2, 3, 4, X]]


def test_a_single_token_predicts_nothing() -> None:
    """B77."""
    assert labels(Batch.from_rows([[5], []])) == [[X], [X]]
    assert causal(Batch.from_rows([[5]])).label_indices.tolist() == []
    assert labels(Batch.from_rows([[], []])) == [[], []]


def test_document_ends_predict_nothing() -> None:
    """B44: lengths 3, 5, 1 give 2 + 4 + 0 = 6 targets of 9; none crosses a border."""
    batch = causal(Batch.packed([[1, 2, 3], [4, 5, 6, 7, 8], [9]]))
    assert batch.labels.tolist() == [[2, 3, X, 5, 6, 7, 8, X, X]]
    assert batch.label_indices.tolist() == [0, 1, 3, 4, 5, 6]


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
    assert causal(Batch.from_rows([[3, 0, 0]])).label_indices.tolist() == [0, 1]


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


# ---- further ahead


def test_targets_some_steps_ahead_stay_in_their_document() -> None:
    """B50: lengths 3 and 5 two steps ahead count 1 + 3 targets."""
    batch = MultiStepTarget(2)(Batch.packed([[1, 2, 3], [4, 5, 6, 7, 8]]))
    assert batch.labels.tolist() == [[3, X, X, 6, 7, 8, X, X]]
    assert MultiStepTarget(9)(Batch.from_rows([[1, 2]])).labels.tolist() == [[X, X]]
    rows = Batch.from_rows([[1, 2, 3], [4]])
    assert torch.equal(MultiStepTarget(1)(rows).labels, causal(rows).labels)
    with pytest.raises(ArgumentError, match="steps is 0"):
        MultiStepTarget(0)


# ---- prefix


def test_only_what_follows_the_prefix_is_predicted() -> None:
    batch = PrefixLM(0.5)(Batch.packed([[1, 2, 3, 4], [5, 6], [7]], length=8))
    assert batch.groups.tolist() == [[1, 1, 0, 0, 1, 0, 1, 0]]
    assert batch.labels.tolist() == [[X, 3, 4, X, 6, X, X, X]]


@pytest.mark.parametrize("share", [0.01, 1.0])
def test_a_prefix_leaves_something_on_both_sides(share: float) -> None:
    size = 1 if share < 0.5 else 4
    batch = PrefixLM(share)(Batch.from_rows([[1, 2, 3, 4, 5]]))
    assert batch.groups.tolist() == [[1] * size + [0] * (5 - size)]
    assert len(batch.label_indices) == 5 - size


def test_a_given_split_stays() -> None:
    groups = torch.tensor([[1, 1, 1, 0, 0, 0]])
    batch = PrefixLM()(replace(Batch.packed([[1, 2, 3, 4], [5, 6]]), groups=groups))
    assert batch.groups is groups
    assert batch.labels.tolist() == [[X, X, 4, X, 6, X]]


def test_random_prefixes_are_uniform_and_those_of_separate_rows() -> None:
    documents = [[1, 2, 3, 4]] * 3000
    rows = PrefixLM()(Batch.from_rows(documents), generator())
    sizes = rows.groups.sum(1)
    shares = torch.bincount(sizes, minlength=5)[1:] / 3000
    assert shares[3] == 0
    assert ((shares[:3] - 1 / 3).abs() < 0.04).all()
    packed = PrefixLM()(Batch.packed(documents[:50]), generator())
    assert torch.equal(packed.groups.flatten(), rows.groups[:50].flatten())


# ---- teacher forcing


def test_targets_begin_with_the_start_token_once() -> None:
    """B110's kind: a start that is there gets no second one."""
    batch = SequenceToSequence(0)(Batch.from_pairs([[5, 8], [6]], [[7, 2], [0, 9, 2]], packed=True))
    assert batch.tokens.tolist() == [[0, 7, 2, 0, 9, 2]]
    assert batch.labels.tolist() == [[7, 2, X, 9, 2, X]]
    assert batch.segments.tolist() == [[1, 1, 1, 2, 2, 2]]
    assert batch.source.tokens.tolist() == [[5, 8, 6]]


def test_slots_stay_as_many_where_the_start_fits_and_pairs_stay_pairs() -> None:
    batch = SequenceToSequence(0)(Batch.from_pairs([[5], [], [6]], [[7], [], [8, 9]], packed=True, length=5))
    assert batch.tokens.tolist() == [[0, 7, 0, 8, 9]]
    gap = SequenceToSequence(0)(Batch.from_pairs([[5], [6], [4]], [[7], [], [8]], packed=True))
    assert gap.segments.tolist() == [[1, 1, 3, 3]]
    begun = Batch.from_pairs([[5]], [[0, 7]], length=4)
    assert SequenceToSequence(0)(begun).tokens is begun.tokens
    begun = Batch.from_pairs([[5]], [[3, 7]], side="left", length=4)  # padding misses no start, whatever its id
    assert SequenceToSequence(3)(begun).tokens is begun.tokens


def test_the_longest_row_of_any_makes_room_for_its_starts() -> None:
    """Rows of 4 and 2 tokens in 4 slots, and the other way round: the start tokens need a fifth."""
    for targets in ([[1, 2, 4, 5], [6, 7]], [[6, 7], [1, 2, 4, 5]]):
        batch = SequenceToSequence(0)(Batch.from_pairs([[5], [6]], targets))
        assert [row[row != 0].tolist() for row in batch.tokens] == targets
        assert batch.shape == (2, 5)


def test_teacher_forcing_needs_pairs() -> None:
    with pytest.raises(InputError, match=r"needs batch\.source, and it is None"):
        SequenceToSequence(0)(Batch.from_rows([[1]]))
    one_each = replace(Batch.from_pairs([[5]], [[7]]), targets=torch.tensor([1]))
    with pytest.raises(InputError, match="before documents with targets; begin each with start_id 0"):
        SequenceToSequence(0)(one_each)


# ---- answers that come with the data


def two(**fields) -> Batch:
    return replace(Batch.packed([[1, 2, 3], [4]], length=5), **{k: torch.tensor(v) for k, v in fields.items()})


@pytest.mark.parametrize(
    ("objective", "good"),
    [
        (Classification(2), {"targets": [1, X]}),
        (Regression(), {"targets": [0.5, -1.0]}),
        (Regression(), {"targets": [[0.5], [-1.0]]}),
        (Regression(2), {"targets": [[0.5, 1.0], [2.0, 3.0]]}),
        (Span(), {"targets": [[0, 2], [X, X]]}),
        (TokenClassification(3), {"labels": [[0, X, 2, 1, X]]}),
    ],
)
def test_given_answers_stay_as_they_are(objective, good) -> None:
    """B82: nothing is shifted or overwritten."""
    batch = two(**good)
    assert objective(batch) is batch


@pytest.mark.parametrize(
    ("objective", "bad", "message"),
    [
        (Classification(2), {}, r"Classification needs batch\.targets \(int64 \[C\]\), and it is None"),
        (Classification(2), {"targets": [0, 2]}, r"class 2 was found, but there are 2 classes \(0 … 1\)"),
        (Classification(2), {"targets": [0, -1]}, "class -1 was found"),
        (Classification(2), {"targets": [0.0, 1.0]}, r"needs targets int64 \[C\], but they are float32 \[2\]"),
        (Regression(), {"targets": [0, 1]}, r"needs targets floating \[C\], but they are int64 \[2\]"),
        (Regression(2), {"targets": [[1.0], [2.0]]}, r"floating \[C, 2\], but they are float32 \[2, 1\]"),
        (Regression(), {"targets": [0.0, float("nan")]}, "the target of document 1 is nan"),
        (Span(), {"targets": [0, 1]}, r"needs targets int64 \[C, 2\], but they are int64 \[2\]"),
        (Span(), {"targets": [[0, 2], [0, 1]]}, r"document 1 goes from position 0 to 1, .* positions 0 … 0"),
        (Span(), {"targets": [[2, 1], [0, 0]]}, "document 0 goes from position 2 to 1"),
        (Span(), {"targets": [[X, 1], [0, 0]]}, "document 0 goes from position -100 to 1"),
        (TokenClassification(3), {}, r"TokenClassification needs batch\.labels, and it is None"),
        (TokenClassification(3), {"labels": [[0, 1, 2, 3, X]]}, "class 3 was found, but there are 3 classes"),
    ],
)
def test_impossible_answers_are_refused(objective, bad, message) -> None:
    with pytest.raises(DataError, match=message):
        objective(two(**bad))


def test_partners_are_neighbours_over_all_rows() -> None:
    batch = Batch.from_documents([[[1], [2]], [[3], [4], [5], [6]]])
    paired = Contrastive()(batch)
    assert paired.targets.tolist() == [1, 0, 3, 2, 5, 4]
    assert Contrastive()(paired).targets.equal(paired.targets)
    with pytest.raises(DataError, match="pairs documents 2i and 2i\\+1, but the batch has 1"):
        Contrastive()(Batch.from_rows([[1]]))
    with pytest.raises(DataError, match="makes the targets itself"):
        Contrastive()(two(targets=[0, 1]))


# ---- one signature

DRAWN = [PrefixLM(), MaskedLM(1, 20, (0, 2)), SpanCorruption((15, 16, 17, 18, 19), 2, 0)]


@pytest.mark.parametrize("objective", DRAWN)
def test_what_draws_says_that_it_needs_a_generator_and_follows_them(objective) -> None:
    batch = Batch.from_rows([list(range(3, 15))] * 8)
    with pytest.raises(InputError, match=f"{type(objective).__name__}.* draws at random, but generator is None"):
        objective(batch)
    one, same, other = (objective(batch, generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(one.labels, same.labels)
    assert torch.equal(one.tokens, same.tokens)
    assert one.labels.shape != other.labels.shape or not torch.equal(one.labels, other.labels)


@pytest.mark.parametrize("objective", [causal, MultiStepTarget(2), SequenceToSequence(0), *DRAWN])
def test_every_objective_leaves_given_labels(objective) -> None:
    """B82."""
    batch = Batch.from_rows([[1, 2, 3]]).with_labels(torch.tensor([[X, 7, X]]))
    assert objective(batch, None) is batch


@pytest.mark.parametrize("objective", [causal, MultiStepTarget(2), PrefixLM(0.5), *DRAWN])
def test_nothing_to_learn_from_counts_nothing(objective) -> None:
    """B79's kind: rows of padding alone, as the last ranks of one pass get them."""
    batch = objective(Batch.from_rows([[], []], length=4), generator())
    assert batch.label_indices.tolist() == []
    assert batch.shape[0] == 2
