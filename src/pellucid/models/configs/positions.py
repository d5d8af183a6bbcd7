"""Configs of positions: added on entry, rotating queries and keys, or as a bias of scores."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pellucid.configfile import Config
from pellucid.models.configs.layers import Count, Positive, Whole

Divisors = Annotated[tuple[Positive, ...], Field(min_length=1, max_length=4096)]

Factor = Annotated[float, Field(ge=1)]
"""The wanted length divided by the trained one."""


class LinearScalingConfig(Config):
    """Positions divided by ``factor``."""

    kind: Literal["linear"] = "linear"
    factor: Factor


class DynamicNTKScalingConfig(Config):
    """A base that grows with each document past the original length."""

    kind: Literal["dynamic"] = "dynamic"
    factor: Factor
    original_max_position_embeddings: Count


class Llama3ScalingConfig(Config):
    """Slow pairs are slowed by ``factor``, fast ones unchanged, those between blended (Llama 3.1)."""

    kind: Literal["llama3"] = "llama3"
    factor: Factor
    original_max_position_embeddings: Count
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0

    @model_validator(mode="after")
    def _bounds_fit(self) -> Llama3ScalingConfig:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor is {self.high_freq_factor} and low_freq_factor {self.low_freq_factor}; "
                "the high one must be larger"
            )
        return self


class YarnScalingConfig(Config):
    """YaRN (Peng et al. 2023), with its factor on cosines and sines and DeepSeek's on scores."""

    kind: Literal["yarn"] = "yarn"
    factor: Factor
    original_max_position_embeddings: Count
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    attention_factor: Positive | None = None
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None
    truncate: bool = True


class LongRopeScalingConfig(Config):
    """One divisor a pair: ``short_factor`` up to the original length, ``long_factor`` past it (Phi 3)."""

    kind: Literal["longrope"] = "longrope"
    short_factor: Divisors
    long_factor: Divisors
    original_max_position_embeddings: Count
    attention_factor: Positive | tuple[Positive, Positive] | None = None
    factor: Positive | None = None


class PartialScalingConfig(Config):
    """Only the first ``partial_rotary_factor`` of all pairs rotate (Gemma 4)."""

    kind: Literal["proportional"] = "proportional"
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)]
    factor: Positive = 1.0


RopeScalingConfig = Annotated[
    LinearScalingConfig
    | DynamicNTKScalingConfig
    | Llama3ScalingConfig
    | YarnScalingConfig
    | LongRopeScalingConfig
    | PartialScalingConfig,
    Field(discriminator="kind"),
]


class RopeConfig(Config):
    """Rotary positions on queries and keys."""

    kind: Literal["rope"] = "rope"
    rope_theta: Positive = 10000.0
    interleaved: bool = False
    """Features (2i, 2i + 1) are rotated together (GPT-J, the paper) instead of (i, i + rotary_dim / 2) (Llama)."""
    rotary_dim: Count | None = None
    """Features of a head that are rotated, from the first; None: all."""
    scaling: RopeScalingConfig | None = None


class LearnedPositionsConfig(Config):
    """A learned table; sequences longer than it are refused."""

    kind: Literal["learned"] = "learned"
    max_position_embeddings: Count
    offset: Whole = 0
    """Rows of the table in front of position 0 (2 in BART and OPT, the padding id + 1 in RoBERTa)."""


class SinusoidalPositionsConfig(Config):
    """Fixed sines and cosines, added on entry."""

    kind: Literal["sinusoidal"] = "sinusoidal"
    base: Positive = 10000.0
    layout: Literal["interleaved", "half", "tensor2tensor"] = "interleaved"
    offset: Whole = 0


class RelativeBiasConfig(Config):
    """A learned bias a head for each bucket of distances (T5)."""

    kind: Literal["relative_bias"] = "relative_bias"
    num_buckets: Annotated[int, Field(ge=2, le=512)] = 32
    max_distance: Count = 128
    bidirectional: bool
    """Half of the buckets are for keys ahead; defaults to true in an encoder, false in a decoder."""
    shared: bool = True
    """One table for all layers, or one each."""


class AlibiConfig(Config):
    """A fixed slope a head on the distance (Press et al. 2022)."""

    kind: Literal["alibi"] = "alibi"
    alibi_bias_max: Positive = 8.0


class NoPositionsConfig(Config):
    """No position signal at all."""

    kind: Literal["none"] = "none"


PositionConfig = Annotated[
    RopeConfig
    | LearnedPositionsConfig
    | SinusoidalPositionsConfig
    | RelativeBiasConfig
    | AlibiConfig
    | NoPositionsConfig,
    Field(discriminator="kind"),
]
LayerPositionConfig = Annotated[
    RopeConfig | RelativeBiasConfig | AlibiConfig | NoPositionsConfig, Field(discriminator="kind")
]
