"""``Batch``: tokens, what they must predict, and where they are. A mask never travels; it follows from these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from pellucid.errors import DataError, ShapeError
from pellucid.shapes import Bool, Float, Int, Tensor
from pellucid.visibility import Coordinates, Layout

IGNORED = -100
"""The label of a position that nothing has to predict."""

Side = Literal["right", "left", "both"]
Row = Sequence[int]

_SLOT_FIELDS = ("positions", "segments", "labels", "groups", "types", "target_mask", "inputs_embeds")


@dataclass(frozen=True, eq=False)
class Batch:
    """One input of a model.

    ``tokens``, ``positions``, ``segments`` (and ``labels``, ``groups``, ``types`` where given) are ``[B, T]``
    integers. Segment 0 is padding and documents are 1, 2, … within a row; positions restart at 0 in each document.
    With a cache, positions count from where the row's last document in the cache ends.
    ``labels[b, t]`` is what position t must predict, or :data:`IGNORED`; ``data.objectives`` makes them.
    ``types`` are token types (0: the first text, 1: the second).

    ``source`` is what an encoder reads, ``[B, S]``, row for row: document d of a row goes with segment d of the
    same row there. ``targets`` has one entry a document, row by row and segment by segment: int64 ``[C]`` classes,
    floats ``[C]`` or ``[C, k]``, or int64 ``[C, 2]`` first and last positions of a span (:data:`IGNORED`: none).

    ``inputs_embeds`` (``[B, T, D]``) replace the embeddings of ``tokens``. ``target_mask`` marks the tokens that the
    losses of an audit may score (None: all); see :attr:`loss_mask`.
    """

    tokens: Int[Tensor, "B T"]
    positions: Int[Tensor, "B T"]
    segments: Int[Tensor, "B T"]
    labels: Int[Tensor, "B T"] | None = None
    groups: Int[Tensor, "B T"] | None = None
    layout: Layout | None = None
    types: Int[Tensor, "B T"] | None = None
    source: Batch | None = None
    targets: Tensor | None = None
    target_mask: Bool[Tensor, "B T"] | None = None
    inputs_embeds: Float[Tensor, "B T D"] | None = None

    def __post_init__(self) -> None:
        if self.tokens.dim() != 2:
            raise ShapeError(f"tokens are [rows, slots], not {tuple(self.tokens.shape)}; add a row axis")
        for name in _SLOT_FIELDS:
            value = getattr(self, name)
            if value is not None and value.shape[:2] != self.tokens.shape:
                raise ShapeError(
                    f"{name} has shape {tuple(value.shape)}, but tokens has {tuple(self.tokens.shape)}; "
                    "every field has one entry a slot"
                )
        if self.labels is not None and self.labels.device.type == "cpu" and self.segments.device.type == "cpu":
            self._refuse_labelled_padding()
        if self.layout is None and self.tokens.device.type == "cpu":
            object.__setattr__(self, "layout", Layout.of(self.positions, self.segments))
        if self.source is not None and self.source.shape[0] != self.shape[0]:
            raise ShapeError(
                f"source has {self.source.shape[0]} rows, but tokens has {self.shape[0]}; "
                "row b is read with row b of the source"
            )
        if self.targets is not None and (self.targets.dim() < 1 or len(self.targets) != self.documents):
            raise ShapeError(
                f"targets has shape {tuple(self.targets.shape)}, but there are {self.documents} documents; "
                "give one entry a document, row by row and segment by segment"
            )

    def _refuse_labelled_padding(self) -> None:
        assert self.labels is not None
        wrong = (self.labels != IGNORED) & (self.segments == 0)
        if bool(wrong.any()):
            row, slot = wrong.nonzero()[0].tolist()
            raise DataError(
                f"slot {slot} of row {row} is padding, but its label is {int(self.labels[row, slot])}; padding has "
                f"{IGNORED}, as data.objectives give it"
            )

    @classmethod
    def from_rows(cls, rows: Sequence[Row], *, side: Side = "right", length: int | None = None) -> Batch:
        """Padded rows, one document a row; padding goes to the ``side``, up to ``length`` slots."""
        return cls.from_documents([[row] for row in rows], side=side, length=length)

    @classmethod
    def packed(cls, documents: Sequence[Row], *, length: int | None = None) -> Batch:
        """Several documents in one row, isolated from each other; padded to ``length`` slots."""
        return cls.from_documents([documents], length=length)

    @classmethod
    def from_documents(cls, rows: Sequence[Sequence[Row]], *, side: Side = "right", length: int | None = None) -> Batch:
        """Rows of documents: the general form of :meth:`from_rows` and :meth:`packed`. Empty documents are allowed."""
        kept = [[ids for ids in map(_ids, row) if len(ids)] for row in rows]
        return cls.from_numbered([[*enumerate(row, 1)] for row in kept], side=side, length=length)

    @classmethod
    def from_pairs(
        cls,
        sources: Sequence[Row],
        targets: Sequence[Row],
        *,
        side: Side = "right",
        packed: bool = False,
        source_length: int | None = None,
        length: int | None = None,
    ) -> Batch:
        """Sources for an encoder and targets for its decoder: one pair a row, or ``packed`` all in one row.

        ``.source`` holds the sources, padded to ``source_length``; the batch itself the targets, padded to ``length``.

        >>> batch = Batch.from_pairs([[5, 8, 9]], [[7, 2]])
        >>> batch.source.tokens.tolist(), batch.tokens.tolist()
        ([[5, 8, 9]], [[7, 2]])
        """
        if len(sources) != len(targets):
            raise DataError(f"{len(sources)} sources were given for {len(targets)} targets; give one source a target")
        pairs = list(zip(sources, targets, strict=True))
        rows = [pairs] if packed else [[pair] for pair in pairs]
        return cls.from_pair_rows(rows, side=side, source_length=source_length, length=length)

    @classmethod
    def from_pair_rows(
        cls,
        rows: Sequence[Sequence[tuple[Row, Row]]],
        *,
        side: Side = "right",
        source_length: int | None = None,
        length: int | None = None,
    ) -> Batch:
        """Rows of ``(source, target)`` pairs: the general form of :meth:`from_pairs`.

        Both halves of a pair carry the same segment, even where one of them is empty.
        """
        kept = [[(_ids(source), _ids(target)) for source, target in row] for row in rows]
        kept = [[pair for pair in row if len(pair[0]) or len(pair[1])] for row in kept]
        sources, targets = ([[(n, pair[half]) for n, pair in enumerate(row, 1)] for row in kept] for half in (0, 1))
        try:
            source = cls.from_numbered(sources, side=side, length=source_length)
        except ShapeError as error:
            raise ShapeError(f"the sources: {error}") from error
        return replace(cls.from_numbered(targets, side=side, length=length), source=source)

    @classmethod
    def from_numbered(
        cls,
        rows: Sequence[Sequence[tuple[int, Row | NDArray[Any]]]],
        *,
        side: Side = "right",
        length: int | None = None,
    ) -> Batch:
        """Rows of ``(segment, ids)``: documents that keep the segments which they have elsewhere."""
        checked = [[(number, _ids(document)) for number, document in row] for row in rows]
        sizes = [sum(len(ids) for _, ids in row) for row in checked]
        longest = max(sizes, default=0)
        slots = longest if length is None else length
        if not rows:
            raise DataError("a batch needs at least one row, but none was given")
        if longest > slots:
            raise ShapeError(f"a row holds {longest} tokens, but length is {slots}; cut the row or raise length")
        if side not in ("right", "left", "both"):
            raise ShapeError(f"padding side is {side!r}; choose right, left or both")
        tokens, positions, segments = (np.zeros((len(rows), slots), dtype=np.int64) for _ in range(3))
        for index, row in enumerate(checked):
            slot = {"right": 0, "left": slots - sizes[index], "both": (slots - sizes[index]) // 2}[side]
            for number, ids in row:
                stop = slot + len(ids)
                tokens[index, slot:stop] = ids
                positions[index, slot:stop] = np.arange(len(ids))
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
        return self.tokens.shape[0], self.tokens.shape[1]

    @property
    def token_mask(self) -> Bool[Tensor, "B T"]:
        """Which slots hold a token."""
        return self.segments != 0

    @property
    def loss_mask(self) -> Bool[Tensor, "B T"]:
        """Which tokens are predicted from their context: those of ``target_mask``, never the first of a document."""
        possible = self.token_mask & (self.positions > 0)
        return possible if self.target_mask is None else possible & self.target_mask

    def slots(self, row: int, segment: int = 1) -> Int[Tensor, "N"]:
        """The slots of one document, in order."""
        return (self.segments[row] == segment).nonzero()[:, 0]

    @cached_property
    def documents(self) -> int:
        """How many documents the rows hold: C. Known on the host, so that nothing asks a device."""
        return sum(map(len, self.document_lengths))

    @cached_property
    def document_lengths(self) -> list[dict[int, int]]:
        """For each row its segments, in order, and the tokens of each; in this order ``targets`` has its entries."""
        layout = self.layout or Layout.of(self.positions.cpu(), self.segments.cpu())
        lengths: list[dict[int, int]] = [{} for _ in range(layout.rows)]
        for run in layout.runs:
            row = lengths[run.row]
            row[run.segment] = row.get(run.segment, 0) + run.stop - run.start
        return [dict(sorted(row.items())) for row in lengths]

    @cached_property
    def document_slots(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """On the host: the flat slots of all real tokens, document by document, and each one's document (0 … C-1)."""
        segments = self.segments.cpu().numpy()
        rows, columns = np.nonzero(segments)
        order = np.lexsort((segments[rows, columns], rows))
        rows, columns = rows[order], columns[order]
        segment = segments[rows, columns]
        begins = (np.diff(rows, prepend=-1) != 0) | (np.diff(segment, prepend=-1) != 0)
        return rows * segments.shape[1] + columns, np.cumsum(begins) - 1

    @cached_property
    def label_indices(self) -> Int[Tensor, "C"] | None:
        """Flat indices of the positions whose label counts, made on the host; None when the labels live elsewhere."""
        if self.labels is None or self.labels.device.type != "cpu":
            return None
        return (self.labels.flatten() != IGNORED).nonzero()[:, 0]

    @cached_property
    def target_indices(self) -> Int[Tensor, "C"] | None:
        """Indices of the documents whose target counts, made on the host; None when the targets live elsewhere.

        A class or a span with :data:`IGNORED` in it does not count, nor do numbers that are NaN.
        """
        if self.targets is None or self.targets.device.type != "cpu":
            return None
        known = ~self.targets.isnan() if self.targets.is_floating_point() else self.targets != IGNORED
        return known.reshape(len(self.targets), -1).all(1).nonzero()[:, 0]

    def coordinates(self) -> Coordinates:
        """Fresh coordinates of the slots (masks made for them live as long as they do)."""
        return Coordinates(self.positions, self.segments, self.groups, self.layout)

    def replace(self, **changes: Any) -> Batch:
        """The same batch with other fields; the layout is read anew where positions or segments change."""
        if "positions" in changes or "segments" in changes:
            changes.setdefault("layout", None)
        return replace(self, **changes)

    def with_labels(self, labels: Int[Tensor, "B T"]) -> Batch:
        """The same batch with these labels."""
        return replace(self, labels=labels)

    def with_token(self, row: int, slot: int, token: int) -> Batch:
        """The same batch with another token in one slot."""
        tokens = self.tokens.clone()
        tokens[row, slot] = token
        return replace(self, tokens=tokens)

    def part(self, start: int, stop: int) -> Batch:
        """Slots ``start … stop-1`` of every row with the positions that they have in the whole; all of a source.

        Raises:
            ShapeError: the batch has one target a document, which a part of a document has not.
        """
        if self.targets is not None:
            raise ShapeError("targets has one entry a document, and a part cuts documents; leave targets out")
        return self._sliced((slice(None), slice(start, stop)), source=self.source)

    def row(self, row: int) -> Batch:
        """One row alone, as wide as it is here."""
        source = None if self.source is None else self.source.row(row)
        targets = self.targets
        if targets is not None:
            before = sum(map(len, self.document_lengths[:row]))
            targets = targets[before : before + len(self.document_lengths[row])]
        return self._sliced((slice(row, row + 1),), source=source, targets=targets)

    def _sliced(self, where: tuple[slice, ...], **changes: Any) -> Batch:
        given = {name: getattr(self, name) for name in ("tokens", *_SLOT_FIELDS)}
        return self.replace(**{name: v[where] for name, v in given.items() if v is not None}, **changes)

    def to(self, device: torch.device | str, *, copy: bool = False) -> Batch:
        """The same batch on ``device``, source and all; the host's knowledge (layout, what counts) goes along.

        ``copy``: no tensor of whole numbers or booleans is shared with this batch.
        """
        if not copy and self.source is None and self.tokens.device == torch.device(device) == self.positions.device:
            return self

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True, copy=copy and not tensor.is_floating_point())

        return self._mapped(moved)

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory, from which a copy to a GPU runs beside the GPU's work."""
        return self._mapped(Tensor.pin_memory)

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """``function`` of every tensor, source and all; what the host knows goes along."""

        def mapped(value: Any) -> Any:
            return function(value) if isinstance(value, Tensor) else value

        known = {name: mapped(getattr(self, name)) for name in ("documents", "label_indices", "target_indices")}
        tensors = {field.name: mapped(getattr(self, field.name)) for field in fields(self)}
        source = None if self.source is None else self.source._mapped(function)
        result = replace(self, **tensors | {"source": source})
        result.__dict__.update(known)
        return result


def _ids(document: Row | NDArray[Any]) -> NDArray[Any]:
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
