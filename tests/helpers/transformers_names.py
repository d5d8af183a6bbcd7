"""Where each of our tensors is in the checkpoints of transformers' models (see :mod:`helpers.from_transformers`)."""

from typing import Any

import torch

HEADS = 4


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
    (LAYER + r"ffn\.router\.expert_bias", r"model.layers.\1.mlp.gate.e_score_correction_bias"),
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
