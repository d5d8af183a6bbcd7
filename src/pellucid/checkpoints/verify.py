"""Verification of a folder against its contract, as a value: for the command line, other programs and reports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pellucid.checkpoints.contract import MismatchError
from pellucid.checkpoints.load_report import LoadReport
from pellucid.checkpoints.loading import Check, open_folder
from pellucid.checkpoints.witness import Difference, WitnessError
from pellucid.records import Table, number

_FIRST = {
    "initializer_range": "only first weights are drawn from it; the weights are here",
    "residual_init": "only first weights are drawn by it; the weights are here",
}

UNWITNESSED = {
    **{f"model.{stack}{field}": reason for stack in ("", "encoder.") for field, reason in _FIRST.items()},
    "model.cross_attention.qk_norm.after_positions": "nothing is rotated between two stacks",
    "digests": "whoever changes a file can note its new digest; the witness compares their outputs",
    "witness.tolerance": "a smaller one than was written passes while every output still is within it",
}
"""Fields of the contract that another value can be written into, digests made to fit, and why that is not seen."""

UNSEEN = {
    "a number changed by very little": "what moves no output by a millionth (a dropout of 0.1 to 0.10000001) passes",
    "a value that changes no output": (
        "as rope's rope_theta does with heads of 2, a scale written out that was null, or top_k_softmax for a softmax "
        "over all experts that is renormalised"
    ),
    "bounds of rules beyond 2^38, or a few of more than 32": "no probe is put there; all others are met exactly",
    "capacities beyond 1024, or of several layers": "an expert is not sent so many tokens; one for all is met exactly",
    "limits that nothing reaches": (
        "clips and caps that a thousand times the input of the first layer of each kind stays below"
    ),
    "tokens and chats that are not in the witness": "merges, rules or turns that none of their texts needs",
    "formatting of the files": "spaces, order and comments of the files, where the same is read from them",
}
"""Changes that can be signed again without being seen, in fields where others are seen."""


@dataclass(frozen=True)
class Verification:
    """What :func:`verify` found; ``problem`` is empty when everything up to ``level`` is as the contract says.

    ``differences`` has the outputs that were compared: all, or those up to the first that is too far off.
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


def verify(path: str | Path, level: Check | None = None) -> Verification:
    """Compare the folder at ``path`` with its contract.

    ``level`` defaults to ``witness`` where the folder has one, and to ``digests`` where it was saved with digests only;
    ``Verification.level`` says which it was.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    folder = open_folder(path)
    if level is None:
        level = "digests" if folder.contract.witness is None else "witness"
    differences: tuple[Difference, ...] = ()
    problem = ""
    try:
        _, differences = folder.check(level)
    except WitnessError as error:
        differences, problem = error.differences, str(error)
    except MismatchError as error:
        problem = str(error)
    return Verification(str(path), level, folder.report, differences, problem)
