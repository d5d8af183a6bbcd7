"""Fixed configs over all that a config can say, and what any of their models is asked."""

from typing import Any

import torch

from helpers.tiny import VOCABULARY
from pellucid.batch import IGNORED
from pellucid.data import Batch, objectives
from pellucid.models import EncoderDecoder, Model, ModelConfig, build
from pellucid.models.configs import VOCABULARY as TOKENS
from pellucid.models.configs import SentenceEmbeddingHeadConfig, SpanHeadConfig, TokenClassificationHeadConfig

BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "attention": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "ffn": {"kind": "gated", "intermediate_size": 24},
}
HEADS = {"num_attention_heads": 4}
BIASED = {**HEADS, "qkv_bias": True, "o_bias": True}
LATENT = {
    "kind": "latent",
    "num_attention_heads": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}
TABLE = {"kind": "learned", "max_position_embeddings": 24}
BUCKETS = {"kind": "relative_bias", "num_buckets": 8, "max_distance": 9}
LAYER_NORM = {"kind": "layer_norm"}
DENSE = {"kind": "dense", "intermediate_size": 24, "bias": True}
ENCODER = {"family": "encoder"}
PAIR = {"family": "encoder_decoder"}


def rope(**more: Any) -> dict[str, Any]:
    return {"kind": "rope", **more}


def scaled(kind: str, **more: Any) -> dict[str, Any]:
    return rope(scaling={"kind": kind, **more})


def moe(**more: Any) -> dict[str, Any]:
    expert = {"kind": "gated", "intermediate_size": 12}
    return {"kind": "moe", "num_experts": 4, "num_experts_per_tok": 2, "expert": expert, **more}


def layers(*each: Any) -> dict[str, Any]:
    return {"layers": list(each)}


SPREAD: dict[str, dict[str, Any]] = {
    # decoders
    "llama": {},
    "gpt2": {"position": TABLE, "ffn": DENSE, "norm": LAYER_NORM, "attention": BIASED},
    "mqa, window, interleaved": {
        "rule": "causal & window(3)",
        "attention": {**HEADS, "num_key_value_heads": 1},
        "position": rope(interleaved=True, rotary_dim=4),
    },
    "local and global, two bases": layers(
        {"rule": "causal & window(2)", "position": rope(rope_theta=100.0)}, "causal", {"rule": "causal & chunk(4)"}
    ),
    "sinks of text, no positions on one": layers("causal & (window(2) | sinks(1))", {"position": {"kind": "none"}}),
    "no positions, soft caps": {
        "position": {"kind": "none"},
        "attention": {**HEADS, "attn_logit_softcapping": 1.5},
        "final_logit_softcapping": 3.0,
    },
    "gemma2": {
        **layers("causal & window(3)", "causal"),
        "attention": {**BASE["attention"], "scale": 0.3, "attn_logit_softcapping": 2.0},
        "norm": {"kind": "rms_norm", "offset": 1},
        "norm_placement": "sandwich",
        "embedding_multiplier": "sqrt",
    },
    "olmo2": {
        "attention": {**BASE["attention"], "qk_norm": {"over": "projection"}},
        "norm_placement": "reordered",
        "tie_word_embeddings": False,
    },
    "cohere": {
        "attention": {**HEADS, "qk_norm": {"kind": "head_layer_norm"}},
        "norm": {"kind": "layer_norm", "bias": False},
        "norm_placement": "parallel",
        "logit_multiplier": 0.25,
    },
    "gpt-neox": {"ffn": DENSE, "norm": LAYER_NORM, "norm_placement": "parallel_two", "attention": BIASED},
    "granite": {"residual_multiplier": 0.3, "embedding_multiplier": 4.0, "attention": {**HEADS, "scale": 0.1}},
    "bloom": {"position": {"kind": "alibi"}, "embedding_norm": True, "norm": LAYER_NORM, "ffn": DENSE},
    "olmo": {"norm": {"kind": "bare_layer_norm"}, "attention": {**HEADS, "clip_qkv": 0.5}},
    "gpt-oss": {
        **layers("causal & window(3)", "causal"),
        "attention": {**BASE["attention"], "attention_sinks": True, "q_bias": True},
        "ffn": moe(
            expert={"kind": "clamped_gated", "intermediate_size": 12, "bias": True},
            router={"kind": "top_k_softmax", "bias": True},
        ),
        "position": scaled("yarn", factor=4.0, original_max_position_embeddings=6),
    },
    "mixtral": {"ffn": moe(), "position": scaled("linear", factor=3.0)},
    "qwen2-moe": {
        "ffn": moe(router={"kind": "softmax", "norm_topk_prob": False}, shared={"intermediate_size": 12, "gated": True}),
        "attention": {**HEADS, "qk_norm": True},
        "position": scaled("llama3", factor=4.0, original_max_position_embeddings=6),
    },
    "llama4": {
        **layers("causal & chunk(4)", {"position": {"kind": "none"}}),
        "ffn": moe(num_experts_per_tok=1, router={"kind": "sigmoid", "norm_topk_prob": False}, apply_weight_on_input=True),
        "attention": {**HEADS, "qk_norm": {"kind": "l2_norm", "after_positions": True}},
    },
    "deepseek": {
        **layers({"rule": "causal", "ffn": {"kind": "gated", "intermediate_size": 24}}, "causal"),
        "attention": LATENT,
        "position": scaled("yarn", factor=4.0, original_max_position_embeddings=6, mscale=0.7, mscale_all_dim=1.0),
        "ffn": moe(
            router={"kind": "sigmoid", "routed_scaling_factor": 2.5, "groups": {"n_group": 2, "topk_group": 1, "score": "top2"}},
            shared={"intermediate_size": 12},
        ),
    },
    "latent without a query latent": {"attention": {**LATENT, "q_lora_rank": None}, "norm": {"kind": "bare_rms_norm"}},
    "dynamic ntk": {"position": scaled("dynamic", factor=2.0, original_max_position_embeddings=6)},
    "longrope": {
        "position": scaled("longrope", short_factor=[1.0] * 4, long_factor=[1.0, 2.0, 3.0, 4.0], original_max_position_embeddings=5, factor=4.0)
    },
    "proportional": {"position": scaled("proportional", partial_rotary_factor=0.5), "residual_dtype": "float32"},
    "relative biases of each layer": {"position": {**BUCKETS, "shared": False}},
    "deepnorm, shared layers": {
        **layers("causal", {"same_as": 0}, {"same_as": 0}),
        "norm": LAYER_NORM,
        "norm_placement": "deep",
    },
    "albert-like table": {"embedding_size": 12, "head_bias": True, "type_vocab_size": 2},
    "prefix": {"rule": "causal | prefix()", "position": {"kind": "sinusoidal", "layout": "half", "offset": 2}},
    "judge": {"head": {"kind": "sequence_classification", "num_labels": 3, "pooler": "tanh"}},
    # encoders
    "bert": {
        **ENCODER, "position": {"kind": "learned", "max_position_embeddings": 24, "offset": 2}, "ffn": DENSE, "norm": LAYER_NORM,
        "attention": BIASED, "norm_placement": "post", "embedding_norm": True, "type_vocab_size": 2, "head_bias": True,
    },
    "modernbert": {
        **ENCODER,
        **layers("full", {"rule": "window(2) & lookahead(1)", "position": rope(rope_theta=100.0)}),
        "norm": {"kind": "layer_norm", "bias": False},
        "head": {"kind": "token_classification", "num_labels": 5},
    },
    "encoder of experts, alibi": {
        **ENCODER, "position": {"kind": "alibi"}, "ffn": moe(), "head": {"kind": "sentence_embedding", "projection_dim": 8},
    },
    "latent encoder": {**ENCODER, "attention": LATENT, "head": {"kind": "span"}},
    "scorer": {
        **ENCODER, "position": BUCKETS,
        "head": {"kind": "regression", "num_outputs": 2, "pooling": "mean"},
    },
    # both
    "transformer 2017": {
        **PAIR, "position": {"kind": "sinusoidal"}, "ffn": {**DENSE, "activation": "relu"}, "norm": LAYER_NORM,
        "norm_placement": "post", "embedding_multiplier": "sqrt",
    },
    "t5": {
        **PAIR, "position": BUCKETS,
        "attention": {**HEADS, "scale": 1.0}, "logit_multiplier": 32**-0.5,
        "ffn": {"kind": "dense", "intermediate_size": 24, "activation": "relu"},
    },
    "two tables, sandwich": {
        **PAIR, "encoder": {"hidden_size": 16, "num_hidden_layers": 1}, "source_vocab_size": VOCABULARY,
        "norm_placement": "sandwich", "cross_attention": {**HEADS, "qk_norm": True},
    },
    "latent pair, deepnorm": {
        **PAIR, "attention": LATENT, "cross_attention": HEADS, "norm": LAYER_NORM, "norm_placement": "deep",
    },
    "pair of experts, windows": {**PAIR, "rule": "causal & window(3)", "ffn": moe(), "norm_placement": "reordered"},
}  # fmt: skip


def spread_config(words: dict[str, Any]) -> ModelConfig:
    said = {**BASE, **words} | ({"num_hidden_layers": None} if "layers" in words else {})
    return ModelConfig(**{key: value for key, value in said.items() if value is not None})


def spread_model(words: dict[str, Any], dtype: torch.dtype = torch.float64) -> Model:
    """A model whose every weight is drawn, so that no norm is 1 and no bias 0."""
    model = build(spread_config(words), dtype=dtype)
    dice = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 or not parameter.any():
                parameter += 0.2 * torch.randn(parameter.shape, generator=dice, dtype=torch.float64).to(parameter)
    return model


def source_of(row: list[int]) -> list[int]:
    """What an encoder reads beside this target: another length, other tokens."""
    return [(7 * token + 3) % VOCABULARY for token in [*row[::-1], 1, 2]][: max(2, len(row) - 1)]


def asked(model: Model, rows: list[list[int]], *, packed: bool = False, **how: Any) -> Batch:
    """``rows`` as the model reads them: with a source each, and with groups where its rules go by them."""
    if isinstance(model, EncoderDecoder):
        batch = Batch.from_pairs([source_of(row) for row in rows], rows, packed=packed, **how)
    else:
        batch = Batch.packed(rows, **how) if packed else Batch.from_rows(rows, **how)
    return grouped(model, batch)


def grouped(model: Model, batch: Batch) -> Batch:
    """The first two tokens of each document as its prefix."""
    if not any("prefix()" in rule.describe() for rule in model.rules):
        return batch
    groups = ((batch.positions < 2) & (batch.segments != 0)).long()
    return Batch(batch.tokens, batch.positions, batch.segments, groups=groups, layout=batch.layout)


def answer(model: Model, batch: Batch, **more: Any) -> torch.Tensor:
    """``[B, T, X]``: logits where each token has some, else hidden states."""
    out = model(batch, **more) if speaks(model) else model(batch, want="hidden", **more)
    found: torch.Tensor = out.logits if speaks(model) else out.hidden
    return found


def speaks(model: Model) -> bool:
    return isinstance(model.config.head, (*TOKENS, TokenClassificationHeadConfig, SpanHeadConfig))  # type: ignore[attr-defined]


def labelled(model: Model, batch: Batch) -> Batch:
    """Something for the model's head to learn, the same for each document however it lies in the batch."""
    head = model.config.head  # type: ignore[attr-defined]
    if model.config.family != "encoder" and isinstance(head, TOKENS):  # type: ignore[attr-defined]
        return objectives.causal(batch)
    if isinstance(head, (*TOKENS, TokenClassificationHeadConfig)):
        labels = torch.where((batch.segments != 0) & (batch.tokens % 3 != 0), batch.tokens % 5, IGNORED)
        return batch.with_labels(labels)
    first = torch.tensor([int(batch.tokens[places][0]) for places in documents(batch)])
    if isinstance(head, SpanHeadConfig):
        last = torch.tensor([int(places.sum()) - 1 for places in documents(batch)])
        targets: torch.Tensor = torch.stack([last.minimum(first % 2), last], 1)
    elif head.kind == "regression":
        targets = torch.stack([first, first**2], 1).double() / 50
    else:
        targets = first % 3
    return Batch(
        batch.tokens, batch.positions, batch.segments, layout=batch.layout,
        targets=None if isinstance(head, SentenceEmbeddingHeadConfig) else targets,
    )  # fmt: skip


def documents(batch: Batch) -> list[torch.Tensor]:
    """``Bool[B, T]`` for each document, in the order of ``Batch.targets``."""
    found = []
    for row, segments in enumerate(batch.segments.tolist()):
        for segment in sorted(set(segments) - {0}):
            places = torch.zeros_like(batch.segments, dtype=torch.bool)
            places[row] = batch.segments[row] == segment
            found.append(places)
    return found
