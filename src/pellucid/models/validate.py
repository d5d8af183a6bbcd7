"""Whether the words of a config fit each other: what cannot be built, or would mean nothing, is refused here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from pellucid.errors import PellucidError
from pellucid.models import builders
from pellucid.models.configs import (
    VOCABULARY,
    LearnedPositionsConfig,
    MaskedLMHeadConfig,
    MLAConfig,
    RopeConfig,
    SinusoidalPositionsConfig,
)

if TYPE_CHECKING:
    from pellucid.models.config import LayerConfig, ModelConfig, TransformerConfig

_SCALED = ("pre", "parallel", "parallel_two")
_WORDS = {
    "rotated": "rotary_dim",
    "buckets": "num_buckets",
    "low": "low_freq_factor",
    "high": "high_freq_factor",
    "base": "theta",
}
_DRAWN = (*_SCALED, "sandwich", "reordered")


def check_stack(stack: TransformerConfig) -> None:
    """Raises ValueError for the first two words of ``stack`` that cannot stand together."""
    _check_first_weights(stack)
    _check_length(stack)
    on_entry = isinstance(stack.position, LearnedPositionsConfig | SinusoidalPositionsConfig)
    layers = stack.each_layer
    for number, layer in enumerate(layers):
        if layer.position is not None and on_entry:
            raise ValueError(
                f"layers.{number}.position is {layer.position.kind!r}, but position {stack.position.kind!r} is added "
                "on entry, before any layer; choose one"
            )
        if layer.same_as is not None:
            _check_shared(layers, number, layer.same_as)
        if isinstance(stack.attention, MLAConfig) and not isinstance(layer.position or stack.position, RopeConfig):
            raise ValueError(
                f"attention 'latent' turns its shared key, but the position of layer {number} is "
                f"{(layer.position or stack.position).kind!r}; choose rope"
            )
    for position in {stack.position, *(layer.position or stack.position for layer in layers)}:
        try:
            with torch.device("meta"):
                builders.rotary(stack.attention, position)
                builders.bias(stack.attention, position)
        except PellucidError as error:
            of = f" of {builders.heads_in_words(stack.attention)}" if isinstance(position, RopeConfig) else ""
            raise ValueError(f"position {position.kind!r}{of}: {_in_words(str(error))}") from error


def _in_words(error: str) -> str:
    """What a part says of its arguments, by the names that they have in a config."""
    return re.sub(r"\b(rotated|buckets|low|high|base) is (?=\S)", lambda found: f"{_WORDS[found[1]]} is ", error)


def _check_length(stack: TransformerConfig) -> None:
    table, most = stack.position, stack.max_position_embeddings
    if isinstance(table, LearnedPositionsConfig) and most is not None and most > table.max_position_embeddings:
        raise ValueError(
            f"max_position_embeddings is {most}, but position 'learned' has a table for {table.max_position_embeddings}; make "
            "position.max_position_embeddings larger, or leave max_position_embeddings out"
        )


def _check_first_weights(stack: TransformerConfig) -> None:
    placement = stack.norm_placement
    if placement not in _DRAWN and (stack.residual_init != "scaled" or stack.initializer_range is not None):
        raise ValueError(
            f"norm_placement {placement!r} starts from Xavier's scale; residual_init and initializer_range belong to "
            "'pre' and its kin: leave them out"
        )
    if placement not in _SCALED and stack.residual_init != "scaled":
        raise ValueError(
            f"residual_init is {stack.residual_init!r}, but under norm_placement {placement!r} a norm behind each "
            "branch undoes it; leave it out"
        )


def _check_shared(layers: Sequence[LayerConfig], number: int, owner: int) -> None:
    if owner >= number or layers[owner].same_as is not None:
        way = f"choose one from 0 to {number - 1} without same_as" if number else "leave it out of the first"
        raise ValueError(
            f"layers.{number}.same_as is {owner}, but must be an earlier layer with weights of its own; {way}"
        )
    if layers[owner] != layers[number].model_copy(update={"same_as": None}):
        raise ValueError(
            f"layers.{number} is the same as layers.{owner}, but says something else of its rule, position or ffn; "
            "make the two agree"
        )


def check_model(config: ModelConfig) -> None:
    """Raises ValueError for the first two words of ``config`` that cannot stand together."""
    if config.family == "encoder_decoder":
        _check_pair(config)
    _check_head(config)


def _check_pair(config: ModelConfig) -> None:
    encoder = config.encoder
    if config.cross_attention is None:
        raise ValueError(
            f"attention {config.attention.kind!r} cannot read an encoder; say how the decoder does: give "
            "cross_attention its num_attention_heads"
        )
    assert encoder is not None
    if config.norm_placement.startswith("parallel"):
        raise ValueError(
            f"norm_placement {config.norm_placement!r} has no place for cross-attention; "
            "choose pre, post, deep, sandwich or reordered"
        )
    alike = encoder.hidden_size == config.hidden_size or config.embedding_size is not None
    if config.source_vocab_size is None and not alike:
        raise ValueError(
            f"encoder.hidden_size is {encoder.hidden_size} and hidden_size {config.hidden_size}, so they cannot share "
            "a token table; give source_vocab_size, or one embedding_size for both"
        )
    if config.cross_attention.attention_sinks:
        raise ValueError(
            "cross_attention.attention_sinks is true, but memory is attended to without sinks; leave it out"
        )


def _check_head(config: ModelConfig) -> None:
    head = config.head
    if isinstance(head, MaskedLMHeadConfig) and config.family != "encoder":
        raise ValueError(
            f"head 'masked_lm' belongs to an encoder, but family is {config.family!r}; take language_model"
        )
    if config.family == "encoder_decoder" and not isinstance(head, VOCABULARY):
        raise ValueError(f"head is {head.kind!r}, but an encoder_decoder gives tokens; take language_model")
    if not isinstance(head, VOCABULARY):
        given = ["tie_word_embeddings"] if config.tie_word_embeddings else []
        given += ["head_bias"] if config.head_bias else []
        given += ["logit_multiplier"] if config.logit_multiplier != 1.0 else []
        given += ["final_logit_softcapping"] if config.final_logit_softcapping is not None else []
        if given:
            raise ValueError(f"{given[0]} is about tokens' logits, but head is {head.kind!r}; leave it out")
