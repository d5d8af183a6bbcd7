"""What a check is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pellucid.audits.engine.context import AuditContext
from pellucid.probe import Capability
from pellucid.records import Finding


@dataclass(frozen=True)
class Check:
    """One family of questions. ``needs`` and ``length`` say what a target must offer to be asked at all.

    ``steady``: it compares answers, so a target that answers otherwise each time cannot be asked.
    """

    name: str
    asks: str
    run: Callable[[AuditContext], Iterator[Finding]]
    needs: frozenset[Capability] = frozenset()
    length: int = 9
    steady: bool = True
