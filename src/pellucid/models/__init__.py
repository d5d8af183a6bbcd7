"""Where config meets parts: a config in, a model out."""

from pellucid.models.build import build
from pellucid.models.config import ModelConfig
from pellucid.models.decoder import Decoder
from pellucid.models.encoder import Encoder
from pellucid.models.encoder_decoder import EncoderDecoder
from pellucid.models.model import Model
from pellucid.models.output import Output

__all__ = ["Decoder", "Encoder", "EncoderDecoder", "Model", "ModelConfig", "Output", "build"]
