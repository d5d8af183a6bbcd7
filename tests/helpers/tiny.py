"""Tiny models of every kind the config can say, and comparisons at the tolerances we promise."""

import torch

from pellucid.models import ModelConfig, build

KINDS = {
    "rope-gated-rms": {},
    "learned-dense-ln": {
        "position": {"kind": "learned", "max_position_embeddings": 32},
        "ffn": {"kind": "dense", "intermediate_size": 40, "bias": True},
        "norm": {"kind": "layer_norm"},
        "attention": {"num_attention_heads": 4, "qkv_bias": True, "o_bias": True},
        "head_bias": True,
    },
    "post-norm-2017": {
        "position": {"kind": "sinusoidal"},
        "ffn": {"kind": "dense", "intermediate_size": 40, "activation": "relu"},
        "norm": {"kind": "layer_norm"},
        "norm_placement": "post",
    },
    "mqa-window": {"rule": "causal & window(3)", "attention": {"num_attention_heads": 4, "num_key_value_heads": 1}},
    "sinks-qk-norm-untied": {
        "rule": "causal & (window(2) | sinks(1))",
        "attention": {"num_attention_heads": 4, "num_key_value_heads": 2, "qk_norm": True},
        "tie_word_embeddings": False,
    },
    "local-global-interleaved": {
        "num_hidden_layers": None,
        "layers": ["causal & window(2)", "causal", "causal & chunk(4)"],
        "position": {"kind": "rope", "interleaved": True},
    },
    "no-positions-softcap": {"position": {"kind": "none"}, "final_logit_softcapping": 3.0},
}

VOCABULARY = 50


def tiny_config(kind="rope-gated-rms", **changes):
    base = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "attention": {"num_attention_heads": 4, "num_key_value_heads": 2},
        "ffn": {"kind": "gated", "intermediate_size": 48},
    }
    merged = {**base, **KINDS[kind], **changes}
    return ModelConfig(**{key: value for key, value in merged.items() if value is not None})


def tiny_model(kind="rope-gated-rms", *, dtype=torch.float64, backend="auto", seed=0, **changes):
    return build(tiny_config(kind, **changes), dtype=dtype, backend=backend, seed=seed)


def assert_agree(got, expected, message=""):
    """float64: 1e-10; float32: 1e-5 relative to the largest logit."""
    allowed = 1e-10 if expected.dtype == torch.float64 else 1e-5 * (1 + float(expected.detach().abs().max()))
    difference = float((got - expected).detach().abs().max()) if expected.numel() else 0.0
    assert difference <= allowed, f"{message}: differs by {difference:.3g}, allowed {allowed:.3g}"
