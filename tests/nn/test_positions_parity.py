"""Positions against transformers: frequencies, turned vectors, tables and biases."""

import pytest
import torch

from pellucid.nn import attend
from pellucid.nn.positions import (
    Alibi,
    DynamicNTKScaling,
    LearnedPositions,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    PartialScaling,
    RelativeBias,
    Rotary,
    SinusoidalPositions,
    YarnScaling,
)
from pellucid.visibility import Coordinates, causal

transformers = pytest.importorskip("transformers")

HEAD = 32
SHORT = [1.0 + i / 16 for i in range(HEAD // 2)]
LONG = [1.0 + i for i in range(HEAD // 2)]
PHI_FACTOR = {"original_max_position_embeddings": 64, "short_factor": SHORT, "long_factor": LONG, "factor": 4.0}

KINDS = {
    "linear": ({"factor": 3.0}, LinearScaling(3.0)),
    "dynamic": ({"factor": 3.0}, DynamicNTKScaling(3.0, 256)),
    "llama3": (
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
        Llama3Scaling(8.0, 1.0, 4.0, 64),
    ),
    "yarn": ({"factor": 4.0, "original_max_position_embeddings": 64}, YarnScaling(4.0, 64)),
    "yarn deepseek": (
        {"factor": 40.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.707},
        YarnScaling(40.0, 64, mscale=1.0, mscale_all_dim=0.707),
    ),
    "yarn gpt-oss": (
        {
            "factor": 32.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": False,
        },
        YarnScaling(32.0, 512, beta_fast=16.0, beta_slow=2.0, truncate=False),
    ),
    "yarn by hand": (
        {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.75},
        YarnScaling(4.0, 64, attention_factor=1.75),
    ),
    "longrope": (PHI_FACTOR, LongRopeScaling(SHORT, LONG, 64, factor=4.0)),
    "longrope by hand": (
        PHI_FACTOR | {"attention_factor": 1.5},
        LongRopeScaling(SHORT, LONG, 64, attention_factor=1.5),
    ),
    "proportional": ({"partial_rotary_factor": 0.25}, PartialScaling(0.25)),
    "proportional stretched": ({"partial_rotary_factor": 0.3, "factor": 2.0}, PartialScaling(0.3, 2.0)),
}


def theirs(kind):
    """A llama of this rope kind; 256 positions."""
    return transformers.LlamaConfig(
        hidden_size=2 * HEAD,
        num_attention_heads=2,
        num_hidden_layers=1,
        head_dim=HEAD,
        max_position_embeddings=256,
        rope_parameters={"rope_type": kind.split()[0], "rope_theta": 50000.0, **KINDS[kind][0]},
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [5, 64, 65, 256, 257, 300])
def test_frequencies(kind, length):
    """They compute in float32, and so agree to a few of its last bits."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    expected, factor = ROPE_INIT_FUNCTIONS[kind.split()[0]](theirs(kind), "cpu", seq_len=length)
    scaling, row = KINDS[kind][1], Coordinates.range(length)
    found = scaling.frequencies(HEAD, 50000.0, row)
    found = found if found.dim() == 1 else found[0, -1]
    torch.testing.assert_close(found, expected.double(), rtol=3e-6, atol=0)
    assert scaling.multiplier(row) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [40, 300])
def test_turned_vectors(kind, length):
    """Queries turned by a whole document's angles, below and above every threshold."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    q, k = torch.randn(2, 1, length, 2, HEAD)
    row = Coordinates.range(length)
    cos, sin = LlamaRotaryEmbedding(theirs(kind))(q, row.positions)
    expected = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    rotary = Rotary(HEAD, rope_theta=50000.0, scaling=KINDS[kind][1])
    torch.testing.assert_close((rotary(q, row), rotary(k, row)), expected, atol=3e-4, rtol=0)


def test_score_multiplier_as_deepseek():
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

    words, ours = KINDS["yarn deepseek"]
    expected = yarn_apply_mscale({"rope_type": "yarn", **words}, 0.125)
    assert 0.125 * ours.score_multiplier == pytest.approx(expected, rel=1e-12)
    assert expected > 0.125


def test_partial_half_as_gpt_neox():
    from transformers.models.gpt_neox import modeling_gpt_neox as neox

    config = transformers.GPTNeoXConfig(hidden_size=64, num_attention_heads=2, rotary_pct=0.25)
    q = torch.randn(1, 9, 2, 32)
    row = Coordinates.range(9)
    cos, sin = neox.GPTNeoXRotaryEmbedding(config)(q, row.positions)
    expected, _ = neox.apply_rotary_pos_emb(q, q, cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(Rotary(32, rotary_dim=8)(q, row), expected, atol=1e-5, rtol=0)


def test_partial_interleaved_as_gptj():
    from transformers.models.gptj import modeling_gptj as gptj

    q = torch.randn(1, 9, 2, 32)
    sin, cos = gptj.create_sinusoidal_positions(9, 8)[None].chunk(2, -1)
    expected = torch.cat([gptj.apply_rotary_pos_emb(q[..., :8], sin, cos), q[..., 8:]], -1)
    rotary = Rotary(32, rotary_dim=8, interleaved=True)
    torch.testing.assert_close(rotary(q, Coordinates.range(9)), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [6, 7])
def test_sinusoids_as_marian_and_m2m100(size):
    from transformers.models.m2m_100 import modeling_m2m_100 as m2m100
    from transformers.models.marian import modeling_marian as marian

    row = Coordinates.range(50)
    half = SinusoidalPositions(size, layout="half").table(row)[0]
    torch.testing.assert_close(
        half.float(), marian.MarianSinusoidalPositionalEmbedding(50, size).create_weight(), atol=1e-6, rtol=0
    )
    closed = SinusoidalPositions(size, layout="tensor2tensor", offset=2).table(row)[0]
    expected = m2m100.M2M100SinusoidalPositionalEmbedding.get_embedding(52, size)[2:]
    torch.testing.assert_close(closed.float(), expected, atol=1e-5, rtol=0)


def test_learned_tables_as_bart_and_opt():
    from transformers.models.bart.modeling_bart import BartLearnedPositionalEmbedding as Bart
    from transformers.models.opt.modeling_opt import OPTLearnedPositionalEmbedding as Opt

    for kind in (Bart, Opt):
        table, ours = kind(12, 4), LearnedPositions(12, 4, offset=2)
        ours.load_state_dict(table.state_dict())
        mask = torch.ones(1, 12, dtype=torch.long)
        expected = table(mask) if kind is Bart else table(attention_mask=mask)
        found = ours(torch.zeros(1, 12, 4), Coordinates.range(12))
        assert torch.equal(found[0], expected.view(12, 4))


@pytest.mark.parametrize("causal_form", [True, False])
@pytest.mark.parametrize(("buckets", "most"), [(32, 128), (8, 20), (64, 256), (32, 40)])
def test_relative_bias_as_t5(causal_form, buckets, most):
    """Every distance up to three times the largest, both ways, and the bias of a chunk that goes on."""
    from transformers.models.t5.modeling_t5 import T5Attention

    config = transformers.T5Config(
        d_model=16,
        num_heads=4,
        d_kv=4,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=most,
        is_decoder=causal_form,
    )
    layer = T5Attention(config, has_relative_attention_bias=True)
    ours = RelativeBias(4, bidirectional=not causal_form, num_buckets=buckets, max_distance=most)
    ours.load_state_dict(layer.relative_attention_bias.state_dict())
    ahead = torch.arange(-3 * most, 3 * most + 1)
    keys = Coordinates((ahead + 3 * most)[None], torch.ones_like(ahead)[None])
    query = Coordinates(torch.tensor([[3 * most]]), torch.ones(1, 1, dtype=torch.long))
    expected = T5Attention._relative_position_bucket(ahead, not causal_form, buckets, most)
    assert torch.equal(ours.buckets(query, keys)[0, 0].long(), expected)
    whole = Coordinates.range(9)
    chunk = Coordinates(whole.positions[:, 5:], whole.segments[:, 5:])
    assert torch.equal(ours(whole, whole), layer.compute_bias(9, 9))
    assert torch.equal(ours(chunk, whole), layer.compute_bias(4, 9, past_seen_tokens=5))


def test_relative_bias_as_mpnet():
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    row = Coordinates.range(200)
    ahead = row.positions[:, None, :] - row.positions[:, :, None]
    expected = MPNetEncoder.relative_position_bucket(ahead, num_buckets=32)
    assert torch.equal(RelativeBias(2, bidirectional=True).buckets(row, row).long(), expected)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12, 20, 32])
def test_alibi_as_bloom_and_mpt(heads):
    """Their rows are ours up to one number a query, which a causal softmax does not see."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    real = torch.tensor([[0, 0, 1, 1, 1, 1]])
    padded = Coordinates((real.cumsum(1) - 1) * real, real)
    bloom = build_alibi_tensor(real, heads, torch.float32).view(1, heads, 1, 6)
    ours = Alibi(heads)(padded, padded)
    newest = bloom[..., -1:]
    torch.testing.assert_close(ours[:, :, -1:, 2:], (bloom - newest)[..., 2:], rtol=1e-5, atol=1e-6)
    mpt = build_mpt_alibi_tensor(heads, 6)
    row = Coordinates.range(6)
    torch.testing.assert_close(Alibi(heads)(row, row)[:, :, -1:], mpt[None], rtol=1e-5, atol=1e-6)
    q, k, v = torch.randn(3, 1, 6, heads, 4, dtype=torch.float64)
    one_row = mpt.double().expand(heads, 6, 6)[None]
    found, expected = (
        attend(q, k, v, rule=causal(), q_coords=row, k_coords=row, bias=bias)
        for bias in (Alibi(heads)(row, row), one_row)
    )
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_alibi_of_another_steepness_as_mpt():
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    row = Coordinates.range(6)
    for heads in (4, 6):
        expected = build_mpt_alibi_tensor(heads, 6, alibi_bias_max=4)
        torch.testing.assert_close(Alibi(heads, alibi_bias_max=4.0)(row, row)[:, :, -1:], expected[None])
