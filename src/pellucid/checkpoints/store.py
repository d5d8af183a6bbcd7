"""Models to folders and back. A folder appears whole or not at all; nothing in it is unpickled or run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from pellucid.checkpoints.atomic import new_folder
from pellucid.checkpoints.contract import Contract, TextContract, contract_of, described, stored_tensors
from pellucid.checkpoints.files import digest, opened
from pellucid.checkpoints.folder import BESIDE, CONTRACT, TEMPLATE, TOKENIZER, Check, Folder, open_folder
from pellucid.checkpoints.report import LoadReport, MismatchError
from pellucid.checkpoints.weights import SINGLE, write_weights
from pellucid.checkpoints.witness import check_live, witness_of
from pellucid.data.chat import ChatTemplate
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import CheckpointError
from pellucid.models.decoder import Decoder
from pellucid.probe import Probe

__all__ = ["CONTRACT", "TOKENIZER", "WEIGHTS", "Check", "Checkpoint", "digest", "load", "save", "write"]

WEIGHTS = SINGLE


@dataclass(frozen=True)
class Checkpoint:
    """A folder, read: model in eval mode, tokenizer if there is one, contract, and what was loaded."""

    model: Decoder
    tokenizer: Tokenizer | None
    contract: Contract
    report: LoadReport
    chat_template: ChatTemplate | None = None

    def probe(self) -> Probe:
        """How an audit asks this checkpoint's model."""
        return self.model.probe()


def save(
    path: str | Path,
    model: nn.Module,
    *,
    tokenizer: Tokenizer | None = None,
    chat_template: ChatTemplate | str | None = None,
    max_shard_bytes: int | None = None,
) -> None:
    """Write ``model`` (and what its text needs) as a new folder. An existing target is refused, whatever it is.

    ``max_shard_bytes`` spreads the weights over files of that size, with an index.

    Raises:
        CheckpointError: the target exists, the disk refuses, or the model is not what its config describes.
    """
    with new_folder(path) as folder:
        write(folder, model, tokenizer=tokenizer, chat_template=chat_template, max_shard_bytes=max_shard_bytes)


def write(
    folder: Path,
    model: nn.Module,
    *,
    tokenizer: Tokenizer | None = None,
    chat_template: ChatTemplate | str | None = None,
    max_shard_bytes: int | None = None,
) -> None:
    """Write a checkpoint's files into ``folder``, which the caller completes (see :func:`new_folder`).

    A file of :data:`~pellucid.checkpoints.folder.BESIDE` that lies in ``folder`` already gets its digest.
    """
    config = described(model)  # refuse before the first byte
    text = None if tokenizer is None else TextContract.of(tokenizer, config)
    stored, tied = stored_tensors(model)
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in stored.items()}
    witness = witness_of(config, held.__getitem__, tied)
    check_live(model, witness)
    names = write_weights(folder, held, max_shard_bytes)
    if tokenizer is not None:
        tokenizer.save(folder / TOKENIZER)
    if chat_template is not None:
        _write_template(folder / TEMPLATE, chat_template, tokenizer)
    names += [name for name in BESIDE if (folder / name).exists()]
    digests = {name: digest(folder / name) for name in names}
    contract = contract_of(model, config, text=text, digests=digests, witness=witness)
    (folder / CONTRACT).write_text(contract.to_text(), encoding="utf-8")


def load(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    check: Check = "headers",
) -> Checkpoint:
    """Read a folder that :func:`save` wrote; its headers are held against the contract before a tensor is read.

    ``dtype`` casts floating-point tensors; the report says which. ``check="digests"`` also hashes the files, and
    ``check="witness"`` also asks the contract's probes (see :mod:`~pellucid.checkpoints.folder` for what that costs).
    On the CPU the weights are mapped from the file, privately: changing them never changes the file.

    Raises:
        LoadError: a tensor is missing, surplus, or of another shape or dtype; ``error.report`` names all.
        WitnessError: the weights do not give what they gave.
        MismatchError: the folder is not what its contract says in another way; the base of these two.
        CheckpointError: the folder is incomplete or damaged; the base of all.
    """
    folder = open_folder(Path(path), dtype)
    model, _ = folder.check(check)
    _fill(model, folder, torch.device(device), dtype)
    return Checkpoint(model.eval(), read_tokenizer(folder), folder.contract, folder.report, read_template(folder))


def read_tokenizer(folder: Folder) -> Tokenizer | None:
    """The tokenizer of an open folder, if its contract speaks of one and it is that one."""
    text = folder.contract.text
    if text is None:
        return None
    path = folder.path / TOKENIZER
    with opened(path):
        tokenizer = Tokenizer.load(path)
    found = TextContract.of(tokenizer)
    if found != text:
        raise MismatchError(
            f"{path} has {found.model_dump()}, the contract says {text.model_dump()}; it is another model's tokenizer"
        )
    return tokenizer


def read_template(folder: Folder) -> ChatTemplate | None:
    """The chat template of an open folder: its contract and its files both have one, or neither."""
    path, listed = folder.path / TEMPLATE, TEMPLATE in folder.contract.digests
    if os.path.lexists(path) != listed:
        have, say = ("has no", "a") if listed else ("has a", "no")
        raise MismatchError(f"{folder.path} {have} {TEMPLATE}, but its contract has {say} digest of it; copy it again")
    if not listed:
        return None
    with opened(path):
        return ChatTemplate.load(path)


def _write_template(path: Path, template: ChatTemplate | str, tokenizer: Tokenizer | None) -> None:
    if tokenizer is None:
        raise CheckpointError("a chat template was given without the tokenizer whose tokens it writes; give both")
    text = template if isinstance(template, str) else template.text
    path.write_bytes(ChatTemplate(text).text.encode("utf-8"))  # bytes: a line's end stays what it is


def _fill(model: nn.Module, folder: Folder, device: torch.device, dtype: torch.dtype | None) -> None:
    """Put the files' tensors in the place of the model's blank ones; a tied tensor stays one parameter."""
    names = _names(folder.places, folder.contract.tied)
    with folder.weights.opened() as read:
        for owner, place in folder.places.items():
            tensor = read(place)
            wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            _assign(model, names[owner], tensor.to(device=device, dtype=wanted))
    left = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    assert not left, f"nothing was loaded into {left}"


def _names(places: Mapping[str, str], tied: Mapping[str, str]) -> dict[str, list[str]]:
    names = {owner: [owner] for owner in places}
    for alias, owner in tied.items():
        names[owner].append(alias)
    return names


def _assign(model: nn.Module, names: list[str], tensor: Tensor) -> None:
    first, _, leaf = names[0].rpartition(".")
    blank = getattr(model.get_submodule(first), leaf)
    if isinstance(blank, nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=blank.requires_grad)
    for name in names:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, tensor)
