"""``pellucid.json``: everything that weights alone do not say about their forward pass.

Names, shapes and dtypes are those that the model's configuration gives, never those that a file happens to
hold; :mod:`~pellucid.checkpoints.store` compares the two before it reads a tensor.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from pellucid.checkpoints.files import canonical_digest, nesting_levels, read_json
from pellucid.checkpoints.fingerprint import Witness
from pellucid.checkpoints.load_report import MismatchError
from pellucid.checkpoints.validate import check_tensors
from pellucid.checkpoints.weights import TensorSpec
from pellucid.configfile import Config
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import CheckpointError, ConfigError
from pellucid.models.build import build
from pellucid.models.config import ModelConfig
from pellucid.models.configs import Whole
from pellucid.models.model import Model

NAME = "pellucid.json"
SCHEMA_VERSION = 5
_LARGEST = 8 * 2**20
_MOST_VALUES, _MOST_KEYS = 40_000, 4000
_SPEC = re.compile(r"[a-z]+[0-9]*\[[0-9, ]{0,200}\]")
_FLAT = re.compile(r"\[\n\s*((?:-?[0-9.e+-]+|null),?\s+)+\]")
_WIDTH = 160

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class TextContract(Config):
    """What the ids mean at their edges."""

    vocab_size: Whole
    bos_id: Whole | None
    eos_id: Whole | None
    pad_id: Whole | None
    adds_bos: Literal["document"] = "document"
    """Encoding text adds nothing: a document gets its one begin token where it is made out of ids."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, config: ModelConfig | None = None) -> TextContract:
        """What ``tokenizer`` says. One that ``config`` has too few rows for is refused."""
        if config is not None and tokenizer.vocab_size > config.vocab_size:
            raise CheckpointError(
                f"the tokenizer has {tokenizer.vocab_size} tokens but the model only {config.vocab_size} rows; "
                "they do not belong together"
            )
        names = ("vocab_size", "bos_id", "eos_id", "pad_id")
        return cls(**{name: getattr(tokenizer, name) for name in names})


class Contract(Config):
    """The contents of ``pellucid.json``, in the order of the file."""

    schema_version: Literal[5] = 5
    model: ModelConfig
    positions_after_cache: Literal["continue"] = "continue"
    """Positions count on from what a cache holds of the row's last document."""
    text: TextContract | None
    tied: dict[str, str]
    """A second name of a tensor, and the name that it is stored under."""
    tensors: dict[str, str]
    """Every stored tensor: its dtype and shape, such as ``float32[256, 64]``."""
    digests: dict[str, Digest]
    """SHA-256 of the files beside this one, and of what this one says (whatever its spaces and order of keys)."""
    witness: Witness | None
    """Probes, and what the weights must give on them. None: saved with ``prove="digests"``."""

    def to_text(self) -> str:
        """The file: JSON with two spaces, in the order of the fields, rows of numbers on one line each."""
        data = with_digest(self.model_dump(mode="json"))
        text = json.dumps(data, indent=2, ensure_ascii=False)
        return _FLAT.sub(lambda match: _row(match[0]), text) + "\n"


def _row(text: str) -> str:
    """A list of numbers on one line, or on as few as hold it."""
    line = " ".join(text.split()).replace("[ ", "[").replace(" ]", "]")
    if len(line) <= _WIDTH:
        return line
    return textwrap.fill(line, _WIDTH, subsequent_indent=" " * 10, break_long_words=False, break_on_hyphens=False)


def with_digest(data: dict[str, Any]) -> dict[str, Any]:
    """A contract as plain data, with the digest of what it says put in."""
    digests = {name: value for name, value in data["digests"].items() if name != NAME}
    return {**data, "digests": {**digests, NAME: canonical_digest({**data, "digests": digests})}}


def config_of(model: nn.Module) -> ModelConfig:
    """The config of ``model``. Refuses a model whose tensors are not what that describes."""
    config = getattr(model, "config", None)
    if not isinstance(config, ModelConfig):
        raise CheckpointError(
            f"a {type(model).__name__} without a ModelConfig in .config cannot be saved: "
            "its folder could not say how to build it again"
        )
    if difference := first_difference(shapes_and_ties(model), shapes_and_ties(meta_model(config))):
        name, have, want = difference
        raise CheckpointError(
            f"the model has {have} as {name!r}, but its config describes {want}; "
            "a model that was changed needs a config that says so"
        )
    check_tensors(stored_tensors(model)[0], float32_tensors(config))
    return config


def contract_of(
    model: nn.Module,
    config: ModelConfig,
    *,
    text: TextContract | None,
    digests: Mapping[str, str],
    witness: Witness | None,
) -> Contract:
    """The contract that ``model``, which is :func:`config_of` by ``config``, keeps."""
    stored, tied = stored_tensors(model)
    return Contract(
        model=config,
        text=text,
        tied=tied,
        tensors={name: str(TensorSpec.of(tensor)) for name, tensor in stored.items()},
        digests=dict(digests),
        witness=witness,
    )


def read_contract(path: Path) -> Contract:
    """The checked contract in the file at ``path``; what it says must have the digest that it says."""
    contract, changed = read_unverified(path)
    if changed:
        raise MismatchError(changed)
    return contract


def read_unverified(path: Path) -> tuple[Contract, str]:
    """The contract in the file at ``path``, and in what way its own digest is wrong (nothing if it is right)."""
    data = read_json(path, _LARGEST)
    version = data.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        older = type(version) is int and version < SCHEMA_VERSION
        way = "or save its model again with this one" if older else "or a newer one"
        raise CheckpointError(
            f"{path} has schema_version {str(version)[:40]}, this version reads {SCHEMA_VERSION}; "
            f"use the Pellucid that wrote it, {way}"
        )
    _refuse_garbage(path, data)
    try:
        contract = Contract.from_mapping(data)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {str(error)[:1000]}") from error
    told, found = contract.digests.get(NAME), with_digest(data)["digests"][NAME]
    if told is None:
        return contract, f"{path} has no digest of itself in digests; save the model again"
    if told != found:
        return contract, (
            f"{path} says something else than when it was written (SHA-256 {found[:16]}…, it notes {told[:16]}…); "
            "to change what a model is, save it with another config"
        )
    return contract, ""


def _refuse_garbage(path: Path, data: Mapping[str, Any]) -> None:
    """Bound what is validated in detail, so that a bad file takes no longer than a good one to refuse."""
    for key, most in (("tied", _MOST_VALUES), ("tensors", _LARGEST), ("digests", 2000)):
        value = data.get(key)
        if not isinstance(value, dict) or not all(isinstance(entry, str) for entry in value.values()):
            raise CheckpointError(f"{path}: {key} must map names to text")
        if len(value) > most:
            raise CheckpointError(f"{path}: {key} has {len(value)} entries, at most {most} are read")
    odd = next((spec for spec in data["tensors"].values() if not _SPEC.fullmatch(spec)), None)
    if odd is not None:
        wanted = "a dtype and shape like 'float32[256, 64]' is wanted"
        raise CheckpointError(f"{path}: tensors holds {odd[:80]!r}, but {wanted}")
    detailed = {key: value for key, value in data.items() if key not in ("tied", "tensors", "digests")}
    parts = [part for level in nesting_levels(detailed) for part in level]
    values, keys = sum(map(len, parts)), sum(len(part) for part in parts if isinstance(part, dict))
    if values > _MOST_VALUES or keys > _MOST_KEYS:
        raise CheckpointError(
            f"{path} holds {values} values and {keys} keys besides its lists of tensors; "
            f"at most {_MOST_VALUES} and {_MOST_KEYS} are read"
        )


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


def meta_model(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Model:
    """The model that ``config`` describes, without memory for its weights."""
    return build(config, device="meta", dtype=dtype)


def float32_tensors(config: ModelConfig) -> frozenset[str]:
    """The tensors that stay float32 in a narrower model: what routers choose by."""
    stored, _ = stored_tensors(meta_model(config, torch.bfloat16))
    return frozenset(name for name, tensor in stored.items() if tensor.dtype != torch.bfloat16)


def shapes_and_ties(model: nn.Module) -> dict[str, str]:
    """Every name in the model's state and its shape, or which other name it is the same as."""
    stored, tied = stored_tensors(model)
    return {name: str(list(tensor.shape)) for name, tensor in stored.items()} | ties(tied)


def ties(tied: Mapping[str, str]) -> dict[str, str]:
    """The part of an :func:`shapes_and_ties` that is tied."""
    return {name: f"the same as {owner}" for name, owner in tied.items()}


def first_difference(have: Mapping[str, str], want: Mapping[str, str]) -> tuple[str, str, str] | None:
    """The first name at which two outlines differ, and what each has there."""
    for name in sorted(have.keys() | want.keys()):
        if have.get(name) != want.get(name):
            return name[:120], have.get(name, "nothing")[:120], want.get(name, "nothing")[:120]
    return None
