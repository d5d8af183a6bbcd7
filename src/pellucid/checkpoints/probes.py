"""What a checkpoint's witness is asked: inputs that follow from the model's config alone.

``plain``      one document
``padded``     three of different lengths, padded on the left
``packed``     three in one row
``continued``  two rows that go on from a cache, chunk by chunk
``far``        positions far apart: beyond every window, chunk and sink, so that each bound is met exactly
``training``   one document in training mode, with a portable dropout

A slot is not a position, so that ``far`` reaches past a window of a hundred thousand tokens with a few dozen.
Probes that a config cannot be asked (a rule that looks ahead without end has no cache) are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated

import numpy as np
import torch
from pydantic import Field, model_validator

from pellucid.configfile import Config
from pellucid.data.batch import Batch
from pellucid.models.config import ModelConfig
from pellucid.models.words import Learned

FARTHEST = 1 << 20
"""The last position of ``far`` where nothing else bounds it."""

MOST_BOUNDS = 32
"""So many different bounds of rules are met exactly; of more, as many from the smallest to the largest."""

LARGEST_BOUND = 1 << 38

_MOST_SEEN = 64
_CONTIGUOUS = 32
_LONGEST_CHUNK = 256

Slot = Annotated[int, Field(ge=0, le=1 << 40)]
Row = Annotated[tuple[Slot, ...], Field(min_length=1, max_length=1024)]
Rows = Annotated[tuple[Row, ...], Field(min_length=1, max_length=8)]


class Probe(Config):
    """One input, row by row as in a :class:`~pellucid.data.batch.Batch`, and the slots that are looked at."""

    tokens: Rows
    positions: Rows
    segments: Rows
    groups: Rows | None = None
    chunks: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(max_length=16)] = ()
    """How many slots go through the cache at a time; none: all at once, without one."""
    training: bool = False
    at: Rows
    """The slots of each row whose output is looked at."""

    @model_validator(mode="after")
    def _fields_fit(self) -> Probe:
        shape = [len(row) for row in self.tokens]
        others = [self.positions, self.segments, *([] if self.groups is None else [self.groups])]
        if len(set(shape)) != 1 or any([len(row) for row in field] != shape for field in others):
            raise ValueError("tokens, positions, segments and groups must have the same rows and slots")
        if len(self.at) != len(shape) or any(slot >= shape[0] for row in self.at for slot in row):
            raise ValueError("at names slots of each row, and none that is not there")
        if self.chunks and sum(self.chunks) != shape[0]:
            raise ValueError("chunks must sum to the slots")
        return self

    @classmethod
    def of(cls, batch: Batch, at: Sequence[Sequence[int]], **more: object) -> Probe:
        """``batch`` as a probe."""
        fields = {name: getattr(batch, name) for name in ("tokens", "positions", "segments", "groups")}
        rows = {name: None if value is None else value.tolist() for name, value in fields.items()}
        return cls.from_mapping({**rows, "at": at, **more})

    def batch(self) -> Batch:
        """The whole input."""
        groups = None if self.groups is None else torch.tensor(self.groups)
        return Batch(torch.tensor(self.tokens), torch.tensor(self.positions), torch.tensor(self.segments), None, groups)

    def pieces(self) -> Iterator[Batch]:
        """The input chunk by chunk, each counting from 0 as a cache wants it."""
        tokens, segments = torch.tensor(self.tokens), torch.tensor(self.segments)
        start = 0
        for size in self.chunks:
            part = slice(start, start + size)
            real = (segments[:, part] != 0).long()
            yield Batch(tokens[:, part], (real.cumsum(1) - 1).clamp(min=0), segments[:, part])
            start += size


def probes_of(config: ModelConfig) -> dict[str, Probe]:
    """Every probe that ``config`` can be asked, in the order in which they are compared."""
    longest = config.position.max_positions if isinstance(config.position, Learned) else None
    text = _Tokens(config.vocab_size, longest)
    plain = _seen(config, Batch.from_rows([text.document(8)]))
    asked = {
        "plain": plain,
        "padded": _seen(config, Batch.from_rows([text.document(n) for n in (7, 4, 1)], side="left")),
        "packed": _seen(config, Batch.packed([text.document(n) for n in (5, 3, 4)], length=14)),
    }
    if continued := _continued(config, text):
        asked["continued"] = continued
    asked["far"] = _far(config, text)
    return asked | {"training": plain.model_copy(update={"training": True})}


def spread(numbers: np.ndarray) -> np.ndarray:
    """Each number as 64 well-mixed bits (splitmix64), the same on every machine."""
    with np.errstate(over="ignore"):
        x = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(x ^ (x >> np.uint64(31)))


class _Tokens:
    """Documents of ids from all over the vocabulary, no longer than the model has positions for."""

    def __init__(self, vocab_size: int, longest: int | None) -> None:
        self.vocab_size, self.longest, self._used = vocab_size, longest, 0

    def document(self, length: int) -> list[int]:
        length = length if self.longest is None else min(length, self.longest)
        numbers = np.arange(self._used, self._used + length)
        self._used += length
        return [int(number) for number in spread(numbers) % np.uint64(self.vocab_size)]


def _seen(config: ModelConfig, batch: Batch) -> Probe:
    """``batch``, looked at in the first, the middle and the last slot of each document."""
    assert batch.layout is not None
    at: list[list[int]] = [[] for _ in range(batch.layout.rows)]
    for run in batch.layout.runs:
        at[run.row] += dict.fromkeys([run.start, (run.start + run.stop - 1) // 2, run.stop - 1])
    return Probe.of(_grouped(config, batch), at)


def _grouped(config: ModelConfig, batch: Batch) -> Batch:
    """``batch``, with groups where a rule reads them: the first two tokens of a document, and its fifth and sixth."""
    if all(rule.positional for rule in config.rules):
        return batch
    place, real = batch.positions, batch.segments != 0
    first, second = real & (place < 2), real & ((place == 4) | (place == 5))
    return Batch(batch.tokens, place, batch.segments, None, first.long() + 2 * second.long())


def _continued(config: ModelConfig, text: _Tokens) -> Probe | None:
    """Two rows of different lengths; the first chunk holds what no rule lets a cache cut in two."""
    if not all(rule.positional for rule in config.rules):
        return None
    settled = [rule.settled for rule in config.rules]
    if any(place is None for place in settled):
        return None
    first = max(place or 0 for place in settled) + 3
    near = max((bound for bound in _bounds(config) if bound <= _CONTIGUOUS), default=0)
    length = max(first + 4, near + 6)
    length = length if text.longest is None else min(length, text.longest)
    if not first < length <= _LONGEST_CHUNK:
        return None
    chunks = [first]
    for size in (1, 2, length):
        if left := length - sum(chunks):
            chunks.append(min(size, left))
    batch = Batch.from_rows([text.document(length), text.document(length - 2)], side="left")
    ends = [sum(chunks[: index + 1]) - 1 for index in range(len(chunks))]
    return Probe.of(batch, [ends, ends], chunks=chunks)


def _far(config: ModelConfig, text: _Tokens) -> Probe:
    """One document with gaps: powers of two, and both sides of every bound that a rule has."""
    bounds = _bounds(config)
    last = max([FARTHEST, *(2 * bound for bound in bounds)]) if text.longest is None else text.longest - 1
    wanted = {0, 1, 2, 3, *(1 << power for power in range(2, 21))}
    wanted |= {place for bound in bounds for place in (bound - 1, bound, bound + 1, 2 * bound)}
    places = sorted(place for place in wanted if 0 <= place <= last)
    tokens = [text.document(1)[0] for _ in places]
    batch = Batch(torch.tensor([tokens]), torch.tensor([places]), torch.ones(1, len(places), dtype=torch.long))
    exact = [places.index(bound) for bound in bounds if bound in places]
    between = _spaced(len(places), min(_MOST_SEEN - len(exact), len(places)))
    return Probe.of(_grouped(config, batch), [sorted({*exact, *between})])


def _bounds(config: ModelConfig) -> list[int]:
    """The numbers in the rules, at most :data:`MOST_BOUNDS` of them, and none beyond :data:`LARGEST_BOUND`."""
    numbers = {int(number) for text in dict.fromkeys(config.layers) for number in re.findall(r"\d+", text)}
    sane = sorted(number for number in numbers if number <= LARGEST_BOUND)
    if len(sane) <= MOST_BOUNDS:
        return sane
    return [sane[index] for index in _spaced(len(sane), MOST_BOUNDS)]


def _spaced(length: int, count: int) -> list[int]:
    """``count`` indices of ``length``, evenly from the first to the last."""
    return [index * (length - 1) // max(count - 1, 1) for index in range(count)]
