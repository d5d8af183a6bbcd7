"""Whether a folder is what its contract says, as a value: for the command line, other programs and reports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pellucid.checkpoints.folder import Check, open_folder
from pellucid.checkpoints.report import LoadReport, MismatchError
from pellucid.checkpoints.unseen import UNSEEN, UNWITNESSED
from pellucid.checkpoints.witness import Difference, WitnessError
from pellucid.records import Table, number


@dataclass(frozen=True)
class Verification:
    """What :func:`verify` found; ``problem`` is empty when everything up to ``level`` is as the contract says.

    ``differences`` has the outputs that were asked: all, or those up to the first that is too far off.
    """

    path: str
    level: Check
    report: LoadReport
    differences: tuple[Difference, ...]
    problem: str

    @property
    def passed(self) -> bool:
        return not self.problem

    def to_table(self) -> Table:
        """The probes, as a table that reports can draw."""
        rows = [(d.probe, d.what, d.size, d.allowed, "pass" if d.passed else "error") for d in self.differences]
        return Table("Witness", ("probe", "output", "difference", "allowed", "status"), tuple(rows))

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        probes = [{**d._asdict(), "size": number(d.size), "passed": d.passed} for d in self.differences]
        return {
            "path": self.path,
            "level": self.level,
            "passed": self.passed,
            "problem": self.problem,
            "report": self.report.to_dict(),
            "probes": probes,
            "unwitnessed": UNWITNESSED | UNSEEN,
        }


def verify(path: str | Path, level: Check = "witness") -> Verification:
    """Hold the folder at ``path`` against its contract. A folder that cannot be read is a CheckpointError."""
    folder = open_folder(path)
    differences: tuple[Difference, ...] = ()
    problem = ""
    try:
        _, differences = folder.check(level)
    except WitnessError as error:
        differences, problem = error.differences, str(error)
    except MismatchError as error:
        problem = str(error)
    return Verification(str(path), level, folder.report, differences, problem)
