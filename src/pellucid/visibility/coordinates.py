"""Where tokens are: explicit positions and segments per row, and what the host knows about them.

Law 1: a slot is not a position. Everything that needs to know *where* a token is reads these coordinates;
nothing counts slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from pellucid.errors import ShapeError
from pellucid.shapes import Int, Tensor


class Run(NamedTuple):
    """Neighbouring slots ``start … stop-1`` of one row that hold consecutive positions of one document."""

    row: int
    start: int
    stop: int
    segment: int
    first: int  # the position at ``start``


@dataclass(frozen=True)
class Layout:
    """What the host knows about a batch, so that no choice of a kernel has to wait for the device."""

    rows: int
    slots: int
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, positions: ArrayLike, segments: ArrayLike) -> Layout:
        """Read the runs off ``[B, T]`` positions and segments (lists, arrays or tensors on the host)."""
        position, segment = np.asarray(positions, dtype=np.int64), np.asarray(segments, dtype=np.int64)
        rows, slots = segment.shape
        if not slots:
            return cls(rows, 0, ())
        continues = (segment[:, 1:] == segment[:, :-1]) & (position[:, 1:] == position[:, :-1] + 1)
        begins = np.concatenate([np.ones((rows, 1), dtype=bool), ~continues], axis=1) & (segment != 0)
        ends = np.concatenate([~continues, np.ones((rows, 1), dtype=bool)], axis=1) & (segment != 0)
        row, start = np.nonzero(begins)
        stop = np.nonzero(ends)[1] + 1
        fields = zip(row, start, stop, segment[row, start], position[row, start], strict=True)
        return cls(rows, slots, tuple(Run(*map(int, values)) for values in fields))

    @cached_property
    def kind(self) -> Literal["full", "ragged", "packed"]:
        """``full``: each row is one document without padding; ``ragged``: one document and padding; else ``packed``."""
        if len(self.runs) == self.rows and all(run.stop - run.start == self.slots for run in self.runs):
            return "full"
        documents = {(run.row, run.segment) for run in self.runs}
        return "ragged" if len(documents) == len({row for row, _ in documents}) else "packed"

    @cached_property
    def max_position(self) -> int:
        """The largest position of any real token, -1 when there is none."""
        return max((run.first + run.stop - run.start - 1 for run in self.runs), default=-1)

    @cached_property
    def by_document(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The flat slot of each real token, and the number of its document: row by row, segment by segment, and by
        position within a document."""
        runs = sorted(self.runs, key=lambda run: (run.row, run.segment, run.first))
        owners = {key: number for number, key in enumerate(dict.fromkeys((run.row, run.segment) for run in runs))}
        sizes = [run.stop - run.start for run in runs]
        nothing = np.zeros(0, dtype=np.int64)  # where there are no runs
        parts = [np.arange(run.start, run.stop, dtype=np.int64) + run.row * self.slots for run in runs]
        numbers = np.array([owners[run.row, run.segment] for run in runs], dtype=np.int64)
        return np.concatenate([nothing, *parts]), np.repeat(numbers, sizes)

    @cached_property
    def tokens(self) -> int:
        """How many slots hold real tokens."""
        return sum(run.stop - run.start for run in self.runs)


@dataclass(frozen=True, eq=False)
class Coordinates:
    """Positions and segments of a row of slots, and optional groups.

    ``positions`` and ``segments`` are ``[B, T]`` integers. Segment 0 is padding; documents are 1, 2, …;
    positions restart at 0 in each document. ``groups`` (0 = none) says what a token belongs to inside its
    document, for :func:`prefix` and :func:`same_group`. ``layout`` is the host's knowledge of the same facts;
    left out, it is read off the tensors once, when they live on the CPU.
    """

    positions: Int[Tensor, "B T"]
    segments: Int[Tensor, "B T"]
    groups: Int[Tensor, "B T"] | None = None
    layout: Layout | None = None
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name, value in (("segments", self.segments), ("groups", self.groups)):
            if value is not None and value.shape != self.positions.shape:
                raise ShapeError(
                    f"{name} has shape {tuple(value.shape)} but positions has {tuple(self.positions.shape)}; "
                    "give one entry of each per slot"
                )
        if self.layout is None and self.positions.device.type == "cpu":
            layout = Layout.of(self.positions, self.segments)
            object.__setattr__(self, "layout", layout)

    @property
    def shape(self) -> tuple[int, int]:
        """``(rows, slots)``."""
        rows, slots = self.positions.shape
        return rows, slots

    @property
    def real(self) -> Tensor:
        """``Bool[B, T]``: which slots hold a token."""
        return self.segments != 0

    def read_layout(self) -> Layout | None:
        """The layout, read off the device once where the host does not know it; None on meta and in a graph."""
        if self.layout is not None or self.positions.device.type == "meta" or torch.compiler.is_compiling():
            return self.layout
        return self.cached("layout", lambda: Layout.of(self.positions.cpu(), self.segments.cpu()))

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        """``make()``, computed once for these coordinates: masks and angles are shared by all layers this way."""
        if torch.compiler.is_compiling():  # a graph computes what it needs; its compiler finds what is common
            return make()
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

    @classmethod
    def range(cls, length: int, rows: int = 1, device: torch.device | str | None = None) -> Coordinates:
        """One whole document of ``length`` tokens in each row."""
        positions = torch.arange(length, device=device).expand(rows, length)
        layout = Layout(rows, length, tuple(Run(row, 0, length, 1, 0) for row in range(rows) if length))
        return cls(positions, torch.ones_like(positions), layout=layout)


def ends(runs: Sequence[Run], rows: int) -> list[tuple[int, int]]:
    """The last document of each row and the position after its end; (1, 0) for a row without tokens."""
    ends = [(1, 0)] * rows
    for run in runs:
        if run.segment >= ends[run.row][0]:
            ends[run.row] = (run.segment, run.first + run.stop - run.start)
    return ends


def lengths(runs: Sequence[Run]) -> dict[tuple[int, int], int]:
    """How long each document (row, segment) is, its past included."""
    lengths: dict[tuple[int, int], int] = {}
    for run in runs:
        stop = run.first + run.stop - run.start
        lengths[run.row, run.segment] = max(stop, lengths.get((run.row, run.segment), 0))
    return lengths


def rows_of(coords: Coordinates, index: Tensor, chosen: list[int]) -> Coordinates:
    """Coordinates of the ``chosen`` rows; ``index`` holds the same numbers on the device."""
    layout = coords.layout
    return Coordinates(
        coords.positions[index],
        coords.segments[index],
        None if coords.groups is None else coords.groups[index],
        None if layout is None else Layout(len(chosen), layout.slots, runs_of(layout.runs, chosen)),
    )


def runs_of(runs: Sequence[Run], chosen: list[int]) -> tuple[Run, ...]:
    """The runs of the ``chosen`` rows, in their order."""
    return tuple(run._replace(row=new) for new, old in enumerate(chosen) for run in runs if run.row == old)


def merge(runs: list[Run]) -> tuple[Run, ...]:
    """Runs sorted by row; neighbors of one document with consecutive positions become one."""
    merged: list[Run] = []
    for run in sorted(runs):
        last = merged[-1] if merged else None
        if (
            last is not None
            and (last.row, last.segment, last.stop) == (run.row, run.segment, run.start)
            and last.first + last.stop - last.start == run.first
        ):
            merged[-1] = last._replace(stop=run.stop)
        else:
            merged.append(run)
    return tuple(merged)
