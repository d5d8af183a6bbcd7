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
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from pellucid.checkpoints.contract import CONTRACT, Contract, MismatchError, TextContract, read_unverified
from pellucid.checkpoints.files import digest, open_regular, read, resolve_checkpoint_path
from pellucid.checkpoints.load_report import (
    LoadError,
    LoadReport,
    compare_tensors,
    described_model,
    matching_model,
    stored_tensors,
)
from pellucid.checkpoints.weights import DTYPES, Weights, read_weights
from pellucid.checkpoints.witness import Difference, check_witness
from pellucid.data.chat import ChatTemplate
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import ArgumentError, CheckpointError
from pellucid.messages import printable, repr_short
from pellucid.models.build import why_unusable
from pellucid.models.model import Model
from pellucid.probe import Probe

TOKENIZER, TEMPLATE, LABELS = "tokenizer.json", "chat_template.jinja", "classes.json"
BESIDE = (TOKENIZER, TEMPLATE, LABELS)
"""Files besides the weights that have a digest when they are there."""

Check = Literal["headers", "digests", "witness"]
LEVELS: tuple[Check, ...] = get_args(Check)


@dataclass(frozen=True)
class Checkpoint:
    """A folder that was read: model in eval mode, tokenizer if there is one, contract, and what was loaded."""

    model: Model
    tokenizer: Tokenizer | None
    contract: Contract
    report: LoadReport
    chat_template: ChatTemplate | None = None
    label_names: tuple[str, ...] = ()
    """The names of a classifier's outputs, if the folder has them."""

    def probe(self) -> Probe:
        """How audits call this checkpoint's model."""
        return self.model.probe()


def load(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    check: Check = "headers",
) -> Checkpoint:
    """Read a folder that :func:`save` wrote; its headers are compared with the contract before a tensor is read.

    Args:
        path: The folder, or a run's folder, ``RUN/best`` or ``RUN/last``.
        device: Where the weights go. On the CPU they are mapped from the file, privately: changing them never changes
            the file.
        dtype: One of :data:`~pellucid.checkpoints.weights.DTYPES` or its name. Weights are cast to it, but those of
            routers never below float32; the report says which.
        check: ``"digests"`` also hashes the weights, and ``"witness"`` also runs the contract's probes (see
            :mod:`~pellucid.checkpoints.loading` for the cost). At ``"headers"``, weights that were changed under
            headers that still fit are loaded as they are.

    Raises:
        ArgumentError: an argument is none of these.
        LoadError: a tensor is missing, surplus, or of another shape or dtype; ``error.report`` names all.
        WitnessError: the outputs are not those that the model had.
        MismatchError: the folder is not what its contract says in another way; the base of these two.
        CheckpointError: the folder is incomplete or damaged; the base of these three.
    """
    kind, place = _float_type(dtype), _usable_device(device)
    folder = open_folder(path, kind)
    model, _ = folder.check(check)
    _load_tensors(model if kind is None else model.to(kind), folder, place, kind)
    return Checkpoint(
        model.eval(), folder.tokenizer, folder.contract, folder.report, folder.template, folder.label_names
    )


def _load_tensors(model: nn.Module, folder: Folder, device: torch.device, dtype: torch.dtype | None) -> None:
    """Replace the model's meta tensors by those of the files; a tied tensor stays one parameter.

    With a ``dtype``, each gets the dtype of its meta tensor: routers stay float32 in a narrow model.
    """
    blanks = model.state_dict(keep_vars=True)
    state: dict[str, Tensor] = {}
    with folder.weights.opened() as read:
        for name, place in folder.places.items():
            tensor, blank = read(place), blanks[name]
            try:
                moved = tensor.to(device=device, dtype=tensor.dtype if dtype is None else blank.dtype)
            except (RuntimeError, TypeError) as error:  # too little memory, or a device without that type
                reason = " ".join(str(error).split())[:200]
                raise CheckpointError(f"{name!r} cannot be put on {device}: {reason}; choose another") from error
            state[name] = nn.Parameter(moved, blank.requires_grad) if isinstance(blank, nn.Parameter) else moved
    state |= {alias: state[owner] for alias, owner in folder.contract.tied.items()}
    model.load_state_dict(state, assign=True)
    left = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    assert not left, f"nothing was loaded into {left}"


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
            raise ArgumentError(f"check is {level!r}; choose one of {', '.join(LEVELS)}")
        if not self.report.complete:
            raise LoadError(self.path, self.report)
        model = matching_model(self.path / CONTRACT, self.contract)
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
    def label_names(self) -> tuple[str, ...]:
        """The names of a classifier's outputs, if the contract has a digest of them."""
        if LABELS not in self.contract.digests:
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
            return check_witness(
                self.path,
                contract.witness,
                contract.model,
                lambda name: read(self.places[name]),
                contract.tied,
                self.tokenizer,
                self.template,
            )


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
    contract, changed = read_unverified(folder / CONTRACT)
    weights = read_weights(folder)
    casts: dict[str, torch.dtype] = {}
    with suppress(MismatchError):  # raised again when the folder is checked
        if dtype is not None:
            stored, _ = stored_tensors(described_model(folder, contract, dtype))
            casts = {name: blank.dtype for name, blank in stored.items()}
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


def _float_type(dtype: object) -> torch.dtype | None:
    """``dtype``, or the one of that name."""
    if dtype is None:
        return None
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or found not in DTYPES.values():
        raise ArgumentError(
            f"dtype is {repr_short(dtype)}, but weights can be {', '.join(DTYPES)}; choose one of these"
        )
    return found


def _usable_device(device: object) -> torch.device:
    """``device``, if tensors can be put there."""
    try:
        if not isinstance(device, str | torch.device):
            raise TypeError(device)
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(
            f"device is {repr_short(device)}, but a device like 'cpu' or 'cuda:0' is wanted; leave it out for the CPU"
        ) from error
    if found.type == "meta":
        raise ArgumentError("device is 'meta', which holds no weights; build(config, device='meta') needs no folder")
    if found.type != "cpu" and (reason := why_unusable(found)):
        raise ArgumentError(f"device is {str(found)!r}, which cannot be used here: {reason}; choose cpu")
    return found


def read_label_names(folder: Path, wanted: int | None) -> tuple[str, ...]:
    """The names in the folder's ``classes.json``, in the order of a classifier's logits; none without that file.

    Raises:
        CheckpointError: the file is no list of different names, or not of ``wanted`` ones.
    """
    path = folder / LABELS
    if not path.exists():
        return ()
    try:
        found = json.loads(read(path, 8 * 2**20).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{printable(path)} is no JSON; copy it again") from error
    check_label_names(printable(path), found, wanted, "copy it again")
    return tuple(found)


def check_label_names(what: str, names: object, wanted: int | None, way: str) -> None:
    """Refuse ``names`` that are not ``wanted`` different texts."""
    if not isinstance(names, list) or not all(isinstance(name, str) and 0 < len(name) <= 1000 for name in names):
        raise CheckpointError(f"{what}: this is no list of names; {way}")
    if len(set(names)) != len(names):
        raise CheckpointError(f"{what}: a class is named twice; {way}")
    if len(names) != wanted:
        raise CheckpointError(f"{what}: {len(names)} classes are named, but the model has {wanted or 'none'}; {way}")
