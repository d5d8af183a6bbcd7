"""What a checkpoint's witness is asked: inputs that follow from the model's config alone.

``plain``      one document (and what an encoder reads for it)
``padded``     three of different lengths, padded on the left
``packed``     four in one row
``continued``  two rows that go on from a cache, chunk by chunk; in one chunk where a rule does not let them
``lengths``    documents of exactly the length from which a scaling of positions turns them otherwise, and one more
``crowded``    so many tokens alike that an expert of finite capacity must leave out exactly the last
``strong``     one document in a few rows, in which branches and head are given numbers many times as large
``far``        positions far apart: beyond every window, bucket and trained length, so that each bound is met exactly
``training``   one document in training mode, with a portable dropout

A slot is not a position, so that ``far`` reaches past a window of a hundred thousand tokens with a few dozen.
Probes that a config cannot be asked (encoders have no cache) or has no need of are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
from pydantic import Field, model_validator

from pellucid.batch import Batch
from pellucid.checkpoints import probe_inputs
from pellucid.checkpoints.probe_inputs import StackProbeInputs
from pellucid.configfile import Config
from pellucid.models.config import ModelConfig
from pellucid.models.configs import RegressionHeadConfig, SentenceEmbeddingHeadConfig, SequenceClassificationHeadConfig

LONGEST_ROW = 1100

Slot = Annotated[int, Field(ge=0, le=1 << 40)]
Row = Annotated[tuple[Slot, ...], Field(min_length=1, max_length=LONGEST_ROW)]
Rows = Annotated[tuple[Row, ...], Field(min_length=1, max_length=8)]
Gain = Annotated[float, Field(gt=0, le=1 << 20)]

_FIELDS = ("tokens", "positions", "segments", "groups", "types")


class ProbeBatch(Config):
    """What one stack reads, row by row as in a :class:`~pellucid.batch.Batch`."""

    tokens: Rows
    positions: Rows
    segments: Rows
    groups: Rows | None = None
    types: Rows | None = None

    @model_validator(mode="after")
    def _rows_fit(self) -> ProbeBatch:
        shape = [len(row) for row in self.tokens]
        others = [field for name in _FIELDS[1:] if (field := getattr(self, name)) is not None]
        if len(set(shape)) != 1 or any([len(row) for row in field] != shape for field in others):
            raise ValueError("tokens, positions, segments, groups and types must have the same rows and slots")
        return self

    def batch(self) -> Batch:
        """The whole input."""
        return _batch({name: getattr(self, name) for name in _FIELDS})


class WitnessProbe(ProbeBatch):
    """One input of a model, and the slots that are looked at."""

    source: ProbeBatch | None = None
    """What an encoder reads beside it."""
    chunks: Annotated[tuple[Annotated[int, Field(ge=1, le=LONGEST_ROW)], ...], Field(max_length=16)] = ()
    """How many slots go through the cache at a time; none: all at once, without one."""
    training: bool = False
    gains: Annotated[tuple[Gain, ...], Field(max_length=8)] = ()
    """For each row, what is multiplied into whatever enters the branches of some layers, and the head."""
    at: Rows | None
    """The slots of each row whose output is looked at; None: one output for each document."""

    @model_validator(mode="after")
    def _fields_fit(self) -> WitnessProbe:
        rows, slots = len(self.tokens), len(self.tokens[0])
        if self.at is not None and (len(self.at) != rows or any(slot >= slots for row in self.at for slot in row)):
            raise ValueError("at names slots of each row, and none that is not there")
        if self.chunks and sum(self.chunks) != slots:
            raise ValueError("chunks must sum to the slots")
        if self.source is not None and len(self.source.tokens) != rows:
            raise ValueError("source must have the same rows")
        if self.gains and (len(self.gains) != rows or self.chunks):
            raise ValueError("gains has one number a row, and goes without chunks")
        return self

    @classmethod
    def of(cls, batch: Batch, at: Sequence[Sequence[int]] | None, **more: object) -> WitnessProbe:
        """``batch`` as a probe."""
        source = None if batch.source is None else _plain(batch.source)
        return cls.from_mapping({**_plain(batch), "source": source, "at": at, **more})

    def batch(self) -> Batch:
        """The whole input, its source too."""
        whole = super().batch()
        return whole if self.source is None else replace(whole, source=self.source.batch())

    def pieces(self) -> Iterator[Batch]:
        """The input chunk by chunk, each counting from 0 as a cache wants it; the source comes with the first."""
        whole, start = self.batch(), 0
        for size in self.chunks:
            part = slice(start, start + size)
            cut = {name: None if (rows := getattr(whole, name)) is None else rows[:, part] for name in _FIELDS}
            cut["positions"] = ((whole.segments[:, part] != 0).long().cumsum(1) - 1).clamp(min=0)
            yield replace(_batch(cut), source=None if start else whole.source)
            start += size

    @property
    def outputs(self) -> int:
        """How many outputs are looked at."""
        if self.at is not None:
            return sum(map(len, self.at))
        return sum(piece.documents for piece in self.pieces()) if self.chunks else self.batch().documents


def _batch(fields: Mapping[str, Any]) -> Batch:
    rows: dict[str, Any] = {name: None if value is None else torch.as_tensor(value) for name, value in fields.items()}
    return Batch(**rows)


def _plain(batch: Batch) -> dict[str, Any]:
    fields = {name: getattr(batch, name) for name in _FIELDS}
    return {name: None if value is None else value.tolist() for name, value in fields.items()}


GAINS = (4.0, 64.0, 1024.0)
"""What branches are given in the rows of ``strong``: limits are met by numbers of any size in between."""

MOST_CROWDED = 1024
"""The largest capacity of an expert that is met exactly."""

_MOST_CAPACITIES = 4
_LONGEST_CHUNK = 256
_ABOUT_DOCUMENTS = (SequenceClassificationHeadConfig, RegressionHeadConfig, SentenceEmbeddingHeadConfig)


def probes_of(config: ModelConfig) -> dict[str, WitnessProbe]:
    """Every probe that ``config`` can be asked, in the order in which they are compared."""
    asking = ProbeBuilder(config)
    plain = asking.at_document_ends(asking.rows((8,), (6,)))
    asked = {
        "plain": plain,
        "padded": asking.at_document_ends(asking.rows((7, 4, 1), (3, 6, 2), side="left", typed=False)),
        "packed": asking.at_document_ends(asking.packed((5, 3, 4, 2), (2, 4, 3, 5))),
    }
    if config.family != "encoder":
        asked["continued"] = asking.continued()
    if any(side.scaling_lengths for side in asking.sides):
        asked["lengths"] = asking.at_document_ends(asking.joined([side.lengths() for side in asking.sides]))
    for number, capacity in enumerate(asking.capacities, 1):
        asked["crowded" if number == 1 else f"crowded {number}"] = asking.crowded(capacity)
    if any(side.has_limits for side in asking.sides) or config.final_logit_softcapping is not None:
        asked["strong"] = asking.strong()
    return asked | {"far": asking.far(), "training": plain.model_copy(update={"training": True})}


class ProbeBuilder:
    """What the stacks of one config are given to read."""

    def __init__(self, config: ModelConfig) -> None:
        self.sides = [StackProbeInputs(config, config.vocab_size)]
        if config.encoder is not None:
            self.sides.append(StackProbeInputs(config.encoder, config.source_vocab_size or config.vocab_size))
        self.by_document = isinstance(config.head, _ABOUT_DOCUMENTS)
        found = sorted({capacity for side in self.sides for capacity in side.capacities})
        self.capacities = [capacity for capacity in found if capacity <= MOST_CROWDED][:_MOST_CAPACITIES]

    def joined(self, batches: Sequence[Batch]) -> Batch:
        """A target and its source, or the one input that there is."""
        return batches[0] if len(batches) == 1 else replace(batches[0], source=batches[1])

    def rows(self, *lengths: Sequence[int], side: str = "right", typed: bool = True) -> Batch:
        """One document a row, of these lengths; those of the source come second."""
        return self.joined([s.rows(wanted, side, typed) for s, wanted in zip(self.sides, lengths, strict=False)])

    def packed(self, *lengths: Sequence[int]) -> Batch:
        """All documents in one row, with a slot of padding at its end."""
        return self.joined([s.packed(wanted) for s, wanted in zip(self.sides, lengths, strict=False)])

    def at_document_ends(self, batch: Batch, **more: object) -> WitnessProbe:
        """``batch``, looked at in the first, the middle and the last slot of each document."""
        assert batch.layout is not None
        at: list[list[int]] = [[] for _ in range(batch.layout.rows)]
        for run in batch.layout.runs:
            at[run.row] += dict.fromkeys([run.start, (run.start + run.stop - 1) // 2, run.stop - 1])
        return self.at(batch, at, **more)

    def at(self, batch: Batch, at: Sequence[Sequence[int]], **more: object) -> WitnessProbe:
        """``batch``, looked at in these slots, or in each document where the head speaks of documents."""
        return WitnessProbe.of(batch, None if self.by_document else at, **more)

    def continued(self) -> WitnessProbe:
        """Two rows of different lengths; the first chunk holds what no rule lets a cache cut in two."""
        own = self.sides[0]
        length, first = min(8, own.max_contiguous), own.first_chunk()
        if first is not None:
            near = max((bound for bound in own.bounds if bound <= probe_inputs.CONTIGUOUS), default=0)
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
        """One token more than ``capacity``, each a document of its own, all alike: all go to the same experts."""
        slots = sorted({0, max(capacity - 1, 0), capacity})
        return self.at(self.joined([side.identical(capacity + 1) for side in self.sides]), [slots])

    def strong(self) -> WitnessProbe:
        """The same document in each row."""
        batches = [side.repeated(length, len(GAINS)) for side, length in zip(self.sides, (5, 4), strict=False)]
        return self.at_document_ends(self.joined(batches), gains=GAINS)

    def far(self) -> WitnessProbe:
        """One document with gaps."""
        batch = self.joined([side.far() for side in self.sides])
        return self.at(batch, [self.sides[0].watched_slots(batch.positions[0].tolist())])
