"""What the kernels are asked: no mask where none is needed, no copy of keys, and never a question to the device."""

import importlib
import math
from dataclasses import replace

import pytest
import torch

from pellucid.errors import ShapeError, UnsupportedError
from pellucid.nn.attend import AttentionOptions, attend, choose
from pellucid.nn.backends import sdpa
from pellucid.nn.backends.inputs import AttentionInputs, replace_nonfinite
from pellucid.visibility import (
    Coordinates,
    Layout,
    causal,
    chunk,
    from_visible,
    full,
    prefix,
    same_group,
    sinks,
    window,
)

attend_module = importlib.import_module("pellucid.nn.attend")  # the package has a function of this name

BACKENDS = ["reference", "sdpa", "varlen"]


def at(*positions, segment=1):
    return Coordinates(torch.tensor([positions]), torch.full((1, len(positions)), segment))


def untold(places):
    """The same places, on a host that does not know them."""
    twin = Coordinates(places.positions, places.segments, places.groups)
    object.__setattr__(twin, "layout", None)
    return twin


def halves(length, rows=1):
    """Rows of two documents of this length."""
    positions = torch.arange(length).repeat(2)[None].repeat(rows, 1)
    return Coordinates(positions, torch.arange(1, 3).repeat_interleave(length)[None].repeat(rows, 1))


def drawn(queries, keys, heads=4, kv_heads=2, size=8):
    torch.manual_seed(1)
    (b, t), s = queries.shape, keys.shape[1]
    shapes = ((b, t, heads, size), (b, s, kv_heads, size), (b, s, kv_heads, size))
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def asked(queries, keys, rule, heads=4, kv_heads=2, **words):
    names = {"bias": None, "sink_logits": None, "options": AttentionOptions(), **words}
    return AttentionInputs(*drawn(queries, keys, heads, kv_heads), rule, queries, keys, **names)


def assert_as_the_reference(queries, keys, rule, heads=(4, 2), backends=("sdpa", "varlen", "auto"), **words):
    tensors = drawn(queries, keys, *heads)
    settings = {"rule": rule, "q_coords": queries, "k_coords": keys, **words}
    expected = attend(*tensors, options=AttentionOptions(backend="reference"), **settings)
    for backend in backends:
        got = attend(*tensors, options=AttentionOptions(backend=backend), **settings)
        torch.testing.assert_close(got, expected, atol=1e-10, rtol=0, msg=f"{backend} under {rule}")
    return expected


TEN = Coordinates.range(10, 2)
NEXT = Coordinates(torch.full((2, 1), 9), torch.ones(2, 1, dtype=torch.long))
PADDED = Coordinates(torch.tensor([[0, 1, 2], [0, 0, 1]]), torch.tensor([[1, 1, 1], [0, 1, 1]]))


@pytest.mark.parametrize(
    ("queries", "keys", "rule", "mask", "is_causal"),
    [
        (TEN, TEN, causal(), False, True),
        (TEN, TEN, causal() & window(10), False, True),
        (TEN, TEN, causal() & window(9), True, False),
        (TEN, TEN, full(), False, False),
        (TEN, TEN, chunk(10), False, False),
        (TEN, TEN, chunk(9), True, False),
        (TEN, TEN, window(1), True, False),  # as many pairs as causal(), and none of them
        (TEN, TEN, from_visible(torch.ones(10, 10, dtype=torch.bool)), True, False),
        (halves(5), halves(5), causal(), True, False),
        (PADDED, PADDED, full(), True, False),
        (NEXT, TEN, causal(), False, False),
        (NEXT, TEN, causal() & window(10), False, False),
        (NEXT, TEN, causal() & window(9), True, False),
        (NEXT, TEN, full(), False, False),
        (TEN, Coordinates.range(3, 2), full(), False, False),
        (TEN, Coordinates.range(3, 2), causal(), True, False),
        (Coordinates.range(1, 2), Coordinates.range(1, 2), causal(), False, False),
    ],
)
def test_a_mask_is_made_only_where_one_is_needed(queries, keys, rule, mask, is_causal):
    """And ``is_causal``, which counts slots, is said only where slots are positions."""
    keys = queries if keys is TEN and queries is TEN else keys
    found = sdpa.prepare(asked(queries, keys, rule)).arguments
    assert ((found["attn_mask"] is not None), found["is_causal"]) == (mask, is_causal)
    assert_as_the_reference(queries, keys, rule, backends=("sdpa",))


@pytest.mark.parametrize(
    ("slots", "heads", "shared"), [(1, (4, 2), False), (1, (4, 4), False), (3, (4, 2), True), (3, (4, 4), False)]
)
def test_a_new_token_shares_keys_without_a_copy(slots, heads, shared):
    keys = Coordinates.range(6)
    queries = at(*range(6 - slots, 6))
    prepared = sdpa.prepare(asked(queries, keys, causal(), *heads))
    assert prepared.arguments["enable_gqa"] is shared
    rows = (heads[1], heads[0] // heads[1]) if slots == 1 else (heads[0], slots)
    assert prepared.arguments["query"].shape == (1, *rows, 8)
    assert_as_the_reference(queries, keys, causal(), heads)


def test_a_new_token_with_a_bias_a_head():
    bias = torch.randn(1, 4, 1, 6, dtype=torch.float64)
    assert_as_the_reference(at(5), Coordinates.range(6), causal(), backends=("sdpa", "auto"), bias=bias)


def test_no_kernel_is_handed_a_row_that_sees_nothing():
    prepared = sdpa.prepare(asked(PADDED, PADDED, causal()))
    assert prepared.arguments["attn_mask"].any(-1).all()
    assert prepared.seeing.equal(PADDED.real)
    whole = sdpa.prepare(asked(halves(3), halves(3), causal()))
    assert whole.seeing is None


# --- a slot is not a position --------------------------------------------------------------------------------------

LATE = at(*range(5, 12))


@pytest.mark.parametrize(
    "rule",
    [causal() & chunk(8), chunk(8), causal() | prefix(6), causal() & (window(2) | sinks(1)), causal() & window(6)],
    ids=str,
)
@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        (LATE, LATE),
        (at(11), LATE),  # the newest of keys that do not begin at 0
        (at(3), Coordinates.range(6)),  # one query in the middle
        (at(7), Coordinates.range(6)),  # one query past the end
        (at(5, 6), Coordinates.range(6)),  # the first of two is the newest
        (Coordinates(torch.tensor([[4, 5, 0]]), torch.tensor([[1, 1, 0]])), Coordinates.range(6)),  # padding asks
        (at(5, 6, 7), at(0, 1, 2)),  # the same slots, other positions
        (at(5, segment=2), Coordinates.range(6)),  # the next position of another document
        (at(3, 4, segment=2), Coordinates.range(6)),
        (at(0, 1, 4, 5), at(0, 1, 4, 5)),  # a gap
        (at(3, 4, 0, 1), at(3, 4, 0, 1)),  # out of order
    ],
    ids=str,
)
def test_positions_decide_for_every_kernel(queries, keys, rule):
    for asking in (rule, causal(), full()):
        assert_as_the_reference(queries, keys, asking)


@pytest.mark.parametrize("rule", [causal(), full(), causal() & window(2), causal() | same_group()], ids=str)
def test_documents_in_pieces_whose_positions_go_back_and_on(rule):
    """One document before and behind padding: its second piece begins again, goes on, or skips."""
    segments = torch.tensor([[1, 1, 0, 1, 1, 2, 1]] * 3)
    positions = torch.tensor([[0, 1, 0, 0, 1, 0, 2], [0, 1, 0, 2, 3, 0, 4], [2, 3, 0, 0, 1, 0, 9]])
    groups = torch.tensor([[1, 1, 0, 1, 2, 2, 2]] * 3)
    places = Coordinates(positions, segments, groups)
    assert_as_the_reference(places, places, rule)
    plan = sdpa._plan(places, places)
    for piece in plan.coordinates.values():
        assert piece.layout == Layout.of(piece.positions, piece.segments)


# --- which kernel --------------------------------------------------------------------------------------------------


def test_documents_are_cut_where_that_is_less_work():
    """Two documents of n: 2 n² pairs and two calls, against (2 n)² pairs; at a tie one call is as good."""
    tie = math.isqrt(sdpa._PAIR_FEATURES_PER_CALL // 32)  # four heads of eight features
    assert tie**2 * 32 == sdpa._PAIR_FEATURES_PER_CALL

    def chosen(length, rule=None, rows=1, **words):
        places = halves(length, rows)
        return choose(asked(places, places, causal() if rule is None else rule, **words))

    assert chosen(tie) == "sdpa"
    assert chosen(tie + 1) == "varlen"
    assert chosen(tie + 1, rows=3) == "varlen"
    assert chosen(tie // 2 + 1) == "sdpa"
    several = halves(tie // 2 + 1)
    assert choose(asked(several, several, causal(), heads=16)) == "varlen", "more heads make each pair dearer"
    faraway = asked(halves(tie + 1), halves(tie + 1), causal())
    faraway = replace(faraway, k_coords=faraway.q_coords, q=faraway.q.to("meta"))
    assert choose(faraway) == "sdpa", "elsewhere pairs are cheaper"
    assert chosen(tie + 1, bias=torch.zeros(1, 1, 2 * tie + 2, 2 * tie + 2)) == "sdpa"
    assert chosen(tie + 1, sink_logits=torch.zeros(4)) == "reference"
    assert choose(asked(halves(tie + 1), halves(tie + 1), causal())) == "sdpa"  # keys of their own
    wide = Coordinates.range(2 * tie + 2)
    assert choose(asked(wide, wide, causal())) == "sdpa"


def test_a_given_mask_is_never_cut():
    """Groups or none, alone or as a part of a rule: ``auto`` finds a kernel that can."""
    n = math.isqrt(sdpa._PAIR_FEATURES_PER_CALL // 32) + 1
    row = halves(n)
    mask = from_visible(torch.ones(2 * n, 2 * n, dtype=torch.bool).tril(-1))
    for groups in (None, torch.ones_like(row.segments)):
        places = Coordinates(row.positions, row.segments, groups)
        for rule in (mask, mask & causal(), mask | causal()):
            assert_as_the_reference(places, places, rule, backends=("auto",))
            with pytest.raises(UnsupportedError, match="varlen cannot cut a given mask into documents; use backend="):
                attend(
                    *drawn(places, places),
                    rule=rule,
                    q_coords=places,
                    k_coords=places,
                    options=AttentionOptions(backend="varlen"),
                )


def test_groups_are_cut_with_their_documents():
    groups = torch.tensor([[1, 1, 0, 2, 2, 0, 1, 1]])
    places = Coordinates(halves(4).positions, halves(4).segments, groups)
    out = assert_as_the_reference(places, places, causal() | same_group())
    assert not torch.equal(out, assert_as_the_reference(places, places, causal()))


@pytest.mark.parametrize("rule", [causal(), full(), causal() & window(2)], ids=str)
@pytest.mark.parametrize("who", ["queries", "keys", "both"])
def test_a_host_that_was_not_told_where_tokens_are(who, rule):
    """The answer stays, ``auto`` finds it, and what has to know says so."""
    for queries, keys in ((PADDED, PADDED), (TEN, TEN), (NEXT, TEN)):
        first = queries if who == "keys" else untold(queries)
        second = first if queries is keys and who == "both" else keys if who == "queries" else untold(keys)
        assert_as_the_reference(first, second, rule, backends=("sdpa", "auto"))
        assert choose(asked(first, second, rule)) == "sdpa"
        with pytest.raises(UnsupportedError, match="varlen needs coordinates whose layout the host knows"):
            attend(
                *drawn(first, second),
                rule=rule,
                q_coords=first,
                k_coords=second,
                options=AttentionOptions(backend="varlen"),
            )


@pytest.mark.parametrize("backend", ["sdpa", "auto"])
def test_no_number_is_asked_of_the_device(backend):
    """Tensors without numbers: asking for one would fail."""
    with torch.device("meta"):
        places = Coordinates(torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 5, dtype=torch.long))
        q, k = torch.zeros(2, 5, 4, 8), torch.zeros(2, 5, 2, 8)
    assert places.layout is None
    out = attend(
        q, k, k, rule=causal() & window(2), q_coords=places, k_coords=places, options=AttentionOptions(backend=backend)
    )
    assert (out.device.type, out.shape) == ("meta", q.shape)


def test_finite_tensors_are_left_alone_and_a_compiler_is_asked_no_number(monkeypatch):
    k, v = torch.randn(2, 1, 3, 2, 4)
    got, nonfinite = replace_nonfinite(k, v)
    assert got[0] is k
    assert got[1] is v
    assert nonfinite is None
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        patch.setattr(torch.Tensor, "__bool__", lambda _: pytest.fail("a number was asked for"))
        same, nonfinite = replace_nonfinite(k, v)
    assert torch.equal(torch.stack(same), torch.stack([k, v]))
    assert nonfinite.tolist() == [[False] * 3]


GROUPS = Coordinates(PADDED.positions, PADDED.segments, torch.tensor([[1, 1, 0], [0, 2, 2]]))


@pytest.mark.parametrize(
    ("queries", "keys", "rule", "given", "options"),
    [
        (TEN, TEN, causal(), {}, {}),
        (PADDED, PADDED, causal() & window(2), {}, {}),
        (halves(5), halves(5), causal(), {}, {"backend": "varlen"}),
        (NEXT, TEN, causal(), {}, {"scale": 0.3}),
        (PADDED, PADDED, full(), {"bias": torch.randn(1, 4, 3, 3, dtype=torch.float64)}, {}),
        (PADDED, PADDED, causal(), {"sink_logits": torch.randn(4, dtype=torch.float64)}, {"softcap": 2.0}),
        (GROUPS, GROUPS, causal() | same_group(), {}, {"backend": "reference"}),
    ],
    ids=["plain", "padded", "packed", "cached", "bias", "sinks", "groups"],
)
def test_the_operator_of_a_compiled_graph_gives_the_same_numbers_and_gradients(
    queries, keys, rule, given, options, monkeypatch
):
    """Inside, it is what runs without a compiler."""
    settings = {"rule": rule, "q_coords": queries, "k_coords": keys, "options": AttentionOptions(**options)}

    def outcome():
        leaves = [x.requires_grad_() for x in drawn(queries, keys)]
        named = {name: value.clone().requires_grad_() for name, value in given.items()}
        out = attend(*leaves, **named, **settings)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), [*leaves, *named.values()])]

    expected = outcome()
    seen = []
    real = attend_module._forward
    monkeypatch.setattr(attend_module, "_forward", lambda *inputs: seen.append(0) or real(*inputs))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: not seen)  # not inside of the operator
    got = outcome()
    assert seen == [0]
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("rule", "options"),
    [(from_visible(torch.ones(3, 3, dtype=torch.bool).tril()), {}), (causal(), {"dropout": 0.5})],
    ids=["a given mask", "dropout"],
)
def test_a_compiler_goes_around_what_is_no_operator(rule, options, monkeypatch):
    """A mask has no text, and dropout must not be drawn again in the backward pass."""
    row, went_around = Coordinates.range(3), []

    def around(function):
        def run(call):
            went_around.append(call.rule)
            monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)
            return function(call)

        return run

    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(torch.compiler, "disable", around)
    out = attend(*drawn(row, row), rule=rule, q_coords=row, k_coords=row, options=AttentionOptions(**options))
    assert out.shape == (1, 3, 4, 8)
    assert went_around == [rule]


# --- what is not finite --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["keys", "values", "both"])
def test_one_number_that_is_not_finite_is_loud_for_those_who_see_it(backend, bad, where):
    """In keys or in values, in one feature of one head; all others have what they had."""
    places = Coordinates(torch.tensor([[0, 1, 2, 0, 1, 0]]), torch.tensor([[1, 1, 1, 2, 2, 0]]))
    settings = {"rule": causal(), "q_coords": places, "k_coords": places, "options": AttentionOptions(backend=backend)}
    q, k, v = drawn(places, places)
    clean = attend(q, k, v, **settings)
    for tensor in (k, v):
        if where == "both" or tensor is (k if where == "keys" else v):
            tensor[0, 1, 1, 3] = bad
    out = attend(q, k, v, **settings)
    assert out[0, 1:3].isnan().all()
    assert torch.equal(out[0, [0, 3, 4, 5]], clean[0, [0, 3, 4, 5]])


@pytest.mark.parametrize(("queries", "rule"), [(TEN, causal()), (TEN, full()), (NEXT, causal())], ids=str)
def test_where_no_mask_is_needed_none_is_made_for_what_is_not_finite(queries, rule, monkeypatch):
    q, k, v = drawn(queries, TEN)
    k[0, 4, 0, 0] = math.nan
    settings = {"rule": rule, "q_coords": queries, "k_coords": TEN}
    expected = attend(q, k, v, options=AttentionOptions(backend="reference"), **settings)
    monkeypatch.setattr(type(rule), "mask", lambda *_: pytest.fail("a mask was made"))
    got = attend(q, k, v, options=AttentionOptions(backend="sdpa"), **settings)
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=0, equal_nan=True)
    assert got[0].isnan().any()
    assert not got[1].isnan().any()


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
def test_values_may_be_of_another_size(backend):
    places = halves(3)
    q, k, _ = drawn(places, places)
    v = torch.randn(1, 6, 2, 5, dtype=torch.float64)
    settings = {"rule": causal(), "q_coords": places, "k_coords": places}
    got = attend(q, k, v, options=AttentionOptions(backend=backend), **settings)
    assert got.shape == (1, 6, 4, 5)
    by_one = [
        attend(q, k, v[..., [i]].expand_as(k), options=AttentionOptions(backend="reference"), **settings)[..., :1]
        for i in range(5)
    ]
    torch.testing.assert_close(got, torch.cat(by_one, -1), atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": 0.0}, "softcap is 0.0, but must be above 0"),
        ({"softcap": float("nan")}, "softcap is nan"),
        ({"dropout": 1.0}, "dropout is 1.0, but a probability below 1"),
        ({"dropout": -0.1}, "dropout is -0.1"),
        ({"dropout": float("nan")}, "dropout is nan"),
    ],
)
def test_meaningless_options_are_refused(options, message):
    with pytest.raises(ShapeError, match=message):
        AttentionOptions(**options)


def test_coordinates_of_another_length_are_refused():
    four, five = Coordinates.range(4), Coordinates.range(5)
    with pytest.raises(ShapeError, match=r"coordinates of the keys are \(1, 5\), but the tensors have \(1, 4\)"):
        attend(*drawn(four, four), rule=causal(), q_coords=four, k_coords=five)
