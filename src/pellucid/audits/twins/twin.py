"""What a faulty twin is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from pellucid.probe import Probe
from pellucid.records import Status


@dataclass(frozen=True)
class Twin:
    """A faulty model, the check that has to catch it, and the verdict that it deserves."""

    make: Callable[[], nn.Module]
    check: str
    verdict: Status = "leak"

    @property
    def name(self) -> str:
        return getattr(self.make, "__name__", str(self.make))

    @property
    def fault(self) -> str:
        """What is wrong with it."""
        return " ".join((self.make.__doc__ or "").split())

    def probe(self) -> Probe:
        probe: Probe = self.make().probe()  # type: ignore[operator]
        return probe
