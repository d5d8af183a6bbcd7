"""``torch.nn.functional.scaled_dot_product_attention``, with its gaps filled: ``sdpa`` for all rows, or ``varlen``.

Its ``is_causal`` counts slots from the first row and column, so it is used only where that *is* the rule: one whole
document in each row, attending to itself. Everything else gets the mask.

``varlen`` calls it document by document: no work on padding, none between documents. Rows are cut into their runs with
one ``split`` and put together with one ``cat``, so that the backward pass costs what the forward pass does.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from pellucid.errors import UnsupportedError
from pellucid.nn.backends.inputs import AttentionInputs, propagate_nan
from pellucid.shapes import Tensor
from pellucid.visibility import Coordinates, Layout, Rule, Run, full
from pellucid.visibility.coordinates import merge
from pellucid.visibility.rules import is_full, is_plain_causal


def unsupported_reason(call: AttentionInputs, name: str = "sdpa") -> str | None:
    """Why this backend, or the one of another ``name`` that is made of it, refuses the call (None: it does not)."""
    if call.options.softcap is not None:
        return f"{name} has no softcap"
    if call.sink_logits is not None:
        return f"{name} has no sink logits"
    return None


def attend(call: AttentionInputs) -> Tensor:
    """As the reference, by torch's fused kernels."""
    prepared = prepare(call)
    return prepared.finish(scaled_dot_product_attention(**prepared.arguments))


@dataclass(frozen=True, eq=False)
class SDPACall:
    """One call of the kernel: its arguments, and what has to be put right in its answer."""

    call: AttentionInputs
    arguments: dict[str, Any]
    folded: bool
    seeing: Tensor | None  # Bool[B, T]

    def finish(self, out: Tensor) -> Tensor:
        """The kernel's answer as ``[B, T, N, U]``: blind queries exactly 0, NaN where a visible key was NaN."""
        out_BTNU = out.flatten(1, 2).unsqueeze(1) if self.folded else out.transpose(1, 2)
        if self.seeing is not None:
            zero = torch.zeros((), dtype=out.dtype, device=out.device)
            out_BTNU = torch.where(self.seeing[:, :, None, None], out_BTNU, zero)
        nonfinite_BS = self.call.nonfinite
        if nonfinite_BS is None:
            return out_BTNU
        if self.arguments["attn_mask"] is not None:
            return propagate_nan(out_BTNU, nonfinite_BS, self.call.rule.mask(self.call.q_coords, self.call.k_coords))
        # what the kernel needed no mask for needs none here: all keys up to the query, or all there are
        sees_BT = nonfinite_BS.cumsum(1) > 0 if self.arguments["is_causal"] else nonfinite_BS.any(1, keepdim=True)
        return out_BTNU.masked_fill(sees_BT[:, :, None, None], float("nan"))


def prepare(call: AttentionInputs) -> SDPACall:
    """The arguments of the kernel, and what its answer needs."""
    why = unsupported_reason(call)
    if why:
        raise UnsupportedError(f"{why}; use backend='reference' or 'auto'")
    shortcut = None if call.bias is not None else infer_is_causal(call.rule, call.q_coords, call.k_coords)
    mask, seeing_BT = mask_with_open_rows(call) if shortcut is None else (None, None)
    heads, kv_heads = call.q.shape[2], call.k.shape[2]
    # One new token: the query heads of a group are rows over the same keys, and no key is copied.
    folded = call.q.shape[1] == 1 and mask is None
    arguments = {
        "query": call.q[:, 0].unflatten(1, (kv_heads, -1)) if folded else call.q.transpose(1, 2),
        "key": call.k.transpose(1, 2),
        "value": call.v.transpose(1, 2),
        "attn_mask": mask,
        "dropout_p": call.options.dropout,
        "is_causal": shortcut == "causal",
        "scale": call.factor,
        "enable_gqa": kv_heads < heads and not folded,
    }
    return SDPACall(call, arguments, folded, seeing_BT)


def infer_is_causal(rule: Rule, q_coords: Coordinates, k_coords: Coordinates) -> str | None:
    """``"causal"`` or ``"none"`` where the kernel needs no mask."""
    query, key = q_coords.layout, k_coords.layout
    if query is None or key is None or query.kind != "full" or key.kind != "full":
        return None
    if q_coords is k_coords and all(run.first == 0 for run in query.runs):
        if is_plain_causal(rule, query.slots):
            return "causal"
        return "none" if is_full(rule, query.slots) else None
    newest = query.slots == 1 and all(
        q.first == k.first + key.slots - 1 for q, k in zip(query.runs, key.runs, strict=True)
    )
    same = all(q.segment == k.segment for q, k in zip(query.runs, key.runs, strict=True))
    if not same:
        return None
    if newest and all(k.first == 0 for k in key.runs):
        # the power of two keeps the number of lengths that are looked at small while a cache grows
        length = 1 << (key.slots - 1).bit_length()
        if is_plain_causal(rule, length) or is_plain_causal(rule, key.slots):
            return "none"
    return "none" if rule == full() else None


def mask_with_open_rows(call: AttentionInputs) -> tuple[Tensor, Tensor | None]:
    """The mask with blind rows opened (a kernel must not divide by nothing), and which rows see at all (None: all)."""
    dtype = call.q.dtype

    def make() -> tuple[Tensor, Tensor | None]:
        mask = call.rule.mask(call.q_coords, call.k_coords)
        seeing = mask.any(-1, keepdim=True)
        if mask.device.type == "cpu" and bool(seeing.all()):
            return mask, None
        return mask | ~seeing, seeing[:, 0, :, 0]

    mask, seeing_BT, _ = call.q_coords.cached(("sdpa", call.rule, id(call.k_coords)), lambda: (*make(), call.k_coords))
    if call.bias is not None:
        mask = torch.where(mask, call.bias.to(dtype), torch.full((), float("-inf"), dtype=dtype, device=mask.device))
    return mask, seeing_BT


# ---- document by document

# A call for one document costs about as much as this many (query, key) pairs of a dense call, times the features of all
# heads. Measured on a CPU (30 µs against 0.055 ns); elsewhere an estimate for the same host and a much faster kernel.
_PAIR_FEATURES_PER_CALL = 1 << 19
_PAIR_FEATURES_PER_CALL_ELSEWHERE = 1 << 30


def varlen_unsupported_reason(call: AttentionInputs) -> str | None:
    """Why this backend does not support the call (None: it does)."""
    if call.q_coords.layout is None or call.k_coords.layout is None:
        return "varlen needs coordinates whose layout the host knows (Coordinates(layout=…) or CPU tensors)"
    if call.bias is not None:
        return "varlen takes no bias"
    if call.rule.is_slot_mask:
        return "varlen cannot cut a given mask into documents"
    return unsupported_reason(call, "varlen")


def varlen_is_profitable(call: AttentionInputs) -> bool:
    """Whether going document by document is less work than one dense call."""
    if not call.is_self:
        return False
    layout = call.q_coords.layout
    assert layout is not None
    pairs = sum((run.stop - run.start) ** 2 for run in layout.runs)
    saved = (layout.rows * layout.slots**2 - pairs) * call.q.shape[2] * call.q.shape[3]
    on_cpu = call.q.device.type == "cpu"
    return saved > len(layout.runs) * (_PAIR_FEATURES_PER_CALL if on_cpu else _PAIR_FEATURES_PER_CALL_ELSEWHERE)


def attend_varlen(call: AttentionInputs) -> Tensor:
    """As the reference, one document at a time."""
    why = varlen_unsupported_reason(call)
    if why:
        others = "'sdpa', 'reference'" if unsupported_reason(call) is None else "'reference'"
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
        prepared = prepare(part)
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
