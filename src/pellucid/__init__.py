"""Pellucid: Transformers in which who may see whom is written once, obeyed everywhere, drawn, and proved.

The names below are loaded when they are first used, so that ``import pellucid`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pellucid.audits import audit
    from pellucid.checkpoints import load, save
    from pellucid.data import Batch, Tokenizer
    from pellucid.generation import generate
    from pellucid.models import ModelConfig, build
    from pellucid.training import TrainConfig, train

_HOMES = {
    "Batch": "pellucid.data",
    "ModelConfig": "pellucid.models",
    "Tokenizer": "pellucid.data",
    "TrainConfig": "pellucid.training",
    "audit": "pellucid.audits",
    "build": "pellucid.models",
    "generate": "pellucid.generation",
    "load": "pellucid.checkpoints",
    "save": "pellucid.checkpoints",
    "train": "pellucid.training",
}

__all__ = [
    "Batch",
    "ModelConfig",
    "Tokenizer",
    "TrainConfig",
    "audit",
    "build",
    "generate",
    "load",
    "save",
    "train",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pellucid' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
