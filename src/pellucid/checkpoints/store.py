"""Models to folders and back. A folder appears whole or not at all; nothing in it is unpickled or run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from pellucid.checkpoints.contract import Contract, TextContract, config_of, contract_of, stored_tensors
from pellucid.checkpoints.files import digest, new_folder
from pellucid.checkpoints.fingerprint import check_live, witness_of
from pellucid.checkpoints.folder import BESIDE, CONTRACT, TEMPLATE, TOKENIZER, Check, Folder, open_folder
from pellucid.checkpoints.label_names import write_classes
from pellucid.checkpoints.load_report import LoadReport
from pellucid.checkpoints.tokenizer_fingerprint import tokenizer_fingerprint
from pellucid.checkpoints.validate import (
    device_of,
    float_type,
    folder_path,
    repr_short,
    shard_size,
    template_of,
    tokenizer_of,
)
from pellucid.checkpoints.weights import SINGLE, write_weights
from pellucid.data.chat import ChatTemplate
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import CheckpointError
from pellucid.models.model import Model
from pellucid.probe import Probe

__all__ = ["CONTRACT", "TOKENIZER", "WEIGHTS", "Check", "Checkpoint", "digest", "load", "save", "write"]

WEIGHTS = SINGLE

Proof = Literal["witness", "digests"]
"""What a saved folder can be verified by."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder, read: model in eval mode, tokenizer if there is one, contract, and what was loaded."""

    model: Model
    tokenizer: Tokenizer | None
    contract: Contract
    report: LoadReport
    chat_template: ChatTemplate | None = None
    classes: tuple[str, ...] = ()
    """What a classifier's logits stand for, where the folder names it."""

    def probe(self) -> Probe:
        """How an audit asks this checkpoint's model."""
        return self.model.probe()


def save(
    path: str | Path,
    model: nn.Module,
    *,
    tokenizer: Tokenizer | None = None,
    chat_template: ChatTemplate | str | None = None,
    classes: Sequence[str] = (),
    max_shard_bytes: int | None = None,
    prove: Proof = "witness",
) -> None:
    """Write ``model`` (and what its text needs) as a new folder. An existing target is refused, whatever it is.

    ``max_shard_bytes`` spreads the weights over files of that size, with an index. A chat template is tried on a few
    small chats first. ``classes`` names what a classifier's logits stand for.

    ``prove="witness"`` computes what the weights give on the contract's probes and stores it, so that
    ``check="witness"`` can compare it later. ``prove="digests"`` stores SHA-256 digests only, made while the files are
    written: for checkpoints that a run writes often.

    Raises:
        CheckpointError: the target exists, the disk refuses, or the model is not what its config describes.
    """
    with new_folder(folder_path(path)) as folder:
        write(
            folder,
            model,
            tokenizer=tokenizer,
            chat_template=chat_template,
            classes=classes,
            max_shard_bytes=max_shard_bytes,
            prove=prove,
        )


def write(
    folder: Path,
    model: nn.Module,
    *,
    tokenizer: Tokenizer | None = None,
    chat_template: ChatTemplate | str | None = None,
    classes: Sequence[str] = (),
    max_shard_bytes: int | None = None,
    prove: Proof = "witness",
) -> None:
    """Write a checkpoint's files into ``folder``, which the caller completes (see :func:`new_folder`).

    A file of :data:`~pellucid.checkpoints.folder.BESIDE` that lies in ``folder`` already gets its digest.
    """
    most = shard_size(max_shard_bytes)  # refuse before the first byte
    tokenizer, template = tokenizer_of(tokenizer), template_of(chat_template)
    config = config_of(model)
    text = None if tokenizer is None else TextContract.of(tokenizer, config)
    stored, tied = stored_tensors(model)
    witness = None
    if prove == "witness":
        witness = witness_of(config, lambda name: stored[name].detach(), tied)
        check_live(model, config, witness)
    elif prove != "digests":
        raise CheckpointError(f"prove is {repr_short(prove)}; choose witness or digests")
    if template is not None:
        _write_template(folder / TEMPLATE, template, tokenizer)
    elif (folder / TEMPLATE).exists():
        template = ChatTemplate.load(folder / TEMPLATE)
    if tokenizer is not None:
        if witness is not None:
            witness = witness.model_copy(update={"text": tokenizer_fingerprint(tokenizer, template)})
        tokenizer.save(folder / TOKENIZER)
    write_classes(folder, classes, getattr(config.head, "num_labels", None))
    digests = write_weights(folder, stored, most)
    digests |= {name: digest(folder / name) for name in BESIDE if (folder / name).exists()}
    contract = contract_of(model, config, text=text, digests=digests, witness=witness)
    (folder / CONTRACT).write_text(contract.to_text(), encoding="utf-8")


def load(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    check: Check = "headers",
) -> Checkpoint:
    """Read a folder that :func:`save` wrote; its headers are held against the contract before a tensor is read.

    ``dtype`` (one of :data:`~pellucid.checkpoints.validate.DTYPES`, or its name) casts the weights, but those of
    routers never below float32; the report says which. ``check="digests"`` also hashes the weights, and
    ``check="witness"`` also asks the contract's probes (see :mod:`~pellucid.checkpoints.folder` for what that costs);
    without either, weights whose bytes were changed under headers that still fit are loaded as they are. On the CPU
    the weights are mapped from the file, privately: changing them never changes the file.

    Raises:
        LoadError: a tensor is missing, surplus, or of another shape or dtype; ``error.report`` names all.
        WitnessError: the weights do not give what they gave.
        MismatchError: the folder is not what its contract says in another way; the base of these two.
        CheckpointError: the folder is incomplete or damaged; the base of all.
    """
    kind, place = float_type(dtype), device_of(device)
    folder = open_folder(path, kind)
    model, _ = folder.check(check)
    _fill(model if kind is None else model.to(kind), folder, place, kind)
    return Checkpoint(model.eval(), folder.tokenizer, folder.contract, folder.report, folder.template, folder.classes)


def _write_template(path: Path, template: ChatTemplate, tokenizer: Tokenizer | None) -> None:
    if tokenizer is None:
        raise CheckpointError("a chat template was given without the tokenizer whose tokens it writes; give both")
    path.write_bytes(template.text.encode("utf-8"))  # bytes: a line's end stays what it is


def _fill(model: nn.Module, folder: Folder, device: torch.device, dtype: torch.dtype | None) -> None:
    """Put the files' tensors in the place of the model's blank ones; a tied tensor stays one parameter.

    With a ``dtype``, each gets the type that its blank one has: routers stay wide in a narrow model.
    """
    names = _names(folder.places, folder.contract.tied)
    with folder.weights.opened() as read:
        for owner, place in folder.places.items():
            tensor = read(place)
            wanted = tensor.dtype if dtype is None else _at(model, owner).dtype
            try:
                moved = tensor.to(device=device, dtype=wanted)
            except (RuntimeError, TypeError) as error:  # too little memory, or a device without that type
                reason = " ".join(str(error).split())[:200]
                raise CheckpointError(f"{owner!r} cannot be put on {device}: {reason}; choose another") from error
            _assign(model, names[owner], moved)
    left = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    assert not left, f"nothing was loaded into {left}"


def _names(places: Mapping[str, str], tied: Mapping[str, str]) -> dict[str, list[str]]:
    names = {owner: [owner] for owner in places}
    for alias, owner in tied.items():
        names[owner].append(alias)
    return names


def _at(model: nn.Module, name: str) -> Tensor:
    parent, _, leaf = name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(parent), leaf)
    return tensor


def _assign(model: nn.Module, names: list[str], tensor: Tensor) -> None:
    blank = _at(model, names[0])
    if isinstance(blank, nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=blank.requires_grad)
    for name in names:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, tensor)
