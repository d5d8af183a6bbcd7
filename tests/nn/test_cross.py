"""Cross-attention: a memory is seen whole by its own document and by nothing else, cached or not."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from helpers.layers import CHUNKS, assert_chunks_agree, in_chunks, laid_out, new_cache, packed, run, with_options
from pellucid.errors import InputError, ShapeError, UnsupportedError
from pellucid.nn import CrossAttention, EncoderOutput, GatedFFN, GroupedQueryAttention, RMSNorm
from pellucid.nn.attention import LayerContext
from pellucid.nn.backends import sdpa
from pellucid.nn.block import (
    DeepNormBlock,
    ParallelBlock,
    ParallelTwoNormBlock,
    PostNormBlock,
    PreNormBlock,
    SandwichBlock,
)
from pellucid.nn.cache import LayerCache
from pellucid.visibility import Coordinates, causal, window

D, M, N, K, H = 12, 10, 4, 2, 6
BACKENDS = ["reference", "sdpa", "varlen"]

OPTIONS = {
    "plain": lambda: {},
    "biases": lambda: {"q_bias": True, "k_bias": True, "v_bias": True, "o_bias": True},
    "norms of heads": lambda: {"q_norm": RMSNorm(H), "k_norm": RMSNorm(H)},
    "norms of projections": lambda: {"q_norm": RMSNorm(N * H), "k_norm": RMSNorm(K * H), "norm_over": "projection"},
    "clip_qkv": lambda: {"clip_qkv": 0.3},
    "softcap and scale": lambda: {"softcap": 0.5, "scale": 1.0},
}


def make(name="plain", **changes):
    torch.manual_seed(1)
    words = {"encoder_hidden_size": M, "num_heads": N, "num_kv_heads": K, "head_dim": H, **OPTIONS[name](), **changes}
    part = CrossAttention(D, **with_options(words)).double().eval()
    with torch.no_grad():
        for parameter in part.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return part


def block(kind=PreNormBlock, name="plain", rule=None, **changes):
    torch.manual_seed(2)
    own = GroupedQueryAttention(D, num_heads=2, num_kv_heads=1, head_dim=4, rule=causal() if rule is None else rule)
    names = ["attn_norm", "ffn_norm", "cross_norm"]
    if kind is SandwichBlock:
        names += ["attn_post_norm", "ffn_post_norm", "cross_post_norm"]
    words = {"alpha": 1.5} if kind is DeepNormBlock else {}
    ffn = GatedFFN(D, 8, activation="silu", bias=False, dropout=0.0)
    norms = {name: RMSNorm(D) for name in names}
    made = kind(attention=own, ffn=ffn, dropout=0.0, cross_attention=make(name, **changes), **norms, **words)
    with torch.no_grad():
        for part in made.modules():
            if isinstance(part, RMSNorm):
                part.weight.uniform_(0.5, 1.5)
    return made.double().eval()


def stream(rows=2, slots=2, size=D):
    return torch.randn(rows, slots, size, dtype=torch.float64)


def whole_memory(rows=2, slots=5):
    return EncoderOutput(stream(rows, slots, M), Coordinates.range(slots, rows))


def written_out(part, x, memory):
    q, k, v = part.q_proj(x), part.k_proj(memory), part.v_proj(memory)
    if part.clip_qkv:
        q, k, v = (y.clamp(-part.clip_qkv, part.clip_qkv) for y in (q, k, v))

    def normed(norm, y):
        return norm(y) if part.norm_over == "projection" else norm(y.unflatten(-1, (-1, H))).flatten(-2)

    q, k = normed(part.q_norm, q), normed(part.k_norm, k)
    outs = []
    for head, shared in enumerate([0, 0, 1, 1]):
        own, theirs = slice(head * H, (head + 1) * H), slice(shared * H, (shared + 1) * H)
        scores = q[..., own] @ k[..., theirs].mT * (H**-0.5 if part.options.scale is None else part.options.scale)
        if part.options.softcap:
            scores = part.options.softcap * (scores / part.options.softcap).tanh()
        outs.append(scores.softmax(-1) @ v[..., theirs])
    return part.o_proj(torch.cat(outs, -1))


@pytest.mark.parametrize("option", OPTIONS)
def test_it_is_its_formula(option):
    part, x, memory = make(option), stream(), whole_memory()
    got = part(x, LayerContext.of(Coordinates.range(2, 2), encoder_output=memory))
    torch.testing.assert_close(got, written_out(part, x, memory.hidden_states), atol=1e-10, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_query_sees_the_whole_memory(backend):
    """B14: two queries, five keys: changing the last key changes what query 0 gets, whatever the backend."""
    part, x, memory, places = make(backend=backend), stream(), whole_memory(), Coordinates.range(2, 2)
    out = part(x, LayerContext.of(places, encoder_output=memory))
    torch.testing.assert_close(
        out, make(backend="reference")(x, LayerContext.of(places, encoder_output=memory)), atol=1e-10, rtol=0
    )
    for slot in range(5):
        moved = memory.hidden_states.clone()
        moved[:, slot] += 1
        assert (
            (part(x, LayerContext.of(places, encoder_output=EncoderOutput(moved, memory.coordinates))) - out)
            .abs()
            .amax(-1)
            > 1e-6
        ).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_read_their_own_memory(backend):
    """P-PACK: document d of the queries and document d of the memory, as if they were alone."""
    part, x, states = make(backend=backend), stream(1, 6), stream(1, 8, M)
    queries, places = packed(2, 3, 1), packed(4, 1, 3)
    out = part(x, LayerContext.of(queries, encoder_output=EncoderOutput(states, places)))
    for own, theirs in (((0, 2), (0, 4)), ((2, 5), (4, 5)), ((5, 6), (5, 8))):
        memory = EncoderOutput(states[:, slice(*theirs)], Coordinates.range(theirs[1] - theirs[0]))
        alone = part(x[:, slice(*own)], LayerContext.of(Coordinates.range(own[1] - own[0]), encoder_output=memory))
        torch.testing.assert_close(out[:, slice(*own)], alone, atol=1e-10, rtol=0)
    for other in (1e4, float("nan")):
        moved = states.clone()
        moved[0, :4] = other
        again = part(x, LayerContext.of(queries, encoder_output=EncoderOutput(moved, places)))
        assert torch.equal(again[0, 2:], out[0, 2:])
        assert not torch.equal(again[0, :2], out[0, :2])


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e4])
def test_padding_of_the_memory_never_matters(option, bad):
    """P-PAD, B25: sources of 5 and 3 tokens; outputs as if alone, and gradients of everything."""
    part, x = make(option), stream()
    places, queries = laid_out((5, 3), (0, 2), 6), Coordinates.range(2, 2)
    states = stream(2, 6, M)

    def outcome(value):
        padded = torch.where(places.real[..., None], states, torch.full((), value).double()).requires_grad_()
        out = part(x, LayerContext.of(queries, encoder_output=EncoderOutput(padded, places)))
        return [out, *torch.autograd.grad(out.square().sum(), [padded, *part.parameters()])]

    expected = outcome(0.0)
    assert (expected[1][~places.real] == 0).all()
    for got, want in zip(outcome(bad), expected, strict=True):
        assert torch.equal(got, want)
    alone = part(
        x[1:],
        LayerContext.of(Coordinates.range(2), encoder_output=EncoderOutput(states[1:, 2:5], Coordinates.range(3))),
    )
    torch.testing.assert_close(expected[0][1:], alone, atol=1e-10, rtol=0)


@pytest.mark.parametrize("option", ["plain", "softcap and scale", "norms of heads"])
def test_an_empty_memory_gives_zero(option):
    """B23: a row without a source, and a query of a document that has none; gradients stay finite."""
    part, x = make(option), stream(2, 3)
    queries = Coordinates(torch.tensor([[0, 1, 2], [0, 1, 0]]), torch.tensor([[1, 1, 1], [1, 1, 2]]))
    states = stream(2, 4, M).requires_grad_()
    out = part(x, LayerContext.of(queries, encoder_output=EncoderOutput(states, laid_out((0, 3), (0, 1), 4))))
    assert (out[0] == 0).all()
    assert (out[1, 2] == 0).all()
    assert (out[1, :2] != 0).any()
    out.square().sum().backward()
    for parameter in part.parameters():
        assert torch.isfinite(parameter.grad).all()
    assert (states.grad[0] == 0).all()


# Through a cache


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_chunks_through_a_cache_equal_one_pass(option, chunks):
    """P-CACHE: targets of 9 and 7 tokens, left-padded, sources of 7 and 4, whose states are told once."""
    memory = EncoderOutput(stream(2, 7, M), laid_out((7, 4), (0, 1), 7))
    same_group = [block(name=option), block(PostNormBlock, option)]
    assert_chunks_agree(same_group, stream(2, 9), laid_out((9, 7), (0, 2), 9), chunks, memory)


def test_a_window_of_the_decoder_does_not_reach_the_memory():
    """B59: source 10, window 3: changing source 0 changes the output at step 5."""
    same_group = [block(rule=causal() & window(3))]
    x, memory = stream(1, 6), whole_memory(1, 10)
    moved = memory.hidden_states.clone()
    moved[0, 0] += 1
    outs = [
        in_chunks(same_group, x, Coordinates.range(6), [1] * 6, memory=EncoderOutput(states, memory.coordinates))
        for states in (memory.hidden_states, moved)
    ]
    assert (outs[0][0, 5] - outs[1][0, 5]).abs().max() > 1e-6


def alone(same_group, x, states, taken):
    """The last output of ``x[:, taken]`` with a memory, in one pass."""
    memory = EncoderOutput(states, Coordinates.range(states.shape[1]))
    return run(same_group, x[:, taken], Coordinates.range(len(taken)), memory=memory)[0, -1]


def test_reorder_takes_memories_along():
    """B55, B56: two sentences of two beams; both go on from beam 1, sentence 0 finishes, sentence 1 goes on with its
    own memory, in as many beams as there are then."""
    same_group = [block(), block()]
    x, sources = stream(1, 12), [stream(1, 5, M), stream(1, 3, M)]
    states = torch.zeros(4, 5, M, dtype=torch.float64)
    states[:2], states[2:, :3] = sources[0], sources[1]
    cache, memory = new_cache(same_group, 4, 9), EncoderOutput(states, laid_out((5, 5, 3, 3), (0, 0, 0, 0), 5))
    begun = [[0, 1], [2, 3], [4, 5], [6, 7]]
    run(same_group, torch.cat([x[:, b] for b in begun]), Coordinates.range(2, 4), cache, memory)

    def step(tokens):
        return run(same_group, torch.cat([x[:, [t]] for t in tokens]), Coordinates.range(1, len(tokens)), cache)[:, 0]

    cache.reorder(torch.tensor([1, 1, 3, 3]))
    rows = [[2, 3], [2, 3], [6, 7], [6, 7]]
    got = step([8, 9, 8, 9])
    for r, token in enumerate([8, 9, 8, 9]):
        expected = alone(same_group, x, sources[r // 2], [*rows[r], token])
        torch.testing.assert_close(got[r], expected, atol=1e-10, rtol=0)
    cache.reorder(torch.tensor([3, 2, 3]))
    assert (cache.rows, cache.encoder_coords.shape, cache.encoder_coords.layout.tokens) == (3, (3, 5), 9)
    got = step([10, 10, 11])
    for r, taken in enumerate([[6, 7, 9, 10], [6, 7, 8, 10], [6, 7, 9, 11]]):
        torch.testing.assert_close(got[r], alone(same_group, x, sources[1], taken), atol=1e-10, rtol=0)


def test_crop_and_snapshot_keep_the_memory():
    same_group, x, memory = [block()], stream(1, 5), whole_memory(1)
    cache = new_cache(same_group, 1, 9)
    run(same_group, x[:, :3], Coordinates.range(3), cache, memory)
    copy = cache.snapshot()
    for kept in cache.layers[0].cross:
        kept.fill_(7.0)
    run(same_group, x[:, 3:4], Coordinates.range(1), copy)
    for keep, taken in ((-2, [0, 1, 4]), (0, [4])):
        copy.crop(keep)
        again = run(same_group, x[:, 4:], Coordinates.range(1), copy)[0, -1]
        torch.testing.assert_close(again, alone(same_group, x, memory.hidden_states, taken), atol=1e-10, rtol=0)


def test_a_cache_without_its_encoder_output_is_refused():
    same_group, x, memory = [block(), block()], stream(), whole_memory()
    cache = new_cache(same_group, 2, 9)
    with pytest.raises(InputError, match="no cache has their keys and values; give EncoderOutput"):
        make()(
            x,
            LayerContext.of(
                Coordinates.range(2, 2), encoder_output=EncoderOutput(None, memory.coordinates), cache=cache.layers[0]
            ),
        )
    with pytest.raises(InputError, match="no cache has their keys and values; give EncoderOutput"):
        make()(x, LayerContext.of(Coordinates.range(2, 2), encoder_output=EncoderOutput(None, memory.coordinates)))
    with pytest.raises(ShapeError, match="the encoder output has 3 rows, the cache 2"):
        cache.set_encoder_output(Coordinates.range(5, 3))
    run(same_group, x, Coordinates.range(2, 2), cache, memory)
    with pytest.raises(UnsupportedError, match="holds 2 slots, whose tokens have read another encoder output"):
        cache.set_encoder_output(memory.coordinates)
    cache.crop(0)
    cache.set_encoder_output(memory.coordinates)
    with pytest.raises(InputError, match="no cache has their keys and values"):  # not those of the memory before
        run(same_group, x, Coordinates.range(2, 2), cache)


def test_a_pass_that_failed_leaves_nothing_of_its_memory():
    """The first layer had projected another source when the second failed."""
    same_group, x, memory = [block(), block()], stream(), whole_memory()
    cache = new_cache(same_group, 2, 9)
    hook = same_group[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("midway")))
    with pytest.raises(RuntimeError, match="midway"):
        run(same_group, x, Coordinates.range(2, 2), cache, whole_memory(2, 4))
    hook.remove()
    got = run(same_group, x, Coordinates.range(2, 2), cache, memory)
    torch.testing.assert_close(got, run(same_group, x, Coordinates.range(2, 2), memory=memory))


def test_states_that_are_given_count_whatever_a_cache_holds():
    part, x, places, kept = make(), stream(), Coordinates.range(2, 2), LayerCache((torch.zeros(2, 1),))
    part(x, LayerContext.of(places, encoder_output=whole_memory(), cache=kept))
    memory = whole_memory()
    expected = part(x, LayerContext.of(places, encoder_output=memory))
    assert torch.equal(part(x, LayerContext.of(places, encoder_output=memory, cache=kept)), expected)
    assert torch.equal(
        part(x, LayerContext.of(places, encoder_output=EncoderOutput(None, memory.coordinates), cache=kept)), expected
    )


def test_gradients_reach_the_memory_at_the_first_pass_and_stop_there():
    same_group, memory = [block()], whole_memory()
    memory.hidden_states.requires_grad_()
    cache = new_cache(same_group, 2, 9)
    run(same_group, stream(), Coordinates.range(2, 2), cache, memory).sum().backward()
    assert memory.hidden_states.grad.abs().sum() > 0
    memory.hidden_states.grad = None
    run(same_group, stream(), Coordinates.range(2, 2), cache).sum().backward()
    assert memory.hidden_states.grad is None


def test_states_of_a_wider_stream():
    """An encoder with a float32 stream hands its states to weights in bfloat16."""
    part = make().bfloat16()
    memory = EncoderOutput(stream(2, 5, M).float(), Coordinates.range(5, 2))
    assert (
        part(stream().bfloat16(), LayerContext.of(Coordinates.range(2, 2), encoder_output=memory)).dtype
        == torch.bfloat16
    )


def test_weights_are_those_of_the_forward_pass():
    for option in OPTIONS:
        part, x = make(option), stream()
        memory = EncoderOutput(stream(2, 5, M), laid_out((5, 3), (0, 1), 5))
        weights = part.weights(x, LayerContext.of(Coordinates.range(2, 2), encoder_output=memory))
        assert weights.shape == (2, N, 2, 5)
        assert (weights[1, :, :, [0, 4]] == 0).all()
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, N, 2).double())
        v = part._project(part.v_proj, memory.hidden_states).repeat_interleave(N // K, 2)
        out = part.o_proj(torch.einsum("bnts,bsnh->btnh", weights, v).flatten(-2))
        torch.testing.assert_close(
            out, part(x, LayerContext.of(Coordinates.range(2, 2), encoder_output=memory)), atol=1e-10, rtol=0
        )


def test_names_sizes_and_dropout():
    state = make("norms of heads").state_dict()
    assert set(state) == {*(f"{p}_proj.weight" for p in "qkvo"), "q_norm.weight", "k_norm.weight"}
    assert state["k_proj.weight"].shape == (K * H, M)
    assert make(encoder_hidden_size=None).k_proj.weight.shape == (K * H, D)
    part, x, memory, places = make(dropout=0.9), stream(), whole_memory(), Coordinates.range(2, 2)
    assert torch.equal(
        part(x, LayerContext.of(places, encoder_output=memory)),
        make()(x, LayerContext.of(places, encoder_output=memory)),
    )
    part.train()
    assert not torch.equal(
        part(x, LayerContext.of(places, encoder_output=memory)), part(x, LayerContext.of(places, encoder_output=memory))
    )


def test_what_does_not_fit_is_named():
    with pytest.raises(
        ShapeError, match=r"states are \(2, 5\), but their coordinates are \(2, 4\); give one coordinate a slot"
    ):
        EncoderOutput(stream(2, 5, M), Coordinates.range(4, 2))
    with pytest.raises(InputError, match="norm_over is 'all'"):
        make(norm_over="all")


# In blocks

CROSSED = [PreNormBlock, PostNormBlock, DeepNormBlock, SandwichBlock]


def block_written_out(b, x, places, memory):
    attend = lambda h: b.attention(h, LayerContext.of(places))  # noqa: E731
    read = lambda h: b.cross_attention(h, LayerContext.of(places, encoder_output=memory))  # noqa: E731
    match b:
        case PreNormBlock():
            x = x + attend(b.attn_norm(x))
            x = x + read(b.cross_norm(x))
            return x + b.ffn(b.ffn_norm(x))
        case PostNormBlock():
            x = b.attn_norm(x + attend(x))
            x = b.cross_norm(x + read(x))
            return b.ffn_norm(x + b.ffn(x))
        case DeepNormBlock():
            x = b.attn_norm(1.5 * x + attend(x))
            x = b.cross_norm(1.5 * x + read(x))
            return b.ffn_norm(1.5 * x + b.ffn(x))
        case SandwichBlock():
            x = x + b.attn_post_norm(attend(b.attn_norm(x)))
            x = x + b.cross_post_norm(read(b.cross_norm(x)))
            return x + b.ffn_post_norm(b.ffn(b.ffn_norm(x)))


@pytest.mark.parametrize("kind", CROSSED)
def test_blocks_read_between_their_halves(kind):
    made, x, memory, places = block(kind), stream(), whole_memory(), Coordinates.range(2, 2)
    expected = block_written_out(made, x, places, memory)
    torch.testing.assert_close(made(x, LayerContext.of(places, encoder_output=memory)), expected, atol=1e-12, rtol=0)
    names = [name.split(".")[0] for name in made.state_dict()]
    assert names.index("attention") < names.index("cross_norm") < names.index("cross_attention") < names.index("ffn")


@pytest.mark.parametrize("kind", CROSSED)
def test_dropout_and_multipliers_reach_the_branch_of_the_memory(kind):
    """Where the other branches give nothing."""
    made, x, memory, places = block(kind), stream(), whole_memory(), Coordinates.range(2, 2)
    with torch.no_grad():
        made.attention.o_proj.weight.zero_()
        made.ffn.down_proj.weight.zero_()
    plain = made(x, LayerContext.of(places, encoder_output=memory))
    made.residual_dropout = nn.Dropout(0.5)
    made.train()
    assert not torch.equal(made(x, LayerContext.of(places, encoder_output=memory)), plain)


@pytest.mark.parametrize("kind", CROSSED)
def test_a_memory_and_a_block_must_fit(kind):
    made, x, places = block(kind), stream(), Coordinates.range(2, 2)
    with pytest.raises(InputError, match="has cross-attention, but the context no encoder_output"):
        made(x, LayerContext.of(places))
    words = {name: getattr(made, name) for name in ("attention", "ffn", "attn_norm", "ffn_norm")}
    words |= {"alpha": 1.5} if kind is DeepNormBlock else {}
    if kind is SandwichBlock:
        words |= {"attn_post_norm": nn.Identity(), "ffn_post_norm": nn.Identity()}
    with pytest.raises(InputError, match="but this block no cross-attention"):
        kind(dropout=0.0, **words)(x, LayerContext.of(places, encoder_output=whole_memory()))
    with pytest.raises(InputError, match=r"got cross_attention, but no cross_norm.*; give all of them, or none"):
        kind(dropout=0.0, cross_attention=make(), **words)


@pytest.mark.parametrize("kind", [ParallelBlock, ParallelTwoNormBlock])
def test_parallel_blocks_have_no_place_for_a_memory(kind):
    made, places = block(), Coordinates.range(2, 2)
    norms = {"norm": RMSNorm(D)} if kind is ParallelBlock else {"attn_norm": RMSNorm(D), "ffn_norm": RMSNorm(D)}
    words = {"attention": made.attention, "ffn": made.ffn, "dropout": 0.0, **norms}
    with pytest.raises(UnsupportedError, match=f"{kind.__name__} got cross-attention, but its halves run side by side"):
        kind(cross_attention=make(), cross_norm=RMSNorm(D), **words)
    with pytest.raises(InputError, match="but this block no cross-attention"):
        kind(**words).double()(stream(), LayerContext.of(places, encoder_output=whole_memory()))


# How far it is to the kernel


def test_three_frames_of_ours_to_the_kernel(monkeypatch):
    """block, attention, attend and a backend; a model and its stack come before them."""
    depths = []

    def kernel(**arguments):
        own, frame = [], sys._getframe(1)
        while frame is not None:
            if "/pellucid/" in frame.f_code.co_filename.replace("\\", "/"):
                own.append(frame.f_code.co_name)
            frame = frame.f_back
        depths.append(own[::-1])
        return real(**arguments)

    real = sdpa.scaled_dot_product_attention
    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", kernel)
    made, places = block(), Coordinates.range(2, 2)
    made(stream(), LayerContext.of(places, encoder_output=whole_memory()))
    assert depths == [["forward", "forward", "attend", "attend"]] * 2


COMPILED = """
import torch
from pellucid.nn import *
from pellucid.visibility import Coordinates, causal

torch.manual_seed(0)
words = {"ffn": GatedFFN(12, 8, activation="silu", bias=False, dropout=0.0), "dropout": 0.0}
grouped = GroupedQueryAttention(
    12, num_heads=4, num_kv_heads=2, head_dim=6, rule=causal(), rotary=Rotary(6), attention_sinks=True,
    options=AttentionOptions(softcap=2.0), clip_qkv=0.5
)
latent = MLA(
    12, num_heads=2, q_lora_rank=4, kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=5,
    rule=causal(), rotary=Rotary(4),
    norm=RMSNorm,
)
places = Coordinates(torch.tensor([[0, 1, 2], [0, 0, 1]]), torch.tensor([[1, 1, 1], [0, 1, 1]]))
for kind, attention in ((PreNormBlock, grouped), (PostNormBlock, latent)):
    cross = CrossAttention(12, encoder_hidden_size=10, num_heads=4, num_kv_heads=2, head_dim=6)
    norms = {name: RMSNorm(12) for name in ("attn_norm", "ffn_norm", "cross_norm")}
    block = kind(attention=attention, cross_attention=cross, **norms, **words)
    step = lambda x, states: block(x, LayerContext.of(places, encoder_output=EncoderOutput(states, places)))
    x, states = torch.randn(2, 3, 12), torch.randn(2, 3, 10)
    expected = step(x, states)  # the places have been asked by now, and a lock around their answers is not traced
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, states), expected)
"""


@pytest.mark.slow
def test_blocks_are_compiled_whole():
    """In a process of its own, because the checks of shapes that tests run under cannot be traced."""
    run = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
