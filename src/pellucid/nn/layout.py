"""What the host keeps of a cache's rows: runs of neighbouring slots, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence

from pellucid.shapes import Tensor
from pellucid.visibility import Coordinates, Layout, Run


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
    """The places of the ``chosen`` rows (``index`` says the same to the device)."""
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


def merged(runs: list[Run]) -> tuple[Run, ...]:
    """Runs sorted by row, neighbours of one document with consecutive positions made one."""
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
