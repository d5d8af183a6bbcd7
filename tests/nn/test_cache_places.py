"""What a cache says about its slots: told and read are the same, and what earlier tokens have missed is refused."""

import pytest
import torch

from helpers.layers import laid_out, packed
from pellucid.errors import InputError, LengthError, ShapeError, UnsupportedError
from pellucid.nn import ContiguousCache
from pellucid.visibility import Coordinates, Layout, Run, causal, chunk, full, lookahead, prefix, same_group, window
from pellucid.visibility.coordinates import ends, lengths, merge


def empty(rows=2, capacity=12, **words):
    return ContiguousCache(shapes=[[(1, 2), (1, 2)]], rows=rows, capacity=capacity, **words)


def take(cache, chunk, rules=()):
    queries, keys = cache.begin_append(chunk, rules)
    new = torch.randn(*chunk.shape, 1, 2)
    cache.layers[0].append(new, new)
    cache.commit()
    for places in (queries, keys):
        assert places.layout == Layout.of(places.positions, places.segments)
    assert_told(cache)
    return queries, keys


def assert_told(cache):
    """What the host believes is what the tensors say; unused slots belong to no document."""
    used = slice(None, cache.length)
    assert cache.layout == Layout.of(cache.positions_BS[:, used], cache.segments_BS[:, used])
    assert cache._last_B2.tolist() == [list(end) for end in ends(cache.layout.runs, cache.rows)]
    assert (cache.segments_BS[:, cache.length :] == 0).all()


GROWN = {
    "whole rows": [Coordinates.range(3, 2), Coordinates.range(2, 2), Coordinates.range(1, 2)],
    "left": [laid_out((3, 1), (0, 2), 3), Coordinates.range(1, 2), Coordinates.range(2, 2)],
    "right": [laid_out((3, 1), (0, 0), 3), laid_out((2, 1), (0, 0), 2), laid_out((1, 2), (1, 0), 2)],
    "resting": [Coordinates.range(2, 2), laid_out((1, 0), (0, 0), 1), laid_out((0, 2), (0, 0), 2)],
    "an empty row": [laid_out((2, 0), (0, 0), 2), laid_out((1, 1), (0, 0), 1), Coordinates.range(2, 2)],
}


@pytest.mark.parametrize("grown", GROWN)
def test_told_is_read_chunk_after_chunk_and_after_every_change(grown):
    for keep in (0, 1, 2, 3, 4, -1, -2):
        cache = empty()
        for given in GROWN[grown]:
            queries, _ = take(cache, given)
            assert (queries.positions[~queries.real] == 0).all() or queries is given
        copy = cache.snapshot()
        assert copy.layout == cache.layout
        cache.crop(keep)
        assert_told(cache)
        take(cache, Coordinates.range(2, 2))
        cache.reorder(torch.tensor([1, 0, 1]))
        assert_told(cache)
        take(cache, Coordinates.range(2, 3))
        assert_told(copy)
        take(copy, Coordinates.range(1, 2))


def test_a_gap_in_positions_stays_a_gap():
    cache = empty(1)
    take(cache, Coordinates(torch.tensor([[0, 1, 5, 6]]), torch.ones(1, 4, dtype=torch.long)))
    take(cache, Coordinates.range(2))
    assert cache.layout.runs == (Run(0, 0, 2, 1, 0), Run(0, 2, 6, 1, 5))
    assert cache.sequence_lengths == [9]


def test_a_packed_chunk_is_cropped_into_its_documents():
    """The row goes on in the last document that is left, at the position after its end."""
    for keep, row_length, segment in ((5, 2, 2), (4, 1, 2), (3, 3, 1), (2, 2, 1), (0, 0, 1)):
        cache = empty(1)
        take(cache, packed(3, 2))
        cache.crop(keep)
        assert_told(cache)
        assert cache.sequence_lengths == [row_length]
        queries, keys = take(cache, Coordinates.range(1))
        assert (queries.positions.item(), queries.segments.item()) == (row_length, segment)
        assert causal().mask(queries, keys).sum().item() == row_length + 1


def test_rows_and_slots_there_must_be():
    assert (empty(1, 1).rows, empty(1, 1).capacity) == (1, 1)
    for rows, capacity in ((0, 4), (2, 0), (-1, 4)):
        with pytest.raises(ShapeError, match=f"not {rows} rows and {capacity} slots"):
            empty(rows, capacity)


def test_the_last_slot_can_be_filled_and_no_more():
    cache = empty(1, 4)
    take(cache, Coordinates.range(3))
    take(cache, Coordinates.range(1))
    with pytest.raises(LengthError, match=r"1 new tokens do not fit: the cache uses 4 of 4; .*capacity=5"):
        cache.begin_append(Coordinates.range(1))


def test_what_goes_on_must_be_told():
    cache, chunk = empty(1), Coordinates.range(1)
    object.__setattr__(chunk, "layout", None)
    take(cache, Coordinates.range(2))
    with pytest.raises(UnsupportedError, match="whose layout the host knows"):
        cache.begin_append(chunk)


# --- who was owed a sight of what ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "held", "goes_on"),
    [
        (causal(), 2, True),
        (causal() & window(2), 2, True),
        (causal() | prefix(3), 2, False),
        (causal() | prefix(3), 3, True),  # the prefix was whole
        (causal() | prefix(3), 4, True),
        (lookahead(1), 3, False),
        (full(), 3, False),
        (chunk(3), 2, False),
        (chunk(3), 3, True),  # a whole chunk, which nothing later is in
        (full() & causal(), 3, True),
    ],
    ids=str,
)
def test_earlier_tokens_must_not_have_missed_what_comes(rule, held, goes_on):
    cache = empty(1)
    take(cache, Coordinates.range(held), [rule])  # the first chunk sees itself, whatever the rule
    if goes_on:
        take(cache, Coordinates.range(2), [causal(), rule])
        assert cache.length == held + 2
        return
    with pytest.raises(UnsupportedError, match="lets earlier tokens see later ones"):
        cache.begin_append(Coordinates.range(2), [causal(), rule])
    assert_told(cache)
    take(cache, laid_out((0,), (0,), 2), [rule])  # nothing but padding is missed by nobody


def test_the_row_that_holds_least_decides():
    """Rows of 4 and 2 tokens under a prefix of 3: the second row's prefix is not whole."""
    cache = empty()
    take(cache, laid_out((4, 2), (0, 2), 4))
    with pytest.raises(UnsupportedError, match="lets earlier tokens see"):
        cache.begin_append(Coordinates.range(1, 2), [causal() | prefix(3)])


@pytest.mark.parametrize("rule", [causal() | prefix(), causal() | same_group()], ids=str)
def test_groups_go_on_where_nobody_missed_them(rule):
    """A grouped prefix that is whole, then plain tokens, then a group that earlier tokens would have seen."""
    ones = torch.ones(1, 3, dtype=torch.long)
    cache = empty(1)
    take(cache, Coordinates(torch.arange(3)[None], ones, ones), [rule])
    queries, keys = take(cache, Coordinates.range(2), [rule])
    assert queries.groups.tolist() == [[0, 0]]
    assert keys.groups.tolist() == [[1, 1, 1, 0, 0]]
    with pytest.raises(UnsupportedError, match="lets earlier tokens see"):
        cache.begin_append(Coordinates(torch.arange(3)[None], ones, ones), [rule])
    cache.reorder(torch.tensor([0, 0]))
    copy = cache.snapshot()
    cache.crop(1)
    _, keys = take(cache, Coordinates.range(1, 2), [rule])
    assert keys.groups.tolist() == [[1, 0]] * 2
    assert copy.groups_BS[:, :5].tolist() == [[1, 1, 1, 0, 0]] * 2


def test_groups_may_come_late():
    """Tokens before the first group belong to none; without any, none are made up."""
    cache = empty(1)
    take(cache, Coordinates.range(1))
    queries, keys = take(cache, Coordinates.range(1))
    assert queries.groups is keys.groups is None
    _, keys = take(
        cache, Coordinates(torch.arange(2)[None], torch.ones(1, 2, dtype=torch.long), torch.tensor([[0, 4]]))
    )
    assert keys.groups.tolist() == [[0, 0, 0, 4]]


def test_what_was_handed_out_stays_as_it_was():
    """Coordinates of an earlier pass are not rewritten by a crop and what comes after it."""
    cache = empty(1)
    ones = torch.ones(1, 3, dtype=torch.long)
    take(cache, Coordinates(torch.arange(3)[None], ones, ones))
    _, keys = take(cache, Coordinates.range(2))
    before = [x.clone() for x in (keys.positions, keys.segments, keys.groups)]
    cache.crop(1)
    take(cache, Coordinates(torch.arange(3)[None], ones, 7 * ones))
    assert all(map(torch.equal, before, (keys.positions, keys.segments, keys.groups)))


# --- angles by length ----------------------------------------------------------------------------------------------


def test_a_document_neither_grows_nor_shrinks_past_its_angles():
    """Other angles from 4 tokens on: 3 may become 3, or another document 9, but never 3 become 4 or 5 become 3."""
    cache = empty(changes_angles=lambda before, after: (before > 3) != (after > 3))
    take(cache, laid_out((3, 2), (0, 1), 3))
    with pytest.raises(UnsupportedError, match=r"a document of 3 tokens, .* than in one of 4; run all 4 tokens again"):
        cache.begin_append(Coordinates.range(1, 2))
    take(cache, laid_out((0, 1), (0, 0), 1))  # the row that is full rests
    cache.crop(3)
    cache.crop(0)
    take(cache, Coordinates.range(5, 2))
    take(cache, Coordinates.range(2, 2))
    cache.crop(4)
    for keep in (3, 1):
        with pytest.raises(UnsupportedError, match=f"a document of 4 tokens, .* one of {keep}"):
            cache.crop(keep)
    assert cache.sequence_lengths == [4, 4]
    copy = cache.snapshot()
    with pytest.raises(UnsupportedError, match="a document of 4 tokens"):
        copy.crop(2)


# --- what is appended ----------------------------------------------------------------------------------------------


def test_chunks_come_back_whole_and_remembered_ones_as_numbers():
    cache = empty(1, 4)
    first, second = torch.randn(2, 1, 2, 1, 2, requires_grad=True)
    for new, seen in ((first, [first]), (second, [first, second])):
        cache.begin_append(Coordinates.range(2))
        (got, _), nonfinite = cache.layers[0].append(new, new.detach())
        cache.commit()
        assert torch.equal(got, torch.cat(seen, 1))
        assert nonfinite.shape == got.shape[:2]
        assert not nonfinite.any()
        (gradient,) = torch.autograd.grad(got.sum(), new, retain_graph=True)
        assert (gradient == 1).all()
    assert torch.autograd.grad(got.sum(), first, allow_unused=True) == (None,)


def test_heads_that_do_not_fit_are_never_broadcast():
    cache = empty(1)
    cache.begin_append(Coordinates.range(2))
    with pytest.raises(ShapeError, match=r"appends \[\(1, 1\), \(1, 2\)\] a slot, but its cache has room for"):
        cache.layers[0].append(torch.zeros(1, 2, 1, 1), torch.zeros(1, 2, 1, 2))


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        ([], ShapeError, r"not the shape \(0,\)"),
        ([[0, 1]], ShapeError, r"not the shape \(1, 2\)"),
        ([0, 2], InputError, r"names rows \[0, 2\], but the cache has rows 0 to 1"),
        ([-1], InputError, "rows 0 to 1"),
    ],
)
@pytest.mark.usefixtures("our_checks_only")
def test_rows_that_are_not_there(index, error, message):
    with pytest.raises(error, match=message):
        empty().reorder(torch.tensor(index, dtype=torch.long))


@pytest.mark.parametrize("index", [[True, False], [0.0, 1.0]], ids=["booleans", "floats"])
@pytest.mark.usefixtures("our_checks_only")
def test_rows_are_numbers(index):
    with pytest.raises(InputError, match=f"reorder takes row numbers, not {torch.tensor(index).dtype}"):
        empty().reorder(torch.tensor(index))


# --- runs ----------------------------------------------------------------------------------------------------------


def test_runs_are_merged_only_where_document_slot_and_position_go_on():
    first = Run(0, 2, 4, 1, 3)
    following = Run(0, 4, 6, 1, 5)
    assert merge([following, first]) == (Run(0, 2, 6, 1, 3),)
    for other in (
        following._replace(row=1),
        following._replace(segment=2),
        following._replace(start=5),
        following._replace(first=6),
        following._replace(first=4),
        following._replace(first=1),
    ):
        assert merge([first, other]) == (first, other)
    assert merge([]) == ()


def test_ends_and_lengths_of_documents_in_pieces():
    """The last document of a row ends where its last piece does; a document's length is its last position plus one."""
    runs = [Run(0, 1, 3, 1, 4), Run(0, 3, 5, 2, 0), Run(0, 6, 9, 2, 2), Run(2, 0, 2, 1, 7), Run(2, 4, 5, 1, 0)]
    assert ends(runs, 3) == [(2, 5), (1, 0), (1, 1)]
    assert lengths(runs) == {(0, 1): 6, (0, 2): 5, (2, 1): 9}
