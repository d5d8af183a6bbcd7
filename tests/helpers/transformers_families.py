"""Families of transformers' models in a tiny size, and ours of the same config."""

from typing import Any

import numpy as np
import torch
import transformers

from helpers.from_transformers import Family
from helpers.transformers_names import (
    BERT,
    DEEPSEEK,
    EXPERTS,
    GPT2,
    GPT_OSS,
    HEADS,
    LAYER,
    LLAMA,
    NEOX,
    POST,
    bart_names,
    t5_names,
)

VOCABULARY, SIZE, INNER, WINDOW = 37, 32, 24, 4
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": SIZE,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {"num_attention_heads": HEADS, "num_key_value_heads": 2}


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
    "attention": {"num_attention_heads": 2, "qkv_bias": True, "o_bias": True},
    "norm": {"kind": "layer_norm"},
    "norm_placement": "post",
    "head_bias": True,
}


def encoder_of_bart(activation: str) -> dict[str, Any]:
    return {
        "num_hidden_layers": 2,
        "attention": {"num_attention_heads": HEADS, "qkv_bias": True, "o_bias": True},
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
RELU = {"intermediate_size": INNER, "activation": "relu"}
TANH = {"intermediate_size": INNER, "activation": "gelu_tanh"}
LONGER = {"factor": 8.0, "original_max_position_embeddings": 8}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
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
            "position": {"max_position_embeddings": 64},
        },
        BERT,
    ),
    "gpt2": Family(
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=SIZE, n_layer=3, n_head=HEADS, n_positions=64)
        ),
        {
            "preset": "gpt2",
            **{name: COMMON[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")},
            "attention": {"num_attention_heads": HEADS},
            "ffn": {"intermediate_size": 4 * SIZE},
            "position": {"max_position_embeddings": 64},
        },
        GPT2,
    ),
    "t5": Family(
        of_t5,
        T5 | {"ffn": {"kind": "dense", **RELU}, "logit_multiplier": SIZE**-0.5},
        t5_names("dense"),
        pairs=True,
        positions=False,
    ),
    "t5 v1.1": Family(
        lambda: of_t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
        T5 | {"ffn": {"kind": "gated", **TANH}, "tie_word_embeddings": False},
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
            "position": {"kind": "learned", "max_position_embeddings": 64, "offset": 2},
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
        bart_names(),
        sides=("right",),
        pairs=True,
        positions=False,
        prepare=marian_tables,
        computed="embed_positions",
    ),
    "llama": Family(
        lambda: causal_lm("Llama", rope_parameters={**ROPE3, "original_max_position_embeddings": 8}),
        decoder(
            position={"kind": "rope", "rope_theta": 500.0, "scaling": {"kind": "llama3", **LONGER}}
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
            position={"kind": "rope", "rope_theta": 1e6},
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
                "rope_theta": 100.0,
                "interleaved": True,
                "scaling": {
                    "kind": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 6,
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
                "router": {"kind": "sigmoid", "routed_scaling_factor": 2.5, "groups": {"n_group": 4, "topk_group": 2, "score": "top2"}},
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
            position={"kind": "rope", "rope_theta": 500000.0, "interleaved": True},
            logit_multiplier=0.25,
            tie_word_embeddings=True,
        ),
        [(LAYER + r"norm\.weight", r"model.layers.\1.input_layernorm.weight"), *LLAMA],
    ),
    "gpt_neox": Family(
        lambda: transformers.GPTNeoXForCausalLM(
            transformers.GPTNeoXConfig(
                **COMMON, **SPECIAL, rope_parameters={**PLAIN, "partial_rotary_factor": 0.5}
            )
        ),
        decoder(
            attention={"num_attention_heads": HEADS, "qkv_bias": True, "o_bias": True},
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
            attention={**GROUPED, "qkv_bias": True, "o_bias": True, "attention_sinks": True},
            norm={"kind": "rms_norm", "eps": 1e-5},
            position={
                "kind": "rope",
                "rope_theta": 100.0,
                "scaling": {
                    "kind": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 6,
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
