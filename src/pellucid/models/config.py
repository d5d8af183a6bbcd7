"""What a model is, in words: one frozen value that says everything its forward pass needs.

Parts are unions told apart by ``kind``, not flags; a key that is not known is an error. Short forms are written out
when a config is made (:mod:`~pellucid.models.defaults`), so that a stored one says everything.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pellucid.configfile import Config, apply_overrides
from pellucid.models import defaults, presets, validate
from pellucid.models.configs import (
    Count,
    FFNConfig,
    GroupedQueryAttentionConfig,
    HeadConfig,
    LayerPositionConfig,
    LearnedPositionsConfig,
    MLAConfig,
    NormConfig,
    PositionConfig,
    Positive,
    Probability,
    RMSNormConfig,
)
from pellucid.visibility import Rule, parse

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

    ``layers`` lists one visibility rule a layer, or a :class:`LayerConfig`; ``num_hidden_layers: 6`` (with ``rule: causal``,
    if you like) is short for six equal entries.
    """

    hidden_size: Count
    layers: tuple[str | LayerConfig, ...] = Field(min_length=1, max_length=defaults.MOST_LAYERS)
    attention: Annotated[GroupedQueryAttentionConfig | MLAConfig, Field(discriminator="kind")]
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
        validate.check_stack(self)
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
        if path in presets.names():
            return cls.from_mapping(apply_overrides({"preset": path}, overrides))
        return super().from_file(path, overrides)

    @property
    def stacks(self) -> tuple[TransformerConfig, ...]:
        """What there is of an encoder and a decoder, in the order in which they run."""
        return (self,) if self.encoder is None else (self.encoder, self)

    @model_validator(mode="before")
    @classmethod
    def _spell_out(cls, data: Any) -> Any:
        return defaults.spelled_out(dict(data)) if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def _family_fits(self) -> ModelConfig:
        validate.check_model(self)
        return self
