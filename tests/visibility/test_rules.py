"""Rules against written-out matrices and against a brute force that looks at one pair at a time."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pellucid.errors import ConfigError
from pellucid.visibility import (
    Coordinates,
    causal,
    chunk,
    from_visible,
    full,
    lookahead,
    parse,
    prefix,
    same_group,
    sinks,
    window,
)
from pellucid.visibility.rules import And, Or, is_full, is_plain_causal


def matrix(rule, length=5):
    tokens = Coordinates.range(length)
    return rule.mask(tokens, tokens)[0, 0].int().tolist()


WRITTEN_OUT = {
    "causal": [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
    "full": [[1] * 5] * 5,
    "causal & window(2)": [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]],
    "causal & window(1)": [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1]],
    "causal | prefix(2)": [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
    "chunk(2)": [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]],
    "causal & (window(2) | sinks(1))": [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 0, 1, 1, 0],
        [1, 0, 0, 1, 1],
    ],
    "window(2) & lookahead(1)": [
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 1, 1, 1, 0],
        [0, 0, 1, 1, 1],
        [0, 0, 0, 1, 1],
    ],
}


@pytest.mark.parametrize(("text", "expected"), WRITTEN_OUT.items())
def test_mask_is_the_matrix_written_out(text, expected):
    assert matrix(parse(text)) == expected


def test_window_counts_the_token_itself():
    """B07: w = 3 over 6 tokens gives 1, 2, 3, 3, 3, 3 visible keys."""
    tokens = Coordinates.range(6)
    assert (causal() & window(3)).mask(tokens, tokens).sum(-1).flatten().tolist() == [1, 2, 3, 3, 3, 3]


def test_right_context_is_the_number_of_future_keys():
    """B10: left 16, right 4, query 10 of 20 sees the future keys 11 to 14."""
    tokens = Coordinates.range(20)
    row = (window(17) & lookahead(4)).mask(tokens, tokens)[0, 0, 10]
    assert row.nonzero().flatten().tolist() == list(range(15))


def test_newest_queries_see_the_whole_past():
    """B01: with 2 queries that are the newest of 5 keys, 4 and 5 are visible; positions decide, not slots."""
    keys = Coordinates.range(5)
    queries = Coordinates(torch.tensor([[3, 4]]), torch.ones(1, 2, dtype=torch.long))
    assert causal().mask(queries, keys).sum(-1).flatten().tolist() == [4, 5]


def test_more_queries_than_keys_leaves_early_ones_blind():
    """B02: 5 queries, 2 keys that are the newest: rows 0 to 2 see nothing."""
    queries = Coordinates.range(5)
    keys = Coordinates(torch.tensor([[3, 4]]), torch.ones(1, 2, dtype=torch.long))
    assert causal().mask(queries, keys).sum(-1).flatten().tolist() == [0, 0, 0, 1, 2]


def test_documents_and_padding_are_apart_under_every_rule():
    segments = torch.tensor([[0, 1, 1, 2, 0]])
    positions = torch.tensor([[0, 0, 1, 0, 0]])
    tokens = Coordinates(positions, segments)
    assert full().mask(tokens, tokens)[0, 0].int().tolist() == [
        [0, 0, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0],
    ]


def test_groups():
    groups = torch.tensor([[0, 1, 1, 0, 2, 2]])
    tokens = Coordinates(torch.arange(6)[None], torch.ones(1, 6, dtype=torch.long), groups)
    spans = (causal() | same_group()).mask(tokens, tokens)[0, 0]
    assert spans[1, 2]
    assert spans[4, 5]
    assert not spans[0, 1]
    assert not spans[0, 3]  # to be of no group is no group
    assert not spans[2, 4]
    image = torch.tensor([[1, 1, 0, 0, 0, 0]])
    tokens = Coordinates(torch.arange(6)[None], torch.ones(1, 6, dtype=torch.long), image)
    assert (causal() | prefix()).mask(tokens, tokens).equal((causal() | prefix(2)).mask(tokens, tokens))
    with pytest.raises(ConfigError, match="reads groups"):
        matrix(causal() | same_group())


# --- brute force -------------------------------------------------------------------------------------------------

leaf = st.one_of(
    st.just(("causal",)),
    st.just(("full",)),
    *(st.tuples(st.just(name), st.integers(1, 7)) for name in ("window", "prefix", "chunk", "sinks", "lookahead")),
)
trees = st.recursive(leaf, lambda inner: st.tuples(st.sampled_from("&|"), inner, inner), max_leaves=5)
MAKERS = {
    "causal": causal,
    "full": full,
    "window": window,
    "prefix": prefix,
    "chunk": chunk,
    "sinks": sinks,
    "lookahead": lookahead,
}


def rule_of(tree):
    if tree[0] == "&":
        return rule_of(tree[1]) & rule_of(tree[2])
    if tree[0] == "|":
        return rule_of(tree[1]) | rule_of(tree[2])
    return MAKERS[tree[0]](*tree[1:])


def _visible(tree, q, k):
    """One pair, from the words of the definitions."""
    match tree:
        case ("&", left, right):
            return _visible(left, q, k) and _visible(right, q, k)
        case ("|", left, right):
            return _visible(left, q, k) or _visible(right, q, k)
        case ("causal",):
            return k <= q
        case ("full",):
            return True
        case ("window", w):
            return q - k <= w - 1
        case ("prefix", n):
            return k < n
        case ("chunk", n):
            return q // n == k // n
        case ("sinks", n):
            return k < n and k <= q
        case ("lookahead", n):
            return k - q <= n


coordinate_rows = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 2)), min_size=1, max_size=9)


@given(trees, coordinate_rows, coordinate_rows)
def test_mask_equals_brute_force(tree, queries, keys):
    def of(pairs):
        return Coordinates(torch.tensor([[p for p, _ in pairs]]), torch.tensor([[s for _, s in pairs]]))

    got = rule_of(tree).mask(of(queries), of(keys))
    assert got.dtype == torch.bool
    assert got.shape == (1, 1, len(queries), len(keys))
    for (i, (qp, qs)), (j, (kp, ks)) in itertools.product(enumerate(queries), enumerate(keys)):
        assert bool(got[0, 0, i, j]) == (qs == ks != 0 and _visible(tree, qp, kp)), (tree, qp, kp)


@given(trees, st.integers(1, 24))
def test_edges_reach_ahead_settled_hold(tree, length):
    rule = rule_of(tree)
    pairs = [(q, k) for q in range(length) for k in range(length) if _visible(tree, q, k)]
    assert rule.num_visible_pairs(length) == len(pairs)
    assert all((stop > start).any() for start, stop in rule.intervals(length))  # few parts, however many rules
    back, first = rule.lookback
    assert all(back is None or q - k <= back or k < first for q, k in pairs)
    assert all(rule.lookahead is None or k - q <= rule.lookahead for q, k in pairs)
    assert rule.causal_from is None or all(k <= q for q, k in pairs if k >= rule.causal_from)
    past = {(q, k) for q in range(length) for k in range(q + 1)}
    assert is_plain_causal(rule, length) == (rule.lookahead == 0 and set(pairs) == past)
    assert is_full(rule, length) == (len(pairs) == length**2)


LEAVES = [("causal",), ("full",)] + [
    (name, n) for name in ("window", "prefix", "chunk", "sinks", "lookahead") for n in (1, 2, 3, 7)
]


@pytest.mark.parametrize("leaf", LEAVES, ids=str)
def test_each_rule_alone_is_its_words_pair_by_pair(leaf):
    """All pairs of 16 positions, its edges at every length, and bounds that are no wider than what is seen."""
    rule, length = rule_of(leaf), 16
    assert matrix(rule, length) == [[int(_visible(leaf, q, k)) for k in range(length)] for q in range(length)]
    for n in range(length):
        assert rule.num_visible_pairs(n) == sum(_visible(leaf, q, k) for q in range(n) for k in range(n))
    pairs = [(q, k) for q in range(length) for k in range(length) if _visible(leaf, q, k)]
    back, first = rule.lookback
    assert first == max((k + 1 for q, k in pairs if back is not None and q - k > back), default=0)
    assert back in (None, max((q - k for q, k in pairs if k >= first), default=0))
    assert rule.lookahead in (None, max(k - q for q, k in pairs))


def test_without_groups_nobody_belongs():
    assert prefix().num_visible_pairs(4) == same_group().num_visible_pairs(4) == 0
    assert (causal() | prefix()).num_visible_pairs(4) == 10


@given(trees)
def test_text_is_read_back(tree):
    rule = rule_of(tree)
    assert parse(rule.describe()) == rule
    assert parse(rule.describe()).describe() == rule.describe()
    assert hash(parse(rule.describe())) == hash(rule)


def test_reach_composes():
    assert causal().lookback == (None, 0)
    assert (causal() & window(4)).lookback == (3, 0)
    assert (causal() & (window(4) | sinks(2))).lookback == (3, 2)
    assert (causal() & chunk(8)).lookback == (7, 0)
    assert (causal() & window(4) | causal() & window(9)).lookback == (8, 0)
    assert (causal() | prefix(3)).lookahead == 2
    assert (causal() | prefix(3)).causal_from == 3
    assert (prefix(3).lookback, prefix(3).lookahead, prefix(3).causal_from) == ((0, 3), 2, 3)
    assert (prefix().lookback, prefix().lookahead, prefix().causal_from) == ((None, 0), None, None)
    assert (causal() & prefix(3)).lookback == (0, 3)
    assert (window(4) | sinks(2)).lookback == (3, 2)
    assert (prefix(3) & sinks(2)).lookback == (sinks(2) & prefix(3)).lookback == (0, 2)
    assert (window(4) & window(2)).lookback == (window(2) & window(4)).lookback == (1, 0)
    assert (causal() | full()).lookahead is None
    assert (lookahead(2) | chunk(5)).lookahead == 4
    assert (lookahead(2) & chunk(5)).lookahead == 2


def test_what_is_by_prefix_and_what_is_seen_ahead_outside_groups():
    assert [rule.uses_prefix_groups for rule in (prefix(), causal() | prefix(), prefix() & window(4))] == [
        True,
        True,
        True,
    ]
    assert [rule.uses_prefix_groups for rule in (prefix(3), causal() | prefix(3), causal(), same_group())] == [
        False
    ] * 4
    assert prefix().lookahead_outside_groups == (causal() | prefix()).lookahead_outside_groups == 0
    assert same_group().lookahead_outside_groups == (causal() | same_group()).lookahead_outside_groups == 0
    assert prefix(3).lookahead_outside_groups == (causal() | prefix(3)).lookahead_outside_groups == 2
    assert (lookahead(2) | prefix()).lookahead_outside_groups == 2
    assert (lookahead(2) & prefix()).lookahead_outside_groups == 0


def test_which_rules_are_plain():
    """Neither as many pairs as ``causal()`` nor none ahead makes a rule it; matrices and groups never are."""
    for rule in (causal(), causal() & window(4), causal() & chunk(4), causal() | sinks(2)):
        assert is_plain_causal(rule, 4), rule
    given = from_visible(torch.ones(4, 4, dtype=torch.bool))
    for rule in (window(1), causal() & window(3), full(), given & causal(), causal() | same_group()):
        assert not is_plain_causal(rule, 4), rule
    for rule in (full(), window(4), chunk(4), causal() | window(4), prefix(4), lookahead(3)):
        assert is_full(rule, 4), rule
    for rule in (given, given | full(), full() & same_group(), chunk(3)):
        assert not is_full(rule, 4), rule


def test_what_each_rule_is_made_of():
    """By positions alone, or also by groups, or by slots: one part decides for the whole."""
    given = from_visible(torch.ones(4, 4, dtype=torch.bool))
    for rule in (causal(), prefix(2), causal() & window(3), causal() | prefix(2)):
        assert (rule.positional, rule.is_slot_mask) == (True, False)
    for rule in (prefix(), same_group(), causal() | same_group(), causal() & prefix()):
        assert (rule.positional, rule.is_slot_mask) == (False, False)
    for rule in (given, given & causal(), causal() | given, (causal() & given) | same_group()):
        assert (rule.positional, rule.is_slot_mask) == (False, True)


@pytest.mark.usefixtures("our_checks_only")
def test_rows_of_queries_and_keys_must_agree():
    with pytest.raises(ConfigError, match="queries have 2 rows but keys have 1"):
        causal().mask(Coordinates.range(3, 2), Coordinates.range(3))


def test_combining_is_flat_and_immutable():
    rule = causal() & window(3) & sinks(1)
    assert isinstance(rule, And)
    assert len(rule.rules) == 3
    assert isinstance(causal() | prefix(1) | same_group(), Or)
    with pytest.raises(AttributeError):
        rule.rules = ()


def test_a_million_tokens_are_counted_exactly():
    n, w, s = 1_000_000, 4096, 4
    rule = causal() & (window(w) | sinks(s))
    # every query sees min(i+1, w) recent keys, and from query w on the sinks that have left the window
    assert rule.num_visible_pairs(n) == sum(min(i + 1, w) + min(s, max(0, i + 1 - w)) for i in range(n))


@pytest.mark.parametrize("make", [window, prefix, chunk, sinks])
@pytest.mark.parametrize("value", [0, -1, True, 1.0, "3"])
def test_sizes_that_mean_nothing_are_refused(make, value):
    """B11: a window of 0 never silently hides everything."""
    with pytest.raises(ConfigError, match=r"at least 1|whole number"):
        make(value)


@pytest.mark.parametrize("make", [window, prefix, chunk, sinks, lookahead])
def test_sizes_have_an_end(make):
    make(1 << 40).mask(Coordinates.range(3), Coordinates.range(3))
    with pytest.raises(ConfigError, match="is 1099511627777, but must be at most 1099511627776"):
        make((1 << 40) + 1)
    with pytest.raises(ConfigError, match="a number of 20000 bits, but must be at most"):
        make(1 << 19999)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("causal & windw(3)", r"there is no rule 'windw'; did you mean 'window'\?"),
        ("window(0)", "at least 1"),
        ("window(3, 4)", "was given 2 numbers"),
        ("window", r"was given 0 numbers; write it like window\(256\)"),
        ("window(-1)", r"window\(w\) is -1, but must be at least 1"),
        ("window(-x)", "write rules like"),
        ("causal & window(9999999999999999999999)", "is 9999999999999999999999, but must be at most 1099511627776"),
        ("causal and window(3)", "write rules like"),
        ("__import__('os')", "there is no rule"),
        ("causal.__class__", "write rules like"),
        ("causal(", "cannot be read"),
        ("causal & " * 400 + "causal", "at most 500"),
        ("(" * 240 + "causal" + ")" * 240, "cannot be read"),
        ("", "cannot be read"),
        ("window('3')", "whole number"),
    ],
)
def test_hostile_text_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse(text)


def test_a_mask_is_built_once():
    tokens = Coordinates.range(4)
    assert causal().mask(tokens, tokens) is causal().mask(tokens, tokens)


def test_masks_keep_the_keys_they_are_of():
    """What is remembered by an identity keeps its owner alive: new keys never find the mask of dead ones."""
    queries = Coordinates.range(3)
    for length in range(1, 200):
        assert causal().mask(queries, Coordinates.range(1 + length % 7)).shape == (1, 1, 3, 1 + length % 7)


def test_a_rule_combines_only_with_rules():
    with pytest.raises(ConfigError, match="only with a rule"):
        causal() & True
