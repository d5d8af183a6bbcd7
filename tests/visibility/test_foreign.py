"""Foreign masks come in by name, and the ones that are plainly upside down do not come in at all."""

import pytest
import torch

from pellucid.errors import ShapeError
from pellucid.visibility import Coordinates, causal, from_additive, from_hidden, from_visible

CAUSAL = torch.ones(4, 4, dtype=torch.bool).tril()


def through(rule, length=4, rows=1):
    tokens = Coordinates.range(length, rows)
    return rule.mask(tokens, tokens)


def test_three_conventions_one_meaning():
    additive = torch.zeros(4, 4).masked_fill(~CAUSAL, float("-inf"))
    lowest = torch.zeros(4, 4).masked_fill(~CAUSAL, torch.finfo(torch.float16).min)
    expected = through(causal())
    early = torch.zeros(4, 4).masked_fill(~CAUSAL, -1e4)  # what BERT added
    masks = additive, lowest, early
    for rule in (from_visible(CAUSAL), from_hidden(~CAUSAL), *map(from_additive, masks)):
        assert through(rule).equal(expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_whole_numbers_say_the_same(dtype):
    assert through(from_visible(CAUSAL.to(dtype))).equal(through(causal()))
    assert through(from_hidden((~CAUSAL).to(dtype))).equal(through(causal()))
    for make in (from_visible, from_hidden):
        with pytest.raises(ShapeError, match="takes 0 and 1, but the mask holds 7"):
            make(CAUSAL.to(dtype) * 7)


def test_one_row_for_all_queries():
    """[B, 1, S]: three dimensions are rows, queries and keys, also where there is one query for all."""
    seen = torch.tensor([[[True, False, True, True]], [[False, True, True, False]]])
    assert through(from_visible(seen), rows=2)[:, 0].equal(seen.expand(2, 4, 4))


def test_they_combine_with_rules():
    padding = torch.tensor([[True, True, True, False]])
    rule = from_visible(padding, padding=True) & causal()
    assert through(rule)[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0]]
    assert through(from_hidden(~padding, padding=True) & causal()).equal(through(rule))


def test_batched_shapes():
    masks = torch.stack([CAUSAL, torch.ones_like(CAUSAL)])
    assert through(from_visible(masks), rows=2)[:, 0].equal(masks)
    assert through(from_visible(masks[:, None]), rows=2)[:, 0].equal(masks)


@pytest.mark.parametrize("inverted", [lambda: from_visible(~CAUSAL), lambda: from_hidden(CAUSAL)])
def test_an_inverted_causal_mask_is_recognised(inverted):
    """B26, L47."""
    with pytest.raises(ShapeError, match="upside down"):
        inverted()


def test_the_smallest_inverted_mask_is_recognised_and_what_only_looks_like_one_is_not():
    """Two tokens, of which the first sees the second; no square, no first query that sees ahead, nothing at all."""
    with pytest.raises(ShapeError, match="upside down"):
        from_visible(torch.tensor([[False, True], [False, False]]))
    for seen in (
        [[True]],
        [[False, True, True, False], [False, False, False, True]],
        [[False, False, False], [False, False, True], [False, False, False]],
        [[False, True, False], [False, True, False], [False, False, False]],
    ):
        assert from_visible(torch.tensor(seen)).visible.tolist() == seen
    for shape in ((0, 0), (0, 4), (2, 0, 0)):
        assert from_visible(torch.zeros(shape, dtype=torch.bool)).visible.shape == shape


def test_a_mask_that_hides_everything_is_refused():
    with pytest.raises(ShapeError, match="hides everything"):
        from_hidden(torch.ones(3, 3, dtype=torch.bool))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: from_additive(CAUSAL), "floating-point"),
        (lambda: from_visible(CAUSAL.float()), "boolean"),
        (lambda: from_hidden(CAUSAL.float()), "boolean"),
        (lambda: from_additive(torch.full((4, 4), -3.0)), "position bias"),
        (lambda: from_additive(torch.full((4, 4), float("nan"))), "position bias"),
        (lambda: from_visible(torch.tensor([[0, 2]])), "holds 2"),
        (lambda: from_visible(CAUSAL[None], padding=True), r"\[B, S\]"),
        (lambda: from_visible(CAUSAL.expand(2, 3, 4, 4)), "a mask is"),
    ],
)
@pytest.mark.usefixtures("our_checks_only")
def test_other_kinds_are_refused(make, message):
    with pytest.raises(ShapeError, match=message):
        make()


def test_a_mask_of_the_wrong_size_names_both():
    with pytest.raises(ShapeError, match=r"\(4, 4\).*\(1, 5, 5\)"):
        through(from_visible(CAUSAL), length=5)


@pytest.mark.parametrize(
    ("rule", "queries", "keys"),
    [
        (from_hidden(~CAUSAL), (1, 1), (1, 4)),  # one query, a mask for four
        (from_visible(CAUSAL), (1, 4), (1, 1)),  # one key
        (from_visible(CAUSAL.expand(3, 4, 4)), (1, 4), (1, 4)),  # one row, a mask for three
        (from_visible(torch.ones(3, 4, dtype=torch.bool), padding=True), (1, 4), (1, 4)),
        (from_additive(torch.zeros(1, 4).repeat(3, 1), padding=True), (1, 4), (1, 4)),
        (from_visible(CAUSAL), (1, 3), (1, 4)),
        (from_visible(CAUSAL) & causal(), (1, 1), (1, 4)),
    ],
)
def test_a_mask_never_makes_rows_queries_or_keys(rule, queries, keys):
    """Axes of 1 grow in the mask alone: tokens are not copied to fit it."""
    want = rf"needs? \({queries[0]}, {queries[1]}, {keys[1]}\); cut the mask"
    with pytest.raises(ShapeError, match=want):
        rule.mask(Coordinates.range(queries[1], queries[0]), Coordinates.range(keys[1], keys[0]))


def test_a_mask_of_one_row_one_query_or_one_key_is_for_all():
    ones = torch.ones(1, 1, 4, dtype=torch.bool)
    assert through(from_visible(ones), rows=3).shape == (3, 1, 4, 4)
    assert through(from_visible(torch.ones(4, 1, dtype=torch.bool)), rows=3).shape == (3, 1, 4, 4)
