"""``pellucid.json``: everything about a forward pass that weights alone do not say.

Names, shapes and dtypes are those of the model's configuration, never those that a file happens to hold;
:mod:`~pellucid.checkpoints.loading` compares the two before a tensor is read.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, PlainSerializer, PlainValidator, TypeAdapter, ValidationError, model_validator

from pellucid.batch import Batch
from pellucid.checkpoints.files import canonical_digest, nesting_levels, read_json
from pellucid.checkpoints.tokenizer_fingerprint import TokenizerFingerprint
from pellucid.configfile import Config
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import CheckpointError, ConfigError
from pellucid.models.config import ModelConfig
from pellucid.models.configs import Whole

CONTRACT = "pellucid.json"
SCHEMA_VERSION = 5

PROJECTIONS = 4
"""Numbers stored of each output: Σ ±logit / sqrt(V), signs from ``splitmix64(id)``; up to 4 logits unchanged."""

TOLERANCE = 1e-6
"""Allowed difference, relative to the largest number of the probe. Rounding to float32 takes 6e-8 of it."""

LONGEST_ROW = 1100
_MAX_BYTES = 8 * 2**20
_MAX_VALUES, _MAX_KEYS = 40_000, 4000
_SPEC = re.compile(r"[a-z]+[0-9]*\[[0-9, ]{0,200}\]")
_FLAT = re.compile(r"\[\n\s*((?:-?[0-9.e+-]+|null),?\s+)+\]")
_WIDTH = 160

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Slot = Annotated[int, Field(ge=0, le=1 << 40, strict=True)]
Rows = Annotated[
    tuple[Annotated[tuple[Slot, ...], Field(min_length=1, max_length=LONGEST_ROW)], ...],
    Field(min_length=1, max_length=8),
]
Gain = Annotated[float, Field(gt=0, le=1 << 20)]
Projection = Annotated[tuple[float, ...], Field(min_length=PROJECTIONS, max_length=PROJECTIONS)]

_REQUIRED = ("tokens", "positions", "segments")
_FIELDS = (*_REQUIRED, "groups", "types")
_ROWS = TypeAdapter(dict[str, Rows | None])


def batch_to_json(batch: Batch) -> dict[str, Any]:
    """The fields of ``batch`` as rows of integers, and its source in the same form."""
    fields = {name: getattr(batch, name) for name in _FIELDS}
    rows: dict[str, Any] = {name: None if value is None else value.tolist() for name, value in fields.items()}
    return {**rows, "source": None if batch.source is None else batch_to_json(batch.source)}


def batch_from_json(data: object) -> Batch:
    """The inverse of :func:`batch_to_json`; anything else is a ValueError."""
    if isinstance(data, Batch):
        return data
    if not isinstance(data, Mapping) or not set(_REQUIRED) <= set(data) <= {*_FIELDS, "source"}:
        raise ValueError(f"a batch has {', '.join(_REQUIRED)}, and may have groups, types and source")
    try:
        rows = _ROWS.validate_python({name: value for name, value in data.items() if name != "source"})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if missing := [name for name in _REQUIRED if rows[name] is None]:
        raise ValueError(f"{missing[0]}: rows of whole numbers are wanted")
    fields: dict[str, Any] = {name: None if value is None else torch.tensor(value) for name, value in rows.items()}
    source = data.get("source")
    return Batch(**fields, source=None if source is None else batch_from_json(source))


class WitnessProbe(Config):
    """One input of a model, how it is run, and the slots whose outputs are compared."""

    batch: Annotated[Batch, PlainValidator(batch_from_json), PlainSerializer(batch_to_json)]
    chunks: Annotated[tuple[Annotated[int, Field(ge=1, le=LONGEST_ROW)], ...], Field(max_length=16)] = ()
    """How many slots go through the cache at a time; none: all at once, without a cache."""
    training: bool = False
    gains: Annotated[tuple[Gain, ...], Field(max_length=8)] = ()
    """For each row, a factor of the inputs of some layers' branches and of the head."""
    at: Rows | None
    """The slots of each row whose output is compared; None: one output for each document."""

    @model_validator(mode="after")
    def _fields_fit(self) -> WitnessProbe:
        rows, slots = self.batch.shape
        if self.at is not None and (len(self.at) != rows or any(slot >= slots for row in self.at for slot in row)):
            raise ValueError("at names slots of each row, and none that is not there")
        if self.chunks and sum(self.chunks) != slots:
            raise ValueError("chunks must sum to the slots")
        if self.gains and (len(self.gains) != rows or self.chunks):
            raise ValueError("gains has one number a row, and goes without chunks")
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WitnessProbe) and self.model_dump() == other.model_dump()

    def pieces(self) -> list[Batch]:
        """The batch, or its chunks, each with positions from 0 as a cache wants it; the source is with the first."""
        whole, start, pieces = self.batch, 0, []
        for size in self.chunks:
            part = slice(start, start + size)
            cut: dict[str, Any] = {
                name: None if (rows := getattr(whole, name)) is None else rows[:, part] for name in _FIELDS
            }
            cut["positions"] = ((whole.segments[:, part] != 0).long().cumsum(1) - 1).clamp(min=0)
            pieces.append(Batch(**cut, source=None if start else whole.source))
            start += size
        return pieces or [whole]

    @property
    def num_outputs(self) -> int:
        """How many outputs are compared."""
        if self.at is None:
            return sum(piece.documents for piece in self.pieces())
        return sum(map(len, self.at))


class ProbeRecord(Config):
    """A probe and the outputs that it must have."""

    probe: WitnessProbe
    logits: tuple[Projection, ...]
    """The projected logits of each slot in ``probe.at``, row after row, or of each document."""
    loss: float | None = None
    """The head's mean loss over targets that follow from the input; none with a cache."""
    num_targets: Slot | None = None

    @model_validator(mode="after")
    def _one_per_output(self) -> ProbeRecord:
        if len(self.logits) != self.probe.num_outputs:
            raise ValueError(f"logits has {len(self.logits)} entries for {self.probe.num_outputs} outputs")
        return self


class MismatchError(CheckpointError):
    """A folder could be read, but is not what its contract says."""


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


class Witness(Config):
    """Probes and the outputs that they must have."""

    tolerance: Annotated[float, Field(gt=0, le=TOLERANCE)] = TOLERANCE
    stream: Annotated[tuple[str, ...], Field(max_length=1 << 13)]
    """The dtype of the residual stream after each layer with its own weights, an encoder's first, in bfloat16."""
    probes: dict[str, ProbeRecord]
    text: TokenizerFingerprint | None = None
    """None without a tokenizer."""


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
    digests = {name: value for name, value in data["digests"].items() if name != CONTRACT}
    return {**data, "digests": {**digests, CONTRACT: canonical_digest({**data, "digests": digests})}}


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
    noted, found = contract.digests.get(CONTRACT), with_digest(data)["digests"][CONTRACT]
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
