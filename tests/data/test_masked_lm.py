"""Masked language modelling: who is chosen, what stands there instead, and what is predicted."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.data import IGNORED, Batch, MaskedLM
from pellucid.errors import ArgumentError, DataError

V, MASK = 50, 3
SPECIAL = (0, 1, 2)
PLAIN = list(range(4, V))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def masked(batch: Batch, seed: int = 0, **settings) -> Batch:
    return MaskedLM(MASK, V, SPECIAL, **settings)(batch, generator(seed))


def test_the_shares_are_those_asked_for() -> None:
    """15 % chosen; of these 80 % hidden, 10 % random, 10 % as they were (a random one may fall on itself)."""
    batch = Batch.from_rows([(PLAIN * 22)[:1000] for _ in range(100)])
    given = masked(batch)
    chosen = given.labels != IGNORED
    assert (chosen.sum(1) == 150).all()
    old, new = batch.tokens[chosen], given.tokens[chosen]
    hidden, same = (new == MASK).float().mean(), (new == old).float().mean()
    other = ((new != old) & (new != MASK)).float().mean()
    spread = 4 * (0.8 * 0.2 / 15_000) ** 0.5
    assert abs(hidden - 0.8) < spread
    assert abs(same - (0.1 + 0.1 / len(PLAIN))) < spread
    assert abs(other - 0.1 * (1 - 1 / len(PLAIN))) < spread
    places = chosen.float().mean(0)
    assert abs(places[:500].mean() - places[500:].mean()) < 0.01


def test_labels_are_the_tokens_that_stood_there_and_no_others() -> None:
    batch = Batch.from_documents([[PLAIN, PLAIN[:7]], [PLAIN[3:]]], length=60, side="left")
    given = masked(batch, mlm_probability=0.5)
    chosen = given.labels != IGNORED
    assert torch.equal(given.labels[chosen], batch.tokens[chosen])
    assert torch.equal(given.tokens[~chosen], batch.tokens[~chosen])
    assert given.positions is batch.positions
    assert given.segments is batch.segments


@pytest.mark.parametrize("side", ["right", "left", "both"])
def test_no_padding_and_no_special_token_is_ever_chosen(side) -> None:
    """B86: at a share of 1 exactly the real, ordinary tokens are; padding has the id of an ordinary token."""
    batch = Batch.from_documents([[[1, 7, 8, 2], [1, 9, 3, 2]], [[1, 2]]], side=side, length=11)
    tokens = torch.where(batch.segments == 0, 9, batch.tokens)
    batch = Batch(tokens, batch.positions, batch.segments)
    given = masked(batch, mlm_probability=1.0)
    assert given.labels[given.labels != IGNORED].tolist() == [7, 8, 9]
    assert torch.equal(given.tokens[batch.segments == 0], tokens[batch.segments == 0])


def test_no_special_token_is_ever_drawn() -> None:
    given = masked(Batch.from_rows([PLAIN * 100]), mlm_probability=1.0, keep_original_prob=0.0, random_replace_prob=1.0)
    drawn = torch.bincount(given.tokens.flatten(), minlength=V)
    assert drawn[: MASK + 1].tolist() == [0, 0, 0, 0]
    assert (drawn[MASK + 1 :] > 50).all()


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(0, V - 1), max_size=9), min_size=1, max_size=8), st.integers(0, 5))
def test_every_document_with_a_token_to_choose_has_one(documents, seed) -> None:
    words = [id_ % 2 == 0 for id_ in range(V)]
    for begins in (None, tuple(words)):
        given = masked(Batch.packed(documents, length=80), seed, word_starts=begins)
        for segment, document in enumerate((d for d in documents if d), 1):
            chosen = (given.labels[given.segments == segment] != IGNORED).sum()
            assert (chosen > 0) == any(token in PLAIN for token in document)


def test_whole_words_stand_or_fall_together() -> None:
    """Words of 3: an even id begins one that odd ids continue. A special token between them ends a word."""
    begins = tuple(id_ % 2 == 0 for id_ in range(V))
    words = [id_ for n in range(20) for id_ in (4 + 2 * n, 5, 7)]
    batch = Batch.from_rows([[1, *words, 2]] * 50)
    given = masked(batch, word_starts=begins)
    chosen = (given.labels != IGNORED)[:, 1:-1].view(50, 20, 3)
    assert (chosen.all(2) == chosen.any(2)).all()
    assert (chosen.all(2).sum(1) == 3).all()
    assert (chosen.all(2).float().mean(0) > 0).all()
    split = masked(Batch.from_rows([[4, 5, 1, 5, 5]] * 200), mlm_probability=0.5, word_starts=begins)
    first, second = (split.labels != IGNORED)[:, :2], (split.labels != IGNORED)[:, 3:]
    assert (first.all(1) == first.any(1)).all()
    assert (second.all(1) == second.any(1)).all()
    assert ((first.any(1)) != (second.any(1))).all()


def test_where_no_word_fits_the_shortest_goes() -> None:
    begins = tuple(id_ % 2 == 0 for id_ in range(V))
    given = masked(Batch.from_rows([[4, 5, 5, 5, 6, 5, 8, 5, 5]] * 20), word_starts=begins)
    assert ((given.labels != IGNORED).nonzero()[:, 1].view(20, 2) == torch.tensor([4, 5])).all()


def test_packed_documents_are_masked_as_separate_ones() -> None:
    documents = [PLAIN[:9], [5], PLAIN, [1, 2], PLAIN[4:20]]
    packed = masked(Batch.packed(documents, length=120))
    rows = masked(Batch.from_rows(documents, side="left"))
    for segment, row in ((1, 0), (2, 1), (3, 2), (4, 3), (5, 4)):
        for field in ("tokens", "labels"):
            together = getattr(packed, field)[packed.segments == segment]
            assert torch.equal(together, getattr(rows, field)[row][rows.segments[row] == 1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mlm_probability": 0.0}, "mlm_probability is 0.0; give a fraction above 0 and at most 1"),
        ({"mlm_probability": float("nan")}, "mlm_probability is nan"),
        (
            {"keep_original_prob": 0.6, "random_replace_prob": 0.6},
            "keep_original_prob is 0.6 and random_replace_prob 0.6",
        ),
        ({"keep_original_prob": -0.1}, "keep_original_prob is -0.1"),
        ({"mask_id": V}, f"special id {V} is not one of the {V} ids"),
        ({"word_starts": (True,)}, f"word_starts has 1 entries, but vocab_size is {V}"),
        ({"special_ids": tuple(range(V))}, f"all {V} ids are special"),
    ],
)
def test_impossible_settings_are_refused(settings, message) -> None:
    with pytest.raises(ArgumentError, match=message):
        MaskedLM(**{"mask_id": MASK, "vocab_size": V, "special_ids": SPECIAL, **settings})


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    with pytest.raises(DataError, match=f"token id {V} was found, but ids are 0 to {V - 1}"):
        masked(Batch.from_rows([[5, V]]))


def test_negative_ids_are_refused_too():
    """They would count from the end of the table of special ids."""
    batch = replace(Batch.from_rows([[5, 6]]), tokens=torch.tensor([[5, -3]]))
    with pytest.raises(DataError, match=r"token id -3 was found"):
        MaskedLM(mask_id=4, vocab_size=V, special_ids=(0, 1))(batch, torch.Generator().manual_seed(0))
