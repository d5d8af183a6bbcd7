"""Words for norms."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pellucid.configfile import Config
from pellucid.models.configs.numbers import Positive


class RMSNormConfig(Config):
    """Scales each token's features by their root mean square."""

    kind: Literal["rms_norm"] = "rms_norm"
    eps: Positive = 1e-6
    offset: Literal[0, 1] = 0
    """1: weights are stored as w - 1 (Gemma)."""


class LayerNormConfig(Config):
    """Centres and scales each token's features."""

    kind: Literal["layer_norm"] = "layer_norm"
    eps: Positive = 1e-5
    bias: bool = True


class BareRMSNormConfig(Config):
    """RMSNorm without weights."""

    kind: Literal["bare_rms_norm"] = "bare_rms_norm"
    eps: Positive = 1e-6


class BareLayerNormConfig(Config):
    """LayerNorm without weights (OLMo)."""

    kind: Literal["bare_layer_norm"] = "bare_layer_norm"
    eps: Positive = 1e-5


NormConfig = Annotated[
    RMSNormConfig | LayerNormConfig | BareRMSNormConfig | BareLayerNormConfig, Field(discriminator="kind")
]
