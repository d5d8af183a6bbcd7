"""The one way in which objectives are called, and what several of them need."""

from __future__ import annotations

from typing import Protocol

import torch

from pellucid.batch import Batch
from pellucid.errors import ConfigError, InputError


class Objective(Protocol):
    """Says what a batch has to predict; ``dice`` is all that it draws from."""

    def __call__(self, batch: Batch, generator: torch.Generator | None = None, /) -> Batch: ...


def overlap_of(objective: Objective) -> int:
    """Tokens that pieces of a long document share, so that the objective counts each thing exactly once.

    That is its attribute ``overlap``; the default is that of the next token: 1.
    """
    return int(getattr(objective, "overlap", 1))


def describe(objective: Objective) -> str:
    """Stable text that identifies an objective in the state of a loader."""
    if hasattr(objective, "__dataclass_fields__"):
        return repr(objective)
    return str(getattr(objective, "__qualname__", type(objective).__qualname__))


def require_generator(generator: torch.Generator | None, what: str) -> torch.Generator:
    """``dice``, which drawing needs."""
    if generator is None:
        raise InputError(f"{what} draws at random, but no dice were given; call it with a torch.Generator")
    return generator


def refuse_share(name: str, share: float) -> None:
    """A share lies in (0, 1]."""
    if not 0 < share <= 1:
        raise ConfigError(f"{name} is {share!r}; give a share above 0 and at most 1")
