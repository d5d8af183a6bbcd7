"""Presets: what is known by name has the sizes that its paper and its checkpoints have."""

import math
from pathlib import Path

import pytest
import torch

from pellucid.errors import ConfigError
from pellucid.models import ModelConfig, build, presets
from pellucid.models.presets import preset
from pellucid.training.config import TrainConfig

TINY = ("tiny-decoder", "tiny-encoder", "tiny-encoder-decoder", "tiny-mla", "tiny-moe")


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def counted(name, *overrides):
    return parameters(build(preset(name, overrides), device="meta"))


def dense(d, f, bias=False):
    return 2 * d * f + (f + d) * bias


def gated(d, f):
    return 3 * d * f


def attention(d, heads, num_kv_heads, size, bias=False):
    projections = 2 * d * heads * size + 2 * d * num_kv_heads * size
    return projections + bias * (2 * heads * size + 2 * num_kv_heads * size if size * heads == d else 0)


def transformer_2017(v, d, f, layers):
    """Vaswani et al. 2017: one table for source, target and logits; two norms an encoder layer, three a decoder one."""
    half, ffn, norm = attention(d, 1, 1, d), dense(d, f, bias=True), 2 * d
    return v * d + layers * (half + ffn + 2 * norm) + layers * (2 * half + ffn + 3 * norm)


def bert(v, d, f, layers, positions):
    norm, half = 2 * d, attention(d, 1, 1, d, bias=True)
    embeddings = (v + positions + 2) * d + norm
    return embeddings + layers * (half + dense(d, f, bias=True) + 2 * norm) + (d * d + d + norm + v)


def gpt2(v, d, f, layers, positions):
    norm, half = 2 * d, attention(d, 1, 1, d, bias=True)
    return (v + positions) * d + layers * (half + dense(d, f, bias=True) + 2 * norm) + norm


def t5(v, d, f, layers, heads, size, buckets):
    half = attention(d, heads, heads, size)
    encoder = layers * (half + dense(d, f) + 2 * d) + d
    decoder = layers * (2 * half + dense(d, f) + 3 * d) + d
    return v * d + encoder + decoder + 2 * buckets * heads


def llama(v, d, layers, ffn, heads, num_kv_heads):
    return 2 * v * d + layers * (attention(d, heads, num_kv_heads, d // heads) + ffn + 2 * d) + d


def deepseek_v3():
    d, n, rank_q, rank_kv, nope, rope, value = 7168, 128, 1536, 512, 128, 64, 128
    queries = d * rank_q + rank_q + rank_q * n * (nope + rope)
    keys = d * (rank_kv + rope) + rank_kv + rank_kv * n * (nope + value)
    half = queries + keys + n * value * d + 2 * d
    routed = 256 * gated(d, 2048) + gated(d, 2048) + 256 * d
    return 2 * 129280 * d + 61 * half + 3 * gated(d, 18432) + 58 * routed + d


SIZES = {
    "transformer-base-2017": (transformer_2017(37000, 512, 2048, 6), 63.0e6),  # 65M in the paper, §5.1's 37,000 tokens
    "transformer-big-2017": (transformer_2017(37000, 1024, 4096, 6), 214.2e6),  # 213M in the paper
    "bert-base": (bert(30522, 768, 3072, 12, 512), 109.5e6),
    "gpt2": (gpt2(50257, 768, 3072, 12, 1024), 124.4e6),
    "t5-base": (t5(32128, 768, 3072, 12, 12, 64, 32), 222.9e6),
    "llama-3-8b": (llama(128256, 4096, 32, gated(4096, 14336), 32, 8), 8.03e9),
    "mixtral-8x7b": (llama(32000, 4096, 32, 8 * gated(4096, 14336) + 8 * 4096, 32, 8), 46.7e9),
    "deepseek-v3": (deepseek_v3(), 671e9),
}


def test_every_preset_is_listed_and_none_besides():
    assert presets.names() == tuple(sorted([*SIZES, *TINY]))


@pytest.mark.parametrize("name", SIZES)
def test_sizes_follow_from_the_formula(name):
    derived, known = SIZES[name]
    assert counted(name) == derived
    assert derived == pytest.approx(known, rel=2e-3)


@pytest.mark.parametrize("name", [name for name in SIZES if not name.endswith("2017")])
def test_sizes_are_those_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    theirs = {
        "bert-base": lambda: transformers.BertForMaskedLM(transformers.BertConfig()),
        "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config()),
        "t5-base": lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12)
        ),
        "llama-3-8b": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(vocab_size=128256, intermediate_size=14336, num_key_value_heads=8)
        ),
        "mixtral-8x7b": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig()),
        "deepseek-v3": lambda: transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config()),
    }
    with torch.device("meta"):
        model = theirs[name]()
    assert counted(name) == parameters(model)


@pytest.mark.parametrize("name", presets.names())
def test_presets_stand_alone_and_come_back_from_their_text(name):
    config = preset(name)
    assert ModelConfig.from_file(name) == config
    assert ModelConfig(**config.model_dump(mode="json")) == config


@pytest.mark.parametrize("name", TINY)
def test_small_ones_are_small(name):
    assert 500_000 < counted(name) < 2_000_000


def test_the_2017_model_is_three_way_tied_and_scaled():
    config = preset("transformer-base-2017", ["vocab_size=50", "num_hidden_layers=1"])
    model = build(config)
    assert model.embed_tokens.weight is model.encoder.embed_tokens.weight is model.lm_head.weight
    assert config.embedding_multiplier == config.encoder.embedding_multiplier == math.sqrt(512)
    assert config.norm_placement == config.encoder.norm_placement == "post"


def test_t5_scales_logits_and_not_scores():
    config = preset("t5-base")
    assert config.logit_multiplier == 768**-0.5
    assert config.attention.scale == config.cross_attention.scale == 1.0
    assert (config.position.bidirectional, config.encoder.position.bidirectional) == (False, True)
    small = preset("t5-base", ["vocab_size=50", "hidden_size=96", "num_hidden_layers=2"])
    assert len(build(small, device="meta").position_biases) == 1  # shared by all layers


def test_changes_are_laid_over():
    config = ModelConfig(preset="gpt2", vocab_size=500, ffn={"intermediate_size": 64}, dropout={"residual": 0.0})
    assert (config.vocab_size, config.ffn.intermediate_size, config.ffn.activation) == (500, 64, "gelu_tanh")
    assert (config.dropout.residual, config.dropout.embedding) == (0.0, 0.1)
    assert len(config.layers) == 12
    swapped = ModelConfig(preset="gpt2", position={"kind": "rope"}, ffn={"kind": "gated", "intermediate_size": 64})
    assert (swapped.position.rope_theta, swapped.ffn.bias) == (10000.0, False)  # another kind takes the whole place
    assert ModelConfig(preset="gpt2", layers=["causal & window(8)"]).layers == ("causal() & window(8)",)
    assert preset("llama-3-8b", ["position.scaling={kind: linear, factor: 4.0}"]).position.scaling.factor == 4.0


def test_a_run_takes_a_preset_and_overrides(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: {preset: gpt2, vocab_size: 500}\nbudget: {kind: steps, steps: 3}\n")
    config = TrainConfig.from_file(path, ["model.preset=tiny-moe", "model.ffn.num_experts=4"])
    assert (config.model.vocab_size, config.model.ffn.num_experts, config.model.hidden_size) == (500, 4, 128)
    assert "preset" not in config.model_dump(mode="json")["model"]


@pytest.mark.parametrize("wrong", ["gpt3", "", "../gpt2", "gpt2.yaml", 4, None, ["gpt2"]])
@pytest.mark.usefixtures("our_checks_only")
def test_other_names_are_refused(wrong):
    with pytest.raises(ConfigError, match="there is no preset") as caught:
        ModelConfig(preset=wrong)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="there is no preset"):
        preset(wrong)


def test_a_near_name_is_offered():
    with pytest.raises(ConfigError, match="did you mean 'mixtral-8x7b'"):
        preset("mixtral-8x7B")


def test_what_does_not_fit_a_preset_is_refused():
    with pytest.raises(ConfigError, match="hidden_size"):
        preset("gpt2", ["hiden_size=3"])
    with pytest.raises(ConfigError, match="make them agree"):
        preset("tiny-decoder", ["num_hidden_layers=40"])


def test_a_preset_that_lists_its_layers_can_be_made_shallower_and_narrower():
    assert preset("deepseek-v3", ["num_hidden_layers=4"]).layers == preset("deepseek-v3").layers[:4]
    assert preset("t5-base", ["hidden_size=96"]).logit_multiplier == 96**-0.5


def test_the_built_package_carries_them():
    """Package data goes by pattern; each preset must match it."""
    import tomllib

    root = Path(__file__).parents[2]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["pellucid"]
    package = root / "src" / "pellucid"
    carried = {path for pattern in patterns for path in package.glob(pattern)}
    assert {package / "models" / "presets" / f"{name}.yaml" for name in presets.names()} <= carried
    assert (package / "models" / "presets" / "__init__.py").is_file()
