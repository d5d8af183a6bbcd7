"""Models to folders and back. A folder appears whole or not at all; nothing in it is unpickled or run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from pellucid.checkpoints.atomic import new_folder
from pellucid.checkpoints.contract import (
    Contract,
    TextContract,
    blank_model,
    contract_of,
    first_difference,
    outline,
    read_contract,
    stored_tensors,
    ties,
)
from pellucid.checkpoints.header import TensorSpec, read_header
from pellucid.checkpoints.report import LoadError, LoadReport, Status, TensorReport
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import CheckpointError
from pellucid.models.decoder import Decoder

WEIGHTS, TOKENIZER, CONTRACT = "model.safetensors", "tokenizer.json", "pellucid.json"

Check = Literal["headers", "digests"]


@dataclass(frozen=True)
class Checkpoint:
    """A folder, read: model in eval mode, tokenizer if there is one, contract, and what was loaded."""

    model: Decoder
    tokenizer: Tokenizer | None
    contract: Contract
    report: LoadReport


def save(path: str | Path, model: nn.Module, *, tokenizer: Tokenizer | None = None) -> None:
    """Write ``model`` (and its tokenizer) as a new folder. An existing target is refused, whatever it is.

    Raises:
        CheckpointError: the target exists, the disk refuses, or the model is not what its config describes.
    """
    with new_folder(path) as folder:
        write(folder, model, tokenizer=tokenizer)


def write(folder: Path, model: nn.Module, *, tokenizer: Tokenizer | None = None) -> None:
    """Write a checkpoint's files into ``folder``, which the caller completes (see :func:`new_folder`)."""
    contract_of(model, tokenizer, {})  # refuse before the first byte
    stored, _ = stored_tensors(model)
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in stored.items()}
    try:
        save_file(held, folder / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:  # the disk's words, in another wrapping
        raise OSError(str(error)) from error
    names = [WEIGHTS]
    if tokenizer is not None:
        tokenizer.save(folder / TOKENIZER)
        names.append(TOKENIZER)
    contract = contract_of(model, tokenizer, {name: digest(folder / name) for name in names})
    (folder / CONTRACT).write_text(contract.to_text(), encoding="utf-8")


def load(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    check: Check = "headers",
) -> Checkpoint:
    """Read a folder that :func:`save` wrote; its header is held against the contract before a tensor is read.

    ``dtype`` casts floating-point tensors; the report says which. ``check="digests"`` also hashes the files.
    On the CPU the weights are mapped from the file, privately: changing them never changes the file.

    Raises:
        LoadError: a tensor is missing, surplus, or of another shape or dtype; ``error.report`` names all.
        CheckpointError: the folder is incomplete, damaged, or contradicts itself.
    """
    folder = _folder(Path(path))
    contract = read_contract(folder / CONTRACT)
    header = read_header(folder / WEIGHTS)
    report, places = _compare(contract, header, dtype)
    if not report.complete:
        raise LoadError(folder, report)
    if check == "digests":
        _check_digests(folder, contract)
    model = _blank(folder, contract)
    _fill(model, folder / WEIGHTS, places, contract.tied, torch.device(device), dtype)
    return Checkpoint(model.eval(), _tokenizer(folder, contract), contract, report)


def digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error


def _folder(path: Path) -> Path:
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
    """Every tensor's fate, and the name in the file of each stored one: a tied one may lie under either."""
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


def _check_digests(folder: Path, contract: Contract) -> None:
    for name in (WEIGHTS, TOKENIZER):
        wanted = contract.digests.get(name)
        if wanted is None and (name == WEIGHTS or contract.text is not None):
            raise CheckpointError(f"{folder / CONTRACT} has no digest of {name}")
        if wanted is not None and (found := digest(folder / name)) != wanted:
            raise CheckpointError(
                f"{folder / name} has SHA-256 {found[:16]}…, the contract says {wanted[:16]}…; "
                "it was changed or damaged"
            )


def _blank(folder: Path, contract: Contract) -> Decoder:
    """The model of the contract's config, if its names, shapes and ties are those that the contract lists."""
    layers, tensors = len(contract.model.layers), len(contract.tensors)
    if layers > tensors:
        raise CheckpointError(f"{folder / CONTRACT} describes {layers} layers but only {tensors} tensors")
    model = blank_model(contract.model)
    listed = {name: spec[spec.find("[") :] for name, spec in contract.tensors.items()} | ties(contract.tied)
    if difference := first_difference(outline(model), listed):
        name, have, want = difference
        raise CheckpointError(
            f"{folder / CONTRACT} contradicts itself: its model has {have} as {name!r}, its lists say {want}"
        )
    return model


def _fill(
    model: nn.Module,
    path: Path,
    places: Mapping[str, str],
    tied: Mapping[str, str],
    device: torch.device,
    dtype: torch.dtype | None,
) -> None:
    """Put the file's tensors in the place of the model's blank ones; a tied tensor stays one parameter."""
    names = {owner: [owner] for owner in places}
    for alias, owner in tied.items():
        names[owner].append(alias)
    try:
        with safe_open(path, framework="pt") as file:
            for owner, place in places.items():
                tensor = file.get_tensor(place)
                wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
                _assign(model, names[owner], tensor.to(device=device, dtype=wanted))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    left = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    assert not left, f"nothing was loaded into {left}"


def _assign(model: nn.Module, names: list[str], tensor: Tensor) -> None:
    first, _, leaf = names[0].rpartition(".")
    blank = getattr(model.get_submodule(first), leaf)
    if isinstance(blank, nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=blank.requires_grad)
    for name in names:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, tensor)


def _tokenizer(folder: Path, contract: Contract) -> Tokenizer | None:
    if contract.text is None:
        return None
    tokenizer = Tokenizer.load(folder / TOKENIZER)
    found = TextContract.of(tokenizer)
    if found != contract.text:
        raise CheckpointError(
            f"{folder / TOKENIZER} has {found.model_dump()}, the contract says {contract.text.model_dump()}; "
            "it is another model's tokenizer"
        )
    return tokenizer
