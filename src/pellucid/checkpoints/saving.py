"""Models to folders. A folder appears whole or not at all, and holds nothing that could be executed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from torch import nn

from pellucid.checkpoints.contract import CONTRACT, Contract, TextContract
from pellucid.checkpoints.files import digest, new_folder, write_text
from pellucid.checkpoints.load_report import config_outline, first_difference, outline, stored_tensors
from pellucid.checkpoints.loading import BESIDE, LABELS, TEMPLATE, TOKENIZER, check_label_names, open_folder
from pellucid.checkpoints.weights import DTYPES, TensorSpec, dtype_name, write_weights
from pellucid.checkpoints.witness import live_witness
from pellucid.data.chat import ChatTemplate
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import ArgumentError, CheckpointError
from pellucid.files import checked_path
from pellucid.messages import repr_short
from pellucid.models.config import ModelConfig

Proof = Literal["witness", "digests"]
"""What a saved folder can be verified by."""


def save(
    path: str | Path,
    model: nn.Module,
    *,
    tokenizer: Tokenizer | None = None,
    chat_template: ChatTemplate | str | None = None,
    label_names: Sequence[str] = (),
    max_shard_bytes: int | None = None,
    prove: Proof = "witness",
    write_more: Callable[[Path], None] | None = None,
) -> None:
    """Write ``model``, and what its text needs, as a new folder.

    Args:
        path: The new folder. An existing target is refused, whatever it is.
        model: A model of :func:`pellucid.build`; its forward must be the one that its config describes.
        tokenizer: Written as ``tokenizer.json``.
        chat_template: Written as ``chat_template.jinja``, after it was tried on a few small chats.
        label_names: The names of a classifier's outputs.
        max_shard_bytes: The largest size of one file of weights; several files get an index.
        prove: ``"witness"`` computes the model's outputs on the contract's probes and stores them, so that
            ``check="witness"`` can compare them later. ``"digests"`` only stores SHA-256 digests, computed while the
            files are written: for checkpoints that a run writes often.
        write_more: Called with the unfinished folder, to write files of your own (a run's state) that appear with it.

    Raises:
        ArgumentError: an argument is none of these.
        CheckpointError: the target exists, the disk refuses, or the model is not what its config describes.
    """
    template = _check_arguments(tokenizer, chat_template, max_shard_bytes, prove)
    with new_folder(checked_path(path, "a checkpoint folder")) as folder:
        config = _config_of(model)
        if write_more is not None:
            write_more(folder)
        text = None if tokenizer is None else TextContract.of(tokenizer, config)
        witness = live_witness(model, config, tokenizer, template) if prove == "witness" else None
        digests = _write_beside(folder, config, tokenizer, template, list(label_names))
        stored, tied = stored_tensors(model)
        digests |= write_weights(folder, stored, max_shard_bytes)
        tensors = {name: str(TensorSpec.of(tensor)) for name, tensor in stored.items()}
        contract = Contract(model=config, text=text, tied=tied, tensors=tensors, digests=digests, witness=witness)
        # last: without it nothing is a model
        (folder / CONTRACT).write_text(contract.to_text(), encoding="utf-8")


def add_witness(path: Path, model: nn.Module, tokenizer: Tokenizer | None = None) -> None:
    """Add a witness to a folder that was saved with ``prove="digests"`` from ``model`` and ``tokenizer``.

    A folder that has one already stays as it is. The contract is replaced in one step.

    Raises:
        CheckpointError: the disk refuses, or the model is not what its config describes.
    """
    folder = open_folder(path)
    if folder.contract.witness is None:
        witness = live_witness(model, _config_of(model), tokenizer, folder.template)
        write_text(path / CONTRACT, folder.contract.model_copy(update={"witness": witness}).to_text())


def _config_of(model: nn.Module) -> ModelConfig:
    """The config of ``model``; a model whose tensors are not those of its config is refused."""
    config = getattr(model, "config", None)
    if not isinstance(config, ModelConfig):
        raise CheckpointError(
            f"a {type(model).__name__} without a ModelConfig in .config cannot be saved: "
            "its folder could not say how to build it again"
        )
    stored, _ = stored_tensors(model)
    for name, tensor in stored.items():
        if tensor.is_meta:
            raise CheckpointError(
                f"the model has no numbers in {name!r}, which is on the meta device; fill it before it is saved"
            )
        if tensor.dtype not in DTYPES.values():
            raise CheckpointError(
                f"the model has {dtype_name(tensor.dtype)} in {name!r}, but weights can be {', '.join(DTYPES)}; "
                "convert it with model.to(torch.float32)"
            )
    dtype = Counter(tensor.dtype for tensor in stored.values()).most_common(1)[0][0]
    device = Counter(tensor.device for tensor in stored.values()).most_common(1)[0][0]
    if difference := first_difference(outline(model), config_outline(config, dtype)):
        name, have, want = difference
        same = have.partition("[")[2] == want.partition("[")[2]
        way = f"convert it with model.to({dtype})" if same else "a model that was changed needs a config that says so"
        raise CheckpointError(f"the model has {have} as {name!r}, but its config describes {want}; {way}")
    if odd := next((name for name, tensor in stored.items() if tensor.device != device), None):
        raise CheckpointError(
            f"the model has {stored[odd].device} in {odd!r} but {device} elsewhere; convert it with model.to({device})"
        )
    return config


def _write_beside(
    folder: Path, config: ModelConfig, tokenizer: Tokenizer | None, template: ChatTemplate | None, labels: list[str]
) -> dict[str, str]:
    """Write what text and labels need; returns the SHA-256 of each file by its name."""
    if template is not None:
        (folder / TEMPLATE).write_bytes(template.text.encode("utf-8"))  # bytes: line ends stay as they are
    if tokenizer is not None:
        (folder / TOKENIZER).write_bytes(tokenizer.to_json().encode())
    if labels:
        wanted = getattr(config.head, "num_labels", None)
        check_label_names("label_names", labels, wanted, "name each class of the model once")
        text = json.dumps(labels, indent=2, ensure_ascii=False)
        (folder / LABELS).write_text(text + "\n", encoding="utf-8")
    return {name: digest(folder / name) for name in BESIDE if (folder / name).exists()}


def _check_arguments(
    tokenizer: object, template: object, max_shard_bytes: object, prove: object
) -> ChatTemplate | None:
    """Refuse wrong arguments of :func:`save`; returns the chat template."""
    if prove not in ("witness", "digests"):
        raise ArgumentError(f"prove is {repr_short(prove)}; choose witness or digests")
    if max_shard_bytes is not None and (type(max_shard_bytes) is not int or max_shard_bytes < 1):
        raise ArgumentError(
            f"max_shard_bytes is {repr_short(max_shard_bytes)}, but must be a whole number of at least 1; "
            "leave it out for a single file"
        )
    if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
        raise ArgumentError(
            f"tokenizer is {repr_short(tokenizer)}, but a pellucid.Tokenizer is wanted; "
            "Tokenizer.load reads a tokenizer.json"
        )
    if template is not None and not isinstance(template, ChatTemplate | str):
        raise ArgumentError(
            f"chat_template is {repr_short(template)}, but a ChatTemplate or its text is wanted; "
            "ChatTemplate.load reads a file"
        )
    if template is not None and tokenizer is None:
        raise ArgumentError("a chat template was given without the tokenizer whose tokens it writes; give both")
    return ChatTemplate(template) if isinstance(template, str) else template
