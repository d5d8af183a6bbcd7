"""What a tiny config needs beyond small sizes, by model type (or by kind and model type)."""

from __future__ import annotations

from typing import Any

_MIXED = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

SPECIAL: dict[Any, Any] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "layer_types": _MIXED,
        "rope_parameters": {"sliding_attention": _ROPE | {"mrope_section": [1, 1, 2]}, "full_attention": None},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48},
    },
    "doge": {"keep_window_size": 64},  # of keys that first weights make all alike the kept ones are arbitrary
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "emu3": _IDS,
    "esm": {"pad_token_id": 1, "mask_token_id": 118},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 4}},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": 48,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1},
    "mpnet": {"relative_attention_num_buckets": 32},
    "neomme": {"head_dim": 16},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh", "local", "lsh"]},
    "prophetnet": {"eps": 0.0, "disable_ngram_loss": True},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 64,
        "indexer_compress_ratio": 2,
        "ngram_vocab_size_base": 100,
        "split_ngram_parts": 2,
        "make_ngram_vocab_size_divisible_by": 8,
        "hc_lowrank": 8,
    },
    "xlstm": {"chunk_size": 64},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_hidden_layers": 5,
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid"],
    },
    "zamba2": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "n_mamba_heads": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    },
}
