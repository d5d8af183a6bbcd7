"""Tiny random models of transformers, and ours of the same config with the same weights.

``FAMILIES`` says for each what both configs are and where each of our tensors comes from: a list of patterns of our
names with their names, in which the first match counts, or a function that cuts a fused tensor.
"""

import re
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers

from pellucid.models import Model, ModelConfig, build

VOCABULARY, SIZE, HEADS, INNER, WINDOW = 37, 32, 4, 24, 4
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": SIZE,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {"num_attention_heads": HEADS, "num_key_value_heads": 2}


@contextmanager
def exact():
    """While inside, what a model of transformers computes in float32 is computed in float64."""
    before = torch.float32, torch.float, torch.Tensor.float, torch.get_default_dtype()
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float, default = before
        torch.set_default_dtype(default)


@dataclass(frozen=True)
class Family:
    theirs: Callable[[], Any]
    ours: dict[str, Any]
    names: list[tuple[str, Any]]
    sides: tuple[str, ...] = ("right", "left")
    pairs: bool = False
    positions: bool = True
    """Whether theirs takes position ids (others count distances, or slots)."""
    prepare: Callable[[Any], None] = field(default=lambda model: None)


def pair_of_models(name: str) -> tuple[Any, Model]:
    """Theirs and ours in float64, every weight drawn anew, so that no norm is 1 and no bias 0."""
    family = FAMILIES[name]
    with exact():
        made = family.theirs()
        made.config._attn_implementation = made.config._experts_implementation = "eager"
        theirs = type(made)(made.config).double().eval()
    dice = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, tensor in [*theirs.named_parameters(), *theirs.named_buffers()]:
            drawn = torch.randn(tensor.shape, generator=dice, dtype=torch.float64)
            if tensor.ndim and ("inv_freq" not in key):
                tensor.copy_(drawn * 0.4 + (1.0 if "norm" in key.lower() and key.endswith("weight") else 0.0))
        family.prepare(theirs)
    ours = build(ModelConfig(**family.ours), dtype=torch.float64)
    copy_weights(family.names, theirs.state_dict(), ours)
    return theirs, ours


def copy_weights(names: list[tuple[str, Any]], state: dict[str, torch.Tensor], ours: Model) -> None:
    """Each of our tensors from one of theirs; all of theirs must have been used."""
    used: set[str] = set()

    def take(key: str) -> torch.Tensor:
        used.add(key)
        return state[key]

    for name, tensor in ours.state_dict().items():
        for pattern, where in names:
            if match := re.fullmatch(pattern, name):
                break
        else:
            raise AssertionError(f"no source for {name}")
        found = take(match.expand(where)) if isinstance(where, str) else where(take, match)
        assert found.shape == tensor.shape, (name, found.shape, tensor.shape)
        tensor.copy_(found)
    known = {state[key].data_ptr() for key in used}
    left = [key for key in state if key not in used and state[key].data_ptr() not in known]
    assert not left, f"never read: {left}"


def third(number: int, key: str, transposed: bool = False) -> Any:
    """One of three equal parts of a fused tensor."""

    def cut(take: Any, match: Any) -> torch.Tensor:
        tensor = take(match.expand(key))
        return (tensor.T if transposed and tensor.ndim == 2 else tensor).chunk(3)[number]

    return cut


def by_head(number: int, key: str) -> Any:
    """q, k or v of a tensor that holds them head by head."""
    return lambda take, match: take(match.expand(key)).unflatten(0, (HEADS, 3, -1))[:, number].flatten(0, 1)


def turned(key: str) -> Any:
    return lambda take, match: take(match.expand(key)).transpose(-1, -2)


def half(number: int, key: str) -> Any:
    """Gate (0) or up (1) of experts that hold both, one after the other."""
    return lambda take, match: take(match.expand(key)).chunk(2, 1)[number]


def each_second(number: int, key: str) -> Any:
    """Gate (0) or up (1) of experts that hold them in turns."""

    def cut(take: Any, match: Any) -> torch.Tensor:
        tensor = take(match.expand(key))[..., number::2]
        return tensor.transpose(1, 2) if tensor.ndim == 3 else tensor

    return cut


LAYER = r"layers\.(\d+)\."
LLAMA = [
    (r"embed_tokens\.weight", "model.embed_tokens.weight"),
    (r"norm\.weight", "model.norm.weight"),
    (r"lm_head\.weight", "lm_head.weight"),
    (LAYER + r"attn_norm\.weight", r"model.layers.\1.input_layernorm.weight"),
    (LAYER + r"ffn_norm\.weight", r"model.layers.\1.post_attention_layernorm.weight"),
    (LAYER + r"attention\.(.*)", r"model.layers.\1.self_attn.\2"),
    (LAYER + r"ffn\.(.*_proj\.weight)", r"model.layers.\1.mlp.\2"),
]
POST = [
    (LAYER + r"attn_post_norm\.weight", r"model.layers.\1.post_attention_layernorm.weight"),
    (LAYER + r"ffn_norm\.weight", r"model.layers.\1.pre_feedforward_layernorm.weight"),
    (LAYER + r"ffn_post_norm\.weight", r"model.layers.\1.post_feedforward_layernorm.weight"),
]
EXPERTS = [
    (LAYER + r"ffn\.router\.weight", r"model.layers.\1.mlp.gate.weight"),
    (LAYER + r"ffn\.experts\.gate_proj", half(0, r"model.layers.\1.mlp.experts.gate_up_proj")),
    (LAYER + r"ffn\.experts\.up_proj", half(1, r"model.layers.\1.mlp.experts.gate_up_proj")),
    (LAYER + r"ffn\.experts\.down_proj", r"model.layers.\1.mlp.experts.down_proj"),
]
DEEPSEEK = [
    (LAYER + r"ffn\.router\.choice_bias", r"model.layers.\1.mlp.gate.e_score_correction_bias"),
    (LAYER + r"ffn\.shared\.(.*)", r"model.layers.\1.mlp.shared_experts.\2"),
    (LAYER + r"attention\.kv_a_proj\.weight", r"model.layers.\1.self_attn.kv_a_proj_with_mqa.weight"),
    (LAYER + r"attention\.(.*)_a_norm\.weight", r"model.layers.\1.self_attn.\2_a_layernorm.weight"),
]
OSS = r"model.layers.\1.mlp.experts."
GPT_OSS = [
    (LAYER + r"ffn\.router\.(.*)", r"model.layers.\1.mlp.router.\2"),
    (LAYER + r"ffn\.experts\.gate_proj", each_second(0, OSS + "gate_up_proj")),
    (LAYER + r"ffn\.experts\.up_proj", each_second(1, OSS + "gate_up_proj")),
    (LAYER + r"ffn\.experts\.down_proj", turned(OSS + "down_proj")),
    (LAYER + r"ffn\.experts\.gate_bias", each_second(0, OSS + "gate_up_proj_bias")),
    (LAYER + r"ffn\.experts\.up_bias", each_second(1, OSS + "gate_up_proj_bias")),
    (LAYER + r"ffn\.experts\.down_bias", OSS + "down_proj_bias"),
]
BERT_LAYER = r"bert.encoder.layer.\1."
BERT = [
    (r"embed_tokens\.weight", "bert.embeddings.word_embeddings.weight"),
    (r"positions\.weight", "bert.embeddings.position_embeddings.weight"),
    (r"token_types\.weight", "bert.embeddings.token_type_embeddings.weight"),
    (r"embedding_norm\.(.*)", r"bert.embeddings.LayerNorm.\1"),
    (LAYER + r"attention\.q_proj\.(.*)", BERT_LAYER + r"attention.self.query.\2"),
    (LAYER + r"attention\.k_proj\.(.*)", BERT_LAYER + r"attention.self.key.\2"),
    (LAYER + r"attention\.v_proj\.(.*)", BERT_LAYER + r"attention.self.value.\2"),
    (LAYER + r"attention\.o_proj\.(.*)", BERT_LAYER + r"attention.output.dense.\2"),
    (LAYER + r"attn_norm\.(.*)", BERT_LAYER + r"attention.output.LayerNorm.\2"),
    (LAYER + r"ffn\.up_proj\.(.*)", BERT_LAYER + r"intermediate.dense.\2"),
    (LAYER + r"ffn\.down_proj\.(.*)", BERT_LAYER + r"output.dense.\2"),
    (LAYER + r"ffn_norm\.(.*)", BERT_LAYER + r"output.LayerNorm.\2"),
    (r"lm_head\.dense\.(.*)", r"cls.predictions.transform.dense.\1"),
    (r"lm_head\.norm\.(.*)", r"cls.predictions.transform.LayerNorm.\1"),
    (r"lm_head\.(.*)", r"cls.predictions.decoder.\1"),
]
GPT2_LAYER = r"transformer.h.\1."
GPT2 = [
    (r"embed_tokens\.weight", "transformer.wte.weight"),
    (r"positions\.weight", "transformer.wpe.weight"),
    (r"norm\.(.*)", r"transformer.ln_f.\1"),
    (r"lm_head\.weight", "lm_head.weight"),
    (LAYER + r"attn_norm\.(.*)", GPT2_LAYER + r"ln_1.\2"),
    (LAYER + r"ffn_norm\.(.*)", GPT2_LAYER + r"ln_2.\2"),
    *(
        (LAYER + rf"attention\.{name}_proj\.(.*)", third(i, GPT2_LAYER + r"attn.c_attn.\2", True))
        for i, name in enumerate("qkv")
    ),
    *(
        (LAYER + ours + r"\.weight", turned(GPT2_LAYER + theirs + ".weight"))
        for ours, theirs in (
            (r"attention\.o_proj", "attn.c_proj"),
            (r"ffn\.up_proj", "mlp.c_fc"),
            (r"ffn\.down_proj", "mlp.c_proj"),
        )
    ),
    (LAYER + r"attention\.o_proj\.bias", GPT2_LAYER + "attn.c_proj.bias"),
    (LAYER + r"ffn\.up_proj\.bias", GPT2_LAYER + "mlp.c_fc.bias"),
    (LAYER + r"ffn\.down_proj\.bias", GPT2_LAYER + "mlp.c_proj.bias"),
]
NEOX_LAYER = r"gpt_neox.layers.\1."
NEOX = [
    (r"embed_tokens\.weight", "gpt_neox.embed_in.weight"),
    (r"norm\.(.*)", r"gpt_neox.final_layer_norm.\1"),
    (r"lm_head\.weight", "lm_head.weight"),
    (LAYER + r"attn_norm\.(.*)", NEOX_LAYER + r"input_layernorm.\2"),
    (LAYER + r"ffn_norm\.(.*)", NEOX_LAYER + r"post_attention_layernorm.\2"),
    *(
        (LAYER + rf"attention\.{name}_proj\.(.*)", by_head(i, NEOX_LAYER + r"attention.query_key_value.\2"))
        for i, name in enumerate("qkv")
    ),
    (LAYER + r"attention\.o_proj\.(.*)", NEOX_LAYER + r"attention.dense.\2"),
    (LAYER + r"ffn\.up_proj\.(.*)", NEOX_LAYER + r"mlp.dense_h_to_4h.\2"),
    (LAYER + r"ffn\.down_proj\.(.*)", NEOX_LAYER + r"mlp.dense_4h_to_h.\2"),
]


def t5_names(inner: str) -> list[tuple[str, Any]]:
    names: list[tuple[str, Any]] = [
        (r"(?:encoder\.)?embed_tokens\.weight", "shared.weight"),
        (r"lm_head\.weight", "lm_head.weight"),
    ]
    for ours, theirs, last in ((r"encoder\.", "encoder", 1), ("", "decoder", 2)):
        block = theirs + r".block.\1.layer."
        names += [
            (
                ours + r"position_biases\.0\.weight",
                theirs + ".block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            ),
            (ours + r"norm\.weight", theirs + ".final_layer_norm.weight"),
            (ours + LAYER + r"attn_norm\.weight", block + "0.layer_norm.weight"),
            (ours + LAYER + r"attention\.(.)_proj\.weight", block + r"0.SelfAttention.\2.weight"),
            (ours + LAYER + r"cross_norm\.weight", block + "1.layer_norm.weight"),
            (ours + LAYER + r"cross_attention\.(.)_proj\.weight", block + r"1.EncDecAttention.\2.weight"),
            (ours + LAYER + r"ffn_norm\.weight", block + f"{last}.layer_norm.weight"),
            (ours + LAYER + r"ffn\.down_proj\.weight", block + f"{last}.DenseReluDense.wo.weight"),
        ]
        wi = block + f"{last}.DenseReluDense."
        if inner == "dense":
            names.append((ours + LAYER + r"ffn\.up_proj\.weight", wi + "wi.weight"))
        else:
            names.append((ours + LAYER + r"ffn\.gate_proj\.weight", wi + "wi_0.weight"))
            names.append((ours + LAYER + r"ffn\.up_proj\.weight", wi + "wi_1.weight"))
    return names


def bart_names() -> list[tuple[str, Any]]:
    names: list[tuple[str, Any]] = [
        (r"(?:encoder\.)?embed_tokens\.weight", "model.shared.weight"),
        (r"lm_head\.weight", "lm_head.weight"),
        (r"lm_head\.bias", lambda take, match: take("final_logits_bias")[0]),
    ]
    for ours, theirs in ((r"encoder\.", "model.encoder."), ("", "model.decoder.")):
        layer = theirs + r"layers.\1."
        names += [
            (ours + r"positions\.weight", theirs + "embed_positions.weight"),
            (ours + r"embedding_norm\.(.*)", theirs + r"layernorm_embedding.\1"),
            (ours + LAYER + r"attention\.o_proj\.(.*)", layer + r"self_attn.out_proj.\2"),
            (ours + LAYER + r"attention\.(.*)", layer + r"self_attn.\2"),
            (ours + LAYER + r"attn_norm\.(.*)", layer + r"self_attn_layer_norm.\2"),
            (ours + LAYER + r"cross_attention\.o_proj\.(.*)", layer + r"encoder_attn.out_proj.\2"),
            (ours + LAYER + r"cross_attention\.(.*)", layer + r"encoder_attn.\2"),
            (ours + LAYER + r"cross_norm\.(.*)", layer + r"encoder_attn_layer_norm.\2"),
            (ours + LAYER + r"ffn\.up_proj\.(.*)", layer + r"fc1.\2"),
            (ours + LAYER + r"ffn\.down_proj\.(.*)", layer + r"fc2.\2"),
            (ours + LAYER + r"ffn_norm\.(.*)", layer + r"final_layer_norm.\2"),
        ]
    return names


def marian_tables(model: Any) -> None:
    """Its sinusoids are kept as float32; here the same formula in float64."""
    for part in (model.model.encoder, model.model.decoder):
        slots, size = part.embed_positions.weight.shape
        angles = np.arange(slots)[:, None] / np.power(10000, 2 * np.arange(size // 2) / size)
        part.embed_positions.weight.copy_(torch.from_numpy(np.concatenate([np.sin(angles), np.cos(angles)], 1)))


def of_bart(kind: str, **more: Any) -> Any:
    sizes = {"encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 24, "decoder_ffn_dim": 40}
    heads = {"encoder_attention_heads": HEADS, "decoder_attention_heads": 2, "d_model": SIZE, "vocab_size": VOCABULARY}
    config = getattr(transformers, f"{kind}Config")(
        **sizes, **heads, **SPECIAL, max_position_embeddings=64, decoder_start_token_id=2, forced_eos_token_id=2, **more
    )
    return getattr(transformers, "BartForConditionalGeneration" if kind == "Bart" else "MarianMTModel")(config)


BART = {
    "family": "encoder_decoder",
    "vocab_size": VOCABULARY,
    "hidden_size": SIZE,
    "num_hidden_layers": 3,
    "attention": {"num_attention_heads": 2, "qkv_bias": True, "out_bias": True},
    "norm": {"kind": "layer_norm"},
    "norm_placement": "post",
    "head_bias": True,
}


def encoder_of_bart(activation: str) -> dict[str, Any]:
    return {
        "num_hidden_layers": 2,
        "attention": {"num_attention_heads": HEADS, "qkv_bias": True, "out_bias": True},
        "ffn": {"kind": "dense", "intermediate_size": 24, "bias": True, "activation": activation},
    }


def of_t5(**more: Any) -> Any:
    sizes = {
        "vocab_size": VOCABULARY,
        "d_model": SIZE,
        "d_kv": 6,
        "d_ff": INNER,
        "num_layers": 2,
        "num_decoder_layers": 3,
    }
    config = transformers.T5Config(
        **sizes, num_heads=HEADS, relative_attention_num_buckets=8, relative_attention_max_distance=9, **more
    )
    return transformers.T5ForConditionalGeneration(config)


T5 = {
    "family": "encoder_decoder",
    "vocab_size": VOCABULARY,
    "hidden_size": SIZE,
    "num_hidden_layers": 3,
    "encoder": {"num_hidden_layers": 2},
    "attention": {"num_attention_heads": HEADS, "head_dim": 6, "scale": 1.0},
    "position": {"kind": "relative_bias", "num_buckets": 8, "max_distance": 9},
}


def causal_lm(kind: str, **more: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(**{**COMMON, **SPECIAL, "num_key_value_heads": 2, **more})
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def decoder(**more: Any) -> dict[str, Any]:
    base = {name: COMMON[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
    base |= {"attention": GROUPED, "ffn": {"kind": "gated", "intermediate_size": INNER}, "tie_word_embeddings": False}
    merged = {**base, **more}
    return {key: value for key, value in merged.items() if value is not None}


ALTERNATE = {
    "num_hidden_layers": None,
    "layers": [f"causal & window({WINDOW})", "causal", f"causal & window({WINDOW})"],
}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
ROPE3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 2.0, "beta_slow": 0.5}

FAMILIES = {
    "bert": Family(
        lambda: transformers.BertForMaskedLM(transformers.BertConfig(**COMMON, max_position_embeddings=64)),
        {
            "preset": "bert-base",
            **{name: COMMON[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")},
            "attention": {"num_attention_heads": HEADS},
            "ffn": {"intermediate_size": INNER},
            "position": {"max_positions": 64},
        },
        BERT,
    ),
    "gpt2": Family(
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=SIZE, n_layer=3, n_head=HEADS, n_positions=64, **SPECIAL)
        ),
        {
            "preset": "gpt2",
            **{name: COMMON[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")},
            "attention": {"num_attention_heads": HEADS},
            "ffn": {"intermediate_size": 4 * SIZE},
            "position": {"max_positions": 64},
        },
        GPT2,
    ),
    "t5": Family(
        of_t5,
        T5 | {"ffn": {"kind": "dense", "intermediate_size": INNER, "activation": "relu"}, "logit_multiplier": SIZE**-0.5},
        t5_names("dense"),
        pairs=True,
        positions=False,
    ),
    "t5 v1.1": Family(
        lambda: of_t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
        T5 | {"ffn": {"kind": "gated", "intermediate_size": INNER, "activation": "gelu_tanh"}, "tie_word_embeddings": False},
        t5_names("gated"),
        pairs=True,
        positions=False,
    ),
    "bart": Family(
        lambda: of_bart("Bart"),
        BART
        | {
            "encoder": encoder_of_bart("gelu"),
            "ffn": {"kind": "dense", "intermediate_size": 40, "bias": True},
            "position": {"kind": "learned", "max_positions": 64, "offset": 2},
            "embedding_norm": True,
        },
        bart_names(),
        sides=("right",),
        pairs=True,
        positions=False,
    ),
    "marian": Family(
        lambda: of_bart("Marian", activation_function="swish", scale_embedding=True),
        BART
        | {
            "encoder": encoder_of_bart("silu"),
            "ffn": {"kind": "dense", "intermediate_size": 40, "bias": True, "activation": "silu"},
            "position": {"kind": "sinusoidal", "layout": "half"},
            "embedding_multiplier": "sqrt",
        },
        [*bart_names()],
        sides=("right",),
        pairs=True,
        positions=False,
        prepare=marian_tables,
    ),
    "llama": Family(
        lambda: causal_lm("Llama", rope_parameters={**ROPE3, "original_max_position_embeddings": 8}),
        decoder(
            position={"kind": "rope", "theta": 500.0, "scaling": {"kind": "llama3", "factor": 8.0, "original_length": 8}}
        ),
        LLAMA,
    ),
    "qwen2": Family(
        lambda: causal_lm("Qwen2", tie_word_embeddings=True),
        decoder(attention={**GROUPED, "qkv_bias": True}, tie_word_embeddings=True),
        LLAMA,
    ),
    "qwen3": Family(
        lambda: causal_lm("Qwen3", head_dim=12),
        decoder(attention={**GROUPED, "head_dim": 12, "qk_norm": True}),
        LLAMA,
    ),
    "gemma2": Family(
        lambda: causal_lm(
            "Gemma2", head_dim=8, query_pre_attn_scalar=20, sliding_window=WINDOW, layer_types=TYPES,
            attn_logit_softcapping=2.0, final_logit_softcapping=3.0,
        ),
        decoder(
            **ALTERNATE,
            attention={**GROUPED, "scale": 20**-0.5, "attn_logit_softcapping": 2.0},
            ffn={"kind": "gated", "intermediate_size": INNER, "activation": "gelu_tanh"},
            norm={"kind": "rms_norm", "offset": 1},
            norm_placement="sandwich",
            embedding_multiplier="sqrt",
            final_logit_softcapping=3.0,
            tie_word_embeddings=True,
        ),
        POST + LLAMA,
    ),
    "mixtral": Family(
        lambda: causal_lm("Mixtral", num_local_experts=4, num_experts_per_tok=2),
        decoder(
            norm={"kind": "rms_norm", "eps": 1e-5},
            position={"kind": "rope", "theta": 1e6},
            ffn={
                "kind": "moe",
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "expert": {"kind": "gated", "intermediate_size": INNER},
            },
        ),
        EXPERTS + LLAMA,
    ),
    "deepseek_v3": Family(
        lambda: causal_lm(
            "DeepseekV3", num_key_value_heads=HEADS, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2,
            first_k_dense_replace=1, moe_intermediate_size=10, n_shared_experts=2, q_lora_rank=12, kv_lora_rank=10,
            qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, routed_scaling_factor=2.5,
            rope_parameters={**YARN, "original_max_position_embeddings": 6, "mscale": 0.7, "mscale_all_dim": 1.0},
        ),
        decoder(
            num_hidden_layers=None,
            layers=[{"rule": "causal", "ffn": {"kind": "gated", "intermediate_size": INNER}}, "causal", "causal"],
            attention={
                "kind": "latent",
                "num_attention_heads": HEADS,
                "q_lora_rank": 12,
                "kv_lora_rank": 10,
                "qk_nope_head_dim": 6,
                "qk_rope_head_dim": 4,
                "v_head_dim": 5,
            },
            position={
                "kind": "rope",
                "theta": 100.0,
                "pairing": "interleaved",
                "scaling": {
                    "kind": "yarn",
                    "factor": 4.0,
                    "original_length": 6,
                    "beta_fast": 2.0,
                    "beta_slow": 0.5,
                    "mscale": 0.7,
                    "mscale_all_dim": 1.0,
                },
            },
            ffn={
                "kind": "moe",
                "num_experts": 8,
                "num_experts_per_tok": 3,
                "expert": {"kind": "gated", "intermediate_size": 10},
                "router": {"kind": "sigmoid", "scale": 2.5, "groups": {"count": 4, "keep": 2, "score": "top2"}},
                "shared": {"intermediate_size": 20},
            },
        ),
        DEEPSEEK + EXPERTS + LLAMA,
    ),
    "cohere": Family(
        lambda: causal_lm("Cohere", use_qk_norm=True, logit_scale=0.25),
        decoder(
            attention={**GROUPED, "qk_norm": {"kind": "head_layer_norm", "eps": 1e-5}},
            norm={"kind": "layer_norm", "bias": False},
            norm_placement="parallel",
            position={"kind": "rope", "theta": 500000.0, "pairing": "interleaved"},
            logit_multiplier=0.25,
            tie_word_embeddings=True,
        ),
        [(LAYER + r"norm\.weight", r"model.layers.\1.input_layernorm.weight"), *LLAMA],
    ),
    "gpt_neox": Family(
        lambda: transformers.GPTNeoXForCausalLM(
            transformers.GPTNeoXConfig(
                **COMMON, **SPECIAL, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
            )
        ),
        decoder(
            attention={"num_attention_heads": HEADS, "qkv_bias": True, "out_bias": True},
            ffn={"kind": "dense", "intermediate_size": INNER, "bias": True},
            norm={"kind": "layer_norm"},
            norm_placement="parallel_two",
            position={"kind": "rope", "rotary_dim": 4},
        ),
        NEOX,
    ),
    "olmo2": Family(
        lambda: causal_lm("Olmo2", rms_norm_eps=1e-6),
        decoder(attention={**GROUPED, "qk_norm": {"over": "projection"}}, norm_placement="reordered"),
        POST + LLAMA,
    ),
    "gpt_oss": Family(
        lambda: causal_lm(
            "GptOss", head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW, layer_types=TYPES,
            rope_parameters={**YARN, "truncate": False, "original_max_position_embeddings": 6},
        ),
        decoder(
            **ALTERNATE,
            attention={**GROUPED, "qkv_bias": True, "out_bias": True, "attention_sinks": True},
            norm={"kind": "rms_norm", "eps": 1e-5},
            position={
                "kind": "rope",
                "theta": 100.0,
                "scaling": {
                    "kind": "yarn",
                    "factor": 4.0,
                    "original_length": 6,
                    "beta_fast": 2.0,
                    "beta_slow": 0.5,
                    "truncate": False,
                },
            },
            ffn={
                "kind": "moe",
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "expert": {"kind": "clamped_gated", "intermediate_size": INNER, "bias": True},
                "router": {"kind": "top_k_softmax", "bias": True},
            },
        ),
        GPT_OSS + LLAMA,
    ),
}  # fmt: skip
