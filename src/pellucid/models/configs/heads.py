"""Configs of output heads: over tokens, or over whole documents."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pellucid.configfile import Config
from pellucid.models.configs.layers import ActivationName, Count, Positive, Probability

Pooling = Literal["first", "mean", "last"]
"""Which tokens speak for a document: the first, the mean of all, or the last (never padding)."""


class LanguageModelHeadConfig(Config):
    """A logit for each token of the vocabulary."""

    kind: Literal["language_model"] = "language_model"


class MaskedLMHeadConfig(Config):
    """The same behind a dense layer, an activation and a norm (Devlin et al. 2019)."""

    kind: Literal["masked_lm"] = "masked_lm"
    activation: ActivationName = "gelu"
    dense_bias: bool = True


class SequenceClassificationHeadConfig(Config):
    """One of ``num_labels`` classes for each document."""

    kind: Literal["sequence_classification"] = "sequence_classification"
    num_labels: Annotated[Count, Field(ge=2)]
    pooling: Pooling
    """Defaults to the first token in an encoder, the last in a decoder."""
    pooler: Literal["none", "tanh", "gelu", "relu"] = "none"
    """A dense layer with this activation between pooling and classes (``tanh``: BERT)."""
    dropout: Probability = 0.0
    bias: bool = True


class TokenClassificationHeadConfig(Config):
    """One of ``num_labels`` classes for each token."""

    kind: Literal["token_classification"] = "token_classification"
    num_labels: Annotated[Count, Field(ge=2)]
    dropout: Probability = 0.0
    bias: bool = True


class SpanHeadConfig(Config):
    """Where an answer begins and ends, among the tokens of its document."""

    kind: Literal["span"] = "span"


class RegressionHeadConfig(Config):
    """``num_outputs`` numbers for each document."""

    kind: Literal["regression"] = "regression"
    num_outputs: Count = 1
    pooling: Pooling
    """Defaults to the first token in an encoder, the last in a decoder."""
    pooler: Literal["none", "tanh", "gelu", "relu"] = "none"
    dropout: Probability = 0.0


class SentenceEmbeddingHeadConfig(Config):
    """A vector for each document, near those of its pair and far from all others."""

    kind: Literal["sentence_embedding"] = "sentence_embedding"
    pooling: Pooling = "mean"
    projection_dim: Count | None = None
    """Features of the vector; None: those of the stream, without a matrix."""
    normalize: bool = True
    """Vectors of length 1."""
    temperature: Positive = 0.05
    """Similarities are divided by this in the contrastive loss."""


HeadConfig = Annotated[
    LanguageModelHeadConfig
    | MaskedLMHeadConfig
    | SequenceClassificationHeadConfig
    | TokenClassificationHeadConfig
    | SpanHeadConfig
    | RegressionHeadConfig
    | SentenceEmbeddingHeadConfig,
    Field(discriminator="kind"),
]
VOCABULARY = (LanguageModelHeadConfig, MaskedLMHeadConfig)
"""Heads that give a logit for each token of the vocabulary."""
