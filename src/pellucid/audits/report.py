"""What an audit found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pellucid.audits.checks import CHECKS
from pellucid.records import Finding, Flow, Status, Table, TokenView, worst


@dataclass(frozen=True)
class AuditReport:
    """What an audit found."""

    target: str
    findings: tuple[Finding, ...]
    seconds: float
    length: int | None = None
    """The tokens of the long sequences; None: the target takes none at all."""
    flows: tuple[Flow, ...] = ()
    """Who may see whom beside who really does, as far as a check has measured it."""
    views: tuple[TokenView, ...] = ()
    """The same token by token."""
    not_run: tuple[str, ...] = ()
    """Checks that did not run because the budget was spent."""
    called: str = ""
    """How the target was called, and with what capabilities."""

    @property
    def finished(self) -> bool:
        """Whether every check ran."""
        return not self.not_run

    @property
    def passed(self) -> bool:
        """Something was shown to hold, nothing leaked and nothing raised, in the checks that ran (see ``finished``)."""
        shown = any(finding.status in ("pass", "fragile") for finding in self.findings)
        return shown and not any(finding.failed for finding in self.findings)

    @property
    def passed_strictly(self) -> bool:
        """The same, nothing is fragile, and every check ran."""
        return self.passed and self.finished and "fragile" not in self.verdicts.values()

    @property
    def verdicts(self) -> dict[str, Status]:
        """The worst status of each check."""
        names = dict.fromkeys(finding.check for finding in self.findings)
        return {name: worst(self.of(name)) for name in names}

    def of(self, check: str) -> tuple[Finding, ...]:
        """The findings of one check."""
        return tuple(finding for finding in self.findings if finding.check == check)

    def __str__(self) -> str:
        """The table, a line for each check."""
        lines = [
            f"audit of {self.target}: {'passed' if self.passed else 'failed'} ({self.seconds:.1f} s; {self.called})"
        ]
        for check, verdict, case, where, message in self.table().rows:
            place = ", ".join(str(part) for part in (case, where) if part)
            lines.append(f"{check!s:13} {verdict!s:15} {message}{f' [{place}]' if place else ''}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "passed": self.passed,
            "finished": self.finished,
            "not_run": list(self.not_run),
            "called": self.called,
            "verdicts": self.verdicts,
            "seconds": round(self.seconds, 3),
            "length": self.length,
            "findings": [finding.to_dict() for finding in self.findings],
        }

    def table(self) -> Table:
        """One line a check: its verdict and the finding that says why."""
        rows = []
        for name, status in self.verdicts.items():
            found = self.of(name)
            first = next(finding for finding in found if finding.status == status)
            where = str(first.where) if first.where and status in ("leak", "fragile") else ""
            message = first.message if status != "pass" else f"{CHECKS[name].asks} {_yes(found)}"
            if status == "pass" and name == "future":
                message = first.message
            verdict = "not run" if name in self.not_run else status
            rows.append((name, verdict, first.case if status != "pass" else "", where, message))
        return Table(f"audit of {self.target}", ("check", "verdict", "case", "where", "what was seen"), tuple(rows))


def _yes(found: Sequence[Finding]) -> str:
    """In how many cases, and which did not apply."""
    silent = [finding.case for finding in found if finding.status == "not_applicable" and finding.case]
    more = f" Not applicable: {', '.join(silent)}." if silent else ""
    count = sum(finding.status == "pass" for finding in found)
    return f"Yes, in {count} case{'s' * (count != 1)}.{more}"
