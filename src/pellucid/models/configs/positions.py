"""Words for where a token is: on entry, by turning queries and keys, or as a bias of scores."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pellucid.configfile import Config
from pellucid.models.configs.numbers import Count, Positive, Whole

Divisors = Annotated[tuple[Positive, ...], Field(min_length=1, max_length=4096)]

Factor = Annotated[float, Field(ge=1)]
"""How many times the trained length is wanted."""


class Linear(Config):
    """Positions divided by ``factor``."""

    kind: Literal["linear"] = "linear"
    factor: Factor


class DynamicNTK(Config):
    """A base that grows with each document past the original length."""

    kind: Literal["dynamic_ntk"] = "dynamic_ntk"
    factor: Factor
    original_length: Count


class Llama3(Config):
    """Slow pairs are slowed by ``factor``, fast ones kept, those between blended (Llama 3.1)."""

    kind: Literal["llama3"] = "llama3"
    factor: Factor
    original_length: Count
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0

    @model_validator(mode="after")
    def _bounds_fit(self) -> Llama3:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor is {self.high_freq_factor} and low_freq_factor {self.low_freq_factor}; "
                "the high one must be larger"
            )
        return self


class Yarn(Config):
    """YaRN (Peng et al. 2023), with its factor on cosines and sines and DeepSeek's on scores."""

    kind: Literal["yarn"] = "yarn"
    factor: Factor
    original_length: Count
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    attention_factor: Positive | None = None
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None
    truncate: bool = True


class LongRope(Config):
    """One divisor a pair: ``short`` up to the original length, ``long`` past it (Phi 3)."""

    kind: Literal["longrope"] = "longrope"
    short: Divisors
    long: Divisors
    original_length: Count
    attention_factor: Positive | tuple[Positive, Positive] | None = None
    factor: Positive | None = None


class Proportional(Config):
    """Only the first ``share`` of all pairs turn (Gemma 4)."""

    kind: Literal["proportional"] = "proportional"
    share: Annotated[float, Field(gt=0, le=1)]
    factor: Positive = 1.0


Scaling = Annotated[
    Linear | DynamicNTK | Llama3 | Yarn | LongRope | Proportional,
    Field(discriminator="kind"),
]


class Rope(Config):
    """Rotary positions on queries and keys."""

    kind: Literal["rope"] = "rope"
    theta: Positive = 10000.0
    pairing: Literal["half", "interleaved"] = "half"
    rotary_dim: Count | None = None
    """Features of a head that are turned, from the first; None: all."""
    scaling: Scaling | None = None


class Learned(Config):
    """A learned table; sequences longer than it are refused."""

    kind: Literal["learned"] = "learned"
    max_positions: Count
    offset: Whole = 0
    """Rows of the table in front of position 0 (2 in BART and OPT, the padding id + 1 in RoBERTa)."""


class Sinusoidal(Config):
    """Fixed sines and cosines, added on entry."""

    kind: Literal["sinusoidal"] = "sinusoidal"
    base: Positive = 10000.0
    layout: Literal["interleaved", "half", "tensor2tensor"] = "interleaved"
    offset: Whole = 0


class RelativeBias(Config):
    """A learned bias a head for each bucket of distances (T5)."""

    kind: Literal["relative_bias"] = "relative_bias"
    num_buckets: Annotated[int, Field(ge=2, le=512)] = 32
    max_distance: Count = 128
    bidirectional: bool
    """Half of the buckets are for keys ahead; defaults to true in an encoder, false in a decoder."""
    shared: bool = True
    """One table for all layers, or one each."""


class Alibi(Config):
    """A fixed slope a head on the distance (Press et al. 2022)."""

    kind: Literal["alibi"] = "alibi"
    max_exponent: Positive = 8.0


class NoPosition(Config):
    """No position signal at all."""

    kind: Literal["none"] = "none"


Position = Annotated[
    Rope | Learned | Sinusoidal | RelativeBias | Alibi | NoPosition,
    Field(discriminator="kind"),
]
LayerPosition = Annotated[Rope | RelativeBias | Alibi | NoPosition, Field(discriminator="kind")]
