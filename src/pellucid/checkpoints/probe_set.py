"""The probes of a witness: inputs that follow from the model's config alone.

``plain``      one document (and what an encoder reads for it)
``padded``     three of different lengths, padded on the left
``packed``     four in one row
``continued``  two rows that continue from a cache, chunk by chunk; in one chunk where a rule does not allow more
``lengths``    documents of exactly the length from which a RoPE scaling changes its angles, and of one token more
``crowded``    so many equal tokens that an expert of finite capacity must drop exactly the last
``strong``     one document in a few rows, whose inputs of branches and head are scaled up
``far``        positions far apart: beyond every window, bucket and trained length, so that each bound is met exactly
``training``   one document in training mode, with a deterministic dropout

Positions need not be contiguous, so that ``far`` reaches past a window of a hundred thousand tokens with a few dozen.
Probes that a config cannot run (encoders have no cache) or does not need are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
from pydantic import Field, PlainSerializer, PlainValidator, TypeAdapter, ValidationError, model_validator

from pellucid.batch import Batch
from pellucid.checkpoints.probe_inputs import CONTIGUOUS, StackProbeInputs
from pellucid.configfile import Config
from pellucid.models.config import ModelConfig
from pellucid.models.configs import RegressionHeadConfig, SentenceEmbeddingHeadConfig, SequenceClassificationHeadConfig

PROJECTIONS = 4
"""Numbers stored of each output: Σ ±logit / sqrt(V), signs from ``splitmix64(id)``; up to 4 logits unchanged."""

LONGEST_ROW = 1100

GAINS = (4.0, 64.0, 1024.0)
"""Factors of the rows of ``strong``: limits of any size in between are met."""

LARGEST_CAPACITY = 1024
"""The largest capacity of an expert that is met exactly."""

_MAX_CAPACITIES = 4
_LONGEST_CHUNK = 256
_DOCUMENT_HEADS = (SequenceClassificationHeadConfig, RegressionHeadConfig, SentenceEmbeddingHeadConfig)

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


def probes_of(config: ModelConfig) -> dict[str, WitnessProbe]:
    """Every probe that ``config`` can run, in the order in which they are compared."""
    builder = ProbeBuilder(config)
    plain = builder.at_document_ends(builder.rows((8,), (6,)))
    probes = {
        "plain": plain,
        "padded": builder.at_document_ends(builder.rows((7, 4, 1), (3, 6, 2), side="left", typed=False)),
        "packed": builder.at_document_ends(builder.packed((5, 3, 4, 2), (2, 4, 3, 5))),
    }
    if config.family != "encoder":
        probes["continued"] = builder.continued()
    if any(stack.scaling_lengths for stack in builder.stacks):
        probes["lengths"] = builder.at_document_ends(builder.joined([stack.lengths() for stack in builder.stacks]))
    for number, capacity in enumerate(builder.capacities, 1):
        probes["crowded" if number == 1 else f"crowded {number}"] = builder.crowded(capacity)
    if any(stack.has_limits for stack in builder.stacks) or config.final_logit_softcapping is not None:
        probes["strong"] = builder.strong()
    return probes | {"far": builder.far(), "training": plain.model_copy(update={"training": True})}


class ProbeBuilder:
    """Inputs for all stacks of one config."""

    def __init__(self, config: ModelConfig) -> None:
        self.stacks = [StackProbeInputs(config, config.vocab_size)]
        if config.encoder is not None:
            self.stacks.append(StackProbeInputs(config.encoder, config.source_vocab_size or config.vocab_size))
        self.by_document = isinstance(config.head, _DOCUMENT_HEADS)
        found = sorted({capacity for stack in self.stacks for capacity in stack.capacities})
        self.capacities = [capacity for capacity in found if capacity <= LARGEST_CAPACITY][:_MAX_CAPACITIES]

    def joined(self, batches: Sequence[Batch]) -> Batch:
        """A target and its source, or the one input that there is."""
        return batches[0] if len(batches) == 1 else replace(batches[0], source=batches[1])

    def rows(self, *lengths: Sequence[int], side: str = "right", typed: bool = True) -> Batch:
        """One document a row, of these lengths; those of the source come second."""
        return self.joined([s.rows(wanted, side, typed) for s, wanted in zip(self.stacks, lengths, strict=False)])

    def packed(self, *lengths: Sequence[int]) -> Batch:
        """All documents in one row, with a slot of padding at its end."""
        return self.joined([s.packed(wanted) for s, wanted in zip(self.stacks, lengths, strict=False)])

    def at_document_ends(self, batch: Batch, **more: object) -> WitnessProbe:
        """``batch``, compared in the first, the middle and the last slot of each document."""
        assert batch.layout is not None
        at: list[list[int]] = [[] for _ in range(batch.layout.rows)]
        for run in batch.layout.runs:
            at[run.row] += dict.fromkeys([run.start, (run.start + run.stop - 1) // 2, run.stop - 1])
        return self.at(batch, at, **more)

    def at(self, batch: Batch, at: Sequence[Sequence[int]], **more: object) -> WitnessProbe:
        """``batch``, compared in these slots, or in each document where the head has outputs for documents."""
        return WitnessProbe.from_mapping({"batch": batch, "at": None if self.by_document else at, **more})

    def continued(self) -> WitnessProbe:
        """Two rows of different lengths; the first chunk holds whatever no rule lets a cache split."""
        own = self.stacks[0]
        length, first = min(8, own.max_contiguous), own.first_chunk()
        if first is not None:
            near = max((bound for bound in own.bounds if bound <= CONTIGUOUS), default=0)
            wanted = min(max(first + 4, near + 6), own.max_contiguous)
            length = wanted if first < wanted <= _LONGEST_CHUNK else length
        chunks = [length if first is None or first >= length else first]
        for size in (1, 2, length):
            if left := length - sum(chunks):
                chunks.append(min(size, left))
        batch = self.rows((length, max(length - 2, 1)), (5, 3), side="left")
        if batch.groups is not None:
            batch = replace(batch, groups=((batch.positions < 2) & (batch.segments != 0)).long())
        ends = [sum(chunks[: index + 1]) - 1 for index in range(len(chunks))]
        return self.at(batch, [ends, ends], chunks=chunks)

    def crowded(self, capacity: int) -> WitnessProbe:
        """One token more than ``capacity``, each a document of its own and all equal: all go to the same experts."""
        slots = sorted({0, max(capacity - 1, 0), capacity})
        return self.at(self.joined([stack.identical(capacity + 1) for stack in self.stacks]), [slots])

    def strong(self) -> WitnessProbe:
        """The same document in each row."""
        batches = [stack.repeated(length, len(GAINS)) for stack, length in zip(self.stacks, (5, 4), strict=False)]
        return self.at_document_ends(self.joined(batches), gains=GAINS)

    def far(self) -> WitnessProbe:
        """One document with gaps."""
        batch = self.joined([stack.far() for stack in self.stacks])
        return self.at(batch, [self.stacks[0].watched_slots(batch.positions[0].tolist())])
