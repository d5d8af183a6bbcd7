"""From a config to a model without weights: which parts there are, and where they go."""

from __future__ import annotations

from typing import Any

from torch import nn

from pellucid.models import builders, configs
from pellucid.models.config import LayerConfig, ModelConfig, TransformerConfig
from pellucid.models.decoder import Decoder
from pellucid.models.encoder import Encoder
from pellucid.models.encoder_decoder import EncoderDecoder
from pellucid.models.heads import (
    EmbeddingHead,
    Head,
    LanguageModelHead,
    MaskedLMHead,
    RegressionHead,
    SequenceClassifier,
    SpanHead,
    TokenClassifier,
)
from pellucid.models.model import Model
from pellucid.nn import block as blocks
from pellucid.nn.attend import Backend
from pellucid.nn.embedding import TokenEmbedding
from pellucid.nn.ffn import Activation
from pellucid.nn.init import deep_norm_constants
from pellucid.nn.parallel_block import ParallelBlock, ParallelTwoNormBlock
from pellucid.nn.positions import TokenTypeEmbedding
from pellucid.visibility import parse

_BLOCKS: dict[str, type[nn.Module]] = {
    "pre": blocks.PreNormBlock,
    "post": blocks.PostNormBlock,
    "deep": blocks.DeepNormBlock,
    "sandwich": blocks.SandwichBlock,
    "reordered": blocks.SandwichBlock,
    "parallel": ParallelBlock,
    "parallel_two": ParallelTwoNormBlock,
}


def assembled(config: ModelConfig, backend: Backend) -> Model:
    """The model that ``config`` describes. What is tied is made one by :func:`tie`, once it has memory."""
    table = TokenEmbedding(config.vocab_size, config.embedding_size or config.hidden_size)
    stack = _stack_parts(config, table, backend, config)
    head = _head(config)
    match config.family:
        case "encoder":
            return Encoder(config, head=head, **stack)
        case "decoder":
            return Decoder(config, head=head, **stack)
    return EncoderDecoder(config, head=head, encoder=_encoder(config, table, backend), **stack)


def tie(model: Model, config: ModelConfig) -> None:
    """Let the token table give the logits too, where the config says so."""
    if config.tie_word_embeddings:
        model.head.weight = model.embed_tokens.weight


def _encoder(config: ModelConfig, shared: TokenEmbedding, backend: Backend) -> Encoder:
    assert config.encoder is not None
    stack, table = config.encoder, shared
    if config.source_vocab_size is not None:
        table = TokenEmbedding(config.source_vocab_size, config.embedding_size or stack.hidden_size)
    return Encoder(stack, head=None, **_stack_parts(stack, table, backend, config))


def _stack_parts(
    stack: TransformerConfig, table: TokenEmbedding, backend: Backend, config: ModelConfig
) -> dict[str, Any]:
    """What every family has, by the names of :class:`Model`."""
    size, layers = stack.hidden_size, stack.each_layer
    made: list[nn.Module] = []
    for layer in layers:
        made.append(_block(stack, layer, backend, config) if layer.same_as is None else made[layer.same_as])
    biases, bias_of = _position_biases(stack)
    has_final_norm = made[-1].needs_final_norm
    return {
        "embed_tokens": table,
        "embed_project": (
            nn.Identity() if table.embedding_dim == size else nn.Linear(table.embedding_dim, size, bias=False)
        ),
        "token_types": None if stack.type_vocab_size is None else TokenTypeEmbedding(stack.type_vocab_size, size),
        "positions": builders.entry_positions(stack),
        "embedding_norm": builders.norm(stack.norm, size) if stack.embedding_norm else nn.Identity(),
        "position_biases": biases,
        "bias_of": bias_of,
        "layers": made,
        "norm": builders.norm(stack.norm, size) if has_final_norm else nn.Identity(),
    }


def _position_biases(stack: TransformerConfig) -> tuple[list[nn.Module], list[int | None]]:
    """The biases of scores, and which of them each layer has; layers with equal words share one where they may."""
    biases: list[nn.Module] = []
    owners: dict[object, int] = {}
    bias_of: list[int | None] = []
    for number, layer in enumerate(stack.each_layer):
        word = layer.position or stack.position
        apart = isinstance(word, configs.RelativeBiasConfig) and not word.shared
        key = (word, (number if layer.same_as is None else layer.same_as) if apart else None)
        if key not in owners and (bias := builders.bias(stack.attention, word)) is not None:
            owners[key] = len(biases)
            biases.append(bias)
        bias_of.append(owners.get(key))
    return biases, bias_of


def _block(stack: TransformerConfig, layer: LayerConfig, backend: Backend, config: ModelConfig) -> Any:
    placement, size = stack.norm_placement, stack.hidden_size
    said: dict[str, Any] = {
        "attention": builders.attention(stack, parse(layer.rule), layer.position or stack.position, backend),
        "ffn": builders.ffn(layer.ffn or stack.ffn, size, stack.dropout.ffn),
        "dropout": stack.dropout.residual,
        "residual_multiplier": stack.residual_multiplier,
        "residual_dtype": builders.residual_dtype(stack.residual_dtype),
    }
    said |= {name: builders.norm(stack.norm, size) for name in _norms(placement, "attn", "ffn")}
    if stack is config and config.cross_attention is not None and config.encoder is not None:
        encoder_hidden_size = config.encoder.hidden_size
        said["cross_attention"] = builders.cross_attention(config.cross_attention, stack, encoder_hidden_size, backend)
        said |= {name: builders.norm(stack.norm, size) for name in _norms(placement, "cross")}
    if placement == "reordered":
        said |= {
            name: nn.Identity() for name in _norms("pre", "attn", "ffn", "cross") if f"{name[:-5]}_post_norm" in said
        }
    if placement == "deep":
        said["alpha"] = deep_norm(config, stack)[0]
    return _BLOCKS[placement](**said)


def _norms(placement: str, *branches: str) -> list[str]:
    """The names of a block's norms."""
    match placement:
        case "parallel":
            return ["norm"]
        case "sandwich":
            return [f"{branch}{role}_norm" for branch in branches for role in ("", "_post")]
        case "reordered":
            return [f"{branch}_post_norm" for branch in branches]
    return [f"{branch}_norm" for branch in branches]


def deep_norm(config: ModelConfig, stack: TransformerConfig) -> tuple[float, float]:
    """DeepNorm's α and β for one stack of the model."""
    if config.encoder is None:
        return deep_norm_constants(len(stack.layers))
    if stack is config:
        return deep_norm_constants(len(stack.layers), part="decoder")
    return deep_norm_constants(len(stack.layers), part="encoder", decoder_layers=len(config.layers))


def _head(config: ModelConfig) -> Head:
    word, size = config.head, config.hidden_size
    tokens: dict[str, Any] = {
        "bias": config.head_bias,
        "embedding_size": config.embedding_size,
        "logit_multiplier": config.logit_multiplier,
        "softcap": config.final_logit_softcapping,
    }
    match word:
        case configs.LanguageModelHeadConfig():
            return LanguageModelHead(size, config.vocab_size, **tokens)
        case configs.MaskedLMHeadConfig(activation=name, dense_bias=bias):
            norm = builders.norm(config.norm, config.embedding_size or size)
            act = Activation(name)
            return MaskedLMHead(size, config.vocab_size, activation=act, dense_bias=bias, norm=norm, **tokens)
        case configs.TokenClassificationHeadConfig(num_labels=labels, bias=bias, dropout=dropout):
            return TokenClassifier(size, labels, bias=bias, dropout=dropout)
        case configs.SpanHeadConfig():
            return SpanHead(size)
        case configs.SentenceEmbeddingHeadConfig():
            return EmbeddingHead(
                size,
                pooling=word.pooling,
                projection_dim=word.projection_dim,
                normalize=word.normalize,
                temperature=word.temperature,
            )
    pool: dict[str, Any] = {"pooling": word.pooling, "pooler": _pooler(word.pooler), "dropout": word.dropout}
    if isinstance(word, configs.RegressionHeadConfig):
        return RegressionHead(size, word.num_outputs, **pool)
    return SequenceClassifier(size, word.num_labels, bias=word.bias, **pool)


def _pooler(name: str) -> nn.Module | None:
    return None if name == "none" else Activation(name)
