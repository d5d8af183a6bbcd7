"""The attention of published models: transformers' layers from tiny configs, weights copied, outputs equal."""

import importlib

import pytest
import torch
from torch import nn

from helpers.layers import laid_out
from pellucid.nn import MLA, CrossAttention, EncoderOutput, GroupedQueryAttention, RMSNorm, Rotary
from pellucid.nn.positions import RelativeBias, YarnScaling
from pellucid.visibility import Coordinates, causal, full, window

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

D, T, S = 16, 7, 5


def theirs_of(model, name, config, kernel="sdpa", **words):
    """Their layer in float64 with random weights; their softmax is exact under sdpa, in float32 elsewhere."""
    config._attn_implementation = kernel
    module = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)
    layer = module(config=config, **words).double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.4) if parameter.ndim > 1 else parameter.uniform_(0.5, 1.5)
    return layer


def copied(ours, theirs, **renamed):
    """Their weights in ours, ``renamed`` by the first part of our name; nothing is left over on either side."""
    state = theirs.state_dict()
    said = {}
    for name in ours.state_dict():
        first, rest = name.split(".", 1) if "." in name else (name, "")
        said[name] = state.pop(".".join(filter(None, (renamed.get(first, first), rest))))
    assert not state
    ours = ours.double().eval()
    ours.load_state_dict(said)
    return ours


def hidden_as_infinity(rule, queries, keys):
    mask = rule.mask(queries, keys)
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, float("-inf"))


def stream(rows=2, slots=T, size=D):
    return torch.randn(rows, slots, size, dtype=torch.float64)


def agree(got, expected, atol=1e-10):
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(got, expected, atol=atol, rtol=0)


def angles(rotary, places):
    """What their layers are handed: cosines and sines of both halves."""
    angle = torch.cat([rotary.angles(places)] * 2, -1)
    multiplier = rotary.scaling.multiplier(places)
    return angle.cos() * multiplier, angle.sin() * multiplier


YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.8,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


def deepseek(model, rope, q_lora_rank, **words):
    config = getattr(transformers, f"Deepseek{model.removeprefix('deepseek_').upper()}Config")(
        hidden_size=D, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=q_lora_rank, kv_lora_rank=6,
        qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=7, rope_parameters=dict(rope), max_position_embeddings=64,
        attention_bias=True, **words,
    )  # fmt: skip
    name = "Deepseek" + model.removeprefix("deepseek_").upper()
    theirs = theirs_of(model, f"{name}Attention", config, layer_idx=0)
    table = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), f"{name}RotaryEmbedding")
    return theirs, table(config)


def latent(theirs, rope, q_lora_rank, interleaved, absorbed):
    scaling = None
    if rope is YARN:
        scaling = YarnScaling(4.0, 16, mscale=1.0, mscale_all_dim=0.8)
    ours = MLA(
        D, num_heads=4, q_lora_rank=q_lora_rank, kv_lora_rank=6, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=7, rule=causal(),
        rotary=Rotary(4, interleaved=interleaved, scaling=scaling), norm=RMSNorm, absorbed=absorbed,
        biases=("kv_a", "o") if q_lora_rank is None else ("q_a", "kv_a", "o"),
    )  # fmt: skip
    names = {"kv_a_proj": "kv_a_proj_with_mqa", "kv_a_norm": "kv_a_layernorm", "q_a_norm": "q_a_layernorm"}
    return copied(ours, theirs, **names)


@pytest.mark.parametrize("absorbed", [False, True])
@pytest.mark.parametrize("q_lora_rank", [8, None])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rope", [PLAIN, YARN], ids=["plain", "yarn"])
def test_deepseek_v3(rope, interleaved, q_lora_rank, absorbed):
    """With YaRN cosines carry m(1) / m(0.8) and the scale m(0.8) ** 2; positions up to 47 of 16 trained ones."""
    theirs, table = deepseek("deepseek_v3", rope, q_lora_rank, rope_interleave=interleaved)
    ours = latent(theirs, rope, q_lora_rank, interleaved, absorbed)
    x, places = stream(), Coordinates(torch.arange(0, 49, 8).expand(2, T), torch.ones(2, T, dtype=torch.long))
    expected, _ = theirs(x, table(x, places.positions), hidden_as_infinity(causal(), places, places))
    agree(ours(x, places, places), expected, atol=1e-5)  # their angles and norms are made in float32
    theirs.kv_a_layernorm = ours.kv_a_norm
    theirs.q_a_layernorm = ours.q_a_norm if q_lora_rank else None
    exact, _ = theirs(x, angles(ours.rotary, places), hidden_as_infinity(causal(), places, places))
    agree(ours(x, places, places), exact)


@pytest.mark.parametrize("q_lora_rank", [8, None])
@pytest.mark.parametrize("rope", [PLAIN, YARN], ids=["plain", "yarn"])
def test_deepseek_v2(rope, q_lora_rank):
    theirs, table = deepseek("deepseek_v2", rope, q_lora_rank)
    ours = latent(theirs, rope, q_lora_rank, "interleaved", absorbed=True)
    x, places = stream(), laid_out((T, T - 2), (0, 2), T)
    mask = hidden_as_infinity(causal(), places, places)
    mask[1, :, :2] = 0.0  # a row that sees nothing has no meaning there
    expected, _ = theirs(x, mask, position_embeddings=table(x, places.positions))
    agree(ours(x, places, places)[places.real], expected[places.real], atol=1e-5)


def source():
    return stream(2, S), laid_out((S, S - 2), (0, 0), S)


def test_t5_attends_to_its_encoder():
    """No biases, and no scale."""
    config = transformers.T5Config(d_model=D, d_kv=6, num_heads=4, is_decoder=True, dropout_rate=0.0)
    theirs = theirs_of("t5", "T5Attention", config, layer_idx=0)
    ours = CrossAttention(D, num_heads=4, num_kv_heads=4, head_dim=6, scale=1.0)
    ours = copied(ours, theirs, q_proj="q", k_proj="k", v_proj="v", o_proj="o")
    x, places, (states, memory) = stream() * 0.3, Coordinates.range(T, 2), source()
    mask = hidden_as_infinity(full(), places, memory)
    expected = theirs(x, mask, key_value_states=states)[0]
    agree(ours(x, places, EncoderOutput(states, memory)), expected)


@pytest.mark.parametrize("decoder", [True, False])
def test_t5_attends_to_itself(decoder):
    """A bias of relative buckets, one way or two ways, in the first layer."""
    config = transformers.T5Config(
        d_model=D, d_kv=6, num_heads=4, is_decoder=decoder, dropout_rate=0.0, relative_attention_num_buckets=8,
        relative_attention_max_distance=6,
    )  # fmt: skip
    theirs = theirs_of("t5", "T5Attention", config, has_relative_attention_bias=True, layer_idx=0)
    bias = RelativeBias(4, bidirectional=not decoder, num_buckets=8, max_distance=6).double()
    table = theirs.relative_attention_bias
    bias.weight = table.weight
    mask = hidden_as_infinity(causal() if decoder else full(), Coordinates.range(T, 2), Coordinates.range(T, 2))
    x, places = stream() * 0.3, Coordinates.range(T, 2)
    expected = theirs(x, mask)[0]
    del theirs.relative_attention_bias
    rule = causal() if decoder else full()
    ours = GroupedQueryAttention(D, num_heads=4, num_kv_heads=4, head_dim=6, rule=rule, scale=1.0)
    ours = copied(ours, theirs, q_proj="q", k_proj="k", v_proj="v", o_proj="o")
    agree(ours(x, places, places, bias=bias(places, places)), expected)


def test_bart_attends_to_its_encoder():
    """A bias everywhere."""
    config = transformers.BartConfig(d_model=D)
    theirs = theirs_of("bart", "BartAttention", config, embed_dim=D, num_heads=4, layer_idx=0)
    ours = CrossAttention(D, num_heads=4, num_kv_heads=4, head_dim=4, biases=("q", "k", "v", "o"))
    ours = copied(ours, theirs, o_proj="out_proj")
    x, places, (states, memory) = stream(), Coordinates.range(T, 2), source()
    mask = hidden_as_infinity(full(), places, memory)
    expected = theirs(x, key_value_states=states, attention_mask=mask)[0]
    agree(ours(x, places, EncoderOutput(states, memory)), expected)


@pytest.mark.parametrize("local", [False, True])
def test_gpt_oss(local):
    """Biases, sinks, and a window in every other layer."""
    config = transformers.GptOssConfig(
        hidden_size=D, num_attention_heads=4, num_key_value_heads=2, head_dim=6, num_hidden_layers=2,
        sliding_window=3, rope_parameters=dict(PLAIN), attention_bias=True,
    )  # fmt: skip
    theirs = theirs_of("gpt_oss", "GptOssAttention", config, layer_idx=0 if local else 1, kernel="eager")
    rule = causal() & window(3) if local else causal()
    ours = GroupedQueryAttention(
        D,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        rule=rule,
        rotary=Rotary(6),
        biases=("q", "k", "v", "o"),
        attention_sinks=True,
    )
    ours = copied(ours, theirs)
    x, places = stream(), Coordinates.range(T, 2)
    rotated = tuple(half.chunk(2, -1)[0] for half in angles(ours.rotary, places))
    expected, _ = theirs(x, rotated, hidden_as_infinity(rule, places, places))
    agree(ours(x, places, places), expected)


def test_olmo2():
    """Norms of whole projections, before rotary."""
    config = transformers.Olmo2Config(
        hidden_size=D, num_attention_heads=4, num_key_value_heads=2, head_dim=6, rms_norm_eps=1e-6
    )
    theirs = theirs_of("olmo2", "Olmo2Attention", config, layer_idx=0)
    size = theirs.head_dim
    ours = GroupedQueryAttention(
        D, num_heads=4, num_kv_heads=2, head_dim=size, rule=causal(), rotary=Rotary(size), q_norm=RMSNorm(4 * size),
        k_norm=RMSNorm(2 * size), norm_over="projection",
    )  # fmt: skip
    ours = copied(ours, theirs)
    x, places = stream(), Coordinates.range(T, 2)
    expected, _ = theirs(x, angles(ours.rotary, places), hidden_as_infinity(causal(), places, places))
    agree(ours(x, places, places), expected, atol=1e-6)  # their norm works in float32


def test_olmo_clips():
    config = transformers.OlmoConfig(hidden_size=D, num_attention_heads=4, num_key_value_heads=2, clip_qkv=0.4)
    theirs = theirs_of("olmo", "OlmoAttention", config, layer_idx=0)
    ours = GroupedQueryAttention(
        D, num_heads=4, num_kv_heads=2, head_dim=4, rule=causal(), rotary=Rotary(4), clip_qkv=0.4
    )
    ours = copied(ours, theirs)
    x, places = stream() * 3, Coordinates.range(T, 2)
    expected, _ = theirs(x, angles(ours.rotary, places), hidden_as_infinity(causal(), places, places))
    agree(ours(x, places, places), expected)


def test_gemma2_bends_its_scores():
    config = transformers.Gemma2Config(
        hidden_size=D, num_attention_heads=4, num_key_value_heads=2, head_dim=6, query_pre_attn_scalar=9,
        attn_logit_softcapping=0.7, num_hidden_layers=2,
    )  # fmt: skip
    theirs = theirs_of("gemma2", "Gemma2Attention", config, layer_idx=1, kernel="eager")
    ours = GroupedQueryAttention(
        D, num_heads=4, num_kv_heads=2, head_dim=6, rule=causal(), rotary=Rotary(6), softcap=0.7, scale=9**-0.5
    )
    ours = copied(ours, theirs)
    x, places = stream(), Coordinates.range(T, 2)
    expected, _ = theirs(x, angles(ours.rotary, places), hidden_as_infinity(causal(), places, places))
    agree(ours(x, places, places), expected, atol=1e-6)  # their softmax works in float32


@pytest.mark.parametrize("norms", ["after", "before"])
def test_hunyuan_turns_before_its_norms(norms):
    config = transformers.HunYuanDenseV1Config(
        hidden_size=D, num_attention_heads=4, num_key_value_heads=2, head_dim=6, rms_norm_eps=1e-6
    )
    theirs = theirs_of("hunyuan_v1_dense", "HunYuanDenseV1Attention", config, layer_idx=0)
    ours = GroupedQueryAttention(
        D, num_heads=4, num_kv_heads=2, head_dim=6, rule=causal(), rotary=Rotary(6), q_norm=RMSNorm(6), k_norm=RMSNorm(6),
        norm_after_rotary=norms == "after",
    )  # fmt: skip
    ours = copied(ours, theirs, q_norm="query_layernorm", k_norm="key_layernorm")
    x, places = stream(), Coordinates.range(T, 2)
    expected, _ = theirs(x, angles(ours.rotary, places), hidden_as_infinity(causal(), places, places))
    difference = (ours(x, places, places) - expected).abs().max()
    assert (difference < 1e-6) if norms == "after" else (difference > 1e-2)


def _from_torch(part, source):
    """torch's fused projection in ours."""
    q, k, v = source.in_proj_weight.chunk(3)
    state = {"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v}
    state |= {f"{p}_proj.bias": bias for p, bias in zip("qkv", source.in_proj_bias.chunk(3), strict=True)}
    state |= {"o_proj.weight": source.out_proj.weight, "o_proj.bias": source.out_proj.bias}
    part = part.double().eval()
    part.load_state_dict(state)
    return part


def test_torch_multihead_attention():
    """Self- and cross-attention; torch's masks say what is hidden."""
    theirs = nn.MultiheadAttention(D, 4, batch_first=True, dtype=torch.float64).eval()
    nn.init.normal_(theirs.in_proj_bias)
    nn.init.normal_(theirs.out_proj.bias)
    words = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 4, "biases": ("q", "k", "v", "o")}
    x, places, (states, memory) = stream(), Coordinates.range(T, 2), source()
    ours = _from_torch(GroupedQueryAttention(D, rule=causal(), **words), theirs)
    expected, weights = theirs(x, x, x, attn_mask=~causal().mask(places, places)[0, 0], average_attn_weights=False)
    agree(ours(x, places, places), expected)
    agree(ours.weights(x, places), weights)
    ours = _from_torch(CrossAttention(D, **words), theirs)
    expected, weights = theirs(x, states, states, key_padding_mask=~memory.real, average_attn_weights=False)
    agree(ours(x, places, EncoderOutput(states, memory)), expected)
    agree(ours.weights(x, places, EncoderOutput(states, memory)), weights)
