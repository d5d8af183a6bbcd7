"""Attention document by document: no work on padding, none between documents.

Rows are cut into their runs with one ``split`` and put together with one ``cat``, so that the backward pass costs
what the forward pass does.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import scaled_dot_product_attention

from pellucid.errors import UnsupportedError
from pellucid.nn.backends import sdpa
from pellucid.nn.backends.inputs import AttentionInputs
from pellucid.shapes import Tensor
from pellucid.visibility import Coordinates, Layout, Run
from pellucid.visibility.coordinates import merge

# A call for one document costs about as much as this many (query, key) pairs of a dense call (two CPU cores).
_PAIRS_PER_CALL = 4096


def unsupported_reason(call: AttentionInputs) -> str | None:
    """Why this backend does not support the call (None: it does)."""
    if call.q_coords.layout is None or call.k_coords.layout is None:
        return "varlen needs coordinates whose layout the host knows (Coordinates(layout=…) or CPU tensors)"
    if call.bias is not None:
        return "varlen takes no bias"
    if call.rule.is_slot_mask:
        return "varlen cannot cut a given mask into documents"
    return sdpa.unsupported_reason(call, "varlen")


def is_profitable(call: AttentionInputs) -> bool:
    """Whether going document by document is less work than one dense call."""
    if not call.is_self:
        return False
    layout = call.q_coords.layout
    assert layout is not None
    pairs = sum((run.stop - run.start) ** 2 for run in layout.runs)
    return pairs + _PAIRS_PER_CALL * len(layout.runs) < layout.rows * layout.slots**2


def attend(call: AttentionInputs) -> Tensor:
    """As the reference, one document at a time."""
    why = unsupported_reason(call)
    if why:
        others = "'sdpa', 'reference'" if sdpa.unsupported_reason(call) is None else "'reference'"
        raise UnsupportedError(f"{why}; use backend={others} or 'auto'")
    plan, _ = call.q_coords.cached(
        ("varlen", id(call.k_coords)), lambda: (_plan(call.q_coords, call.k_coords), call.k_coords)
    )
    q_pieces = _cut(call.q, plan.queries)
    k_pieces, v_pieces = _cut(call.k, plan.keys), _cut(call.v, plan.keys)
    nonfinite = None if call.nonfinite is None else _cut(call.nonfinite, plan.keys)
    outs = []
    for piece, q in zip(plan.queries, q_pieces, strict=True):
        indices = plan.keys_of.get(piece.document) if piece.document else None
        if indices is None:
            # padding, or a document without keys: exactly 0, and still part of the graph
            outs.append(q.new_zeros(*q.shape[:-1], call.v.shape[-1]))
            continue
        k_coords = plan.coordinates[indices]
        q_coords = k_coords if piece.slots == _only_slots(plan, indices) and call.is_self else piece.coordinates
        part = replace(
            call,
            q=q.unsqueeze(0),
            k=_joined(k_pieces, indices).unsqueeze(0),
            v=_joined(v_pieces, indices).unsqueeze(0),
            q_coords=q_coords,
            k_coords=k_coords,
            nonfinite=None if nonfinite is None else _joined(nonfinite, indices).unsqueeze(0),
        )
        prepared = sdpa.prepare(part)
        outs.append(prepared.finish(scaled_dot_product_attention(**prepared.arguments)).squeeze(0))
    return torch.cat(outs).unflatten(0, call.q.shape[:2])


@dataclass(frozen=True, eq=False)
class VarlenSegment:
    """Neighbouring slots, counted through all rows: one run, or (document None) the padding between two."""

    slots: tuple[int, int]
    document: tuple[int, int] | None  # (row, segment)
    coordinates: Coordinates | None


@dataclass(frozen=True, eq=False)
class VarlenPlan:
    queries: list[VarlenSegment]
    keys: list[VarlenSegment]
    keys_of: dict[tuple[int, int], tuple[int, ...]]  # document -> its pieces of the keys
    coordinates: dict[tuple[int, ...], Coordinates]


def _plan(q_coords: Coordinates, k_coords: Coordinates) -> VarlenPlan:
    query_pieces, key_pieces = _pieces(q_coords), _pieces(k_coords)
    grouped: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, piece in enumerate(key_pieces):
        if piece.document:
            grouped[piece.document].append(index)
    keys_of = {document: tuple(indices) for document, indices in grouped.items()}
    joined = {indices: _join_coordinates([key_pieces[i] for i in indices]) for indices in keys_of.values()}
    return VarlenPlan(query_pieces, key_pieces, keys_of, joined)


def _pieces(coordinates: Coordinates) -> list[VarlenSegment]:
    layout = coordinates.layout
    assert layout is not None
    pieces: list[VarlenSegment] = []
    done = 0
    for run in sorted(layout.runs):
        start, stop = run.row * layout.slots + run.start, run.row * layout.slots + run.stop
        if start > done:
            pieces.append(VarlenSegment((done, start), None, None))
        pieces.append(VarlenSegment((start, stop), (run.row, run.segment), _of_run(coordinates, run)))
        done = stop
    if done < layout.rows * layout.slots:
        pieces.append(VarlenSegment((done, layout.rows * layout.slots), None, None))
    return pieces


def _of_run(whole: Coordinates, run: Run) -> Coordinates:
    row, slots = slice(run.row, run.row + 1), slice(run.start, run.stop)
    length = run.stop - run.start
    layout = Layout(1, length, (Run(0, 0, length, run.segment, run.first),))
    groups = None if whole.groups is None else whole.groups[row, slots]
    return Coordinates(whole.positions[row, slots], whole.segments[row, slots], groups, layout)


def _join_coordinates(pieces: list[VarlenSegment]) -> Coordinates:
    parts = [piece.coordinates for piece in pieces if piece.coordinates is not None]
    if len(parts) == 1:
        return parts[0]
    runs: list[Run] = []
    for part in parts:
        assert part.layout is not None
        (run,) = part.layout.runs
        start = runs[-1].stop if runs else 0
        runs.append(run._replace(start=start, stop=start + run.stop))
    groups = [part.groups for part in parts if part.groups is not None]
    return Coordinates(
        torch.cat([part.positions for part in parts], 1),
        torch.cat([part.segments for part in parts], 1),
        torch.cat(groups, 1) if groups else None,
        Layout(1, runs[-1].stop, merge(runs)),
    )


def _only_slots(plan: VarlenPlan, indices: tuple[int, ...]) -> tuple[int, int] | None:
    return plan.keys[indices[0]].slots if len(indices) == 1 else None


def _cut(x: Tensor, pieces: list[VarlenSegment]) -> tuple[Tensor, ...]:
    return x.flatten(0, 1).split([piece.slots[1] - piece.slots[0] for piece in pieces])


def _joined(pieces: tuple[Tensor, ...], indices: tuple[int, ...]) -> Tensor:
    return pieces[indices[0]] if len(indices) == 1 else torch.cat([pieces[i] for i in indices])
