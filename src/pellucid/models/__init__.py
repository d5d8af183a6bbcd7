"""Where config meets parts: a config in, a model out."""

from pellucid.models.build import build
from pellucid.models.config import ModelConfig
from pellucid.models.decoder import Decoder, Output

__all__ = ["Decoder", "ModelConfig", "Output", "build"]
