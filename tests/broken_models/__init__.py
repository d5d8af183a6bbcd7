"""All broken models: those that the package ships, and many more. Each is a healthy model with one part wrong.

Every check has to catch its broken models; ``BROKEN_MODELS`` lists which check catches which. Each class is an
attribute of this package.
"""

from __future__ import annotations

from typing import Any

from broken_models import (
    caches,
    dropout,
    encoder_decoder,
    flow,
    kernels,
    layers,
    loss,
    masks,
    positions,
    side_effects,
    train_eval,
)
from pellucid.audits.broken import BROKEN_MODELS as SHIPPED
from pellucid.audits.broken import BrokenModel

_MODULES = (
    *(flow, layers, encoder_decoder, loss, side_effects, caches, positions, masks, train_eval, dropout, kernels),
)

BROKEN_MODELS: tuple[BrokenModel, ...] = (*SHIPPED, *(broken for module in _MODULES for broken in module.BROKEN_MODELS))

_BY_NAME = {broken.name: broken.make for broken in BROKEN_MODELS}


def __getattr__(name: str) -> Any:
    """Each broken model's class by its name."""
    if name not in _BY_NAME:
        raise AttributeError(f"there is no broken model {name!r}; there are {', '.join(sorted(_BY_NAME))}")
    return _BY_NAME[name]
