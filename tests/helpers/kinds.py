"""Small configs that together say every word that a model's config knows, and models of them that feel each."""

from __future__ import annotations

from typing import Any

import torch

from pellucid.models import Model, ModelConfig, build

GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}
DENSE = {"kind": "dense", "intermediate_size": 24}
GATED = {"kind": "gated", "intermediate_size": 24}
MLA = {
    "kind": "latent",
    "num_attention_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
LONG = {
    "kind": "longrope",
    "short_factor": [1.0, 2.0],
    "long_factor": [3.0, 4.0],
    "original_max_position_embeddings": 20,
}


def experts(router: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A mixture of eight."""
    return {"kind": "moe", "num_experts": 8, "num_experts_per_tok": 2, "expert": GATED, "router": router} | more


DECODERS: dict[str, dict[str, Any]] = {
    "sandwich, capped, limits of every kind": {
        "attention": GROUPED | {"attn_logit_softcapping": 5.0, "clip_qkv": 3.0, "scale": 0.3},
        "ffn": {"kind": "clamped_gated", "intermediate_size": 24, "limit": 4.0, "alpha": 1.5, "bias": True},
        "norm": {"kind": "rms_norm", "offset": 1, "eps": 1e-4},
        "norm_placement": "sandwich",
        "embedding_multiplier": "sqrt",
        "final_logit_softcapping": 8.0,
        "residual_multiplier": 0.5,
        "residual_dtype": "float32",
        "logit_multiplier": 0.5,
    },
    "reordered, norms over projections, sinks": {
        "attention": GROUPED
        | {"qk_norm": {"over": "projection", "eps": 1e-3, "after_positions": True}, "attention_sinks": True},
        "norm_placement": "reordered",
        "position": {"kind": "rope", "scaling": {"kind": "linear", "factor": 4.0}},
        "max_position_embeddings": 300,
    },
    "parallel, partial interleaved rope": {
        "attention": GROUPED | {"head_dim": 8, "qk_norm": {"kind": "head_layer_norm", "eps": 1e-3}},
        "ffn": {"kind": "dense", "intermediate_size": 24, "activation": "quick_gelu", "bias": True},
        "norm": {"kind": "layer_norm", "bias": False},
        "norm_placement": "parallel",
        "position": {"kind": "rope", "interleaved": True, "rotary_dim": 4, "rope_theta": 500.0},
        "tie_word_embeddings": False,
    },
    "parallel of two norms, bare, dynamic": {
        "attention": GROUPED | {"head_dim": 8, "qk_norm": {"kind": "bare_rms_norm", "eps": 1e-3}},
        "norm": {"kind": "bare_rms_norm"},
        "norm_placement": "parallel_two",
        "position": {
            "kind": "rope",
            "scaling": {"kind": "dynamic", "factor": 2.0, "original_max_position_embeddings": 12},
        },
    },
    "deep, learned with an offset": {
        "ffn": DENSE | {"activation": "relu_squared"},
        "norm": {"kind": "layer_norm", "eps": 1e-3},
        "norm_placement": "deep",
        "position": {"kind": "learned", "max_position_embeddings": 30, "offset": 2},
        "dropout": {"embedding": 0.1, "attention": 0.1, "residual": 0.1, "ffn": 0.1},
    },
    "alibi, one layer's bias of its own": {
        "position": {"kind": "alibi"},
        "num_hidden_layers": None,
        "layers": ["causal", {"rule": "causal & window(3)", "position": {"kind": "alibi", "alibi_bias_max": 4.0}}],
        "attention": GROUPED | {"qk_norm": {"kind": "l2_norm", "eps": 1e-3}},
    },
    "llama3 of two bases, one layer without": {
        "attention": {"num_attention_heads": 2, "head_dim": 8},
        "num_hidden_layers": None,
        "position": {
            "kind": "rope",
            "rope_theta": 1000.0,
            "scaling": {"kind": "llama3", "factor": 8.0, "original_max_position_embeddings": 128},
        },
        "layers": [
            "causal & window(5)",
            {"rule": "causal", "position": {"kind": "none"}},
            {"rule": "causal", "position": {"kind": "rope", "rope_theta": 50.0}, "ffn": DENSE},
        ],
    },
    "longrope, one factor": {
        "position": {"kind": "rope", "scaling": LONG | {"factor": 8.0}},
    },
    "longrope, two factors": {
        "position": {"kind": "rope", "scaling": LONG | {"attention_factor": [1.25, 1.5]}},
    },
    "proportional rope": {
        "attention": {"num_attention_heads": 2, "head_dim": 8},
        "position": {"kind": "rope", "scaling": {"kind": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0}},
    },
    "yarn with a factor": {
        "attention": {"num_attention_heads": 2, "head_dim": 16},
        "position": {
            "kind": "rope",
            "scaling": {
                "kind": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 4096,
                "attention_factor": 1.3,
                "truncate": False,
            },
        },
    },
    "latent with yarn, experts in groups": {
        "attention": MLA | {"attn_logit_softcapping": 5.0, "qk_rope_head_dim": 8},
        "position": {
            "kind": "rope",
            "scaling": {
                "kind": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 4096,
                "mscale": 0.7,
                "mscale_all_dim": 1.2,
                "truncate": False,
            },
        },
        "num_hidden_layers": None,
        "layers": [{"rule": "causal", "ffn": GATED}, "causal"],
        "ffn": experts(
            {
                "kind": "sigmoid",
                "routed_scaling_factor": 2.5,
                "groups": {"n_group": 4, "topk_group": 2, "score": "top2"},
            },
            shared={"intermediate_size": 16},
        ),
    },
    "latent, queries of one step, crowded experts": {
        "attention": {name: value for name, value in MLA.items() if name != "q_lora_rank"} | {"scale": 0.2},
        "ffn": experts(
            {"kind": "softmax", "norm_topk_prob": False},
            expert_capacity=6,
            shared={"intermediate_size": 16, "gated": True},
        ),
    },
    "experts by their best logits, weighed on entry": {
        "ffn": experts(
            {"kind": "top_k_softmax", "bias": True, "groups": {"n_group": 4, "topk_group": 1, "score": "max"}},
            apply_weight_on_input=True,
            expert=DENSE | {"bias": True, "activation": "silu"},
        ),
        "dropout": {"ffn": 0.2},
    },
    "experts with clamped gates": {
        "ffn": experts(
            {"kind": "softmax", "routed_scaling_factor": 2.0},
            expert={"kind": "clamped_gated", "intermediate_size": 24, "limit": 3.0, "bias": True},
        ),
    },
    "one layer twice, factorised": {
        "num_hidden_layers": None,
        "layers": ["causal", {"rule": "causal", "same_as": 0}],
        "embedding_size": 8,
        "head_bias": True,
    },
    "a prefix by groups": {"rule": "causal | prefix()"},
    "a decoder that sees everything": {"rule": "full", "norm": {"kind": "bare_layer_norm"}},
    "a classifier by its last token": {
        "head": {"kind": "sequence_classification", "num_labels": 3, "pooler": "gelu", "dropout": 0.3},
    },
}

BERT: dict[str, Any] = {
    "family": "encoder",
    "position": {"kind": "learned", "max_position_embeddings": 24},
    "ffn": DENSE | {"bias": True},
    "norm": {"kind": "layer_norm", "eps": 1e-4},
    "norm_placement": "post",
    "embedding_norm": True,
    "type_vocab_size": 2,
    "attention": {"num_attention_heads": 4, "qkv_bias": True, "o_bias": True},
    "dropout": {"embedding": 0.1, "attention": 0.1, "residual": 0.1},
}
ENCODERS: dict[str, dict[str, Any]] = {
    "masked lm": BERT | {"head_bias": True},
    "masked lm, factorised": BERT
    | {"embedding_size": 8, "head": {"kind": "masked_lm", "activation": "relu", "dense_bias": False}},
    "classifier": BERT
    | {"head": {"kind": "sequence_classification", "num_labels": 5, "pooler": "tanh", "dropout": 0.2}},
    "tagger": BERT | {"head": {"kind": "token_classification", "num_labels": 4, "dropout": 0.2}},
    "span": BERT | {"head": {"kind": "span"}, "layers": ["lookahead(2)", "full & window(3)"]},
    "regression": BERT | {"head": {"kind": "regression", "num_outputs": 2, "pooling": "mean", "dropout": 0.1}},
    "embedding": BERT | {"head": {"kind": "sentence_embedding", "projection_dim": 6}},
    "embedding as it is": {"family": "encoder", "head": {"kind": "sentence_embedding", "normalize": False}},
    "two-way biases": {
        "family": "encoder",
        "position": {"kind": "relative_bias", "num_buckets": 8, "max_distance": 18, "shared": False},
        "head": {"kind": "language_model"},
    },
}
PAIRS: dict[str, dict[str, Any]] = {
    "2017": {
        "family": "encoder_decoder",
        "position": {"kind": "sinusoidal"},
        "ffn": DENSE | {"activation": "relu"},
        "norm": {"kind": "layer_norm"},
        "norm_placement": "post",
        "embedding_multiplier": "sqrt",
        "dropout": {"embedding": 0.1, "attention": 0.1, "residual": 0.1, "ffn": 0.1},
    },
    "t5": {
        "family": "encoder_decoder",
        "position": {"kind": "relative_bias", "num_buckets": 8, "max_distance": 20},
        "encoder": {"position": {"kind": "relative_bias", "num_buckets": 8, "max_distance": 18}},
        "attention": {"num_attention_heads": 4, "head_dim": 4, "scale": 1.0},
        "norm": {"kind": "rms_norm", "eps": 1e-4},
        "logit_multiplier": 0.25,
    },
    "two widths, two vocabularies": {
        "family": "encoder_decoder",
        "source_vocab_size": 30,
        "attention": {"num_attention_heads": 4, "clip_qkv": 2.0, "attn_logit_softcapping": 4.0},
        "cross_attention": {
            "num_attention_heads": 2,
            "head_dim": 8,
            "qk_norm": {"kind": "layer_norm", "eps": 1e-3},
            "q_bias": True,
            "attn_logit_softcapping": 4.0,
            "clip_qkv": 2.0,
            "scale": 0.4,
        },
        "norm_placement": "sandwich",
        "encoder": {
            "hidden_size": 24,
            "layers": ["full", {"rule": "lookahead(3)", "position": {"kind": "rope", "rope_theta": 30.0}}],
            "attention": {"num_attention_heads": 4},
            "position": {
                "kind": "rope",
                "scaling": LONG | {"short_factor": [1.0, 2.0, 3.0], "long_factor": [4.0, 5.0, 6.0], "factor": 2.0},
            },
            "norm_placement": "deep",
            "norm": {"kind": "layer_norm"},
            "type_vocab_size": 3,
            "residual_dtype": "float32",
            "max_position_embeddings": 200,
            "residual_multiplier": 0.5,
            "embedding_norm": True,
            "ffn": experts({"kind": "softmax", "norm_topk_prob": False}, expert_capacity=5),
            "dropout": {"embedding": 0.1, "attention": 0.1, "residual": 0.1, "ffn": 0.1},
        },
    },
    "deep, layers shared on both sides": {
        "family": "encoder_decoder",
        "norm": {"kind": "layer_norm"},
        "norm_placement": "deep",
        "num_hidden_layers": None,
        "layers": ["causal", {"rule": "causal", "same_as": 0}],
        "encoder": {"layers": ["full", {"rule": "full", "same_as": 0}]},
        "tie_word_embeddings": False,
    },
}
EVERY_KIND = {
    **{f"decoder: {name}": words for name, words in DECODERS.items()},
    **{f"encoder: {name}": words for name, words in ENCODERS.items()},
    **{f"both: {name}": words for name, words in PAIRS.items()},
}


def config_of(kind: str, **changes: Any) -> ModelConfig:
    """The config of that name in :data:`EVERY_KIND`."""
    base = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "attention": GROUPED, "ffn": GATED}
    words = base | EVERY_KIND[kind] | changes
    if "layers" in words:
        words.pop("num_hidden_layers", None)
    return ModelConfig(**{name: value for name, value in words.items() if value is not None})


def model_of(kind: str, *, seed: int = 1, dtype: torch.dtype = torch.float32, **changes: Any) -> Model:
    """A model of it in which nothing is at a value of its own: norms scale unevenly, biases and choices are there."""
    model = build(config_of(kind, **changes), seed=seed, dtype=dtype)
    return stirred(model)


@torch.no_grad()
def stirred(model: Model) -> Model:
    """``model``, with noise on all that begins alike: vectors, and the choice of experts."""
    dice = torch.Generator().manual_seed(7)
    for name, tensor in model.state_dict().items():
        if tensor.dim() == 1:
            tensor += 0.3 * torch.randn(tensor.shape, generator=dice).to(tensor)
        elif "position_biases" in name:
            tensor += torch.randn(tensor.shape, generator=dice).to(tensor)
    return model
