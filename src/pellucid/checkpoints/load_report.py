"""What became of every tensor when a folder was loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pellucid.errors import CheckpointError
from pellucid.records import Table

Status = Literal["loaded", "tied", "cast", "missing", "surplus", "mismatched"]
_GOOD: tuple[Status, ...] = ("loaded", "tied", "cast")
_BAD: tuple[Status, ...] = ("missing", "surplus", "mismatched")
_NAMED = 5


class TensorReport(NamedTuple):
    """One tensor: its name, what became of it, and the details in words."""

    name: str
    status: Status
    detail: str


@dataclass(frozen=True)
class LoadReport:
    """Every tensor of the contract and of the file, exactly once, in the contract's order."""

    tensors: tuple[TensorReport, ...]

    def __iter__(self) -> Iterator[TensorReport]:
        return iter(self.tensors)

    def names(self, status: Status) -> tuple[str, ...]:
        """The tensors of one status."""
        return tuple(tensor.name for tensor in self.tensors if tensor.status == status)

    @property
    def complete(self) -> bool:
        """Whether every tensor that must be there is, and nothing else."""
        return not any(tensor.status in _BAD for tensor in self.tensors)

    def to_table(self) -> Table:
        """As a table that reports can draw."""
        return Table("Tensors", TensorReport._fields, tuple(tuple(tensor) for tensor in self.tensors))

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"complete": self.complete, "tensors": [tensor._asdict() for tensor in self.tensors]}

    def __str__(self) -> str:
        counts = {status: len(self.names(status)) for status in (*_GOOD, *_BAD)}
        return ", ".join(f"{number} {status}" for status, number in counts.items() if number) or "no tensors"


class MismatchError(CheckpointError):
    """A folder could be read, but is not what its contract says."""


class LoadError(MismatchError):
    """The tensors of a folder are not those its contract names; ``report`` has each of them."""

    def __init__(self, path: object, report: LoadReport) -> None:
        bad = [tensor for tensor in report if tensor.status in _BAD]
        named = "; ".join(f"{t.status} {t.name[:120]!r} ({t.detail})" for t in bad[:_NAMED])
        more = f"; and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        super().__init__(f"{path} does not hold the tensors of its contract: {named}{more}; nothing was loaded")
        self.report = report
