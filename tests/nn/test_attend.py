"""Every backend gives what the reference gives, and hidden content never matters."""

import math
import re

import pytest
import torch

from pellucid.errors import ShapeError, UnsupportedError
from pellucid.nn.attend import AttentionOptions, attend, choose, probabilities
from pellucid.nn.backends.inputs import AttentionInputs
from pellucid.visibility import Coordinates, causal, chunk, from_visible, full, parse, sinks, window

BACKENDS = ["reference", "sdpa", "varlen"]
RULES = [
    "causal",
    "full",
    "causal & window(3)",
    "causal & (window(2) | sinks(1))",
    "chunk(4)",
    "causal | prefix(3)",
]

# Three rows of different lengths in one layout each; 0 is padding.
SEGMENTS = {
    "full": [[1] * 9] * 3,
    "right": [[1] * 9, [1] * 5 + [0] * 4, [1] + [0] * 8],
    "left": [[1] * 9, [0] * 4 + [1] * 5, [0] * 8 + [1]],
    "packed": [[1, 1, 1, 2, 2, 2, 2, 2, 3], [1] * 9, [1] * 4 + [2] * 2 + [0] * 3],
    "gap": [[1, 1, 0, 0, 1, 1, 1, 0, 2], [0, 1, 0, 1, 0, 1, 0, 1, 0], [0] * 9],
}


def coordinates(name):
    segments = torch.tensor(SEGMENTS[name])
    positions = torch.zeros_like(segments)
    for row in range(3):
        seen = {}
        for slot, segment in enumerate(segments[row].tolist()):
            if segment:
                positions[row, slot] = seen.get(segment, 0)
                seen[segment] = seen.get(segment, 0) + 1
    return Coordinates(positions, segments)


def qkv(queries, keys, heads=4, kv_heads=2, size=8, dtype=torch.float64):
    (b, t), s = queries.shape, keys.shape[1]
    return (
        torch.randn(b, t, heads, size, dtype=dtype),
        torch.randn(b, s, kv_heads, size, dtype=dtype),
        torch.randn(b, s, kv_heads, size, dtype=dtype),
    )


def brute_force(q, k, v, rule, queries, keys, softcap=None, sinks_N=None):
    """One query, one head, one key at a time, in Python numbers."""
    mask = rule.mask(queries, keys)[:, 0]
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    group = q.shape[2] // k.shape[2]
    for b, t, n in torch.cartesian_prod(*(torch.arange(x) for x in q.shape[:3])).tolist():
        seen = [s for s in range(k.shape[1]) if mask[b, t, s]]
        scores = [float(q[b, t, n] @ k[b, s, n // group]) / math.sqrt(q.shape[-1]) for s in seen]
        if softcap:
            scores = [softcap * math.tanh(x / softcap) for x in scores]
        weights = [math.exp(x) for x in scores]
        total = sum(weights) + (math.exp(sinks_N[n]) if sinks_N is not None else 0)
        for s, weight in zip(seen, weights, strict=True):
            out[b, t, n] += weight / total * v[b, s, n // group].double()
    return out


@pytest.mark.parametrize("layout", SEGMENTS)
@pytest.mark.parametrize("text", RULES)
def test_every_backend_equals_brute_force(layout, text):
    tokens, rule = coordinates(layout), parse(text)
    q, k, v = qkv(tokens, tokens)
    expected = brute_force(q, k, v, rule, tokens, tokens)
    for backend in [*BACKENDS, "auto"]:
        got = attend(q, k, v, rule=rule, q_coords=tokens, k_coords=tokens, options=AttentionOptions(backend=backend))
        torch.testing.assert_close(got, expected, atol=1e-10, rtol=0, msg=f"{backend} under {text} on {layout}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("text", RULES)
def test_queries_that_are_not_the_keys(backend, text):
    """q_len ≠ k_len both ways: the newest three of nine tokens, and nine queries over three keys."""
    tokens, rule = coordinates("left"), parse(text)
    newest = Coordinates(tokens.positions[:, -3:], tokens.segments[:, -3:])
    for queries, keys in ((newest, tokens), (tokens, newest)):
        q, k, v = qkv(queries, keys)
        got = attend(q, k, v, rule=rule, q_coords=queries, k_coords=keys, options=AttentionOptions(backend=backend))
        torch.testing.assert_close(got, brute_force(q, k, v, rule, queries, keys), atol=1e-10, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_one_new_token_over_a_cache(backend, heads):
    """B01: a single query sees all keys before it, for multi-head, grouped and multi-query attention."""
    keys = Coordinates.range(6, 2)
    queries = Coordinates(torch.full((2, 1), 5), torch.ones(2, 1, dtype=torch.long))
    q, k, v = qkv(queries, keys, *heads)
    got = attend(q, k, v, rule=causal(), q_coords=queries, k_coords=keys, options=AttentionOptions(backend=backend))
    torch.testing.assert_close(got, brute_force(q, k, v, causal(), queries, keys), atol=1e-10, rtol=0)
    ones = torch.zeros(1, 1, 1, 1)
    value = torch.tensor([1.0, 3.0, 5.0]).view(1, 3, 1, 1)
    three, last = Coordinates.range(3), Coordinates(torch.tensor([[2]]), torch.tensor([[1]]))
    out = attend(
        ones,
        torch.zeros_like(value),
        value,
        rule=causal(),
        q_coords=last,
        k_coords=three,
        options=AttentionOptions(backend=backend),
    )
    assert out.item() == pytest.approx(3.0)


def test_grouped_heads_are_neighbours():
    """4 query heads over 2 key/value heads read them as [0, 0, 1, 1]."""
    tokens = Coordinates.range(1)
    v = torch.tensor([10.0, 20.0]).view(1, 1, 2, 1)
    for backend in BACKENDS:
        out = attend(
            torch.zeros(1, 1, 4, 1),
            torch.zeros(1, 1, 2, 1),
            v,
            rule=causal(),
            q_coords=tokens,
            k_coords=tokens,
            options=AttentionOptions(backend=backend),
        )
        assert out.flatten().tolist() == [10, 10, 20, 20]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["full", "right", "left", "packed", "gap"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_hidden_content_never_matters(backend, layout, bad):
    """B25: NaN, Inf and huge numbers in keys nobody may see; outputs and gradients bit for bit the same."""
    tokens, rule = coordinates(layout), causal() & window(3)
    q, k, v = qkv(tokens, tokens, dtype=torch.float32)
    visible_BS = rule.mask(tokens, tokens)[:, 0, -4:].any(1)  # what the last four queries may see
    wanted = slice(-4, None)
    results = []
    for fill in (0.0, bad):
        leaves = [x.clone() for x in (q, k, v)]
        for x in leaves[1:]:
            x[~visible_BS] = fill
        leaves = [x.requires_grad_() for x in leaves]
        out = attend(*leaves, rule=rule, q_coords=tokens, k_coords=tokens, options=AttentionOptions(backend=backend))[
            :, wanted
        ]
        out.sum().backward()
        results.append([out.detach(), *(x.grad for x in leaves)])
    hidden_queries = torch.zeros_like(results[0][1], dtype=torch.bool)
    hidden_queries[:, :-4] = True
    for clean, dirty in zip(*results, strict=True):
        if clean.shape == q.shape and clean is results[0][1]:
            clean, dirty = clean.masked_fill(hidden_queries, 0), dirty.masked_fill(hidden_queries, 0)
        assert torch.equal(clean, dirty)
        assert torch.isfinite(clean).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_visible_nan_is_loud(backend):
    tokens = coordinates("packed")
    q, k, v = qkv(tokens, tokens, dtype=torch.float32)
    v[0, 4] = float("nan")  # second token of the second document
    out = attend(q, k, v, rule=causal(), q_coords=tokens, k_coords=tokens, options=AttentionOptions(backend=backend))
    loud = out.isnan().all(-1).all(-1)
    assert loud.nonzero().tolist() == [[0, 4], [0, 5], [0, 6], [0, 7]]
    assert out.isnan().any(-1).any(-1).equal(loud)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_query_that_sees_nothing_is_exactly_zero(backend, dtype):
    """B23, L04: output 0 and gradient 0, never NaN and never the uniform row of a finite minimum."""
    keys = Coordinates(torch.tensor([[3, 4]]), torch.ones(1, 2, dtype=torch.long))
    queries = Coordinates.range(5)
    q, k, v = (x.to(dtype).requires_grad_() for x in qkv(queries, keys))
    out = attend(q, k, v, rule=causal(), q_coords=queries, k_coords=keys, options=AttentionOptions(backend=backend))
    assert (out[:, :3] == 0).all()
    torch.testing.assert_close(out[:, 3], v[:, 0].repeat_interleave(2, 1))
    out.float().square().sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))
    assert (q.grad[:, :3] == 0).all()
    assert out[:, 4].abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masks_select_and_never_add(dtype):
    """B28, B29: a hidden key with the largest score keeps weight 0 in 16 bits, beside very negative visible ones."""
    tokens = Coordinates(torch.arange(3)[None], torch.tensor([[1, 1, 2]]))
    q = torch.full((1, 3, 1, 1), 200.0, dtype=dtype)
    k = torch.tensor([-30.0, -30.0, 300.0], dtype=dtype).view(1, 3, 1, 1)
    v = torch.tensor([1.0, 3.0, 1000.0], dtype=dtype).view(1, 3, 1, 1)
    for backend in BACKENDS:
        out = attend(q, k, v, rule=full(), q_coords=tokens, k_coords=tokens, options=AttentionOptions(backend=backend))
        assert out.flatten().tolist() == [2.0, 2.0, 1000.0], backend


def test_raw_scores_may_pass_the_range_of_float16():
    """B118: q = k = 40 in 64 features, raw product 102400 > 65504."""
    tokens = Coordinates.range(2)
    q = torch.full((1, 2, 1, 64), 40.0, dtype=torch.float16)
    v = torch.tensor([1.0, 2.0]).view(1, 2, 1, 1).expand(1, 2, 1, 64).half()
    for backend in BACKENDS:
        out = attend(
            q, q, v, rule=causal(), q_coords=tokens, k_coords=tokens, options=AttentionOptions(backend=backend)
        )
        assert out[0, :, 0, 0].tolist() == pytest.approx([1.0, 1.5], abs=1e-3)


def test_weights_can_be_asked_for():
    """L01, L03."""
    tokens = coordinates("packed")
    q, k, v = qkv(tokens, tokens)
    weights = probabilities(q, k, rule=causal(), q_coords=tokens, k_coords=tokens)
    mask = causal().mask(tokens, tokens).expand_as(weights)
    assert weights.shape == (3, 4, 9, 9)
    assert (weights[~mask] == 0).all()
    sums = weights.sum(-1)
    torch.testing.assert_close(sums, tokens.real[:, None].expand_as(sums).double())
    out = torch.einsum("bnts,bsnu->btnu", weights, v.repeat_interleave(2, 2))
    torch.testing.assert_close(
        out, attend(q, k, v, rule=causal(), q_coords=tokens, k_coords=tokens, options=AttentionOptions(backend="sdpa"))
    )


def test_softcap_and_sinks_by_the_reference():
    """B119: scores [0, 100] under cap 50 become [0, 50·tanh 2]; a backend without it raises."""
    tokens = coordinates("right")
    q, k, v = qkv(tokens, tokens)
    settings = {"rule": causal(), "q_coords": tokens, "k_coords": tokens}
    capped = attend(q, k, v, options=AttentionOptions(softcap=0.5), **settings)
    torch.testing.assert_close(capped, brute_force(q, k, v, causal(), tokens, tokens, softcap=0.5))
    sink_logits = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)
    with_sinks = attend(q, k, v, sink_logits=sink_logits, **settings)
    torch.testing.assert_close(with_sinks, brute_force(q, k, v, causal(), tokens, tokens, sinks_N=sink_logits))
    for backend in ("sdpa", "varlen"):
        with pytest.raises(UnsupportedError, match="softcap; use backend="):
            attend(q, k, v, options=AttentionOptions(softcap=0.5, backend=backend), **settings)
        with pytest.raises(UnsupportedError, match="sink logits; use backend="):
            attend(q, k, v, sink_logits=sink_logits, options=AttentionOptions(backend=backend), **settings)
    one = torch.tensor([[0.0, 100.0]]).view(1, 2, 1, 1)
    weights = probabilities(
        torch.ones(1, 1, 1, 1),
        one,
        rule=full(),
        q_coords=Coordinates.range(1),
        k_coords=Coordinates.range(2),
        options=AttentionOptions(softcap=50.0),
    )
    assert weights.flatten()[1].log().sub(weights.flatten()[0].log()).item() == pytest.approx(48.201, abs=1e-2)


def test_bias_is_a_bias_and_not_a_mask():
    tokens = coordinates("gap")
    q, k, v = qkv(tokens, tokens)
    bias = torch.randn(1, 4, 9, 9, dtype=torch.float64) * 30
    settings = {"rule": causal(), "q_coords": tokens, "k_coords": tokens, "bias": bias}
    expected = attend(q, k, v, options=AttentionOptions(backend="reference"), **settings)
    torch.testing.assert_close(
        attend(q, k, v, options=AttentionOptions(backend="sdpa"), **settings), expected, atol=1e-10, rtol=0
    )
    with pytest.raises(UnsupportedError, match="takes no bias"):
        attend(q, k, v, options=AttentionOptions(backend="varlen"), **settings)
    assert (expected[0, 2] == 0).all()  # padding sees nothing, whatever the bias


def test_a_given_mask_is_obeyed():
    mask = torch.ones(9, 9, dtype=torch.bool).tril(1)
    tokens = Coordinates.range(9, 3)
    q, k, v = qkv(tokens, tokens)
    rule = from_visible(mask)
    expected = brute_force(q, k, v, rule, tokens, tokens)
    for backend in ("reference", "sdpa", "auto"):
        torch.testing.assert_close(
            attend(q, k, v, rule=rule, q_coords=tokens, k_coords=tokens, options=AttentionOptions(backend=backend)),
            expected,
        )
    with pytest.raises(UnsupportedError, match="given mask"):
        attend(q, k, v, rule=rule, q_coords=tokens, k_coords=tokens, options=AttentionOptions(backend="varlen"))


def test_choice_follows_the_layout():
    def chosen(tokens, rule=None, **asked):
        q = torch.zeros(*tokens.shape, 4, 16)
        return choose(AttentionInputs(q, q, q, rule or causal(), tokens, tokens, None, None, AttentionOptions(**asked)))

    full = Coordinates.range(256, 4)
    halves = Coordinates(
        torch.arange(256).remainder(64)[None].repeat(4, 1),
        torch.arange(256).div(64, rounding_mode="floor").add(1)[None].repeat(4, 1),
    )
    assert chosen(full) == "sdpa"
    assert chosen(halves) == "varlen"
    assert chosen(full, softcap=3.0) == "reference"
    assert chosen(coordinates("packed")) == "sdpa"  # too small to be worth cutting


def test_flash_dropout_is_off_unless_asked():
    tokens = Coordinates.range(8, 2)
    q, k, v = qkv(tokens, tokens, dtype=torch.float32)
    settings = {"rule": causal(), "q_coords": tokens, "k_coords": tokens}
    for backend in BACKENDS:
        plain = attend(q, k, v, options=AttentionOptions(backend=backend), **settings)
        assert torch.equal(plain, attend(q, k, v, options=AttentionOptions(backend=backend), **settings))
        dropped = torch.stack(
            [attend(q, k, v, options=AttentionOptions(backend=backend, dropout=0.5), **settings) for _ in range(400)]
        )
        assert not torch.equal(dropped[0], dropped[1])
        torch.testing.assert_close(dropped.mean(0)[:, -1], plain[:, -1], atol=0.35, rtol=0)


@pytest.mark.usefixtures("our_checks_only")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (2, 5, 3, 8), "v": (2, 5, 3, 8)}, "4 query heads cannot share 3"),
        ({"k": (2, 5, 2, 4)}, "do not fit"),
        ({"v": (2, 4, 2, 8)}, "do not fit"),
        ({"k": (1, 5, 2, 8), "v": (1, 5, 2, 8)}, "do not fit"),
        ({"q": (2, 6, 4, 8)}, r"\(2, 5\), but the tensors have \(2, 6\)"),
    ],
)
def test_sizes_that_do_not_fit_name_both_values(change, message):
    """L06."""
    shapes = {"q": (2, 5, 4, 8), "k": (2, 5, 2, 8), "v": (2, 5, 2, 8)} | change
    tokens = Coordinates.range(5, 2)
    with pytest.raises(ShapeError, match=message):
        attend(*(torch.zeros(shape) for shape in shapes.values()), rule=causal(), q_coords=tokens, k_coords=tokens)


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
@pytest.mark.parametrize(
    ("shape", "given"),
    [
        ("bias", (3, 1, 4, 4)),  # more rows than there are
        ("bias", (1, 3, 4, 4)),
        ("bias", (1, 1, 2, 4)),
        ("bias", (1, 1, 4, 5)),
        ("sink_logits", (1,)),
        ("sink_logits", (3,)),
    ],
)
def test_nothing_that_is_spread_makes_rows_heads_or_tokens(backend, shape, given, our_checks_only):
    tokens = Coordinates.range(4)
    q, k, v = qkv(tokens, tokens)
    with pytest.raises(ShapeError, match=rf"shape {re.escape(str(given))}, but"):
        attend(
            q,
            k,
            v,
            rule=causal(),
            q_coords=tokens,
            k_coords=tokens,
            options=AttentionOptions(backend=backend),
            **{shape: torch.zeros(given)},
        )


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
def test_a_given_mask_for_more_queries_than_there_are(backend):
    query, keys = Coordinates(torch.tensor([[3]]), torch.tensor([[1]])), Coordinates.range(4)
    q, k, v = qkv(query, keys)
    rule = from_visible(torch.ones(4, 4, dtype=torch.bool).tril())
    with pytest.raises((ShapeError, UnsupportedError), match=r"need \(1, 1, 4\); cut the mask|varlen cannot cut"):
        attend(q, k, v, rule=rule, q_coords=query, k_coords=keys, options=AttentionOptions(backend=backend))


@pytest.mark.parametrize("backend", ["sdpa", "varlen"])
@pytest.mark.parametrize(("softcap", "sink_logits"), [(2.0, None), (None, torch.zeros(4))])
def test_a_refusal_names_the_backend_asked_and_one_that_can(backend, softcap, sink_logits):
    tokens = Coordinates.range(4)
    q, k, v = qkv(tokens, tokens)
    settings = {"rule": causal(), "q_coords": tokens, "k_coords": tokens, "sink_logits": sink_logits}
    with pytest.raises(UnsupportedError, match=rf"^{backend} has no .*; use backend='reference' or 'auto'$"):
        attend(q, k, v, options=AttentionOptions(softcap=softcap, backend=backend), **settings)
    attend(q, k, v, options=AttentionOptions(softcap=softcap, backend="reference"), **settings)


def test_unknown_backend_is_named():
    tokens = Coordinates.range(2)
    q = torch.zeros(1, 2, 1, 1)
    with pytest.raises(UnsupportedError, match="no attention backend 'flash'; choose one of auto, reference"):
        attend(q, q, q, rule=causal(), q_coords=tokens, k_coords=tokens, options=AttentionOptions(backend="flash"))


def test_wide_windows_and_late_positions_are_not_mistaken_for_plain_causal():
    rule = causal() & (window(2) | sinks(1)) & chunk(16)
    late = Coordinates(torch.arange(5, 12)[None], torch.ones(1, 7, dtype=torch.long))
    q, k, v = qkv(late, late)
    for backend in BACKENDS:
        got = attend(q, k, v, rule=rule, q_coords=late, k_coords=late, options=AttentionOptions(backend=backend))
        torch.testing.assert_close(got, brute_force(q, k, v, rule, late, late), atol=1e-10, rtol=0)
