"""What a check is: a question about a target, and the cases that answer it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass

from pellucid.audits.engine.context import AuditContext
from pellucid.probe import Capability
from pellucid.records import Finding

Run = Callable[[AuditContext], Iterator[Finding]]


@dataclass(frozen=True)
class Check:
    """One family of questions, named like its file.

    ``needs`` and ``length`` (tokens in a row) are what a target must offer for the check to apply. ``steady``: it
    compares answers, so it does not apply to a target that answers differently each time.
    """

    name: str
    asks: str
    run: Run
    needs: frozenset[Capability] = frozenset()
    length: int = 9
    steady: bool = True


def question(
    asks: str, *, needs: Set[Capability] = frozenset(), length: int = 9, steady: bool = True
) -> Callable[[Run], Check]:
    """Makes a check of a generator of findings."""
    return lambda run: Check(run.__module__.rpartition(".")[2], asks, run, frozenset(needs), length, steady)
