"""``pellucid.json``: everything that weights alone do not say about their forward pass.

Names, shapes and dtypes are those that the model's configuration gives, never those that a file happens to
hold; :mod:`~pellucid.checkpoints.store` compares the two before it reads a tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor, nn

from pellucid.checkpoints.header import TensorSpec
from pellucid.configfile import Config
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import CheckpointError, ConfigError
from pellucid.models.build import build
from pellucid.models.config import ModelConfig
from pellucid.models.decoder import Decoder

SCHEMA_VERSION = 1
_LARGEST = 32 * 2**20

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class TextContract(Config):
    """What the ids mean at their edges."""

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    adds_bos: Literal["document"] = "document"
    """Encoding text adds nothing: a document gets its one begin token where it is made out of ids."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TextContract:
        """What ``tokenizer`` says."""
        names = ("vocab_size", "bos_id", "eos_id", "pad_id")
        return cls(**{name: getattr(tokenizer, name) for name in names})


class Contract(Config):
    """The contents of ``pellucid.json``, in the order of the file."""

    schema_version: Literal[1] = 1
    model: ModelConfig
    positions_after_cache: Literal["continue"] = "continue"
    """Positions count on from what a cache holds of the row's last document."""
    text: TextContract | None
    tied: dict[str, str]
    """A second name of a tensor, and the name that it is stored under."""
    tensors: dict[str, str]
    """Every stored tensor: its dtype and shape, such as ``float32[256, 64]``."""
    digests: dict[str, Digest]
    """SHA-256 of the files beside this one."""

    def to_text(self) -> str:
        """The file: JSON with two spaces, in the order of the fields, a newline at the end."""
        return json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"


def contract_of(model: nn.Module, tokenizer: Tokenizer | None, digests: Mapping[str, str]) -> Contract:
    """The contract that ``model`` keeps. Refuses a model that is not what its own config describes."""
    config = getattr(model, "config", None)
    if not isinstance(config, ModelConfig):
        raise CheckpointError(
            f"a {type(model).__name__} without a ModelConfig in .config cannot be saved: "
            "its folder could not say how to build it again"
        )
    if difference := first_difference(outline(model), outline(blank_model(config))):
        name, have, want = difference
        raise CheckpointError(
            f"the model has {have} as {name!r}, but its config describes {want}; "
            "a model that was changed needs a config that says so"
        )
    stored, tied = stored_tensors(model)
    return Contract(
        model=config,
        text=_text_contract(tokenizer, config),
        tied=tied,
        tensors={name: str(TensorSpec.of(tensor)) for name, tensor in stored.items()},
        digests=dict(digests),
    )


def read_contract(path: Path) -> Contract:
    """The checked contract in the file at ``path``."""
    try:
        with open(path, "rb") as file:
            content = file.read(_LARGEST + 1)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    if len(content) > _LARGEST:
        raise CheckpointError(f"{path} is larger than {_LARGEST} bytes; it is not a contract")
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise CheckpointError(
            f"{path} has schema_version {str(version)[:40]}, this version reads {SCHEMA_VERSION}; "
            "use the Pellucid that wrote it, or a newer one"
        )
    try:
        return Contract.from_mapping(data)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


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


def blank_model(config: ModelConfig) -> Decoder:
    """The model that ``config`` describes, without memory for its weights."""
    return build(config, device="meta")


def outline(model: nn.Module) -> dict[str, str]:
    """Every name in the model's state and its shape, or which other name it is the same as."""
    stored, tied = stored_tensors(model)
    return {name: str(list(tensor.shape)) for name, tensor in stored.items()} | ties(tied)


def ties(tied: Mapping[str, str]) -> dict[str, str]:
    """The part of an :func:`outline` that is tied."""
    return {name: f"the same as {owner}" for name, owner in tied.items()}


def first_difference(have: Mapping[str, str], want: Mapping[str, str]) -> tuple[str, str, str] | None:
    """The first name at which two outlines differ, and what each has there."""
    for name in sorted(have.keys() | want.keys()):
        if have.get(name) != want.get(name):
            return name[:120], have.get(name, "nothing")[:120], want.get(name, "nothing")[:120]
    return None


def _text_contract(tokenizer: Tokenizer | None, config: ModelConfig) -> TextContract | None:
    if tokenizer is None:
        return None
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"the tokenizer has {tokenizer.vocab_size} tokens but the model only {config.vocab_size} rows; "
            "they do not belong together"
        )
    return TextContract.of(tokenizer)
