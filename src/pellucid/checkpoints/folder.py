"""A checkpoint's folder, read as far as was asked and checked against its contract.

===========  ==========================================================  ==============================
level        what is compared                                            what it costs
===========  ==========================================================  ==============================
``headers``  the contract with itself and its own digest; every          milliseconds: no tensor is
             tensor's name, shape and dtype with the files' headers;     read
             SHA-256 and special ids of tokenizer and chat template
``digests``  also the SHA-256 of every file                              reading every file once
``witness``  also what weights, tokenizer and template give on the       a few hundred tokens in float64
             contract's probes
===========  ==========================================================  ==============================
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from pellucid.checkpoints import contract as contracts
from pellucid.checkpoints.contract import (
    Contract,
    TextContract,
    first_difference,
    float32_tensors,
    meta_model,
    shapes_and_ties,
    stored_tensors,
    ties,
)
from pellucid.checkpoints.files import digest, open_regular, read
from pellucid.checkpoints.fingerprint import Difference, WitnessError, check_text, check_witness
from pellucid.checkpoints.label_names import NAME as CLASSES
from pellucid.checkpoints.label_names import read_classes
from pellucid.checkpoints.load_report import LoadError, LoadReport, MismatchError, Status, TensorReport
from pellucid.checkpoints.validate import DTYPES, folder_path, widened
from pellucid.checkpoints.weights import TensorSpec, Weights, read_weights
from pellucid.data.chat import ChatTemplate
from pellucid.data.records import printable
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import CheckpointError, InputError
from pellucid.models.model import Model

CONTRACT, TOKENIZER, TEMPLATE = contracts.NAME, "tokenizer.json", "chat_template.jinja"
BESIDE = (TOKENIZER, TEMPLATE, CLASSES)
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

    def check(self, level: Check) -> tuple[Model, tuple[Difference, ...]]:
        """Everything up to ``level``, or an error. Returns the contract's model, still without weights."""
        if level not in LEVELS:
            raise CheckpointError(f"check is {level!r}; choose one of {', '.join(LEVELS)}")
        if not self.report.complete:
            raise LoadError(self.path, self.report)
        model = _blank(self.path / CONTRACT, self.contract)
        if self.changed:
            raise MismatchError(self.changed)
        beside = {name: self.path / name for name in BESIDE if os.path.lexists(self.path / name)}
        self._check_digests(beside, BESIDE)
        _ = self.tokenizer, self.template
        if level != "headers":
            self._check_digests(beside | {path.name: path for path in self.weights.files}, self.contract.digests)
        return model, self._ask() if level == "witness" else ()

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, if the contract speaks of one and it is that one."""
        text, path = self.contract.text, self.path / TOKENIZER
        if text is None:
            if os.path.lexists(path):
                raise MismatchError(f"{self.path} has a {TOKENIZER}, but its contract says nothing of text; remove it")
            return None
        with open_regular(path):
            tokenizer = Tokenizer.load(path)
        found = TextContract.of(tokenizer)
        if found != text:
            raise MismatchError(
                f"{path} has {found.model_dump()}, the contract says {text.model_dump()}; "
                "it is another model's tokenizer"
            )
        return tokenizer

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template, if the contract has a digest of one."""
        if TEMPLATE not in self.contract.digests:
            return None
        with open_regular(self.path / TEMPLATE):
            return ChatTemplate.load(self.path / TEMPLATE)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, if the contract has a digest of them."""
        if CLASSES not in self.contract.digests:
            return ()
        return read_classes(self.path, getattr(self.contract.model.head, "num_labels", None))

    def _check_digests(self, files: Mapping[str, Path], names: Iterable[str]) -> None:
        """Hold ``files``, and those of ``names`` that the contract has a digest of, against it."""
        wanted = {n: value for n, value in self.contract.digests.items() if n in names and n != CONTRACT}
        for name in sorted(files.keys() | wanted.keys()):
            if name not in wanted:
                raise MismatchError(
                    f"{self.path} has a {printable(name)[:80]}, but its contract has no digest of it; "
                    "save the model again"
                )
            if name not in files:
                raise MismatchError(
                    f"{self.path} has no {printable(name)[:80]}, but its contract has a digest of it; copy it again"
                )
            if (found := digest(files[name])) != wanted[name]:
                raise MismatchError(
                    f"{files[name]} has SHA-256 {found[:16]}…, the contract says {wanted[name][:16]}…; "
                    "it was changed or damaged"
                )

    def _ask(self) -> tuple[Difference, ...]:
        contract = self.contract
        if contract.witness is None:
            raise MismatchError(
                f"{self.path} was saved with digests only, so there is no witness to compare; "
                "verify it at the level 'digests', or load it and save it with prove='witness'"
            )
        with self.weights.opened() as read:
            found = check_witness(
                self.path, contract.witness, contract.model, lambda name: read(self.places[name]), contract.tied
            )
        try:
            return found + check_text(self.path, contract.witness.text, self.tokenizer, self.template)
        except WitnessError as error:
            error.differences = found + error.differences
            raise


def open_folder(path: str | Path, dtype: torch.dtype | None = None) -> Folder:
    """Read contract and headers of the folder at ``path``; ``dtype`` is only what the report calls a cast.

    ``RUN/best``, ``RUN/last`` and a run's folder stand for its checkpoints (:mod:`~pellucid.checkpoints.folder`).
    """
    path = resolve_checkpoint_path(path)
    try:
        folder = _found(path)
    except OSError as error:
        way = "choose a folder that you may read" if isinstance(error, PermissionError) else "give another folder"
        raise CheckpointError(f"cannot read {str(path)[:200]}: {error.strerror or error}; {way}") from error
    contract, changed = contracts.read_unverified(folder / CONTRACT)
    weights = read_weights(folder)
    report, places = _compare(contract, weights.header, _casts(folder, contract, dtype))
    return Folder(folder, contract, weights, report, places, changed)


def _found(path: Path) -> Path:
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; give a folder that was saved") from None
    except NotADirectoryError:
        hint = f"; did you mean {path.parent}?" if (path.parent / CONTRACT).is_file() else "; give a folder"
        raise CheckpointError(f"{path} is not a folder{hint}") from None
    if CONTRACT in names:
        return path
    inside = sorted(p for p in path.glob(f"checkpoints/*/{CONTRACT}") if p.parent.suffix != ".damaged")
    hint = f"; did you mean {inside[-1].parent}?" if inside else ""
    raise CheckpointError(f"{path} is not a checkpoint folder: it has no {CONTRACT}{hint}")


def _compare(
    contract: Contract, header: Mapping[str, TensorSpec], casts: Mapping[str, torch.dtype]
) -> tuple[LoadReport, dict[str, str]]:
    """Every tensor's fate, given the types that they are cast to, and where each stored one lies."""
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
        reports.append(TensorReport(name, *_fate(wanted, header[found], casts.get(name))))
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


def _casts(path: Path, contract: Contract, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """The type that each tensor gets where ``dtype`` is wanted; of a contract that makes no model, simply that."""
    if dtype is None:
        return {}
    try:
        wide = float32_tensors(contract.model) if _laid_out(path, contract, dtype) else frozenset()
    except MismatchError:  # said when the folder is checked
        wide = frozenset()
    return {name: widened(dtype) if name in wide else dtype for name in contract.tensors}


def _blank(path: Path, contract: Contract) -> Model:
    """The model of the contract's config, if its names, shapes, types and ties are those that the contract lists."""
    usual = Counter(spec.partition("[")[0] for spec in contract.tensors.values()).most_common(1)
    model = _laid_out(path, contract, DTYPES.get(usual[0][0] if usual else "", torch.float32))
    _refuse_odd_types(path, contract, stored_tensors(model)[0])
    listed = {name: spec[spec.find("[") :] for name, spec in contract.tensors.items()} | ties(contract.tied)
    if difference := first_difference(shapes_and_ties(model), listed):
        name, have, want = difference
        raise MismatchError(f"{path} contradicts itself: its model has {have} as {name!r}, its lists say {want}")
    return model


def _laid_out(path: Path, contract: Contract, dtype: torch.dtype) -> Model:
    config, tensors = contract.model, len(contract.tensors)
    layers = sum(layer.same_as is None for stack in config.stacks for layer in stack.each_layer)
    if layers > tensors:
        raise MismatchError(f"{path} describes {layers} layers but only {tensors} tensors")
    try:
        return meta_model(config, dtype)
    except (InputError, RuntimeError, OverflowError) as error:  # sizes whose product no tensor can have
        raise MismatchError(f"{path} describes a model that cannot be laid out: {str(error)[:200]}") from error


def _refuse_odd_types(path: Path, contract: Contract, blanks: Mapping[str, Tensor]) -> None:
    """Weights are floating-point numbers, all of one type but for those that stay wide."""
    usual = next(iter(blanks.values())).dtype
    for name, spec in contract.tensors.items():
        kind = spec.partition("[")[0]
        wanted = blanks[name].dtype if name in blanks else usual
        if DTYPES.get(kind) != wanted:
            word = str(wanted).removeprefix("torch.")
            raise MismatchError(f"{path} lists {name[:80]!r} as {kind[:40]}, but wants {word}; save the model again")


STEP = re.compile(r"step-[0-9]{8,12}\Z")
INSIDE = "checkpoints"
POINTERS = ("best", "last")


def read_pointer(pointer: Path) -> Path | None:
    """The checkpoint that the file ``RUN/best`` or ``RUN/last`` points to, None where there is no such file.

    Raises:
        CheckpointError: what the file holds is not the name of a step.
    """
    if not os.path.lexists(pointer):
        return None
    text = read(pointer, 1000).decode("utf-8", errors="replace").strip()[:100]
    if not STEP.match(text):
        raise CheckpointError(f"{pointer} holds {text!r}, which is not the name of a step such as step-00000200")
    return pointer.parent / INSIDE / text


def resolve_checkpoint_path(path: str | os.PathLike[str]) -> Path:
    """The checkpoint folder that ``path`` stands for: of a run its best or, before any validation, its last.

    What is neither a run nor a pointer of one is given back as it is.
    """
    path = folder_path(path)
    try:
        if path.name in POINTERS and not path.is_dir() and (path.parent / INSIDE).is_dir():
            return read_pointer(path) or path
        if (path / INSIDE).is_dir() and not (path / "pellucid.json").exists():
            return read_pointer(path / "best") or read_pointer(path / "last") or path
    except OSError:
        pass  # whoever reads the folder says why it cannot be read
    return path
