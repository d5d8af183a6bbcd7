"""``Batch``: tokens, what they must predict, and where they are. A mask never travels; it follows from these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from pellucid.errors import DataError, ShapeError
from pellucid.shapes import Int, Tensor
from pellucid.visibility import Coordinates, Layout

IGNORED = -100
"""The label of a position that nothing has to predict."""

Side = Literal["right", "left", "both"]
Row = Sequence[int]


@dataclass(frozen=True, eq=False)
class Batch:
    """One input of a model.

    ``tokens``, ``positions``, ``segments`` (and ``labels``, ``groups`` where given) are ``[B, T]`` integers.
    Segment 0 is padding and documents are 1, 2, … within a row; positions restart at 0 in each document.
    With a cache, positions count on from what the cache already holds of the row's last document.
    ``labels[b, t]`` is what position t must predict, or :data:`IGNORED`; ``data.objectives`` makes them.
    """

    tokens: Int[Tensor, "B T"]
    positions: Int[Tensor, "B T"]
    segments: Int[Tensor, "B T"]
    labels: Int[Tensor, "B T"] | None = None
    groups: Int[Tensor, "B T"] | None = None
    layout: Layout | None = None

    def __post_init__(self) -> None:
        if self.tokens.dim() != 2:
            raise ShapeError(f"tokens are [rows, slots], not {tuple(self.tokens.shape)}; add a row axis")
        for name in ("positions", "segments", "labels", "groups"):
            value = getattr(self, name)
            if value is not None and value.shape != self.tokens.shape:
                raise ShapeError(
                    f"{name} has shape {tuple(value.shape)}, but tokens has {tuple(self.tokens.shape)}; "
                    "every field has one entry a slot"
                )
        if self.layout is None and self.tokens.device.type == "cpu":
            object.__setattr__(self, "layout", Layout.of(self.positions, self.segments))

    @classmethod
    def from_rows(cls, rows: Sequence[Row], *, side: Side = "right", length: int | None = None) -> Batch:
        """Padded rows, one document a row; padding goes to the ``side``, up to ``length`` slots."""
        return cls.from_documents([[row] for row in rows], side=side, length=length)

    @classmethod
    def packed(cls, documents: Sequence[Row], *, length: int | None = None) -> Batch:
        """Several documents in one row, apart from each other; padded to ``length`` slots."""
        return cls.from_documents([documents], length=length)

    @classmethod
    def from_documents(cls, rows: Sequence[Sequence[Row]], *, side: Side = "right", length: int | None = None) -> Batch:
        """Rows of documents: the general form of :meth:`from_rows` and :meth:`packed`. Empty documents are allowed."""
        ids = [[_ids(document) for document in row] for row in rows]
        longest = max((sum(map(len, row)) for row in ids), default=0)
        slots = longest if length is None else length
        if not ids:
            raise DataError("a batch needs at least one row, but none was given")
        if longest > slots:
            raise ShapeError(f"a row holds {longest} tokens, but length is {slots}; cut the row or raise length")
        if side not in ("right", "left", "both"):
            raise ShapeError(f"padding side is {side!r}; choose right, left or both")
        tokens, positions, segments = (np.zeros((len(ids), slots), dtype=np.int64) for _ in range(3))
        for index, row in enumerate(ids):
            start = {"right": 0, "left": 1.0, "both": 0.5}[side] * (slots - sum(map(len, row)))
            slot = int(start)
            for number, document in enumerate((d for d in row if len(d)), 1):
                stop = slot + len(document)
                tokens[index, slot:stop] = document
                positions[index, slot:stop] = np.arange(len(document))
                segments[index, slot:stop] = number
                slot = stop
        return cls(
            torch.from_numpy(tokens),
            torch.from_numpy(positions),
            torch.from_numpy(segments),
            layout=Layout.of(positions, segments),
        )

    @property
    def shape(self) -> tuple[int, int]:
        """``(rows, slots)``."""
        rows, slots = self.tokens.shape
        return rows, slots

    @cached_property
    def counted(self) -> Int[Tensor, "C"] | None:
        """Flat indices of the positions whose label counts, made on the host; None when the labels live elsewhere."""
        if self.labels is None or self.labels.device.type != "cpu":
            return None
        return (self.labels.flatten() != IGNORED).nonzero()[:, 0]

    def coordinates(self) -> Coordinates:
        """Fresh coordinates of the slots (masks made for them live as long as they do)."""
        return Coordinates(self.positions, self.segments, self.groups, self.layout)

    def with_labels(self, labels: Int[Tensor, "B T"]) -> Batch:
        """The same batch with these labels."""
        return replace(self, labels=labels)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on ``device``; the host's knowledge (layout, counted positions) goes along."""
        counted = self.counted

        def moved(field: Tensor | None) -> Any:
            return None if field is None else field.to(device, non_blocking=True)

        result = replace(
            self,
            tokens=moved(self.tokens),
            positions=moved(self.positions),
            segments=moved(self.segments),
            labels=moved(self.labels),
            groups=moved(self.groups),
        )
        result.__dict__["counted"] = moved(counted)
        return result


def _ids(document: Row) -> NDArray[Any]:
    """A document's token ids: whole numbers; nothing is rounded to one in silence."""
    try:
        ids = np.asarray(document)
    except (ValueError, OverflowError):
        ids = np.asarray("")
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise DataError(
            f"a document is a list of token ids (whole numbers), not {str(document)[:60]!r}; "
            "rows look like [[5, 8, 2], [7]]"
        )
    return ids
