"""Pieces of a store, laid into rows without a loop over tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pellucid.batch import IGNORED, Batch
from pellucid.visibility import Layout, Run

_EMPTY = {"labels": IGNORED, "groups": 0, "types": 0}


def lay(
    tokens: np.ndarray,
    columns: Mapping[str, np.ndarray],
    starts: np.ndarray,
    sizes: np.ndarray,
    held: np.ndarray,
    shape: tuple[int, int],
) -> Batch:
    """Rows of ``held[r]`` pieces each, then rows of padding, up to ``shape``.

    Piece i is ``tokens[starts[i] : starts[i] + sizes[i]]``; pieces are segments 1, 2, … of their row, empty ones too.
    ``columns`` (labels, groups, types) have an entry a token and travel with it.
    """
    taken, position = ranges(starts, sizes)
    _, number = ranges(np.zeros_like(held), held)
    before = np.cumsum(sizes) - sizes
    row = np.repeat(np.arange(len(held)), held)
    first = before[np.cumsum(held) - held]  # tokens before each row's first piece
    begins = before - first[row]
    slots = np.repeat(row * shape[1] + begins, sizes) + position
    fields = {"tokens": tokens[taken], "positions": position, "segments": np.repeat(number + 1, sizes)}
    fields |= {name: column[taken] for name, column in columns.items()}
    runs = zip(*(c.tolist() for c in (row, begins, begins + sizes, number + 1, np.zeros_like(row))), strict=True)
    layout = Layout(*shape, tuple(run for run in map(Run._make, runs) if run.stop > run.start))
    spread: dict[str, Any] = {name: _spread(name, values, slots, shape) for name, values in fields.items()}
    return replace(
        Batch(spread.pop("tokens"), spread.pop("positions"), spread.pop("segments"), layout=layout), **spread
    )


def _spread(name: str, values: np.ndarray, slots: np.ndarray, shape: tuple[int, int]) -> torch.Tensor:
    field = np.full(shape[0] * shape[1], _EMPTY.get(name, 0), dtype=np.int64)
    field[slots] = values
    return torch.from_numpy(field).view(shape)


def ranges(starts: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ranges ``starts … starts + sizes - 1`` end to end, and the place of each element in its range."""
    begins = np.cumsum(sizes) - sizes
    place = np.arange(int(sizes.sum())) - np.repeat(begins, sizes)
    return np.repeat(starts, sizes) + place, place
