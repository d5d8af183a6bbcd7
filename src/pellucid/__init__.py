"""Pellucid: Transformers in which who may see whom is written once, obeyed everywhere, drawn, and proved.

The names below are imported when they are first used, so that ``import pellucid`` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pellucid.audits import audit
    from pellucid.batch import Batch
    from pellucid.checkpoints import LoadError, MismatchError, WitnessError, load, save
    from pellucid.data import Tokenizer
    from pellucid.errors import (
        ArgumentError,
        CheckpointError,
        ConfigError,
        DataError,
        InputError,
        LengthError,
        PellucidError,
        RunError,
        ShapeError,
        StorageError,
        TrainingError,
        UnsupportedError,
    )
    from pellucid.generation import generate
    from pellucid.models import ModelConfig, build
    from pellucid.training import NotFiniteError, TrainConfig, train

_EXPORTS = {
    "pellucid.audits": ["audit"],
    "pellucid.batch": ["Batch"],
    "pellucid.checkpoints": ["LoadError", "MismatchError", "WitnessError", "load", "save"],
    "pellucid.data": ["Tokenizer"],
    "pellucid.errors": [
        "ArgumentError",
        "CheckpointError",
        "ConfigError",
        "DataError",
        "InputError",
        "LengthError",
        "PellucidError",
        "RunError",
        "ShapeError",
        "StorageError",
        "TrainingError",
        "UnsupportedError",
    ],
    "pellucid.generation": ["generate"],
    "pellucid.models": ["ModelConfig", "build"],
    "pellucid.training": ["NotFiniteError", "TrainConfig", "train"],
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = [
    "ArgumentError",
    "Batch",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "InputError",
    "LengthError",
    "LoadError",
    "MismatchError",
    "ModelConfig",
    "NotFiniteError",
    "PellucidError",
    "RunError",
    "ShapeError",
    "StorageError",
    "Tokenizer",
    "TrainConfig",
    "TrainingError",
    "UnsupportedError",
    "WitnessError",
    "audit",
    "build",
    "generate",
    "load",
    "save",
    "train",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'pellucid' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
