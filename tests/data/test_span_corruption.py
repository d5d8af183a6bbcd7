"""Span corruption: nothing lost, nothing twice, and the lengths that T5 has."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.data import Batch, SpanCorruption, causal
from pellucid.errors import ArgumentError, DataError, InputError, ShapeError

SENTINELS = tuple(range(900, 960))
EOS, START = 1, 0


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def corrupt(batch: Batch, seed: int = 0, **settings) -> Batch:
    return SpanCorruption(SENTINELS, EOS, START, **settings)(batch, generator(seed))


def halves(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """``(source, tokens)`` of every document, in order."""
    found = []
    for row, lengths in enumerate(batch.document_lengths):
        for segment in lengths:
            source = batch.source.tokens[row][batch.source.segments[row] == segment]
            found.append((source.tolist(), batch.tokens[row][batch.segments[row] == segment].tolist()))
    return found


def rebuilt(source: list[int], tokens: list[int]) -> list[int]:
    """The document: each sentinel of the source is replaced by what follows it in the tokens."""
    assert (source.pop(), tokens.pop(), tokens.pop(0)) == (EOS, EOS, START)
    spans: dict[int, list[int]] = {}
    for token in tokens:
        if token in SENTINELS:
            spans[token] = []
        else:
            spans[list(spans)[-1]].append(token)
    used = [token for token in source if token in SENTINELS]
    assert used == list(spans) == list(SENTINELS[: len(used)])
    assert all(spans.values())
    return [part for token in source for part in (spans[token] if token in SENTINELS else [token])]


@settings(max_examples=80)
@given(
    st.lists(st.lists(st.lists(st.integers(2, 899), max_size=30), max_size=4), min_size=1, max_size=3),
    st.sampled_from([0.05, 0.15, 0.5, 0.9, 1.0]),
    st.sampled_from([1.0, 3.0, 8.0]),
    st.integers(0, 9),
)
def test_source_and_tokens_hold_each_token_once(rows, share, mean_span, seed) -> None:
    batch = corrupt(Batch.from_documents(rows, length=120), seed, noise_density=share, mean_noise_span_length=mean_span)
    assert torch.equal(batch.labels, causal(Batch(batch.tokens, batch.positions, batch.segments)).labels)
    documents = [document for row in rows for document in row if document]
    for document, (source, tokens) in zip(documents, halves(batch), strict=True):
        assert rebuilt(source, tokens) == document


@pytest.mark.parametrize(("length", "noise", "spans"), [(568, 85, 28), (100, 15, 5), (10, 2, 1), (3, 1, 1), (2, 1, 1)])
def test_lengths_are_those_of_t5(length, noise, spans) -> None:
    """T5 turns 568 tokens into 512 (568 - 85 + 28 sentinels + end) and 114 (85 + 28 + end)."""
    objective = SpanCorruption(SENTINELS, EOS, START)
    assert objective.counts(length) == (noise, spans)
    batch = objective(Batch.from_rows([[7] * length]), generator())
    assert batch.source.shape[1] == length - noise + spans + 1
    assert batch.shape[1] == 1 + noise + spans + 1


def test_spans_are_no_more_than_what_stays() -> None:
    """27 spans of 1 token could not be kept apart by the 3 that stay."""
    assert SpanCorruption(SENTINELS, EOS, START, noise_density=0.9, mean_noise_span_length=1.0).counts(30) == (27, 3)


def test_a_worked_case() -> None:
    """Share 0.5, spans of 2: 2 of 4 tokens in one span, which begins at 0, 1 or 2, each as often."""
    batch = corrupt(Batch.from_rows([[5, 6, 7, 8]] * 900), noise_density=0.5, mean_noise_span_length=2.0)
    counts = Counter((tuple(source), tuple(tokens)) for source, tokens in halves(batch))
    s = SENTINELS[0]
    expected = {
        ((s, 7, 8, EOS), (START, s, 5, 6, EOS)),
        ((5, s, 8, EOS), (START, s, 6, 7, EOS)),
        ((5, 6, s, EOS), (START, s, 7, 8, EOS)),
    }
    assert set(counts) == expected
    assert all(abs(count - 300) < 70 for count in counts.values())


def test_documents_too_short_to_cut_stay_whole() -> None:
    batch = corrupt(Batch.packed([[5], [6, 7]]))
    assert halves(batch)[0] == ([5, EOS], [START, EOS])
    assert batch.labels.tolist()[0][:2] == [EOS, -100]


def test_packed_documents_are_corrupted_as_separate_ones() -> None:
    documents = [list(range(10, 40)), [5], list(range(50, 62))]
    assert halves(corrupt(Batch.packed(documents))) == halves(corrupt(Batch.from_rows(documents, side="left")))


def test_running_out_of_sentinels_names_the_way_out() -> None:
    few = SpanCorruption(SENTINELS[:4], EOS, START)
    with pytest.raises(DataError, match=r"100 tokens has 5 spans .* there are 4 sentinels; shorten the rows, raise"):
        few(Batch.from_rows([[7] * 100]), generator())
    assert few(Batch.from_rows([[7] * 80]), generator()).source is not None


def test_rows_of_a_fixed_length() -> None:
    batch = corrupt(Batch.from_rows([[7] * 20, [8] * 9]), source_length=24, length=12)
    assert (batch.source.shape, batch.shape) == ((2, 24), (2, 12))
    with pytest.raises(ShapeError, match="the sources: a row holds 19 tokens, but length is 8"):
        corrupt(Batch.from_rows([[7] * 20]), source_length=8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"noise_density": 1.5}, "noise_density is 1.5"),
        ({"mean_noise_span_length": 0.5}, "mean_noise_span_length is 0.5"),
        ({"sentinel_ids": (900, 900)}, "name an id twice"),
        ({"sentinel_ids": (900, EOS)}, "eos_id 1 and sentinel_ids name an id twice"),
    ],
)
def test_impossible_settings_are_refused(settings, message) -> None:
    with pytest.raises(ArgumentError, match=message):
        SpanCorruption(**{"sentinel_ids": SENTINELS, "eos_id": EOS, "start_id": START, **settings})


def test_what_is_a_pair_already_is_refused() -> None:
    with pytest.raises(InputError, match="makes both halves itself, but the batch has source"):
        corrupt(Batch.from_pairs([[5]], [[6]]))
