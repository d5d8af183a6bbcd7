"""A checkpoint's folder, read as far as was asked and checked against its contract.

===========  ==========================================================  ==============================
level        what is compared                                            what it costs
===========  ==========================================================  ==============================
``headers``  the contract with itself and its own digest; every          milliseconds: no tensor is
             tensor's name, shape and dtype with the files' headers;     read
             special ids with the tokenizer
``digests``  also the SHA-256 of every file                              reading every file once
``witness``  also what the weights give on the contract's probes         a few hundred tokens in float64
===========  ==========================================================  ==============================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from pellucid.checkpoints import contract as contracts
from pellucid.checkpoints.contract import Contract, blank_model, first_difference, outline, ties
from pellucid.checkpoints.files import digest
from pellucid.checkpoints.header import TensorSpec
from pellucid.checkpoints.report import LoadError, LoadReport, MismatchError, Status, TensorReport
from pellucid.checkpoints.weights import Weights, read_weights
from pellucid.checkpoints.witness import Difference, check_witness
from pellucid.errors import CheckpointError, InputError
from pellucid.models.decoder import Decoder

CONTRACT, TOKENIZER, TEMPLATE = contracts.NAME, "tokenizer.json", "chat_template.jinja"
BESIDE = (TOKENIZER, TEMPLATE)
"""Files besides the weights that have a digest when they are there."""

Check = Literal["headers", "digests", "witness"]
LEVELS: tuple[Check, ...] = get_args(Check)


@dataclass(frozen=True)
class Folder:
    """A folder whose contract and headers have been read; its tensors may still be wrong, ``report`` says so."""

    path: Path
    contract: Contract
    weights: Weights
    report: LoadReport
    places: Mapping[str, str]
    """The name in the files of each stored tensor: a tied one may lie under either of its names."""
    changed: str
    """In what way the contract's own digest is wrong; nothing if it is right."""

    def check(self, level: Check) -> tuple[Decoder, tuple[Difference, ...]]:
        """Everything up to ``level``, or an error. Returns the contract's model, still without weights."""
        if level not in LEVELS:
            raise CheckpointError(f"check is {level!r}; choose one of {', '.join(LEVELS)}")
        if not self.report.complete:
            raise LoadError(self.path, self.report)
        model = _blank(self.path / CONTRACT, self.contract)
        if self.changed:
            raise MismatchError(self.changed)
        if self.contract.text is None and (self.path / TOKENIZER).exists():
            raise MismatchError(f"{self.path} has a {TOKENIZER}, but its contract says nothing of text; take it away")
        if level != "headers":
            self._check_digests()
        return model, self._ask() if level == "witness" else ()

    def _check_digests(self) -> None:
        beside = [self.path / name for name in BESIDE if (self.path / name).exists()]
        files = {path.name: path for path in (*self.weights.files, *beside)}
        wanted = {name: value for name, value in self.contract.digests.items() if name != CONTRACT}
        for name in sorted(files.keys() | wanted.keys()):
            if name not in wanted:
                raise MismatchError(f"{self.path / CONTRACT} has no digest of {name[:80]}; save the model again")
            if name not in files:
                raise MismatchError(f"{self.path} has no {name[:80]!r}, but its contract has a digest of it")
            if (found := digest(files[name])) != wanted[name]:
                raise MismatchError(
                    f"{files[name]} has SHA-256 {found[:16]}…, the contract says {wanted[name][:16]}…; "
                    "it was changed or damaged"
                )

    def _ask(self) -> tuple[Difference, ...]:
        contract = self.contract
        with self.weights.opened() as read:
            return check_witness(
                self.path, contract.witness, contract.model, lambda name: read(self.places[name]), contract.tied
            )


def open_folder(path: Path, dtype: torch.dtype | None = None) -> Folder:
    """Read contract and headers of the folder at ``path``; ``dtype`` is only what the report calls a cast."""
    try:
        folder = _found(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {str(path)[:200]}: {error.strerror or error}") from error
    contract, changed = contracts.read_unsigned(folder / CONTRACT)
    weights = read_weights(folder)
    report, places = _compare(contract, weights.header, dtype)
    return Folder(folder, contract, weights, report, places, changed)


def _found(path: Path) -> Path:
    if (path / CONTRACT).is_file():
        return path
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    inside = sorted(path.glob(f"checkpoints/*/{CONTRACT}")) if path.is_dir() else []
    hint = f"; did you mean {inside[-1].parent}?" if inside else ""
    raise CheckpointError(f"{path} is not a checkpoint folder: it has no {CONTRACT}{hint}")


def _compare(
    contract: Contract, header: Mapping[str, TensorSpec], dtype: torch.dtype | None
) -> tuple[LoadReport, dict[str, str]]:
    """Every tensor's fate, and where each stored one lies."""
    aliases: dict[str, list[str]] = {}
    for alias, owner in contract.tied.items():
        aliases.setdefault(owner, []).append(alias)
    reports: list[TensorReport] = []
    places: dict[str, str] = {}
    for name, wanted in contract.tensors.items():
        names = [name, *aliases.get(name, [])]
        found = next((n for n in names if n in header), None)
        if found is None:
            reports.append(TensorReport(name, "missing", f"the contract wants {wanted}"))
            continue
        places[name] = found
        reports.append(TensorReport(name, *_fate(wanted, header[found], dtype)))
        reports += [TensorReport(n, "tied", f"is {name}") for n in names[1:]]
    known = set(places.values())
    reports += [
        TensorReport(name, "surplus", f"the file holds {spec}, which the contract does not name or ties to another")
        for name, spec in header.items()
        if name not in known
    ]
    return LoadReport(tuple(reports)), places


def _fate(wanted: str, found: TensorSpec, dtype: torch.dtype | None) -> tuple[Status, str]:
    if str(found) != wanted:
        return "mismatched", f"the contract wants {wanted}, the file holds {found}"
    source: torch.dtype = getattr(torch, found.dtype)
    if dtype is not None and source.is_floating_point and source != dtype:
        return "cast", f"{found} to {str(dtype).removeprefix('torch.')}"
    return "loaded", str(found)


def _blank(path: Path, contract: Contract) -> Decoder:
    """The model of the contract's config, if its names, shapes and ties are those that the contract lists."""
    layers, tensors = len(contract.model.layers), len(contract.tensors)
    if layers > tensors:
        raise MismatchError(f"{path} describes {layers} layers but only {tensors} tensors")
    try:
        model = blank_model(contract.model)
    except (InputError, RuntimeError, OverflowError) as error:  # sizes whose product no tensor can have
        raise MismatchError(f"{path} describes a model that cannot be laid out: {str(error)[:200]}") from error
    listed = {name: spec[spec.find("[") :] for name, spec in contract.tensors.items()} | ties(contract.tied)
    if difference := first_difference(outline(model), listed):
        name, have, want = difference
        raise MismatchError(f"{path} contradicts itself: its model has {have} as {name!r}, its lists say {want}")
    return model
