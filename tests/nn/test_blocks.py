"""Blocks by placement: formulas written out, zero branches, multipliers, a wider stream, routing, first weights."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pellucid.errors import ShapeError
from pellucid.nn import MLA, CrossAttention, EncoderOutput, GroupedQueryAttention, Rotary
from pellucid.nn import init as first
from pellucid.nn.attention import LayerContext
from pellucid.nn.block import (
    DeepNormBlock,
    ParallelBlock,
    ParallelTwoNormBlock,
    PostNormBlock,
    PreNormBlock,
    SandwichBlock,
)
from pellucid.nn.ffn import GatedFFN
from pellucid.nn.moe import GatedExperts, MoE, SigmoidRouter, SoftmaxRouter
from pellucid.nn.norms import LayerNorm, RMSNorm
from pellucid.visibility import Coordinates, causal

D = 8
TOKENS = Coordinates.range(4, 2)
BLOCKS = [PreNormBlock, PostNormBlock, DeepNormBlock, SandwichBlock, ParallelBlock, ParallelTwoNormBlock]
NORMS = {ParallelBlock: ["norm"], SandwichBlock: ["attn_norm", "attn_post_norm", "ffn_norm", "ffn_post_norm"]}


def make(kind, norm=RMSNorm, ffn=None, attention=None, **words):
    torch.manual_seed(1)
    if kind is DeepNormBlock:
        words = {"alpha": 1.5, **words}
    norms = {name: norm(D) for name in NORMS.get(kind, ["attn_norm", "ffn_norm"])}
    attention = attention or GroupedQueryAttention(D, num_heads=2, num_kv_heads=1, head_dim=4, rule=causal())
    ffn = ffn or GatedFFN(D, 12, activation="silu", bias=False, dropout=0.0)
    block = kind(attention=attention, ffn=ffn, **norms, **{"dropout": 0.0, **words})
    with torch.no_grad():
        for part in block.modules():
            if isinstance(part, RMSNorm | LayerNorm):
                part.weight.uniform_(0.5, 1.5)
    return block.eval()


def stream():
    return torch.randn(2, 4, D, dtype=torch.float64)


def written_out(block, x, m=1.0):
    """Each placement as its paper has it."""
    b = block
    attend = lambda h: b.attention(h, LayerContext.of(TOKENS))  # noqa: E731
    match b:
        case PreNormBlock():
            x = x + m * attend(b.attn_norm(x))
            return x + m * b.ffn(b.ffn_norm(x))
        case PostNormBlock():
            x = b.attn_norm(x + m * attend(x))
            return b.ffn_norm(x + m * b.ffn(x))
        case DeepNormBlock():
            x = b.attn_norm(1.5 * x + m * attend(x))
            return b.ffn_norm(1.5 * x + m * b.ffn(x))
        case SandwichBlock():
            x = x + m * b.attn_post_norm(attend(b.attn_norm(x)))
            return x + m * b.ffn_post_norm(b.ffn(b.ffn_norm(x)))
        case ParallelBlock():
            return x + m * attend(b.norm(x)) + m * b.ffn(b.norm(x))
        case ParallelTwoNormBlock():
            return x + m * attend(b.attn_norm(x)) + m * b.ffn(b.ffn_norm(x))


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("multiplier", [1.0, 0.22])
def test_blocks_are_their_formulas(kind, multiplier):
    block = make(kind, residual_multiplier=multiplier).double()
    x = stream()
    torch.testing.assert_close(block(x, LayerContext.of(TOKENS)), written_out(block, x, multiplier), rtol=0, atol=1e-12)


def test_no_placement_is_another():
    x, outs = stream(), []
    for kind in BLOCKS:
        outs.append(make(kind, norm=RMSNorm).double()(x, LayerContext.of(TOKENS)))
    for i, a in enumerate(outs):
        for b in outs[:i]:
            assert (a - b).abs().max() > 1e-3


@pytest.mark.parametrize("norm", [RMSNorm, LayerNorm])
@pytest.mark.parametrize("kind", BLOCKS)
def test_branch_ends_of_zero_show_where_the_norms_sit(kind, norm):
    """B107: identity for all that add to an untouched stream; the norms alone for the others."""
    block = make(kind, norm=norm).double()
    with torch.no_grad():
        block.attention.o_proj.weight.zero_()
        block.ffn.down_proj.weight.zero_()
    x = stream()
    out = block(x, LayerContext.of(TOKENS))
    if kind in (PostNormBlock, DeepNormBlock):
        alpha = getattr(block, "alpha", 1.0)
        torch.testing.assert_close(out, block.ffn_norm(alpha * block.attn_norm(alpha * x)))
    else:
        assert torch.equal(out, x)


def test_norms_of_branches_alone():
    """OLMo 2: nothing on the way in, a norm on the way out."""
    block = make(SandwichBlock).double()
    block.attn_norm, block.ffn_norm = nn.Identity(), nn.Identity()
    x = stream()
    half = x + block.attn_post_norm(block.attention(x, LayerContext.of(TOKENS)))
    torch.testing.assert_close(block(x, LayerContext.of(TOKENS)), half + block.ffn_post_norm(block.ffn(half)))


def test_which_stacks_need_a_final_norm():
    assert [kind.needs_final_norm for kind in BLOCKS] == [True, False, False, True, True, True]


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_float32_stream_in_a_bfloat16_model(kind):
    """The stream is float32 from the first block on, and a change too small for bfloat16 gets through."""
    block = make(kind, norm=LayerNorm, residual_dtype=torch.float32)
    narrow = copy.deepcopy(block).bfloat16()
    assert narrow.attention.q_proj.weight.dtype == torch.bfloat16
    x = stream().bfloat16()
    out = narrow(x, LayerContext.of(TOKENS))
    assert out.dtype == torch.float32
    exact = copy.deepcopy(narrow).double()
    exact.to_stream = nn.Identity()
    assert (out.double() - exact(x.double(), LayerContext.of(TOKENS))).abs().max() < 0.05
    assert narrow(out, LayerContext.of(TOKENS)).dtype == torch.float32
    assert make(kind).bfloat16()(x, LayerContext.of(TOKENS)).dtype == torch.bfloat16


def test_a_float32_stream_keeps_what_bfloat16_rounds_away():
    """256 + 0.5 is 256 in bfloat16, so 64 halves never arrive; in float32 they are 32."""

    class Half(nn.Linear):
        def forward(self, x, *_):
            assert x.dtype == self.weight.dtype
            return torch.full_like(x, 0.5)

    def after(residual_dtype):
        words = {
            "attn_norm": nn.Identity(),
            "ffn_norm": nn.Identity(),
            "dropout": 0.0,
            "residual_dtype": residual_dtype,
        }
        block = PreNormBlock(attention=Half(D, D), ffn=Half(D, D), **words).bfloat16()
        x = torch.full((1, 1, D), 256.0).bfloat16()
        for _ in range(32):
            x = block(x, LayerContext.of(TOKENS))
        return x[0, 0, 0].item()

    assert after(None) == 256
    assert after(torch.float32) == 288


@pytest.mark.parametrize("kind", BLOCKS)
def test_what_is_not_used_is_not_there(kind):
    block = make(kind)
    assert isinstance(block.to_stream, nn.Identity)
    assert isinstance(block.to_branch, nn.Identity)
    assert isinstance(block.residual_dropout, nn.Dropout)
    wide = make(kind, residual_dtype=torch.float32, residual_multiplier=0.5)
    assert list(block.state_dict()) == list(wide.state_dict())


@pytest.mark.parametrize("kind", BLOCKS)
def test_dropout_on_branches_changes_training_alone(kind):
    block, plain = make(kind, dropout=0.5).double(), make(kind).double()
    x = stream()
    assert torch.equal(block(x, LayerContext.of(TOKENS)), plain(x, LayerContext.of(TOKENS)))
    block.train()
    assert not torch.equal(block(x, LayerContext.of(TOKENS)), plain(x, LayerContext.of(TOKENS)))


def routed(kind):
    torch.manual_seed(2)
    router = SoftmaxRouter(D, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True)
    return make(kind, ffn=MoE(router=router, experts=GatedExperts(D, 12, num_experts=4))).double()


PADDED = Coordinates(torch.tensor([[0, 1, 2, 3], [0, 1, 0, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]))


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_tell_their_experts_what_is_padding(kind):
    block, x, router_stats = routed(kind), stream(), []
    out = block(x, LayerContext.of(PADDED, router_stats=router_stats))
    assert router_stats[0].count.item() == 6
    assert router_stats[0].tokens.sum().item() == 12
    assert torch.equal(block(x, LayerContext.of(PADDED)), out)
    plain = []
    make(kind).double()(x, LayerContext.of(PADDED, router_stats=plain))
    assert plain == []


@pytest.mark.parametrize("kind", BLOCKS)
def test_the_balance_loss_comes_through_checkpointing(kind):
    def gradients(run):
        block, router_stats = routed(kind), []
        x = torch.ones(2, 4, D, dtype=torch.float64).cumsum(-1).cumsum(1).sin().requires_grad_()
        out = run(block, x, LayerContext.of(PADDED, router_stats=router_stats))
        loss = router_stats[0].loss()
        (out.sum() + 3 * loss.total / loss.count).backward()
        return [x.grad, *(p.grad for p in block.parameters())], router_stats[0]

    plain, sums = gradients(lambda block, *args, **words: block(*args, **words))
    again, sums_again = gradients(lambda block, *args, **words: checkpoint(block, *args, use_reentrant=False, **words))
    for a, b in zip(plain, again, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert torch.equal(sums.tokens, sums_again.tokens)


def test_a_foreign_feed_forward_part_takes_the_stream_alone():
    block = make(PreNormBlock, ffn=nn.Linear(D, D)).double()
    assert block(stream(), LayerContext.of(TOKENS)).shape == (2, 4, D)


# First weights


def wide(kind, **words):
    """A block wide enough for a standard deviation to be measured."""
    router = SigmoidRouter(64, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, bias=True)
    norms = {name: RMSNorm(64) for name in NORMS.get(kind, ["attn_norm", "ffn_norm"])}
    return kind(
        attention=GroupedQueryAttention(
            64, num_heads=4, num_kv_heads=4, head_dim=16, rule=causal(), q_bias=True, k_bias=True, v_bias=True
        ),
        ffn=MoE(router=router, experts=GatedExperts(64, 96, num_experts=4, bias=True)),
        dropout=0.0,
        **norms,
        **words,
    )


def seeded():
    return torch.Generator().manual_seed(5)


def assert_std(std, *weights, rel=0.06):
    for weight in weights:
        assert weight.std().item() == pytest.approx(std, rel=rel)


def parts(block):
    a, f = block.attention, block.ffn
    return a.q_proj.weight, a.v_proj.weight, a.o_proj.weight, f.experts.up_proj, f.experts.down_proj, f.router.weight


def test_pre_norm_makes_branch_ends_smaller_stacked_ones_too():
    block = wide(PreNormBlock)
    first.init_pre_norm(block, num_layers=8, std=None, residual_init="scaled", generator=seeded())
    q, _, o, up, down, router = parts(block)
    assert_std(64**-0.5, q, up)
    assert_std(64**-0.5, router, rel=0.15)
    assert_std(64**-0.5 / 4, o)
    assert_std(96**-0.5 / 4, down)
    for name, parameter in block.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
    first.init_pre_norm(block, num_layers=8, std=0.02, residual_init="zero", generator=seeded())
    assert (block.ffn.experts.down_proj == 0).all()
    assert_std(0.02, block.ffn.experts.gate_proj)
    x, places = torch.randn(1, 3, 64), Coordinates.range(3)
    assert torch.equal(block(x, LayerContext.of(places)), x)


def test_sandwich_scales_no_branch_end():
    block = wide(SandwichBlock)
    first.init_sandwich(block, std=None, generator=seeded())
    q, _, o, _, down, _ = parts(block)
    assert_std(64**-0.5, q, o)
    assert_std(96**-0.5, down)


def test_post_norm_takes_xaviers_scale_for_each_expert():
    block = wide(PostNormBlock)
    first.init_post_norm(block, generator=seeded())
    _, _, o, up, _, _ = parts(block)
    assert o.abs().max().item() == pytest.approx(math.sqrt(6 / 128), rel=0.02)
    assert up.abs().max().item() == pytest.approx(math.sqrt(6 / 160), rel=0.02)


def test_dense_post_norm_is_torchs_xavier_bit_for_bit():
    ours, theirs = nn.Linear(8, 12), nn.Linear(8, 12)
    first.init_post_norm(ours, generator=seeded())
    nn.init.xavier_uniform_(theirs.weight, generator=seeded())
    assert torch.equal(ours.weight, theirs.weight)


def test_deep_norm_scales_the_way_of_the_values():
    block = wide(DeepNormBlock, alpha=2.0)
    first.init_deep_norm(block, beta=0.5, generator=seeded())
    q, v, o, up, down, router = parts(block)
    assert_std(math.sqrt(2 / 128), q, block.attention.k_proj.weight)
    assert_std(0.5 * math.sqrt(2 / 128), v, o)
    assert_std(0.5 * math.sqrt(2 / 160), up, down)
    assert_std(math.sqrt(2 / 68), router, rel=0.15)


def crossed(kind, **words):
    """A wide block that reads a memory, with latent attention to itself and sinks nowhere but there."""
    norms = {name: RMSNorm(64) for name in ("attn_norm", "ffn_norm", "cross_norm")}
    latent = MLA(
        64, num_heads=4, q_lora_rank=32, kv_lora_rank=48, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24,
        rule=causal(), rotary=Rotary(8),
        norm=RMSNorm, q_a_bias=True, kv_a_bias=True, o_bias=True,
    )  # fmt: skip
    cross = CrossAttention(
        64,
        encoder_hidden_size=96,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        q_bias=True,
        k_bias=True,
        v_bias=True,
        o_bias=True,
    )
    ffn = GatedFFN(64, 96, activation="silu", bias=True, dropout=0.0)
    block = kind(attention=latent, cross_attention=cross, ffn=ffn, dropout=0.0, **norms, **words)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.fill_(float("nan"))
    first.init_norms(block)
    return block


def assert_all_are_drawn(block):
    for name, parameter in block.named_parameters():
        assert torch.isfinite(parameter).all(), name
        assert (parameter == 0).all() == name.endswith("bias"), name


def test_pre_norm_counts_the_branches_of_a_layer():
    """Six layers of three branches: every branch end, and no other matrix, is divided by the root of 18."""
    block = crossed(PreNormBlock)
    first.init_pre_norm(block, num_layers=6, branches=3, std=None, residual_init="scaled", generator=seeded())
    assert_all_are_drawn(block)
    own, cross = block.attention, block.cross_attention
    assert_std(96**-0.5 / 18**0.5, own.o_proj.weight, block.ffn.down_proj.weight)
    assert_std(64**-0.5 / 18**0.5, cross.o_proj.weight)
    assert_std(64**-0.5, own.q_a_proj.weight, own.kv_a_proj.weight, cross.q_proj.weight)
    assert_std(32**-0.5, own.q_b_proj.weight)
    assert_std(48**-0.5, own.kv_b_proj.weight)
    assert_std(96**-0.5, cross.k_proj.weight, cross.v_proj.weight)
    first.init_pre_norm(block, num_layers=6, branches=3, std=None, residual_init="zero", generator=seeded())
    x, places = torch.randn(1, 3, 64), Coordinates.range(3)
    assert torch.equal(
        block(x, LayerContext.of(places, encoder_output=EncoderOutput(torch.randn(1, 3, 96), places))), x
    )


def test_deep_norm_scales_the_values_of_latent_and_cross_attention():
    """Of the matrix that makes keys and values, the rows of values."""
    block = crossed(DeepNormBlock, alpha=2.0)
    first.init_deep_norm(block, beta=0.5, generator=seeded())
    assert_all_are_drawn(block)
    own, cross = block.attention, block.cross_attention
    keys, values = own.up()
    assert_std(math.sqrt(2 / (48 + 160)), keys)
    assert_std(0.5 * math.sqrt(2 / (48 + 160)), values)
    assert_std(math.sqrt(2 / (64 + 56)), own.kv_a_proj.weight)
    assert_std(0.5 * math.sqrt(2 / (64 + 96)), own.o_proj.weight, cross.v_proj.weight)
    assert_std(0.5 * math.sqrt(2 / 128), cross.o_proj.weight)
    assert_std(math.sqrt(2 / (64 + 96)), cross.k_proj.weight)


@pytest.mark.parametrize("kind", [PostNormBlock, PreNormBlock])
def test_sinks_start_at_zero_wherever_they_were(kind):
    attention = GroupedQueryAttention(64, num_heads=4, num_kv_heads=4, head_dim=16, rule=causal(), attention_sinks=True)
    attention.sinks.data.fill_(float("nan"))
    if kind is PostNormBlock:
        first.init_post_norm(attention, generator=seeded())
    else:
        first.init_pre_norm(attention, num_layers=2, std=0.02, residual_init="plain", generator=seeded())
    assert attention.sinks.tolist() == [0.0] * 4


def test_deep_norm_constants():
    """Wang et al. 2022, figure 2, for 18 layers and for 6 and 18."""
    assert first.deep_norm_constants(18) == pytest.approx((36**0.25, 144**-0.25))
    assert first.deep_norm_constants(18, part="decoder") == pytest.approx((54**0.25, 216**-0.25))
    encoder = first.deep_norm_constants(6, part="encoder", num_decoder_layers=18)
    assert encoder == pytest.approx((0.81 * (6**4 * 18) ** (1 / 16), 0.87 * (6**4 * 18) ** (-1 / 16)))
    with pytest.raises(ShapeError, match="part is 'encoder' and num_decoder_layers None; an encoder needs its"):
        first.deep_norm_constants(18, part="encoder")
    with pytest.raises(ShapeError, match="part is 'alone' and num_decoder_layers 6"):
        first.deep_norm_constants(18, num_decoder_layers=6)


def _deep(layers, alpha, beta):
    words = {"dropout": 0.0, "alpha": alpha}
    same_group = nn.ModuleList(
        DeepNormBlock(
            attention=GroupedQueryAttention(32, num_heads=2, num_kv_heads=2, head_dim=16, rule=causal()),
            ffn=GatedFFN(32, 64, activation="silu", bias=False, dropout=0.0),
            attn_norm=LayerNorm(32),
            ffn_norm=LayerNorm(32),
            **words,
        )
        for _ in range(layers)
    )
    first.init_deep_norm(same_group, beta=beta, generator=seeded())
    return same_group


def _moved(same_group):
    """How far one step of plain gradient descent moves the output."""

    def run():
        h = torch.randn(2, 6, 32, generator=seeded())
        for block in same_group:
            h = block(h, LayerContext.of(Coordinates.range(6, 2)))
        return h

    before = run()
    (before * torch.randn(before.shape, generator=seeded().manual_seed(6))).sum().backward()
    with torch.no_grad():
        for p in same_group.parameters():
            if p.ndim > 1:  # the paper's bound is about matrices, not about the norms' own weights
                p -= 1e-4 * p.grad
    return (run() - before).abs().mean().item()


def test_deep_norm_bounds_the_first_change_of_a_deep_stack():
    """Wang et al. 2022 §4: a first step moves 48 layers no more than 4. Without α and β it moves them far more."""
    shallow, deep = (_moved(_deep(n, *first.deep_norm_constants(n))) for n in (4, 48))
    assert deep < 1.5 * shallow
    shallow, deep = (_moved(_deep(n, 1.0, 1.0)) for n in (4, 48))
    assert deep > 8 * shallow


def test_a_seed_says_all_weights():
    one, same, other = wide(PreNormBlock), wide(PreNormBlock), wide(PreNormBlock)
    for block, seed in ((one, 5), (same, 5), (other, 6)):
        generator = torch.Generator().manual_seed(seed)
        state = torch.get_rng_state()
        first.init_pre_norm(block, num_layers=2, std=None, residual_init="scaled", generator=generator)
        assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.ffn.router.weight, other.ffn.router.weight)
