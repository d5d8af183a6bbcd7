"""What became of every tensor when a folder was loaded, and the errors that say so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from pellucid.checkpoints.weights import TensorSpec, dtype_name
from pellucid.errors import CheckpointError
from pellucid.messages import join_some
from pellucid.records import Table

Status = Literal["loaded", "tied", "cast", "missing", "surplus", "mismatched"]
_GOOD: tuple[Status, ...] = ("loaded", "tied", "cast")
_BAD: tuple[Status, ...] = ("missing", "surplus", "mismatched")


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
        bad = [f"{t.status} {t.name[:120]!r} ({t.detail})" for t in report if t.status in _BAD]
        super().__init__(
            f"{path} does not hold the tensors of its contract: {join_some(bad, 5, '; ')}; nothing was loaded"
        )
        self.report = report


def compare_tensors(
    wanted: Mapping[str, str],
    tied: Mapping[str, str],
    header: Mapping[str, TensorSpec],
    casts: Mapping[str, torch.dtype],
) -> tuple[LoadReport, dict[str, str]]:
    """What becomes of every tensor, and under which name each stored one lies in the files.

    ``wanted`` and ``tied`` are the contract's, ``header`` the files'; ``casts`` has the dtypes that tensors get.
    """
    aliases: dict[str, list[str]] = {}
    for alias, owner in tied.items():
        aliases.setdefault(owner, []).append(alias)
    reports: list[TensorReport] = []
    places: dict[str, str] = {}
    for name, spec in wanted.items():
        names = [name, *aliases.get(name, [])]
        found = next((n for n in names if n in header), None)
        if found is None:
            reports.append(TensorReport(name, "missing", f"the contract wants {spec}"))
            continue
        places[name] = found
        reports.append(TensorReport(name, *_status(spec, header[found], casts.get(name))))
        reports += [TensorReport(n, "tied", f"is {name}") for n in names[1:]]
    known = set(places.values())
    reports += [
        TensorReport(name, "surplus", f"the file holds {spec}, which the contract does not name or ties to another")
        for name, spec in header.items()
        if name not in known
    ]
    return LoadReport(tuple(reports)), places


def _status(wanted: str, found: TensorSpec, dtype: torch.dtype | None) -> tuple[Status, str]:
    if str(found) != wanted:
        return "mismatched", f"the contract wants {wanted}, the file holds {found}"
    source: torch.dtype = getattr(torch, found.dtype)
    if dtype is not None and source.is_floating_point and source != dtype:
        return "cast", f"{found} to {dtype_name(dtype)}"
    return "loaded", str(found)
