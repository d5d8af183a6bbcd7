"""One input of a witness, as plain data: what a model reads, in which way, and where it is looked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field, model_validator

from pellucid.batch import Batch
from pellucid.configfile import Config

LONGEST_ROW = 1100

Slot = Annotated[int, Field(ge=0, le=1 << 40)]
Row = Annotated[tuple[Slot, ...], Field(min_length=1, max_length=LONGEST_ROW)]
Rows = Annotated[tuple[Row, ...], Field(min_length=1, max_length=8)]
Gain = Annotated[float, Field(gt=0, le=1 << 20)]

_FIELDS = ("tokens", "positions", "segments", "groups", "types")


class Reading(Config):
    """What one stack reads, row by row as in a :class:`~pellucid.batch.Batch`."""

    tokens: Rows
    positions: Rows
    segments: Rows
    groups: Rows | None = None
    types: Rows | None = None

    @model_validator(mode="after")
    def _rows_fit(self) -> Reading:
        shape = [len(row) for row in self.tokens]
        others = [field for name in _FIELDS[1:] if (field := getattr(self, name)) is not None]
        if len(set(shape)) != 1 or any([len(row) for row in field] != shape for field in others):
            raise ValueError("tokens, positions, segments, groups and types must have the same rows and slots")
        return self

    def batch(self) -> Batch:
        """The whole input."""
        return _batch({name: getattr(self, name) for name in _FIELDS})


class Probe(Reading):
    """One input of a model, and the slots that are looked at."""

    source: Reading | None = None
    """What an encoder reads beside it."""
    chunks: Annotated[tuple[Annotated[int, Field(ge=1, le=LONGEST_ROW)], ...], Field(max_length=16)] = ()
    """How many slots go through the cache at a time; none: all at once, without one."""
    training: bool = False
    gains: Annotated[tuple[Gain, ...], Field(max_length=8)] = ()
    """For each row, what is multiplied into whatever enters the branches of some layers, and the head."""
    at: Rows | None
    """The slots of each row whose output is looked at; None: one output for each document."""

    @model_validator(mode="after")
    def _fields_fit(self) -> Probe:
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
    def of(cls, batch: Batch, at: Sequence[Sequence[int]] | None, **more: object) -> Probe:
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


def spread(numbers: np.ndarray) -> np.ndarray:
    """Each number as 64 well-mixed bits (splitmix64), the same on every machine."""
    with np.errstate(over="ignore"):
        x = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(x ^ (x >> np.uint64(31)))
