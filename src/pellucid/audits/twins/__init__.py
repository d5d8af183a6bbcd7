"""Faulty twins: each is a healthy model with one part wrong, as seen in public.

Every check has to catch its twins; ``TWINS`` says which twin belongs to which. To see an audit bite::

    audit(twins.SeesOneAhead(), checks=["future"])
"""

from __future__ import annotations

from typing import Any

from pellucid.audits.twins import caches, flow, kernels, left, masks, modes, pairs, places, stack, state, sums
from pellucid.audits.twins.twin import Twin

_MODULES = (flow, stack, pairs, sums, state, caches, places, masks, modes, left, kernels)

TWINS: tuple[Twin, ...] = tuple(twin for module in _MODULES for twin in module.TWINS)
"""Every shipped twin."""

_BY_NAME = {twin.name: twin.make for twin in TWINS}

__all__ = ["TWINS", "Twin"]


def __getattr__(name: str) -> Any:
    """Each twin's class by its name."""
    if name not in _BY_NAME:
        raise AttributeError(f"there is no twin {name!r}; there are {', '.join(sorted(_BY_NAME))}")
    return _BY_NAME[name]


def __dir__() -> list[str]:
    return sorted([*globals(), *_BY_NAME])
