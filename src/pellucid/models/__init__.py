"""Where config meets parts: a config in, a model out."""

from pellucid.models.build import build
from pellucid.models.config import ModelConfig
from pellucid.models.model import Decoder, Encoder, EncoderDecoder, Model, Output
from pellucid.probe import Probe

__all__ = ["Decoder", "Encoder", "EncoderDecoder", "Model", "ModelConfig", "Output", "build"]


def _make_probe(model: Model) -> Probe:
    from pellucid.models.probe import probe_of

    return probe_of(model)


Model.make_probe = staticmethod(_make_probe)  # here, because probes know every family
