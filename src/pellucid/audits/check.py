"""What a check is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pellucid.audits.bench import Bench
from pellucid.probe import Capability
from pellucid.records import Finding


@dataclass(frozen=True)
class Check:
    """One family of questions. ``needs`` and ``length`` say what a target must offer to be asked at all."""

    name: str
    asks: str
    run: Callable[[Bench], Iterator[Finding]]
    needs: frozenset[Capability] = frozenset()
    length: int = 9
