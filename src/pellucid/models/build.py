"""From a config to a model with first weights: its parts, where they go, and how they start."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pellucid.errors import ConfigError, one_line
from pellucid.models import builders, configs, heads
from pellucid.models.config import LayerConfig, ModelConfig, TransformerConfig
from pellucid.models.model import Decoder, Encoder, EncoderDecoder, Model
from pellucid.nn import block as blocks
from pellucid.nn import init
from pellucid.nn.attend import Backend
from pellucid.nn.embedding import TokenEmbedding
from pellucid.nn.positions import TokenTypeEmbedding
from pellucid.visibility import parse

_BLOCKS: dict[str, type[blocks.Block]] = {
    "pre": blocks.PreNormBlock,
    "post": blocks.PostNormBlock,
    "deep": blocks.DeepNormBlock,
    "sandwich": blocks.SandwichBlock,
    "reordered": blocks.SandwichBlock,
    "parallel": blocks.ParallelBlock,
    "parallel_two": blocks.ParallelTwoNormBlock,
}
_UNUSABLE = (RuntimeError, AssertionError, ImportError, AttributeError, TypeError, ValueError)


def build(
    config: ModelConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    backend: Backend = "auto",
) -> Model:
    """A new model in eval mode, its weights drawn from ``seed``; the global random state is not touched.

    ``backend`` names the attention kernel for every layer; it changes speed, never results. On the ``meta`` device
    no memory is used and no weights are drawn.

    Raises:
        ConfigError: a config, seed, dtype or device that cannot be used.
    """
    if not isinstance(config, ModelConfig):
        raise ConfigError(
            f"build takes a ModelConfig, not {type(config).__name__}; make one with ModelConfig(**mapping)"
        )
    _check(seed, dtype, device)
    with torch.device("meta"):
        model = _assemble(config, backend)
    if torch.device(device).type != "meta":
        model.to_empty(device=device)
        _init_weights(model, config, seed)
    if config.tie_word_embeddings:
        model.head.weight = model.embed_tokens.weight
    return model.to(dtype).eval()


def why_unusable(device: torch.device | str) -> str:
    """Why no tensor can be put on ``device`` and computed with, on one line; empty where one can."""
    try:
        torch.zeros(1, device=device).add_(1).item()
    except _UNUSABLE as error:
        return one_line(error, 200).split(". ")[0]
    return ""


def _check(seed: object, dtype: object, device: torch.device | str) -> None:
    if type(seed) is not int or not 0 <= seed < 1 << 63:
        raise ConfigError(f"seed is {str(seed)[:40]!r}, but a whole number from 0 to 2^63 - 1 is needed")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(
            f"dtype is {str(dtype)[:40]!r}, but weights are floating-point; give torch.float32, for example"
        )
    if str(device).split(":")[0] != "meta" and (reason := why_unusable(device)):  # nothing is computed on meta
        raise ConfigError(f"device is {str(device)[:40]!r}, which cannot be used here ({reason}); choose cpu")


def _assemble(config: ModelConfig, backend: Backend) -> Model:
    """The model without weights; the token table and the head are tied once they have memory."""
    table = TokenEmbedding(config.vocab_size, config.embedding_size or config.hidden_size)
    stack = _stack_parts(config, table, backend, config)
    head = _head(config)
    if config.family == "encoder":
        return Encoder(config, head=head, **stack)
    if config.encoder is None:
        return Decoder(config, head=head, **stack)
    source = table
    if config.source_vocab_size is not None:
        source = TokenEmbedding(config.source_vocab_size, config.embedding_size or config.encoder.hidden_size)
    encoder = Encoder(config.encoder, head=None, **_stack_parts(config.encoder, source, backend, config))
    return EncoderDecoder(config, head=head, encoder=encoder, **stack)


def _stack_parts(
    stack: TransformerConfig, table: TokenEmbedding, backend: Backend, config: ModelConfig
) -> dict[str, Any]:
    """The parts of an encoder or a decoder, by the names of :class:`Model`."""
    size, layers = stack.hidden_size, stack.each_layer
    made: list[nn.Module] = []
    for layer in layers:
        made.append(_block(stack, layer, backend, config) if layer.same_as is None else made[layer.same_as])
    biases, bias_of = _position_biases(stack)
    widens = table.embedding_dim != size
    return {
        "embed_tokens": table,
        "embed_project": nn.Linear(table.embedding_dim, size, bias=False) if widens else nn.Identity(),
        "token_types": None if stack.type_vocab_size is None else TokenTypeEmbedding(stack.type_vocab_size, size),
        "positions": builders.entry_positions(stack.position, size),
        "embedding_norm": builders.norm(stack.norm, size) if stack.embedding_norm else nn.Identity(),
        "position_biases": biases,
        "bias_of": bias_of,
        "layers": made,
        "norm": builders.norm(stack.norm, size) if made[-1].needs_final_norm else nn.Identity(),
    }


def _position_biases(stack: TransformerConfig) -> tuple[list[nn.Module], list[int | None]]:
    """The position biases, and the number of each layer's; layers with equal configs share one where they may."""
    biases: list[nn.Module] = []
    owners: dict[object, int] = {}
    bias_of: list[int | None] = []
    for number, layer in enumerate(stack.each_layer):
        position = layer.position or stack.position
        own = isinstance(position, configs.RelativeBiasConfig) and not position.shared
        key = (position, (number if layer.same_as is None else layer.same_as) if own else None)
        if key not in owners and (bias := builders.bias(stack.attention, position)) is not None:
            owners[key] = len(biases)
            biases.append(bias)
        bias_of.append(owners.get(key))
    return biases, bias_of


def _block(stack: TransformerConfig, layer: LayerConfig, backend: Backend, config: ModelConfig) -> nn.Module:
    size, dropout, kind = stack.hidden_size, stack.dropout, _BLOCKS[stack.norm_placement]
    parts: dict[str, Any] = {
        "attention": builders.attention(
            stack.attention,
            size,
            rule=parse(layer.rule),
            position=layer.position or stack.position,
            stack_norm=stack.norm,
            dropout=dropout.attention,
            backend=backend,
        ),
        "ffn": builders.ffn(layer.ffn or stack.ffn, size, dropout.ffn),
        "dropout": dropout.residual,
        "residual_multiplier": stack.residual_multiplier,
        "residual_dtype": None if stack.residual_dtype is None else torch.float32,
    }
    names = kind.norm_names
    if stack is config and config.cross_attention is not None and config.encoder is not None:
        names += kind.cross_norm_names
        parts["cross_attention"] = builders.cross_attention(
            config.cross_attention,
            size,
            encoder_hidden_size=config.encoder.hidden_size,
            dropout=dropout.attention,
            backend=backend,
        )
    for name in names:
        absent = stack.norm_placement == "reordered" and not name.endswith("_post_norm")
        parts[name] = nn.Identity() if absent else builders.norm(stack.norm, size)
    if stack.norm_placement == "deep":
        parts["alpha"] = _deep_norm(config, stack).alpha
    return kind(**parts)


def _head(config: ModelConfig) -> heads.Head:
    """The head of a model, without weights."""
    head, size = config.head, config.hidden_size
    tokens: dict[str, Any] = {
        "bias": config.head_bias,
        "embedding_size": config.embedding_size,
        "logit_multiplier": config.logit_multiplier,
        "softcap": config.final_logit_softcapping,
    }
    fields = head.model_dump(exclude={"kind"})
    match head:
        case configs.LanguageModelHeadConfig():
            return heads.LanguageModelHead(size, config.vocab_size, **tokens)
        case configs.MaskedLMHeadConfig():
            norm = builders.norm(config.norm, config.embedding_size or size)
            return heads.MaskedLMHead(size, config.vocab_size, norm=norm, **fields, **tokens)
        case configs.TokenClassificationHeadConfig():
            return heads.TokenClassifier(size, **fields)
        case configs.SpanHeadConfig():
            return heads.SpanHead(size)
        case configs.SentenceEmbeddingHeadConfig():
            return heads.EmbeddingHead(size, **fields)
        case configs.RegressionHeadConfig():
            return heads.RegressionHead(size, **fields)
    return heads.SequenceClassifier(size, **fields)


def _deep_norm(config: ModelConfig, stack: TransformerConfig) -> init.DeepNormConstants:
    layers = len(stack.layers)
    if config.encoder is None:
        return init.deep_norm_constants(layers)
    if stack is config:
        return init.deep_norm_constants(layers, part="decoder")
    return init.deep_norm_constants(layers, part="encoder", num_decoder_layers=len(config.layers))


def _init_weights(model: Model, config: ModelConfig, seed: int) -> None:
    """First values of every parameter and buffer, drawn on the model's device from ``seed``."""
    generator = torch.Generator(device=model.device).manual_seed(seed)
    init.init_norms(model)
    _init_stack(model, config, config, generator)
    if isinstance(model, EncoderDecoder):
        assert config.encoder is not None
        _init_stack(model.encoder, config.encoder, config, generator)
        if model.encoder.embed_tokens is model.embed_tokens:
            _init_stack(model.embed_tokens, config, config, generator)  # a shared table starts as the decoder's
    for part in reversed(model.stacks):
        init.init_positions(part, std=part.config.initializer_range or 0.02, generator=generator)


def _init_stack(model: nn.Module, stack: TransformerConfig, config: ModelConfig, generator: torch.Generator) -> None:
    """First weights of one stack by its norm placement."""
    words: dict[str, Any] = {"std": stack.initializer_range, "generator": generator}
    scaled = words | {"num_layers": len(stack.layers), "residual_init": stack.residual_init}
    match stack.norm_placement:
        case "pre" | "parallel" | "parallel_two":
            branches = 3 if stack is config and config.encoder is not None else 2
            init.init_pre_norm(model, branches=branches, **scaled)
        case "sandwich" | "reordered":
            init.init_sandwich(model, **words)
        case "post":
            init.init_post_norm(model, generator=generator)
        case "deep":
            init.init_deep_norm(model, beta=_deep_norm(config, stack).beta, generator=generator)
