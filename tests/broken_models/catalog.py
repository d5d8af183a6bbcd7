"""Which check has to catch which broken models."""

from __future__ import annotations

from torch import nn

from pellucid.audits.broken import BrokenModel
from pellucid.records import Status


def caught_by(check: str, *makes: type[nn.Module], verdict: Status = "leak") -> tuple[BrokenModel, ...]:
    """One entry for each class."""
    return tuple(BrokenModel(make, check, verdict) for make in makes)
