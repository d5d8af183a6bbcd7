"""The config of a model: one frozen value with everything that its forward pass needs.

Parts are unions told apart by ``kind``, not flags; a key that is not known is an error. Short forms are written out
when a config is made (:mod:`~pellucid.models.defaults`), so that a stored one is complete.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator

from pellucid.configfile import Config, apply_overrides
from pellucid.errors import PellucidError
from pellucid.models import builders, defaults
from pellucid.models.configs import (
    VOCABULARY,
    AttentionConfig,
    Count,
    FFNConfig,
    GroupedQueryAttentionConfig,
    HeadConfig,
    LayerPositionConfig,
    LearnedPositionsConfig,
    MaskedLMHeadConfig,
    MLAConfig,
    NormConfig,
    PositionConfig,
    Positive,
    Probability,
    RMSNormConfig,
    RopeConfig,
    SinusoidalPositionsConfig,
)
from pellucid.visibility import Rule, parse

_SCALED = ("pre", "parallel", "parallel_two")
_DRAWN = (*_SCALED, "sandwich", "reordered")

Placement = Literal["pre", "post", "deep", "sandwich", "reordered", "parallel", "parallel_two"]


class LayerConfig(Config):
    """One layer: its visibility rule, and what it does otherwise than its neighbours."""

    rule: str
    position: LayerPositionConfig | None = None
    """Instead of the stack's own ``position`` (two bases by layer, layers without positions)."""
    ffn: FFNConfig | None = None
    """Instead of the stack's own ``ffn`` (first layers dense, others experts)."""
    same_as: Annotated[int, Field(ge=0, lt=defaults.MOST_LAYERS)] | None = None
    """The number of an earlier layer whose weights this one uses (ALBERT)."""


class DropoutConfig(Config):
    """The probability at each of the four places where something may be dropped in training."""

    embedding: Probability = 0.0
    attention: Probability = 0.0
    residual: Probability = 0.0
    ffn: Probability = 0.0


class TransformerConfig(Config):
    """Embeddings, layers and a final norm: what an encoder or a decoder is made of.

    ``layers`` lists one visibility rule a layer, or a :class:`LayerConfig`; ``num_hidden_layers: 6``, with or
    without ``rule: causal``, is short for six equal entries.
    """

    hidden_size: Count
    layers: tuple[str | LayerConfig, ...] = Field(min_length=1, max_length=defaults.MOST_LAYERS)
    attention: AttentionConfig
    ffn: FFNConfig
    position: PositionConfig
    """Defaults to rotary positions of base 10000."""
    norm: NormConfig = RMSNormConfig()
    norm_placement: Placement = "pre"
    """``deep``: DeepNorm. ``sandwich``: before and behind each branch; ``reordered``: behind alone (OLMo 2).
    ``parallel``: attention and feed-forward side by side from one norm, ``parallel_two``: from one each."""
    residual_multiplier: Positive = 1.0
    """What each branch is multiplied by before it joins the stream (Granite)."""
    residual_dtype: Literal["float32"] | None = None
    """The type of the stream, whatever that of the weights; None: the weights' own."""
    embedding_multiplier: Positive = 1.0
    """What token embeddings are multiplied by; ``sqrt`` is short for the root of ``hidden_size``."""
    embedding_norm: bool = False
    """The norm once more, on what enters the first layer (BERT, BLOOM)."""
    type_vocab_size: Count | None = None
    """How many types of tokens have a vector of their own, added on entry (BERT's two)."""
    max_position_embeddings: Count | None = None
    """Longer documents are refused; None: as long as the positions go, extrapolating where they can."""
    dropout: DropoutConfig = DropoutConfig()
    initializer_range: Positive | None = None
    """Standard deviation of first weights; None: ``1/sqrt(fan_in)`` for matrices, 0.02 for tables."""
    residual_init: Literal["scaled", "zero", "plain"] = "scaled"
    """How the last matrix of each branch starts under ``pre`` and ``parallel``."""

    @model_validator(mode="after")
    def _parts_fit(self) -> TransformerConfig:
        _check_stack(self)
        return self

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The visibility rule of each layer."""
        return tuple(parse(layer.rule) for layer in self.each_layer)

    @property
    def max_length(self) -> int | None:
        """The longest document that may be read (None: any length)."""
        table = self.position.max_position_embeddings if isinstance(self.position, LearnedPositionsConfig) else None
        return min((most for most in (table, self.max_position_embeddings) if most is not None), default=None)

    @property
    def each_layer(self) -> tuple[LayerConfig, ...]:
        """The layers, those given by their rule alone too."""
        return tuple(LayerConfig(rule=layer) if isinstance(layer, str) else layer for layer in self.layers)


class ModelConfig(TransformerConfig):
    """An encoder, a decoder, or both: of a model of two stacks, the fields outside ``encoder`` are the decoder's.

    ``preset: gpt2`` begins with a config known by name (:mod:`~pellucid.models.presets`); what else is given is laid
    over it.
    """

    family: Literal["encoder", "decoder", "encoder_decoder"] = "decoder"
    vocab_size: Count
    embedding_size: Count | None = None
    """Size of the token table where it is not ``hidden_size``; matrices lead in, and out to the tokens' logits."""
    encoder: TransformerConfig | None = None
    """What the decoder reads; every field left out is the decoder's, and its rule is ``full``."""
    source_vocab_size: Count | None = None
    """Tokens of an encoder with a table of its own; None: both read the same table."""
    cross_attention: GroupedQueryAttentionConfig | None = None
    """How the decoder reads the encoder; left out, as it attends to itself."""
    head: HeadConfig
    """Defaults to a language model's, a masked one's in an encoder."""
    tie_word_embeddings: bool
    """The token table gives the logits too; defaults to true where the head has logits for tokens."""
    head_bias: bool = False
    """A bias on the tokens' logits."""
    logit_multiplier: Positive = 1.0
    """What tokens' logits are multiplied by; ``rsqrt`` is short for ``hidden_size ** -0.5`` (T5's tied table)."""
    final_logit_softcapping: Positive | None = None
    """Bends tokens' logits to ``c · tanh(logit / c)``, after the multiplier."""

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> ModelConfig:
        """The config of a YAML or JSON file, or of the preset that is called so, with overrides laid over it."""
        if path in defaults.preset_names():
            return cls.from_mapping(apply_overrides({"preset": path}, overrides))
        return super().from_file(path, overrides)

    @property
    def stacks(self) -> tuple[TransformerConfig, ...]:
        """What there is of an encoder and a decoder, in the order in which they run."""
        return (self,) if self.encoder is None else (self.encoder, self)

    @model_validator(mode="before")
    @classmethod
    def _spell_out(cls, data: Any) -> Any:
        return defaults.normalize(dict(data)) if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def _family_fits(self) -> ModelConfig:
        _check_model(self)
        return self


def _check_stack(stack: TransformerConfig) -> None:
    """Raises ValueError for the first two fields of ``stack`` that contradict each other."""
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
                f"attention 'latent' rotates its shared key, but the position of layer {number} is "
                f"{(layer.position or stack.position).kind!r}; choose rope"
            )
    for position in {stack.position, *(layer.position or stack.position for layer in layers)}:
        try:
            with torch.device("meta"):
                builders.rotary(stack.attention, position)
                builders.bias(stack.attention, position)
        except PellucidError as error:
            of = f" of {stack.attention.rotary_size_text}" if isinstance(position, RopeConfig) else ""
            raise ValueError(f"position {position.kind!r}{of}: {error}") from error


def _check_length(stack: TransformerConfig) -> None:
    table, most = stack.position, stack.max_position_embeddings
    if isinstance(table, LearnedPositionsConfig) and most is not None and most > table.max_position_embeddings:
        raise ValueError(
            f"max_position_embeddings is {most}, but position 'learned' has a table for "
            f"{table.max_position_embeddings}; make position.max_position_embeddings larger, or leave "
            "max_position_embeddings out"
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
            f"layers.{number} is the same as layers.{owner}, but its rule, position or ffn differ; make the two agree"
        )


def _check_model(config: ModelConfig) -> None:
    """Raises ValueError for the first two fields of ``config`` that contradict each other."""
    if config.family == "encoder_decoder":
        _check_pair(config)
    _check_head(config)


def _check_pair(config: ModelConfig) -> None:
    encoder = config.encoder
    if config.cross_attention is None:
        raise ValueError(
            f"attention {config.attention.kind!r} cannot read an encoder; choose how the decoder does: give "
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
        raise ValueError("cross_attention.attention_sinks is true, but cross-attention has no sinks; leave it out")


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
