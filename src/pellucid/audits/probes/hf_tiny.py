"""Tiny, randomly weighted transformers models: every class of the auto maps from a shrunk default config."""

from __future__ import annotations

import math
from typing import Any

import torch

from pellucid.audits.probes.hf_special import SPECIAL
from pellucid.errors import InputError

VOCABULARY = 120
LAYERS = 4
_WIDTH, _HEADS, _HEAD = 32, 4, 8

_SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size", "attention_hidden_size",
                     "model_dim", "embed_dim", "encoder_hidden_dim", "lru_width", "output_hidden_size", "proj_dim",
                     "projection_dim", "width", "embd_dim", "cross_attn_hidden_size",
                     "pooler_hidden_size", "rank_dim", "out_hidden_size", "d_embed"), _WIDTH),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
                     "num_decoder_layers", "num_encoder_layers", "num_blocks", "depth"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
                     "decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads",
                     "n_heads_text"), _HEADS),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size", "attention_head_dim", "head_size", "kv_channels",
                     "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "swa_head_dim",
                     "linear_key_head_dim", "linear_value_head_dim", "rotary_dim", "global_head_dim", "d_head",
                     "swa_v_head_dim", "index_head_dim", "kv_head_dim", "head_k_dim", "head_v_dim", "linear_head_dim",
                     "swa_rope_head_dim", "attention_key_size", "indexer_head_dim"), _HEAD),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner",
                     "moe_intermediate_size", "expert_ffn_hidden_size", "ffn_hidden_size", "ff_dim", "inner_dim",
                     "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "dim_ff", "d_inner",
                     "intermediate_size_mlp", "expert_intermediate_size", "mlp_hidden_size", "shared_intermediate_size",
                     "block_ff_dim", "dense_intermediate_size", "hidden_dim", "feed_forward_size", "dff",
                     "share_expert_dim", "expert_dim", "intermediate_dim", "encoder_ffn_size"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_source_positions", "max_target_positions",
                     "max_sequence_length", "max_seq_len", "seq_length", "max_seq_length", "context_length",
                     "original_max_position_embeddings", "max_encoder_position_embeddings",
                     "max_decoder_position_embeddings", "ngram_vocab"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts",
                     "ffn_num_experts", "moe_num_primary_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", "num_selected_experts",
                     "top_k_experts", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "num_expert_group",
                     "n_shared_experts", "first_k_dense_replace", "num_shared_experts", "mamba_n_groups", "n_groups",
                     "num_limited_groups", "moe_layer_start_index"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "lora_rank", "low_rank_dim", "gate_low_rank_dim",
                     "decay_low_rank_dim", "mamba_dt_rank", "adapter_rank", "adapter_mamba_rank", "gate_lora_rank"), 8),
    **dict.fromkeys(("sliding_window", "window_size", "attention_window_size",
                     "local_attention_window_len", "sliding_window_size", "swa_window_size"), 3),
    **dict.fromkeys(("attention_chunk_size",), 5), "local_attention": 4,
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "mamba_state_dim"), 8),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "linear_chunk_size"), 4),
    "mamba_n_heads": 4, "mamba_num_heads": 4, "mamba_d_head": 16, "mamba_head_dim": 16, "mamba_d_ssm": 64,
    "n_mamba_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "hidden_size_per_layer_input": 8,
    "index_topk": 64, "index_n_heads": 4, "index_num_heads": 4, "num_mem_blocks": 1,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16,
    "max_2d_position_embeddings": 64, "image_size": 28, "patch_size": 14,
    "num_mel_bins": 16, "num_nextn_predict_layers": 0, "num_mtp_layers": 0, "num_buckets": 4,
}  # fmt: skip
_LEFT_OUT = ("transformers_version", "per_layer_config")
_UNSET = {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1, "pad_token_id": 0}
_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
           "num_decoder_layers", "num_encoder_layers")  # fmt: skip
_SEPARATE_KV = ("num_key_value_heads", "multi_query_group_num", "num_kv_heads", "swa_num_key_value_heads", "n_head_kv",
                "num_global_key_value_heads", "num_attention_groups")  # fmt: skip
_LISTS = (
    "layer_types", "attn_layer_indices", "n_input_layers", "attn_layers", "mlp_layer_types", "layers_block_type",
    "no_rope_layers", "attn_type_list", "mlp_only_layers", "moe_layers", "attention_layers", "indexer_types",
    "decoder_layer_types", "num_attention_heads_per_layer", "is_causal_layers", "layer_type_list",
    "hybrid_layer_pattern", "moe_layer_freq", "compress_ratios", "activation_sparsity_pattern", "mtp_layer_types",
)  # fmt: skip


def tiny_config(config_class: type, kind: str, special: dict[str, Any] | None = None) -> Any:
    """A config of the same architecture with small sizes. ``special`` wins over what is found by name."""
    base = config_class()
    given = _shrunk(base)
    names = set(vars(base)) | set(getattr(config_class, "attribute_map", {}))
    if kind == "causal" and "is_decoder" in names and not getattr(base, "is_encoder_decoder", False):
        given["is_decoder"] = True
    if kind == "causal" and "causal" in names:
        given["causal"] = True
    if not _patterned(base) and not set(special or {}) & set(_LISTS):
        given |= {key: 2 for key in given if key in _COUNTS} | {key: given[key][:2] for key in given if key in _LISTS}
    given.update(special or {})
    return config_class(**given)


def is_pretrained_class(found: object) -> bool:
    """Whether it is one of transformers' model classes, known by what it offers."""
    return isinstance(found, type) and hasattr(found, "from_pretrained") and hasattr(found, "config_class")


def tiny_model(model_class: Any, kind: str | None = None) -> torch.nn.Module:
    """A class of transformers over a tiny config of its own, with random weights that matter.

    Raises:
        InputError: the class cannot be built so.
    """
    kind = kind or ("causal" if model_class.__name__.endswith(("CausalLM", "LMHeadModel")) else "masked")
    try:
        model_type = model_class.config_class.model_type
        special = SPECIAL.get((kind, model_type), SPECIAL.get(model_type, {}))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return reweighted(model_class(tiny_config(model_class.config_class, kind, special)))
    except Exception as error:  # anybody's code
        said = " ".join(str(error).split())[:200]
        raise InputError(
            f"{model_class.__name__} cannot be built from a tiny config: {type(error).__name__}: {said}; "
            "write a factory that builds it and name that"
        ) from error


def _patterned(config: Any) -> bool:
    """Whether layers differ from each other, which takes four of them to show."""
    parts = [config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))]
    lists = [vars(part).get(key) for part in parts for key in _LISTS]
    return any(isinstance(value, list | tuple) and len(set(map(str, value))) > 1 for value in lists) or any(
        "pattern" in key or "_freq" in key or "period" in key or "every" in key for part in parts for key in vars(part)
    )


def _shrunk(config: Any) -> dict[str, Any]:
    """New values of everything that has a size in its name."""
    given: dict[str, Any] = {}
    ids = 3
    for key, value in sorted(vars(config).items()):
        if hasattr(value, "to_dict"):
            given[key] = {k: v for k, v in value.to_dict().items() if k not in _LEFT_OUT} | _shrunk(value)
        elif key in ("vocab_size", "src_vocab_size", "tgt_vocab_size", "vocab_size_per_layer_input", "n_words"):
            given[key] = VOCABULARY
        elif key.endswith(("_token_id", "_token_index", "_token_ids")) and value is not None:
            known = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
            if key in known:
                given[key] = known[key]
            elif isinstance(value, int) and value >= VOCABULARY - 20:
                ids += 1
                given[key] = VOCABULARY - ids
        elif key in _SEPARATE_KV and isinstance(value, int):
            given[key] = 1 if value == 1 else 2 if value != _of(config, "num_attention_heads") else _HEADS
        elif key in _SIZES and isinstance(value, int) and not isinstance(value, bool) and value > 0:
            given[key] = min(value, _SIZES[key])
        elif key == "head_dim" and value is None:
            given[key] = _HEAD
        elif key in _UNSET and value is None:
            given[key] = _UNSET[key]
        elif key in _SIZES and isinstance(value, list | tuple) and value and isinstance(value[0], int):
            given[key] = [min(size, _SIZES[key]) for size in value[:LAYERS]]
        elif key in _LISTS and isinstance(value, list | tuple) and value:
            given[key] = _pattern(list(value))
        elif "dropout" in key or "drop_prob" in key or "layerdrop" in key:
            given[key] = 0.0 if isinstance(value, float | int) and not isinstance(value, bool) else value
    return given


def _of(config: Any, name: str) -> int | None:
    value = vars(config).get(name)
    return value if isinstance(value, int) else None


def _pattern(values: list[Any]) -> list[Any]:
    """Four entries in which as many kinds as possible appear, in their order."""
    if len(values) <= LAYERS:
        return values
    first = values[:LAYERS]
    for value in dict.fromkeys(map(str, values)):
        if value not in map(str, first):
            first = [*first[: LAYERS - 1], next(v for v in values if str(v) == value)]
    return first


def reweighted(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Weights so large that attention visibly matters; norms, decays and biases nearly as they come."""
    generator = torch.Generator().manual_seed(seed)
    tables = {id(part.weight) for part in model.modules() if isinstance(part, torch.nn.Embedding)}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.is_floating_point():
                continue
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() < 2 or any(word in name.lower() for word in ("a_log", "dt_", "norm", "decay")):
                weight.add_(0.05 * noise.to(weight.dtype))
            else:
                fan_in = weight.shape[-1] if weight.dim() == 2 else math.prod(weight.shape[1:-1]) or 1
                scale = 1.0 if id(weight) in tables else 1.2 / math.sqrt(max(fan_in, 1))
                weight.copy_(scale * noise.to(weight.dtype))
    return model.eval().float()
