"""The contiguous key/value cache: what past tokens said, *and where they were*.

Visibility is computed from the stored coordinates like everywhere else, so slots that are unused or padding are
invisible by construction, and a row's positions go on from what the row holds, not from a shared counter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pellucid.errors import InputError, LengthError, ShapeError, UnsupportedError
from pellucid.shapes import Float, Int, Tensor
from pellucid.visibility import Coordinates, Layout, Rule, Run


@dataclass(eq=False)
class LayerCache:
    """Keys and values of one layer; :class:`ContiguousCache` owns it and says which slots are next."""

    k: Float[Tensor, "B S K H"]
    v: Float[Tensor, "B S K U"]
    start: int = 0

    def append(self, k_BTKH: Tensor, v_BTKU: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new chunk at the slots that :meth:`ContiguousCache.place` opened; all slots up to it come back.

        Gradients flow into this chunk and stop at earlier ones, which are remembered as numbers.
        """
        return self._append(self.k, k_BTKH), self._append(self.v, v_BTKU)

    def _append(self, store: Tensor, new: Tensor) -> Tensor:
        stop = self.start + new.shape[1]
        store[:, self.start : stop] = new.detach()
        if self.start == 0:
            return new
        if new.requires_grad:
            return torch.cat([store[:, : self.start].to(new.dtype), new], 1)
        return store[:, :stop].to(new.dtype)


class ContiguousCache:
    """Room for ``capacity`` slots of each row in every layer.

    A chunk is *placed* (coordinates only), then every layer appends to it, then it is *committed*; a forward pass
    that fails in between leaves the cache as it was.
    """

    def __init__(
        self,
        *,
        layers: int,
        rows: int,
        capacity: int,
        kv_heads: int,
        head_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if rows < 1 or capacity < 1:
            raise ShapeError(f"a cache needs at least one row and one slot, not {rows} rows and {capacity} slots")
        shape = (rows, capacity, kv_heads, head_size)
        self.layers = [
            LayerCache(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for _ in range(layers)
        ]
        self.positions_BS = torch.zeros(rows, capacity, dtype=torch.long, device=device)
        self.segments_BS = torch.zeros(rows, capacity, dtype=torch.long, device=device)
        self.length = 0
        self._runs: tuple[Run, ...] = ()
        self._placed: tuple[int, tuple[Run, ...]] | None = None

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
    def row_lengths(self) -> list[int]:
        """How many tokens of its last document each row holds: the position that comes next."""
        return [end for _, end in _ends(self._runs, self.rows)]

    def place(self, chunk: Coordinates, rules: Sequence[Rule] = ()) -> tuple[Coordinates, Coordinates]:
        """Coordinates of a chunk that goes on from here, and of everything it may look at.

        ``chunk`` counts from 0; each row's real tokens continue the row's last document. Returns (queries, keys).
        """
        slots = chunk.shape[1]
        if chunk.shape[0] != self.rows:
            raise ShapeError(f"the chunk has {chunk.shape[0]} rows but the cache has {self.rows}; they must agree")
        if self.length + slots > self.capacity:
            raise LengthError(
                f"{slots} new tokens do not fit: the cache holds {self.length} of {self.capacity}; make a larger one "
                f"with new_cache(rows, capacity={self.length + slots})"
            )
        if chunk.groups is not None:
            raise UnsupportedError("a cache keeps no groups; run prefix() and blocks() by groups without a cache")
        queries = chunk if self.length == 0 else self._continued(chunk)
        assert queries.layout is not None
        self._refuse_ahead(rules, queries.layout)
        start, stop = self.length, self.length + slots
        self.positions_BS[:, start:stop] = queries.positions
        self.segments_BS[:, start:stop] = queries.segments
        shifted = (run._replace(start=run.start + start, stop=run.stop + start) for run in queries.layout.runs)
        runs = _merged([*self._runs, *shifted])
        for layer in self.layers:
            layer.start = start
        self._placed = stop, runs
        if start == 0:
            return queries, queries
        keys = Coordinates(
            self.positions_BS[:, :stop], self.segments_BS[:, :stop], layout=Layout(self.rows, stop, runs)
        )
        return queries, keys

    def commit(self) -> None:
        """The chunk that was placed now counts."""
        assert self._placed is not None
        self.length, self._runs = self._placed
        self._placed = None

    def _continued(self, chunk: Coordinates) -> Coordinates:
        if chunk.layout is None:
            raise UnsupportedError(
                "going on from a cache needs a batch whose layout the host knows; build it on the CPU"
            )
        if chunk.layout.kind == "packed":
            raise UnsupportedError(
                "going on from a cache takes one document a row; packed rows only fit an empty cache"
            )
        ends = _ends(self._runs, self.rows)
        device = chunk.positions.device
        segment_B = torch.tensor([segment for segment, _ in ends], device=device)
        next_B = torch.tensor([end for _, end in ends], device=device)
        real = chunk.real
        positions = torch.where(real, chunk.positions + next_B[:, None], 0)
        segments = torch.where(real, segment_B[:, None], 0)
        runs = tuple(
            run._replace(segment=ends[run.row][0], first=run.first + ends[run.row][1]) for run in chunk.layout.runs
        )
        return Coordinates(positions, segments, layout=Layout(self.rows, chunk.layout.slots, runs))

    def _refuse_ahead(self, rules: Sequence[Rule], new: Layout) -> None:
        """Old tokens must not have been owed a sight of new ones: they were computed without it."""
        if self.length == 0:
            return
        first = min((run.first for run in new.runs), default=None)
        for rule in rules:
            if first is None or (rule.settled is not None and first >= rule.settled):
                continue
            raise UnsupportedError(
                f"the rule {rule} lets earlier tokens see later ones, which a cached chunk cannot give them; "
                "run the whole sequence at once, or give the whole prefix in the first chunk"
            )

    def reorder(self, index_B: Int[Tensor, "B"]) -> None:
        """Row b becomes what row ``index_B[b]`` was: keys, values and coordinates of every layer."""
        if index_B.shape != (self.rows,):
            raise ShapeError(f"reorder takes one row number for each of {self.rows} rows, not {tuple(index_B.shape)}")
        chosen = index_B.tolist()
        if any(not 0 <= row < self.rows for row in chosen):
            raise InputError(f"reorder names rows {chosen}, but the cache has rows 0 to {self.rows - 1}")
        for layer in self.layers:
            layer.k, layer.v = layer.k[index_B], layer.v[index_B]
        self.positions_BS, self.segments_BS = self.positions_BS[index_B], self.segments_BS[index_B]
        self._runs = tuple(
            run._replace(row=new) for new, old in enumerate(chosen) for run in self._runs if run.row == old
        )

    def crop(self, keep: int) -> None:
        """Keep the first ``keep`` slots; a negative number drops that many. Clamped to what there is."""
        kept = max(0, min(self.length, keep if keep >= 0 else self.length + keep))
        self.segments_BS[:, kept:] = 0
        self._runs = tuple(run._replace(stop=min(run.stop, kept)) for run in self._runs if run.start < kept)
        self.length = kept

    def snapshot(self) -> ContiguousCache:
        """A copy that shares no memory with this one."""
        copy = object.__new__(ContiguousCache)
        copy.layers = [LayerCache(layer.k.clone(), layer.v.clone(), layer.start) for layer in self.layers]
        copy.positions_BS, copy.segments_BS = self.positions_BS.clone(), self.segments_BS.clone()
        copy.length, copy._runs, copy._placed = self.length, self._runs, None
        return copy


def _ends(runs: Sequence[Run], rows: int) -> list[tuple[int, int]]:
    """The last document of each row and the position after its end; (1, 0) for a row without tokens."""
    ends = [(1, 0)] * rows
    for run in runs:
        if run.segment >= ends[run.row][0]:
            ends[run.row] = (run.segment, run.first + run.stop - run.start)
    return ends


def _merged(runs: list[Run]) -> tuple[Run, ...]:
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
