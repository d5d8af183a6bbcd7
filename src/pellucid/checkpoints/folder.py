"""A checkpoint's folder, read and compared with its contract up to a level.

===========  ==========================================================  ==============================
level        what is compared                                            cost
===========  ==========================================================  ==============================
``headers``  the contract with itself and its own digest; every          milliseconds: no tensor is
             tensor's name, shape and dtype with the files' headers;     read
             SHA-256 and special ids of tokenizer and chat template
``digests``  also the SHA-256 of every file                              reading every file once
``witness``  also the outputs of weights, tokenizer and template on the  a few hundred tokens in float64
             contract's probes
===========  ==========================================================  ==============================

``RUN/best``, ``RUN/last`` and a run's folder stand for a checkpoint in ``RUN/checkpoints``: ``best`` and ``last`` are
files with the name of one of them. Only the name of a step is accepted there, and it leads only into that folder.
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
    widened,
)
from pellucid.checkpoints.files import digest, open_regular, read
from pellucid.checkpoints.fingerprint import Difference, WitnessError, check_text, check_witness
from pellucid.checkpoints.label_names import NAME as CLASSES
from pellucid.checkpoints.label_names import read_label_names
from pellucid.checkpoints.load_report import LoadError, LoadReport, MismatchError, compare_tensors
from pellucid.checkpoints.weights import DTYPES, Weights, dtype_name, read_weights
from pellucid.data.chat import ChatTemplate
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import CheckpointError, InputError
from pellucid.messages import printable, repr_short
from pellucid.models.model import Model

CONTRACT, TOKENIZER, TEMPLATE = contracts.NAME, "tokenizer.json", "chat_template.jinja"
BESIDE = (TOKENIZER, TEMPLATE, CLASSES)
"""Files besides the weights that have a digest when they are there."""

Check = Literal["headers", "digests", "witness"]
LEVELS: tuple[Check, ...] = get_args(Check)

STEP = re.compile(r"step-[0-9]{8,12}\Z")
INSIDE = "checkpoints"
POINTERS = ("best", "last")


@dataclass(frozen=True)
class Folder:
    """A folder whose contract and headers have been read; ``report`` says whether its tensors are the contract's."""

    path: Path
    contract: Contract
    weights: Weights
    report: LoadReport
    places: Mapping[str, str]
    """The name in the files of each stored tensor: a tied one may lie under either of its names."""
    changed: str
    """What is wrong with the contract's own digest; empty if nothing is."""

    def check(self, level: Check) -> tuple[Model, tuple[Difference, ...]]:
        """Compare everything up to ``level``; returns the contract's model, still without weights, and the differences.

        Raises:
            MismatchError: something is not as the contract says.
        """
        if level not in LEVELS:
            raise CheckpointError(f"check is {level!r}; choose one of {', '.join(LEVELS)}")
        if not self.report.complete:
            raise LoadError(self.path, self.report)
        model = _checked_model(self.path / CONTRACT, self.contract)
        if self.changed:
            raise MismatchError(self.changed)
        beside = {name: self.path / name for name in BESIDE if os.path.lexists(self.path / name)}
        self._check_digests(beside, BESIDE)
        _ = self.tokenizer, self.template
        if level != "headers":
            self._check_digests(beside | {path.name: path for path in self.weights.files}, self.contract.digests)
        return model, self._compare_outputs() if level == "witness" else ()

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, if the contract has one; another than the contract's is refused."""
        text, path = self.contract.text, self.path / TOKENIZER
        if text is None:
            if os.path.lexists(path):
                raise MismatchError(f"{self.path} has a {TOKENIZER}, but its contract has no text; remove it")
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
        return read_label_names(self.path, getattr(self.contract.model.head, "num_labels", None))

    def _check_digests(self, files: Mapping[str, Path], names: Iterable[str]) -> None:
        """Compare ``files``, and those of ``names`` that the contract has a digest of, with the contract."""
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

    def _compare_outputs(self) -> tuple[Difference, ...]:
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

    ``path`` may also be a run's folder, ``RUN/best`` or ``RUN/last``.
    """
    path = resolve_checkpoint_path(path)
    try:
        folder = _found(path)
    except OSError as error:
        way = "choose a folder that you may read" if isinstance(error, PermissionError) else "give another folder"
        raise CheckpointError(f"cannot read {str(path)[:200]}: {error.strerror or error}; {way}") from error
    contract, changed = contracts.read_unverified(folder / CONTRACT)
    weights = read_weights(folder)
    casts = _casts(folder, contract, dtype)
    report, places = compare_tensors(contract.tensors, contract.tied, weights.header, casts)
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


def _casts(path: Path, contract: Contract, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """The dtype that each tensor is cast to; of a contract that describes no valid model, simply ``dtype``."""
    if dtype is None:
        return {}
    try:
        wide = float32_tensors(contract.model) if _build(path, contract, dtype) else frozenset()
    except MismatchError:  # raised again when the folder is checked
        wide = frozenset()
    return {name: widened(dtype) if name in wide else dtype for name in contract.tensors}


def _checked_model(path: Path, contract: Contract) -> Model:
    """The model of the contract's config; its names, shapes, dtypes and ties must be those that the contract lists."""
    usual = Counter(spec.partition("[")[0] for spec in contract.tensors.values()).most_common(1)
    model = _build(path, contract, DTYPES.get(usual[0][0] if usual else "", torch.float32))
    _refuse_odd_types(path, contract, stored_tensors(model)[0])
    listed = {name: spec[spec.find("[") :] for name, spec in contract.tensors.items()} | ties(contract.tied)
    if difference := first_difference(shapes_and_ties(model), listed):
        name, have, want = difference
        raise MismatchError(f"{path} contradicts itself: its model has {have} as {name!r}, its lists say {want}")
    return model


def _build(path: Path, contract: Contract, dtype: torch.dtype) -> Model:
    config, tensors = contract.model, len(contract.tensors)
    layers = sum(layer.same_as is None for stack in config.stacks for layer in stack.each_layer)
    if layers > tensors:
        raise MismatchError(f"{path} describes {layers} layers but only {tensors} tensors")
    try:
        return meta_model(config, dtype)
    except (InputError, RuntimeError, OverflowError) as error:  # sizes whose product is too large for a tensor
        raise MismatchError(f"{path} describes a model that cannot be laid out: {str(error)[:200]}") from error


def _refuse_odd_types(path: Path, contract: Contract, blanks: Mapping[str, Tensor]) -> None:
    """Weights are floating-point numbers, all of one dtype except those of routers, which stay float32."""
    usual = next(iter(blanks.values())).dtype
    for name, spec in contract.tensors.items():
        kind = spec.partition("[")[0]
        wanted = blanks[name].dtype if name in blanks else usual
        if DTYPES.get(kind) != wanted:
            raise MismatchError(
                f"{path} lists {name[:80]!r} as {kind[:40]}, but wants {dtype_name(wanted)}; save the model again"
            )


# ---- names of folders


def folder_path(path: object) -> Path:
    """``path`` as a Path that the system can be asked about; anything that cannot name a folder is refused."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str):
        raise CheckpointError(f"a checkpoint folder is a text or a Path, not {repr_short(path, 60)}; give its name")
    if not text:
        raise CheckpointError("the name of the checkpoint folder is empty; '.' is the current folder")
    odd = next((c for c in text if c == "\0" or "\ud800" <= c <= "\udfff"), None)
    if odd is not None:
        kind = "a NUL character" if odd == "\0" else f"the lone surrogate {printable(odd)}"
        raise CheckpointError(f"{printable(text)[:200]!r} cannot name a folder: it holds {kind}; remove it")
    return Path(text)


def read_pointer(pointer: Path) -> Path | None:
    """The checkpoint named by the file ``RUN/best`` or ``RUN/last``; None where there is no such file.

    Raises:
        CheckpointError: the file does not hold the name of a step.
    """
    if not os.path.lexists(pointer):
        return None
    text = read(pointer, 1000).decode("utf-8", errors="replace").strip()[:100]
    if not STEP.match(text):
        raise CheckpointError(f"{pointer} holds {text!r}, which is not the name of a step such as step-00000200")
    return pointer.parent / INSIDE / text


def resolve_checkpoint_path(path: str | os.PathLike[str]) -> Path:
    """The checkpoint folder that ``path`` stands for: a run's best or, before any validation, its last.

    Any other path is returned as it is.
    """
    path = folder_path(path)
    try:
        if path.name in POINTERS and not path.is_dir() and (path.parent / INSIDE).is_dir():
            return read_pointer(path) or path
        if (path / INSIDE).is_dir() and not (path / "pellucid.json").exists():
            return read_pointer(path / "best") or read_pointer(path / "last") or path
    except OSError:
        pass  # reading the folder will say why it cannot be read
    return path
