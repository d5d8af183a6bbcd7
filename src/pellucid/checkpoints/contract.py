"""``pellucid.json``: everything about a forward pass that weights alone do not say.

Names, shapes and dtypes are those of the model's configuration, never those that a file happens to hold;
:mod:`~pellucid.checkpoints.folder` compares the two before a tensor is read.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from pellucid.checkpoints.files import canonical_digest, nesting_levels, read_json
from pellucid.checkpoints.fingerprint import Witness
from pellucid.checkpoints.load_report import MismatchError
from pellucid.checkpoints.weights import DTYPES, TensorSpec, dtype_name
from pellucid.configfile import Config
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import CheckpointError, ConfigError
from pellucid.models.build import build
from pellucid.models.config import ModelConfig
from pellucid.models.configs import Whole
from pellucid.models.model import Model

NAME = "pellucid.json"
SCHEMA_VERSION = 5
_MAX_BYTES = 8 * 2**20
_MAX_VALUES, _MAX_KEYS = 40_000, 4000
_SPEC = re.compile(r"[a-z]+[0-9]*\[[0-9, ]{0,200}\]")
_FLAT = re.compile(r"\[\n\s*((?:-?[0-9.e+-]+|null),?\s+)+\]")
_WIDTH = 160

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class TextContract(Config):
    """Sizes and special ids of the tokenizer."""

    vocab_size: Whole
    bos_id: Whole | None
    eos_id: Whole | None
    pad_id: Whole | None
    adds_bos: Literal["document"] = "document"
    """Encoding text adds nothing: a document gets its one begin token when it is made from ids."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, config: ModelConfig | None = None) -> TextContract:
        """Read from ``tokenizer``; one with more tokens than ``config`` has rows is refused."""
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
    """Positions continue those that a cache holds of the row's last document."""
    text: TextContract | None
    tied: dict[str, str]
    """A second name of a tensor, and the name that it is stored under."""
    tensors: dict[str, str]
    """Every stored tensor: its dtype and shape, such as ``float32[256, 64]``."""
    digests: dict[str, Digest]
    """SHA-256 of the files beside this one, and of this one's content (whatever its spaces and order of keys)."""
    witness: Witness | None
    """Probes, and what the weights must give on them. None: saved with ``prove="digests"``."""

    def to_text(self) -> str:
        """The file: JSON with two spaces, in the order of the fields, rows of numbers on one line each."""
        data = with_digest(self.model_dump(mode="json"))
        text = json.dumps(data, indent=2, ensure_ascii=False)
        return _FLAT.sub(lambda match: _row(match[0]), text) + "\n"


def _row(text: str) -> str:
    """A list of numbers on as few lines as possible."""
    line = " ".join(text.split()).replace("[ ", "[").replace(" ]", "]")
    if len(line) <= _WIDTH:
        return line
    return textwrap.fill(line, _WIDTH, subsequent_indent=" " * 10, break_long_words=False, break_on_hyphens=False)


def with_digest(data: dict[str, Any]) -> dict[str, Any]:
    """A contract as plain data, with its own digest added to ``digests``."""
    digests = {name: value for name, value in data["digests"].items() if name != NAME}
    return {**data, "digests": {**digests, NAME: canonical_digest({**data, "digests": digests})}}


def config_of(model: nn.Module) -> ModelConfig:
    """The config of ``model``; a model whose tensors are not those of its config is refused."""
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
    """The contract of ``model``, whose config (see :func:`config_of`) is ``config``."""
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
    """The contract in the file at ``path``, whose own digest must be right."""
    contract, changed = read_unverified(path)
    if changed:
        raise MismatchError(changed)
    return contract


def read_unverified(path: Path) -> tuple[Contract, str]:
    """The contract in the file at ``path``, and what is wrong with its own digest (empty if nothing is)."""
    data = read_json(path, _MAX_BYTES)
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
    noted, found = contract.digests.get(NAME), with_digest(data)["digests"][NAME]
    if noted is None:
        return contract, f"{path} has no digest of itself in digests; save the model again"
    if noted != found:
        return contract, (
            f"{path} was changed after it was written (SHA-256 {found[:16]}…, it notes {noted[:16]}…); "
            "to change what a model is, save it with another config"
        )
    return contract, ""


def _refuse_garbage(path: Path, data: Mapping[str, Any]) -> None:
    """Bound what is validated in detail, so that a bad file is refused as fast as a good one is read."""
    for key, most in (("tied", _MAX_VALUES), ("tensors", _MAX_BYTES), ("digests", 2000)):
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
    if values > _MAX_VALUES or keys > _MAX_KEYS:
        raise CheckpointError(
            f"{path} holds {values} values and {keys} keys besides its lists of tensors; "
            f"at most {_MAX_VALUES} and {_MAX_KEYS} are read"
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
    """The model that ``config`` describes, on the meta device."""
    return build(config, device="meta", dtype=dtype)


def float32_tensors(config: ModelConfig) -> frozenset[str]:
    """The tensors that stay float32 in a narrower model: those of routers."""
    stored, _ = stored_tensors(meta_model(config, torch.bfloat16))
    return frozenset(name for name, tensor in stored.items() if tensor.dtype != torch.bfloat16)


def shapes_and_ties(model: nn.Module) -> dict[str, str]:
    """Every name in the model's state, with its shape or the name that it is tied to."""
    stored, tied = stored_tensors(model)
    return {name: str(list(tensor.shape)) for name, tensor in stored.items()} | ties(tied)


def check_tensors(tensors: Mapping[str, Tensor], wide: Set[str]) -> None:
    """The tensors of a model must hold numbers, of one dtype, on one device; ``wide`` ones are at least float32."""
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise CheckpointError(
                f"the model has no numbers in {name!r}, which is on the meta device; fill it before it is saved"
            )
        if tensor.dtype not in DTYPES.values():
            raise CheckpointError(
                f"the model has {dtype_name(tensor.dtype)} in {name!r}, but weights can be {', '.join(DTYPES)}; "
                "convert it with model.to(torch.float32)"
            )
    dtype = Counter(t.dtype for name, t in tensors.items() if name not in wide).most_common(1)[0][0]
    device = Counter(t.device for name, t in tensors.items() if name not in wide).most_common(1)[0][0]
    for name, tensor in tensors.items():
        wanted = widened(dtype) if name in wide else dtype
        if tensor.dtype != wanted:
            raise CheckpointError(
                f"the model has {dtype_name(tensor.dtype)} in {name!r} but {dtype_name(wanted)} "
                f"{'is wanted there' if name in wide else 'elsewhere'}; convert it with model.to({dtype})"
            )
        if tensor.device != device:
            raise CheckpointError(
                f"the model has {tensor.device} in {name!r} but {device} elsewhere; convert it with model.to({device})"
            )


def widened(dtype: torch.dtype) -> torch.dtype:
    """``dtype``, or float32 where that is wider: the dtype of the tensors of routers in a narrow model."""
    return torch.promote_types(dtype, torch.float32)


def ties(tied: Mapping[str, str]) -> dict[str, str]:
    """The tied part of :func:`shapes_and_ties`."""
    return {name: f"the same as {owner}" for name, owner in tied.items()}


def first_difference(have: Mapping[str, str], want: Mapping[str, str]) -> tuple[str, str, str] | None:
    """The first name at which two outlines differ, and what each has there."""
    for name in sorted(have.keys() | want.keys()):
        if have.get(name) != want.get(name):
            return name[:120], have.get(name, "nothing")[:120], want.get(name, "nothing")[:120]
    return None
