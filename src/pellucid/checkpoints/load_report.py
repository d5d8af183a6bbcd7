"""The tensors of a model and of a folder: what a config describes, what became of each, and the errors that say so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from pellucid.checkpoints.contract import Contract, MismatchError
from pellucid.checkpoints.weights import DTYPES, TensorSpec, dtype_name
from pellucid.errors import InputError
from pellucid.messages import join_some
from pellucid.models.build import build
from pellucid.models.config import ModelConfig
from pellucid.models.model import Model
from pellucid.records import Table

Status = Literal["loaded", "tied", "cast", "missing", "surplus", "mismatched"]
_GOOD: tuple[Status, ...] = ("loaded", "tied", "cast")
_BAD: tuple[Status, ...] = ("missing", "surplus", "mismatched")


def stored_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parameters and buffers under their first names, and the other names of those that are tied."""
    stored: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        owner = first.setdefault(id(tensor), name)
        if owner == name:
            stored[name] = tensor
        else:
            tied[name] = owner
    return stored, tied


def outline(model: nn.Module) -> dict[str, str]:
    """Every name in the model's state, with its dtype and shape or the name that it is tied to."""
    stored, tied = stored_tensors(model)
    return {name: str(TensorSpec.of(tensor)) for name, tensor in stored.items()} | ties(tied)


@lru_cache(maxsize=4)
def config_outline(config: ModelConfig, dtype: torch.dtype) -> Mapping[str, str]:
    """The :func:`outline` of the model that ``config`` describes; routers are at least float32 in every ``dtype``."""
    return outline(build(config, device="meta", dtype=dtype))


def ties(tied: Mapping[str, str]) -> dict[str, str]:
    """The tied part of an :func:`outline`."""
    return {name: f"the same as {owner}" for name, owner in tied.items()}


def first_difference(have: Mapping[str, str], want: Mapping[str, str]) -> tuple[str, str, str] | None:
    """The first name at which two outlines differ, and what each has there."""
    for name in sorted(have.keys() | want.keys()):
        if have.get(name) != want.get(name):
            return name[:120], have.get(name, "nothing")[:120], want.get(name, "nothing")[:120]
    return None


def described_model(path: Path, contract: Contract, dtype: torch.dtype) -> Model:
    """The model of the contract's config, without weights; a config that cannot be laid out is refused."""
    config, tensors = contract.model, len(contract.tensors)
    layers = sum(layer.same_as is None for stack in config.stacks for layer in stack.each_layer)
    if layers > tensors:
        raise MismatchError(f"{path} describes {layers} layers but only {tensors} tensors")
    try:
        return build(config, device="meta", dtype=dtype)
    except (InputError, RuntimeError, OverflowError) as error:  # sizes whose product is too large for a tensor
        raise MismatchError(f"{path} describes a model that cannot be laid out: {str(error)[:200]}") from error


def matching_model(path: Path, contract: Contract) -> Model:
    """The :func:`described_model`; its names, shapes, dtypes and ties must be those that the contract lists."""
    usual = Counter(spec.partition("[")[0] for spec in contract.tensors.values()).most_common(1)
    model = described_model(path, contract, DTYPES.get(usual[0][0] if usual else "", torch.float32))
    if difference := first_difference(outline(model), contract.tensors | ties(contract.tied)):
        name, have, want = difference
        raise MismatchError(f"{path} contradicts itself: its model has {have} as {name!r}, its lists say {want}")
    return model


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
