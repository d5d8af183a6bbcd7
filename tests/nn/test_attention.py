"""Grouped attention with each of its options: the formula written out, head by head, and what must never matter."""

import pytest
import torch
from torch import nn

from helpers.layers import (
    CHUNKS,
    assert_chunks_agree,
    assert_unread_slots_never_matter,
    in_chunks,
    laid_out,
    new_cache,
    run,
    with_options,
)
from pellucid.errors import InputError, ShapeError, UnsupportedError
from pellucid.nn import GroupedQueryAttention, PreNormBlock, RMSNorm, Rotary
from pellucid.nn.attend import AttentionOptions
from pellucid.nn.attention import LayerContext
from pellucid.nn.norms import BareRMSNorm, HeadLayerNorm, LayerNorm
from pellucid.nn.positions import Alibi, LongRopeScaling, RelativeBias
from pellucid.visibility import Coordinates, causal, full, sinks, window

D, N, K, H = 12, 4, 2, 6
BACKENDS = ["reference", "sdpa", "varlen"]

OPTIONS = {
    "plain": lambda: {},
    "biases": lambda: {"q_bias": True, "k_bias": True, "v_bias": True, "o_bias": True},
    "norms of heads": lambda: {"q_norm": RMSNorm(H), "k_norm": RMSNorm(H), "rotary": Rotary(H)},
    "norms of projections": lambda: {
        "q_norm": RMSNorm(N * H), "k_norm": RMSNorm(K * H), "norm_over": "projection", "rotary": Rotary(H),
    },
    "norms with weights a head": lambda: {"q_norm": HeadLayerNorm(N, H), "k_norm": HeadLayerNorm(K, H)},
    "norms after rotary": lambda: {
        "q_norm": RMSNorm(H), "k_norm": LayerNorm(H), "norm_after_rotary": True, "rotary": Rotary(H),
    },
    "norms of projections after rotary": lambda: {
        "q_norm": RMSNorm(N * H), "k_norm": RMSNorm(K * H), "norm_over": "projection", "norm_after_rotary": True,
        "rotary": Rotary(H),
    },
    "norm of keys alone": lambda: {"k_norm": BareRMSNorm(), "rotary": Rotary(H, interleaved=True)},
    "clip_qkv": lambda: {"clip_qkv": 0.3, "rotary": Rotary(H)},
    "softcap": lambda: {"softcap": 0.5},
    "attention_sinks": lambda: {"attention_sinks": True},
    "scale": lambda: {"scale": 1.0},
    "all": lambda: {
        "q_bias": True, "o_bias": True, "q_norm": RMSNorm(H), "k_norm": RMSNorm(H), "rotary": Rotary(H,
        rotary_dim=4), "clip_qkv": 0.5,
        "softcap": 2.0, "attention_sinks": True, "scale": 0.7,
    },
}  # fmt: skip


def make(name="plain", *, num_heads=N, num_kv_heads=K, rule=None, **changes):
    torch.manual_seed(1)
    words = {"rule": causal(), **OPTIONS[name](), **changes}
    words["rule"] = words["rule"] if rule is None else rule
    part = (
        GroupedQueryAttention(D, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=H, **with_options(words))
        .double()
        .eval()
    )
    with torch.no_grad():
        for parameter in part.parameters():
            if parameter.ndim == 1 or parameter.shape == (N, H):
                parameter.uniform_(0.5, 1.5)
    return part


def layer(attention):
    """A block that is its attention and nothing else."""

    class Nothing(nn.Module):
        def forward(self, x):
            return torch.zeros_like(x)

    return PreNormBlock(
        attention=attention, ffn=Nothing(), attn_norm=nn.Identity(), ffn_norm=nn.Identity(), dropout=0.0
    )


def written_out(part, x_BTD, places):
    """One row, one head, one query at a time."""
    q, k, v = (p(x_BTD) for p in (part.q_proj, part.k_proj, part.v_proj))
    if part.clip_qkv:
        q, k, v = (y.clamp(-part.clip_qkv, part.clip_qkv) for y in (q, k, v))

    def normed(norm, y):
        heads = y.shape[-1] // H
        return norm(y) if part.norm_over == "projection" else norm(y.unflatten(-1, (heads, H))).flatten(-2)

    def turned(y):
        return y if part.rotary is None else part.rotary(y.unflatten(-1, (-1, H)), places).flatten(-2)

    if part.norm_after_rotary:
        q, k = normed(part.q_norm, turned(q)), normed(part.k_norm, turned(k))
    else:
        q, k = turned(normed(part.q_norm, q)), turned(normed(part.k_norm, k))
    scale = H**-0.5 if part.options.scale is None else part.options.scale
    out = torch.zeros(*x_BTD.shape[:2], N * H, dtype=torch.float64)
    for row in range(len(x_BTD)):
        for head in range(N):
            own = slice(head * H, (head + 1) * H)
            shared = slice([0, 0, 1, 1][head] * H, ([0, 0, 1, 1][head] + 1) * H)
            for t in range(x_BTD.shape[1]):
                seen = k[row, : t + 1, shared]
                scores = scale * seen @ q[row, t, own]
                if part.options.softcap:
                    scores = part.options.softcap * (scores / part.options.softcap).tanh()
                if part.sinks is not None:
                    scores = torch.cat([scores, part.sinks[head : head + 1]])
                weights = scores.softmax(0)[: t + 1]
                out[row, t, own] = weights @ v[row, : t + 1, shared]
    return part.o_proj(out)


def stream(rows=2, slots=5):
    return torch.randn(rows, slots, D, dtype=torch.float64)


@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_is_its_formula(option):
    """Four query heads over two key/value heads read them as [0, 0, 1, 1]."""
    part, x, places = make(option), stream(), Coordinates.range(5, 2)
    expected = written_out(part, x, places)
    torch.testing.assert_close(part(x, LayerContext.of(places)), expected, atol=1e-10, rtol=0)


def test_no_option_does_nothing():
    x, places = stream(), Coordinates.range(5, 2)
    outs = [make(option)(x, LayerContext.of(places)) for option in OPTIONS]
    for i, a in enumerate(outs):
        for b in outs[:i]:
            assert (a - b).abs().max() > 1e-3


@pytest.mark.parametrize("named", [(), ("q",), ("k", "v"), ("o",), ("q", "k", "v", "o")])
def test_a_bias_for_each_projection_that_is_named(named):
    state = make(**{f"{name}_bias": True for name in named}).state_dict()
    expected = {f"{p}_proj.weight" for p in "qkvo"} | {f"{p}_proj.bias" for p in named}
    assert set(state) == expected


def test_names_in_the_state_dict():
    state = make("all").state_dict()
    assert {"q_norm.weight", "k_norm.weight", "sinks"} <= set(state)
    assert state["sinks"].shape == (N,)
    fresh = GroupedQueryAttention(D, num_heads=N, num_kv_heads=K, head_dim=H, rule=causal(), attention_sinks=True)
    assert fresh.sinks.tolist() == [0.0] * N
    assert fresh.cache_shapes == ((K, H), (K, H))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_chunks_through_a_cache_equal_one_pass(option, chunks):
    """P-CACHE, the second row left-padded."""
    whole = laid_out((9, 7), (0, 2), 9)
    assert_chunks_agree([layer(make(option)), layer(make(option))], stream(2, 9), whole, chunks)


@pytest.mark.parametrize("rule", [causal() & window(3), causal() & (window(2) | sinks(1))], ids=str)
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_windows_through_a_cache(rule, chunks):
    part = make("norms of heads", rule=rule)
    assert_chunks_agree([layer(part)], stream(2, 9), laid_out((9, 7), (0, 2), 9), chunks)


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@pytest.mark.parametrize("kind", ["relative", "alibi"])
def test_a_bias_stays_through_a_cache(kind, chunks):
    """B58: with a table of large random numbers."""
    bias = (
        RelativeBias(N, bidirectional=False, num_buckets=8, max_distance=6).double() if kind == "relative" else Alibi(N)
    )
    if kind == "relative":
        nn.init.normal_(bias.weight, std=5.0)
    whole, x = laid_out((9, 7), (0, 2), 9), stream(2, 9)
    same_group = [layer(make()), layer(make("softcap"))]
    assert_chunks_agree(same_group, x, whole, chunks, bias=bias)
    plain, biased = run(same_group, x, whole), run(same_group, x, whole, bias=bias)
    assert (plain - biased).abs().max() > 1e-2


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("starts", [(0, 0, 0), (2, 0, 4), (1, 0, 2)], ids=["right", "left", "both"])
def test_padding_and_batch_mates_move_nothing(option, starts):
    """P-PAD, P-BATCH, B65: rows of 3, 5 and 1 tokens with positions of their own."""
    same_group, lengths = [layer(make(option)), layer(make(option))], (3, 5, 1)
    rows = [stream(1, length) for length in lengths]
    together = laid_out(lengths, starts, 6)
    x = torch.full((3, 6, D), 1e4, dtype=torch.float64)
    for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
        x[i, start : start + lengths[i]] = row[0]
    got = run(same_group, x, together)
    x[~together.real] = float("nan")
    assert torch.equal(run(same_group, x, together)[together.real], got[together.real])
    for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
        alone = run(same_group, row, Coordinates.range(lengths[i]))
        torch.testing.assert_close(got[i, start : start + lengths[i]], alone[0], atol=1e-10, rtol=0)


@pytest.mark.parametrize("option", OPTIONS)
def test_later_tokens_never_matter(option):
    """P-CAUSAL, for other numbers and for NaN, cached or not."""
    part, x, places = make(option), stream(1, 6), Coordinates.range(6)
    same_group = [layer(part)]
    plain, cached = run(same_group, x, places), in_chunks(same_group, x, places, [2, 4])
    for j in range(1, 6):
        for other in (1e4, float("nan")):
            y = x.clone()
            y[0, j] = other
            assert torch.equal(run(same_group, y, places)[0, :j], plain[0, :j])
            assert torch.equal(in_chunks(same_group, y, places, [2, 4])[0, :j], cached[0, :j])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_is_the_token_and_those_just_before_it(backend):
    """B07, B11: w = 3 sees 1, 2, 3, 3, 3, 3 keys; moving token i-3 moves nothing at i, moving i-2 does."""
    part = make(rule=causal() & window(3), backend=backend)
    x, places = stream(1, 6), Coordinates.range(6)
    seen = (part.weights(x, LayerContext.of(places)) > 0).sum(-1)
    assert seen[0].tolist() == [[1, 2, 3, 3, 3, 3]] * N
    out = part(x, LayerContext.of(places))
    torch.testing.assert_close(out, make(rule=causal() & window(3), backend="reference")(x, LayerContext.of(places)))
    for back, moves in ((3, False), (2, True)):
        y = x.clone()
        y[0, 5 - back] += 1
        assert torch.equal(part(y, LayerContext.of(places))[0, 5], out[0, 5]) is not moves


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("option", ["softcap", "attention_sinks"])
def test_what_a_backend_cannot_do_it_refuses(option, backend):
    """B119, P-SWEEP: the same numbers or an error, never a third answer."""
    x, places = stream(), Coordinates.range(5, 2)
    expected = make(option)(x, LayerContext.of(places))
    part = make(option, backend=backend)
    if backend == "reference":
        assert torch.equal(part(x, LayerContext.of(places)), expected)
    else:
        with pytest.raises(UnsupportedError, match=f"{backend} has no .*; use backend='reference'"):
            part(x, LayerContext.of(places))


def test_a_softcap_bends_scores():
    """B119: scores [0, 100] under a cap of 50 become [0, 50·tanh 2 = 48.201]."""
    part = GroupedQueryAttention(
        2, num_heads=1, num_kv_heads=1, head_dim=1, rule=full(), options=AttentionOptions(scale=1.0, softcap=50.0)
    ).double()
    with torch.no_grad():
        part.q_proj.weight.copy_(torch.tensor([[1.0, 0.0]]))
        part.k_proj.weight.copy_(torch.tensor([[0.0, 1.0]]))
    x = torch.tensor([[[1.0, 0.0], [1.0, 100.0]]]).double()
    weights = part.weights(x, LayerContext.of(Coordinates.range(2)))[0, 0, 0]
    assert (weights[1].log() - weights[0].log()).item() == pytest.approx(48.2013790, abs=1e-6)


def test_sinks_take_weight_and_give_no_value():
    """A head of weight w on its keys leaves 1 - w to its sink; a sink of -inf takes nothing; a large one all."""
    part, x, places = make("attention_sinks"), stream(), Coordinates.range(5, 2)
    weights = part.weights(x, LayerContext.of(places))
    own = make().weights(x, LayerContext.of(places))
    sums = weights.sum(-1)
    assert (sums < 1).all()
    torch.testing.assert_close(weights / sums[..., None], own, atol=1e-10, rtol=0)
    with torch.no_grad():
        part.sinks.fill_(-float("inf"))
    torch.testing.assert_close(part(x, LayerContext.of(places)), make()(x, LayerContext.of(places)), atol=1e-10, rtol=0)
    with torch.no_grad():
        part.sinks.fill_(1e3)
    assert (part(x, LayerContext.of(places)) == 0).all()


@pytest.mark.parametrize("option", ["plain", "softcap", "attention_sinks", "clip_qkv", "norms of heads"])
def test_a_row_that_sees_nothing_gives_zero_and_moves_nothing(option):
    """B23: a row of padding among three, two layers deep: exactly 0, gradients finite and 0 at what it holds."""
    same_group = [layer(make(option)), layer(make(option))]
    x = stream(3, 4)
    x[1] = float("nan")
    x.requires_grad_()
    places = laid_out((4, 0, 2), (0, 0, 1), 4)
    out = run(same_group, x, places)
    assert (out[1] == 0).all()
    out.square().sum().backward()
    assert (x.grad[1] == 0).all()
    assert x.grad[0].abs().sum() > 0
    for block in same_group:
        for name, parameter in block.named_parameters():
            assert torch.isfinite(parameter.grad).all(), name
            assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_queries_than_keys(backend):
    """B02: five queries over the keys of the last two: rows 0 to 2 are 0, row 3 is v[0], row 4 a mix."""
    part = make(backend=backend)
    x = stream(1, 5).requires_grad_()
    cache = new_cache([layer(part)], 1, 5)
    late, places = Coordinates(torch.tensor([[3, 4]]), torch.ones(1, 2, dtype=torch.long)), Coordinates.range(5)

    class OnlyLast:
        def append(self, k, v):
            return (k[:, 3:], v[:, 3:]), None

    out = part(x, LayerContext(places, late, cache=OnlyLast()))
    assert (out[0, :3] == 0).all()
    first, both = part.v_proj(x[0, 3]), part.v_proj(x[0, 4])
    as_heads = lambda v: part.o_proj(v.unflatten(-1, (K, H)).repeat_interleave(2, 0).flatten())  # noqa: E731
    torch.testing.assert_close(out[0, 3], as_heads(first))
    assert (out[0, 4] - as_heads(first)).abs().max() > 1e-3
    assert (out[0, 4] - as_heads(both)).abs().max() > 1e-3
    out.sum().backward()
    assert torch.isfinite(x.grad).all()
    assert cache.length == 0


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_what_unused_and_padded_slots_hold_never_matters(option, bad):
    """B20, B25: outputs and gradients as if it were 0, for finite numbers bit for bit."""
    same_group = [layer(make(option)), layer(make(option))]
    assert_unread_slots_never_matter(same_group, stream(2, 9), bad, atol=0 if bad == 1e30 else 1e-12)


def test_scores_do_not_overflow_in_float16():
    """B118: q = k = 40 in 64 features is 102400 before scaling, past what float16 holds."""
    part = GroupedQueryAttention(1, num_heads=1, num_kv_heads=1, head_dim=64, rule=causal())
    with torch.no_grad():
        for projection in (part.q_proj, part.k_proj):
            projection.weight.fill_(40.0)
        part.v_proj.weight.fill_(0.5)
        part.o_proj.weight.fill_(1 / 64)
    places, x = Coordinates.range(3), torch.ones(1, 3, 1)
    for backend in BACKENDS:
        part.options = AttentionOptions(backend=backend)
        out = part.float()(x, LayerContext.of(places))
        assert part.half()(x.half(), LayerContext.of(places)).float().sub(out).abs().max() < 1e-3


def test_weights_are_those_of_the_forward_pass():
    for option in OPTIONS:
        part, x = make(option), stream(2, 5)
        places = laid_out((5, 3), (0, 2), 5)
        bias = torch.randn(1, N, 5, 5, dtype=torch.float64)
        weights = part.weights(x, LayerContext.of(places, bias=bias))
        assert (weights[~causal().mask(places, places).expand_as(weights)] == 0).all()
        v = part._project(part.v_proj, x).repeat_interleave(N // K, 2)
        out = part.o_proj(torch.einsum("bnts,bsnh->btnh", weights, v).flatten(-2))
        torch.testing.assert_close(out, part(x, LayerContext.of(places, bias=bias)), atol=1e-10, rtol=0)


def test_dropout_is_for_training_alone():
    """B113."""
    part, x, places = make(dropout=0.9), stream(), Coordinates.range(5, 2)
    assert torch.equal(part(x, LayerContext.of(places)), make()(x, LayerContext.of(places)))
    part.train()
    assert not torch.equal(part(x, LayerContext.of(places)), part(x, LayerContext.of(places)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"norm_over": "heads"}, "norm_over is 'heads'; choose head or projection"),
        ({"clip_qkv": 0.0}, "clip_qkv is 0.0, but must be above 0; leave it out for none"),
        ({"clip_qkv": float("nan")}, "clip_qkv is nan, but must be above 0"),
    ],
)
def test_what_there_is_not_is_refused(words, message):
    with pytest.raises(InputError, match=message):
        make(**words)


@pytest.mark.usefixtures("our_checks_only")
def test_sizes_that_do_not_fit_are_named():
    places = Coordinates.range(3)
    with pytest.raises(ShapeError, match="4 query heads cannot share 3"):
        GroupedQueryAttention(D, num_heads=4, num_kv_heads=3, head_dim=H, rule=causal())(
            torch.zeros(1, 3, D), LayerContext.of(places)
        )
    with pytest.raises(ShapeError, match=r"softcap is -1\.0"):
        make(softcap=-1.0)(stream(1, 3), LayerContext.of(places))


def test_a_rotary_that_goes_by_length_refuses_to_go_on():
    rotary = Rotary(4, scaling=LongRopeScaling([1.0, 1.5], [2.0, 4.0], original_max_position_embeddings=8, factor=2.0))
    part = GroupedQueryAttention(D, num_heads=2, num_kv_heads=2, head_dim=4, rule=causal(), rotary=rotary).double()
    same_group = [layer(part)]
    cache = new_cache(same_group, 1, 16, changes_angles=rotary.scaling.changes_angles)
    x = stream(1, 9)
    run(same_group, x[:, :8], Coordinates.range(8), cache)
    with pytest.raises(UnsupportedError, match="a document of 8 tokens, which are rotated by other angles than in one"):
        run(same_group, x[:, 8:], Coordinates.range(1), cache)
    assert cache.sequence_lengths == [8]
