"""Models to folders and back. A folder appears whole or not at all; nothing in it is unpickled or executed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from pellucid.checkpoints.contract import Contract, TextContract, config_of, contract_of, stored_tensors
from pellucid.checkpoints.files import digest, new_folder, write_text
from pellucid.checkpoints.fingerprint import check_live, witness_of
from pellucid.checkpoints.folder import (
    BESIDE,
    CONTRACT,
    TEMPLATE,
    TOKENIZER,
    Check,
    Folder,
    folder_path,
    open_folder,
)
from pellucid.checkpoints.label_names import write_label_names
from pellucid.checkpoints.load_report import LoadReport
from pellucid.checkpoints.tokenizer_fingerprint import tokenizer_fingerprint
from pellucid.checkpoints.weights import DTYPES, SINGLE, dtype_name, write_weights
from pellucid.data.chat import ChatTemplate
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import CheckpointError
from pellucid.messages import repr_short
from pellucid.models.build import why_unusable
from pellucid.models.model import Model
from pellucid.probe import Probe

__all__ = [
    "CONTRACT",
    "TOKENIZER",
    "WEIGHTS",
    "Check",
    "Checkpoint",
    "Proof",
    "add_witness",
    "digest",
    "load",
    "save",
    "write",
]

WEIGHTS = SINGLE

Proof = Literal["witness", "digests"]
"""What a saved folder can be verified by."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder that was read: model in eval mode, tokenizer if there is one, contract, and what was loaded."""

    model: Model
    tokenizer: Tokenizer | None
    contract: Contract
    report: LoadReport
    chat_template: ChatTemplate | None = None
    classes: tuple[str, ...] = ()
    """The names of a classifier's outputs, if the folder has them."""

    def probe(self) -> Probe:
        """How audits call this checkpoint's model."""
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
    """Write ``model``, and what its text needs, as a new folder.

    Args:
        path: The new folder. An existing target is refused, whatever it is.
        model: A model of :func:`pellucid.build`; its forward must be the one that its config describes.
        tokenizer: Written as ``tokenizer.json``.
        chat_template: Written as ``chat_template.jinja``, after it was tried on a few small chats.
        classes: The names of a classifier's outputs.
        max_shard_bytes: The largest size of one file of weights; several files get an index.
        prove: ``"witness"`` computes the model's outputs on the contract's probes and stores them, so that
            ``check="witness"`` can compare them later. ``"digests"`` only stores SHA-256 digests, computed while the
            files are written: for checkpoints that a run writes often.

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

    Arguments are those of :func:`save`. A file of :data:`~pellucid.checkpoints.folder.BESIDE` that is in ``folder``
    already gets its digest.
    """
    template = _check_arguments(tokenizer, chat_template, max_shard_bytes, prove)  # before the first byte is written
    config = config_of(model)
    text = None if tokenizer is None else TextContract.of(tokenizer, config)
    stored, tied = stored_tensors(model)
    witness = None
    if prove == "witness":
        witness = witness_of(config, lambda name: stored[name].detach(), tied)
        check_live(model, config, witness)
    if template is not None:
        if tokenizer is None:
            raise CheckpointError("a chat template was given without the tokenizer whose tokens it writes; give both")
        (folder / TEMPLATE).write_bytes(template.text.encode("utf-8"))  # bytes: line ends stay as they are
    elif (folder / TEMPLATE).exists():
        template = ChatTemplate.load(folder / TEMPLATE)
    if tokenizer is not None:
        if witness is not None:
            witness = witness.model_copy(update={"text": tokenizer_fingerprint(tokenizer, template)})
        tokenizer.save(folder / TOKENIZER)
    write_label_names(folder, classes, getattr(config.head, "num_labels", None))
    digests = write_weights(folder, stored, max_shard_bytes)
    digests |= {name: digest(folder / name) for name in BESIDE if (folder / name).exists()}
    contract = contract_of(model, config, text=text, digests=digests, witness=witness)
    (folder / CONTRACT).write_text(contract.to_text(), encoding="utf-8")


def add_witness(path: Path, model: nn.Module, tokenizer: Tokenizer | None = None) -> None:
    """Add a witness to a folder that was saved with ``prove="digests"`` from ``model`` and ``tokenizer``.

    A folder that has one already stays as it is. The contract is replaced in one step.

    Raises:
        CheckpointError: the disk refuses, or the model is not what its config describes.
    """
    folder = open_folder(path)
    if folder.contract.witness is not None:
        return
    stored, tied = stored_tensors(model)
    witness = witness_of(config := config_of(model), lambda name: stored[name].detach(), tied)
    check_live(model, config, witness)
    if tokenizer is not None:
        witness = witness.model_copy(update={"text": tokenizer_fingerprint(tokenizer, folder.template)})
    write_text(path / CONTRACT, folder.contract.model_copy(update={"witness": witness}).to_text())


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
            :mod:`~pellucid.checkpoints.folder` for the cost). At ``"headers"``, weights that were changed under headers
            that still fit are loaded as they are.

    Raises:
        LoadError: a tensor is missing, surplus, or of another shape or dtype; ``error.report`` names all.
        WitnessError: the outputs are not those that the model had.
        MismatchError: the folder is not what its contract says in another way; the base of these two.
        CheckpointError: the folder is incomplete or damaged; the base of all.
    """
    kind, place = _float_type(dtype), _usable_device(device)
    folder = open_folder(path, kind)
    model, _ = folder.check(check)
    _load_tensors(model if kind is None else model.to(kind), folder, place, kind)
    return Checkpoint(model.eval(), folder.tokenizer, folder.contract, folder.report, folder.template, folder.classes)


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


# ---- arguments


def _check_arguments(
    tokenizer: object, template: object, max_shard_bytes: object, prove: object
) -> ChatTemplate | None:
    """Refuse wrong arguments of :func:`save`; returns the chat template."""
    if prove not in ("witness", "digests"):
        raise CheckpointError(f"prove is {_shown(prove)}; choose witness or digests")
    if max_shard_bytes is not None and (type(max_shard_bytes) is not int or max_shard_bytes < 1):
        raise CheckpointError(
            f"max_shard_bytes is {_shown(max_shard_bytes)}, but must be a whole number of at least 1; "
            "leave it out for a single file"
        )
    if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
        raise CheckpointError(
            f"tokenizer is {_shown(tokenizer)}, but a pellucid.Tokenizer is wanted; "
            "Tokenizer.load reads a tokenizer.json"
        )
    if template is None or isinstance(template, ChatTemplate):
        return template
    if not isinstance(template, str):
        raise CheckpointError(
            f"chat_template is {_shown(template)}, but a ChatTemplate or its text is wanted; "
            "ChatTemplate.load reads a file"
        )
    return ChatTemplate(template)


def _float_type(dtype: object) -> torch.dtype | None:
    """``dtype``, or the one of that name."""
    if dtype is None:
        return None
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or found not in DTYPES.values():
        raise CheckpointError(f"dtype is {_shown(dtype)}, but weights can be {', '.join(DTYPES)}; choose one of these")
    return found


def _usable_device(device: object) -> torch.device:
    """``device``, if tensors can be put there."""
    try:
        if not isinstance(device, str | torch.device):
            raise TypeError(device)
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"device is {_shown(device)}, but a device like 'cpu' or 'cuda:0' is wanted; leave it out for the CPU"
        ) from error
    if found.type == "meta":
        raise CheckpointError("device is 'meta', which holds no weights; build(config, device='meta') needs no folder")
    if found.type != "cpu" and (reason := why_unusable(found)):
        raise CheckpointError(f"device is {str(found)!r}, which cannot be used here: {reason}; choose cpu")
    return found


def _shown(value: object) -> str:
    """``value`` on one short line."""
    return dtype_name(value) if isinstance(value, torch.dtype) else " ".join(repr_short(value, 60).split())
