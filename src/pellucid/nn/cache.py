"""The contiguous cache: keys and values of past tokens, *and where these were*.

Visibility is computed from the stored coordinates like everywhere else, so slots that are unused or padding are
invisible by construction, and a row's positions continue those of the row, not a shared counter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy as shallow_copy
from dataclasses import dataclass, field

import torch

from pellucid.errors import ArgumentError, LengthError, ShapeError, UnsupportedError
from pellucid.nn.backends.inputs import replace_nonfinite
from pellucid.shapes import Int, Tensor
from pellucid.visibility import Coordinates, Layout, Rule, Run
from pellucid.visibility.coordinates import ends, lengths, merge, rows_of, runs_of


@dataclass(eq=False)
class LayerCache:
    """The cache of one layer; its :class:`ContiguousCache` decides which slots are next.

    ``tensors`` are ``[B, S, …]``: keys and values, or a latent and a shared key. ``cross`` has those of an
    encoder's output, ``[B, S', K, H]``, and its slots that were not finite, from the first pass on.
    ``nonfinite`` are the slots in which something else than a finite number was appended: 0 is stored in its place,
    and a query that sees the slot gets NaN.
    """

    tensors: tuple[Tensor, ...]
    start: int = 0
    cross: tuple[Tensor, Tensor, Tensor] | None = None
    nonfinite: Tensor = field(init=False)

    def __post_init__(self) -> None:
        first = self.tensors[0]
        self.nonfinite = torch.zeros(first.shape[:2], dtype=torch.bool, device=first.device)

    def append(self, *new: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Store a new chunk of each tensor at the slots that :meth:`ContiguousCache.begin_append` opened.

        Returns the tensors of all slots up to its end, all finite, and which slots were not (``[B, S]``).

        Gradients flow into this chunk and stop at earlier ones, which are remembered as numbers.

        Raises:
            ShapeError: tensors that are not what the cache has room for.
        """
        room, got = [tuple(t.shape[2:]) for t in self.tensors], [tuple(t.shape[2:]) for t in new]
        if room != got:  # assignment alone would broadcast one head into the room of many
            raise ShapeError(f"a layer appends {got} a slot, but its cache has room for {room}; make the shapes agree")
        start, stop = self.start, self.start + new[0].shape[1]
        new, nonfinite_BT = replace_nonfinite(*new)
        casts = tuple(chunk.detach().to(store.dtype) for chunk, store in zip(new, self.tensors, strict=True))
        overflow_BT = None
        if any(chunk.dtype != cast.dtype for chunk, cast in zip(new, casts, strict=True)):
            casts, overflow_BT = replace_nonfinite(*casts)
        for store, cast in zip(self.tensors, casts, strict=True):
            store[:, start:stop] = cast
        self.nonfinite[:, start:stop] = False if nonfinite_BT is None else nonfinite_BT
        nonfinite_BS = self.nonfinite[:, :stop].clone()  # later chunks are marked in place
        if overflow_BT is not None:  # finite in this pass, which reads what is not cast yet
            self.nonfinite[:, start:stop] |= overflow_BT
        return tuple(self._read(store, chunk) for store, chunk in zip(self.tensors, new, strict=True)), nonfinite_BS

    def _read(self, store: Tensor, new: Tensor) -> Tensor:
        if self.start == 0:
            return new
        if new.requires_grad:
            return torch.cat([store[:, : self.start].to(new.dtype), new], 1)
        return store[:, : self.start + new.shape[1]].to(new.dtype)

    def append_cross(self, k_BSKH: Tensor, v_BSKH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Store keys and values of an encoder's output; returns them, finite, and which slots were not."""
        (k_BSKH, v_BSKH), nonfinite_BS = replace_nonfinite(k_BSKH, v_BSKH)
        if nonfinite_BS is None:
            nonfinite_BS = torch.zeros(k_BSKH.shape[:2], dtype=torch.bool, device=k_BSKH.device)
        self.cross = k_BSKH.detach(), v_BSKH.detach(), nonfinite_BS
        return k_BSKH, v_BSKH, nonfinite_BS

    def apply(self, change: Callable[[Tensor], Tensor]) -> None:
        """Put ``change(tensor)`` in the place of every tensor."""
        self.tensors = tuple(change(tensor) for tensor in self.tensors)
        self.nonfinite = change(self.nonfinite)
        if self.cross is not None:
            k_BSKH, v_BSKH, nonfinite_BS = self.cross
            self.cross = change(k_BSKH), change(v_BSKH), change(nonfinite_BS)


class ContiguousCache:
    """Room for ``capacity`` slots of each row in every layer.

    ``shapes`` has one entry a layer: the shape of each of its tensors in one slot, ``((K, H), (K, H))`` for keys and
    values. ``changes_angles(before, after)`` says whether a document of ``before`` tokens must not grow (or be cropped)
    to ``after``, because its keys were rotated by other angles (``RopeScaling.changes_angles``).

    A chunk is *placed* (coordinates only), then every layer appends to it, then it is *committed*; a forward pass
    that fails in between leaves the cache as it was.
    """

    def __init__(
        self,
        *,
        shapes: Sequence[Sequence[tuple[int, ...]]],
        rows: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        changes_angles: Callable[[int, int], bool] | None = None,
    ) -> None:
        if rows < 1 or capacity < 1:
            raise ShapeError(f"a cache needs at least one row and one slot, not {rows} rows and {capacity} slots")
        self.layers = [
            LayerCache(tuple(torch.zeros(rows, capacity, *shape, dtype=dtype, device=device) for shape in layer))
            for layer in shapes
        ]
        self.positions_BS = torch.zeros(rows, capacity, dtype=torch.long, device=device)
        self.segments_BS = torch.zeros(rows, capacity, dtype=torch.long, device=device)
        self.groups_BS: Tensor | None = None  # from the first chunk on that has groups
        self.encoder_coords: Coordinates | None = None
        self.length = 0
        self._changes_angles = changes_angles
        self._runs: tuple[Run, ...] = ()
        self._pending: tuple[int, tuple[Run, ...]] | None = None
        # the last document of each row and the position after its end, on their device: no step copies from the host
        self._last_B2 = self._last_documents()

    @property
    def rows(self) -> int:
        return self.positions_BS.shape[0]

    @property
    def capacity(self) -> int:
        return self.positions_BS.shape[1]

    @property
    def layout(self) -> Layout:
        """What the host knows about the slots in use."""
        return Layout(self.rows, self.length, self._runs)

    @property
    def sequence_lengths(self) -> list[int]:
        """The length of the last document of each row: its next position."""
        return [end for _, end in ends(self._runs, self.rows)]

    def set_encoder_output(self, coords: Coordinates) -> None:
        """Store the coordinates of an encoder's output for later passes; forgets keys and values of another one.

        Raises:
            ShapeError: another number of rows.
            UnsupportedError: cached tokens have read another encoder's output.
        """
        if coords.shape[0] != self.rows:
            raise ShapeError(f"the encoder output has {coords.shape[0]} rows, the cache {self.rows}; make them agree")
        if self.length:
            raise UnsupportedError(
                f"the cache holds {self.length} slots, whose tokens have read another encoder output; "
                "crop(0) first, or begin with a new cache"
            )
        self.encoder_coords = coords
        for layer in self.layers:
            layer.cross = None

    def begin_append(self, chunk: Coordinates, rules: Sequence[Rule] = ()) -> tuple[Coordinates, Coordinates]:
        """Coordinates of a chunk that continues the cache, and of everything it may see: (queries, keys).

        ``chunk`` counts from 0; each row's real tokens continue the row's last document. Its groups are stored; without
        them, new tokens belong to no group. A prefix that sees itself has to be in the first chunk, whole.

        Raises:
            ShapeError: another number of rows.
            LengthError: more slots than are left.
            UnsupportedError: packed rows that continue; earlier tokens that would have had to see, or to be rotated by
                the length of, what comes now.
        """
        start, slots = self.length, chunk.shape[1]
        stop = start + slots
        if chunk.shape[0] != self.rows:
            raise ShapeError(f"the chunk has {chunk.shape[0]} rows but the cache has {self.rows}; they must agree")
        if stop > self.capacity:
            raise LengthError(
                f"{slots} new tokens do not fit: the cache uses {self.length} of {self.capacity}; make a larger one "
                f"with new_cache(rows, capacity={stop})"
            )
        q_coords = chunk if start == 0 else self._continued(chunk)
        assert q_coords.layout is not None
        if start:
            self._refuse_ahead(rules, q_coords)
            self._check_angles(self._runs, (*self._runs, *q_coords.layout.runs))
        self.positions_BS[:, start:stop] = q_coords.positions
        self.segments_BS[:, start:stop] = q_coords.segments
        if q_coords.groups is not None and self.groups_BS is None:
            self.groups_BS = torch.zeros_like(self.segments_BS)
        if self.groups_BS is not None:
            self.groups_BS[:, start:stop] = 0 if q_coords.groups is None else q_coords.groups
        shifted = (run._replace(start=run.start + start, stop=run.stop + start) for run in q_coords.layout.runs)
        runs = merge([*self._runs, *shifted])
        for layer in self.layers:
            layer.start = start
        self._pending = stop, runs
        return (q_coords, q_coords) if start == 0 else (q_coords, self._slots_in_use(stop, runs))

    def commit(self) -> None:
        """The chunk that was placed now counts."""
        assert self._pending is not None
        start, (self.length, self._runs) = self.length, self._pending
        self._pending = None
        if start == 0:
            self._last_B2 = self._last_documents()
        elif self.length > start:
            new = slice(start, self.length)
            ends_BT = torch.where(self.segments_BS[:, new] != 0, self.positions_BS[:, new] + 1, 0)
            segment_B, end_B = self._last_B2.unbind(1)
            self._last_B2 = torch.stack([segment_B, torch.maximum(end_B, ends_BT.amax(1))], 1)

    def _last_documents(self) -> Tensor:
        return torch.tensor(ends(self._runs, self.rows), device=self.positions_BS.device)

    def _slots_in_use(self, stop: int, runs: tuple[Run, ...]) -> Coordinates:
        groups = None if self.groups_BS is None else self.groups_BS[:, :stop]
        layout = Layout(self.rows, stop, runs)
        return Coordinates(self.positions_BS[:, :stop], self.segments_BS[:, :stop], groups, layout)

    def _continued(self, chunk: Coordinates) -> Coordinates:
        if chunk.layout is None:
            raise UnsupportedError("continuing a cache needs a batch whose layout the host knows; build it on the CPU")
        if chunk.layout.kind == "packed":
            raise UnsupportedError("continuing a cache takes one document a row; packed rows only fit an empty cache")
        last = ends(self._runs, self.rows)
        segment_B, next_B = self._last_B2.unbind(1)
        real = chunk.real
        positions = torch.where(real, chunk.positions + next_B[:, None], 0)
        segments = torch.where(real, segment_B[:, None], 0)
        runs = tuple(
            run._replace(segment=last[run.row][0], first=run.first + last[run.row][1]) for run in chunk.layout.runs
        )
        groups = torch.zeros_like(segments) if chunk.groups is None and self.groups_BS is not None else chunk.groups
        return Coordinates(positions, segments, groups, Layout(self.rows, chunk.layout.slots, runs))

    def _refuse_ahead(self, rules: Sequence[Rule], new: Coordinates) -> None:
        """Raises UnsupportedError where old tokens would see new ones: they were computed without them."""
        assert new.layout is not None
        first = min((run.first for run in new.layout.runs), default=None)
        old = self._slots_in_use(self.length, self._runs)
        for rule in rules:
            if first is None or (rule.causal_from is not None and first >= rule.causal_from):
                continue
            if not rule.mask(old, new).any():
                continue
            raise UnsupportedError(
                f"the rule {rule} lets earlier tokens see later ones, which a cached chunk cannot give them; "
                "run the whole sequence at once, or give the whole prefix in the first chunk"
            )

    def _check_angles(self, current: Sequence[Run], wanted: Sequence[Run]) -> None:
        if self._changes_angles is None:
            return
        before, after = lengths(current), lengths(wanted)
        for document, length in before.items():
            new = after.get(document, 0)
            if self._changes_angles(length, new):
                raise UnsupportedError(
                    f"the cache holds a document of {length} tokens, which are rotated by other angles than in one of "
                    f"{new}; run all {new} tokens again, with an empty cache or none"
                )

    def reorder(self, index: Int[Tensor, "R"]) -> None:
        """Row r becomes what row ``index[r]`` was, encoder output included; rows may be repeated or left out.

        Raises:
            ShapeError: not a list of one row or more.
            ArgumentError: a row that is not there.
        """
        if index.ndim != 1 or not len(index):
            raise ShapeError(f"reorder takes a list of one row number or more, not the shape {tuple(index.shape)}")
        if index.dtype == torch.bool or index.is_floating_point():
            raise ArgumentError(f"reorder takes row numbers, not {index.dtype}; give the numbers of the rows to keep")
        chosen = index.tolist()
        if any(not 0 <= row < self.rows for row in chosen):
            raise ArgumentError(f"reorder names rows {chosen}, but the cache has rows 0 to {self.rows - 1}")
        for layer in self.layers:
            layer.apply(lambda tensor: tensor[index])
        self.positions_BS, self.segments_BS = self.positions_BS[index], self.segments_BS[index]
        self.groups_BS = None if self.groups_BS is None else self.groups_BS[index]
        self.encoder_coords = None if self.encoder_coords is None else rows_of(self.encoder_coords, index, chosen)
        self._runs = runs_of(self._runs, chosen)
        self._last_B2 = self._last_B2[index]

    def crop(self, keep: int) -> None:
        """Keep the first ``keep`` slots; a negative number drops that many. Clamped to what there is.

        An encoder's output stays. Raises UnsupportedError where what is left has the angles of a longer document.
        """
        kept = max(0, min(self.length, keep if keep >= 0 else self.length + keep))
        runs = tuple(run._replace(stop=min(run.stop, kept)) for run in self._runs if run.start < kept)
        self._check_angles(self._runs, runs)
        # new tensors, because coordinates that were returned before share the old ones
        self.positions_BS, self.segments_BS = self.positions_BS.clone(), self.segments_BS.clone()
        self.groups_BS = None if self.groups_BS is None else self.groups_BS.clone()
        self.segments_BS[:, kept:] = 0
        self._runs = runs
        self.length = kept
        self._last_B2 = self._last_documents()

    def snapshot(self) -> ContiguousCache:
        """A copy that shares no memory with this one."""
        copy = shallow_copy(self)
        copy.layers = [shallow_copy(layer) for layer in self.layers]
        for layer in copy.layers:
            layer.apply(torch.clone)
        copy.positions_BS, copy.segments_BS = self.positions_BS.clone(), self.segments_BS.clone()
        copy.groups_BS = None if self.groups_BS is None else self.groups_BS.clone()
        copy._last_B2, copy._pending = self._last_B2.clone(), None
        return copy  # nothing writes into encoder_coords: they are frozen
