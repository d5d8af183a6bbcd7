"""Broken models, to see what an audit finds: each is a tiny healthy model with one part wrong."""

from pellucid.audits.broken.models import (
    BROKEN_MODELS,
    BrokenModel,
    CrossIsCausal,
    DropsOutInEval,
    InvertedMask,
    MeanOverPads,
    NoIsolation,
    SeesOneAhead,
    SharedCounter,
    ShiftedTwice,
    WindowLostByOneKernel,
    WindowOneTooWide,
)
from pellucid.audits.broken.tiny_decoder import TinyDecoder

__all__ = [
    "BROKEN_MODELS",
    "BrokenModel",
    "CrossIsCausal",
    "DropsOutInEval",
    "InvertedMask",
    "MeanOverPads",
    "NoIsolation",
    "SeesOneAhead",
    "SharedCounter",
    "ShiftedTwice",
    "TinyDecoder",
    "WindowLostByOneKernel",
    "WindowOneTooWide",
]
