"""Are positions counted from 0 in every document, obeyed where given, relative where promised, and bounded?"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from pellucid.audits.checks.check import Check
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.decision import (
    against_alone,
    at,
    find_cause,
    finding,
    judge,
    not_moved,
    rows_of,
    skip_if_unsupported,
)
from pellucid.audits.engine.deviation import Deviation, TargetRun, logit_scale, max_abs_diff
from pellucid.audits.engine.out_of_range import past_the_end
from pellucid.batch import Batch
from pellucid.records import Finding, Location
from pellucid.visibility import Coordinates

NAME = "positions"
_SHIFTS = (1, 7, 100, 1000)
_SPREAD = 3  # a row whose tokens stand so far apart
_SLOTS = 5


def run(context: AuditContext) -> Iterator[Finding]:
    """By place in a row, in a pack and in a cache; by explicit positions; past the end."""
    found = False
    for finding_ in _all(context):
        found = True
        yield finding_
    if not found:
        message = f"{context.probe.name} can be given no positions, padding or documents, and states no bound"
        yield Finding(NAME, "not_applicable", message)


def _all(context: AuditContext) -> Iterator[Finding]:
    if context.can("padding") and "left" in context.probe.sides:
        yield _left_padded(context)
    if context.can("packing"):
        yield _packed(context)
    if context.can("padding", "cache") and "left" in context.probe.sides:
        yield skip_if_unsupported(NAME, "left padded, through a cache", partial(_cached, context))
    if context.can("positions"):
        yield from _explicit(context)
    if context.probe.max_length is not None:
        yield from past_the_end(context, NAME, context.probe.max_length)


# ------------------------------------------------------------------------------------------ by place in the row


def _left_padded(context: AuditContext) -> Finding:
    rows = rows_of(context)
    batch, right = (Batch.from_rows(rows, side=side, length=7) for side in ("left", "right"))
    pads = [(r, s) for r, s in (~batch.token_mask).nonzero().tolist()]
    return _restarts(context, "left padded", batch, rows, right, rows, pads)


def _packed(context: AuditContext) -> Finding:
    """The second document of a row against itself alone; in the control it comes first."""
    docs = rows_of(context, (3, 5))
    batch, control = Batch.packed(docs), Batch.packed(docs[::-1])
    others = [(0, slot) for slot in batch.slots(0, 1).tolist()]
    return _restarts(context, "packed", batch, docs, control, docs[::-1], others, only=2)


def _restarts(
    context: AuditContext,
    case: str,
    batch: Batch,
    rows: list[list[int]],
    control: Batch,
    control_rows: list[list[int]],
    others: Sequence[tuple[int, int]],
    only: int | None = None,
) -> Finding:
    """Documents answer as alone; where they do not, no other token moves them and in another place all is well."""
    inside_BT = batch.token_mask if only is None else batch.segments == only

    def measure(run: TargetRun) -> Deviation:
        reading = against_alone(run, batch, rows)
        return Deviation(run, torch.where(inside_BT, reading.sizes, 0.0), reading.scale)

    readings = context.read(measure)
    verdict = judge(context, readings, bits=False)
    good = "every document counts its positions from 0, wherever it stands"
    if verdict.size == math.inf:
        message = "these tokens are answered with NaN or infinity, which says nothing of positions (see padding)"
        return Finding(NAME, "not_applicable", message, case, Location(*verdict.first), verdict.size, verdict.decided)
    if verdict.status != "pass":
        first = control.segments == 1
        sound = context.read(lambda run: _within(against_alone(run, control, control_rows), first))
        row, query = verdict.first
        moving = find_cause(context, verdict.reading.run, batch, row, query, others)
        if moving is not None or judge(context, sound, bits=False).status != "pass":
            message = (
                "these tokens answer otherwise than alone, but not by their positions only (see padding and packing)"
            )
            return Finding(NAME, "not_applicable", message, case, Location(row, query), verdict.size, verdict.decided)

    def describe(row: int, query: int) -> str:
        token = f"token {int(batch.positions[row, query])} of its document, in slot {query}"
        return f"{token}, answers by its place in the row: positions do not restart"

    return finding(context, NAME, case, readings, bits=False, good=good, place=at(describe))


def _within(reading: Deviation, where_BT: Tensor) -> Deviation:
    return Deviation(reading.run, torch.where(where_BT, reading.sizes, 0.0), reading.scale)


def _cached(context: AuditContext) -> Finding:
    """Rows of other lengths go on where each of them stopped, not where the longest did."""
    case = "left padded, through a cache"
    rows = rows_of(context, (8, 6, 4)) if context.length >= 8 else rows_of(context, (5, 3, 2))
    batch = Batch.from_rows(rows, side="left")
    chunks = [batch.shape[1] - 2, 1, 1]

    def measure(run: TargetRun) -> Deviation:
        return against_alone(run, batch, rows, run.chunked(batch, chunks))

    def control(run: TargetRun) -> Deviation:
        reading = against_alone(run, batch, rows)
        for row in rows:
            alone = Batch.from_rows([row])
            spaced = against_alone(
                run, alone, [row], run.chunked(alone, [size for size in (len(row) - 2, 1, 1) if size])
            )
            reading = max(reading, spaced, key=lambda r: r.largest / r.scale)
        return reading

    readings = context.read(measure)
    verdict = judge(context, readings, bits=False)
    if verdict.status != "pass" and judge(context, context.read(control), bits=False).status != "pass":
        message = "these tokens answer otherwise than alone, but not by the cache and the padding together (see both)"
        return Finding(NAME, "not_applicable", message, case)

    def describe(row: int, query: int) -> str:
        at_position = int(batch.positions[row, query])
        return f"slot {query} goes on at another position than {at_position}: rows share a counter"

    good = "every row goes on through the cache where its own last token was"
    return finding(context, NAME, case, readings, bits=False, good=good, place=at(describe))


# ---------------------------------------------------------------------------------------- by explicit positions


def _explicit(context: AuditContext) -> Iterator[Finding]:
    batch = Batch.from_rows([context.tokens(_SLOTS)])
    spread = _SPREAD if _fits(context, batch.positions * _SPREAD) else 2
    if not _fits(context, batch.positions * spread):
        message = f"{context.probe.max_length} positions are too few to try others"
        yield Finding(NAME, "not_applicable", message, "other positions")
        return
    spaced = batch.replace(positions=batch.positions * spread)
    yield _obeyed(context, batch, spaced)
    if context.probe.shift_invariant:
        for shift in _SHIFTS:
            shifted = batch.replace(positions=batch.positions + shift)
            if _fits(context, shifted.positions) and _same_masks(context, batch, shifted):
                yield _invariant(context, batch, shifted, spaced, shift)
    yield _own_rows(context, batch, spaced)
    if context.can("padding"):
        yield skip_if_unsupported(NAME, "positions of pads", partial(_of_pads, context))


def _fits(context: AuditContext, positions_BT: Tensor) -> bool:
    return context.probe.max_length is None or int(positions_BT.max()) < context.probe.max_length


def _same_masks(context: AuditContext, batch: Batch, shifted: Batch) -> bool:
    """Chunks, sinks and prefixes are counted from the start: with them a shift may change who is seen."""
    before, after = (Coordinates(r.positions, r.segments) for r in (batch, shifted))
    rules = dict.fromkeys(context.probe.rules)
    return all(torch.equal(rule.mask(before, before), rule.mask(after, after)) for rule in rules)


def _obeyed(context: AuditContext, batch: Batch, spaced: Batch) -> Finding:
    """Other positions change something: tokens further apart, or, where a shift may matter, all of them shifted."""
    case, runs = "other positions", context.runs
    others = [spaced]
    shifted = batch.replace(positions=batch.positions + 1)
    if not context.probe.shift_invariant and _fits(context, shifted.positions):
        others.append(shifted)
    for run in runs:
        for other in others:
            sizes_BT = max_abs_diff(run.plain(batch), run.plain(other))
            if float(sizes_BT.max()) > 0:
                return Finding(NAME, "pass", "other positions give other answers", case, size=float(sizes_BT.max()))
    message = f"positions {spaced.positions[0].tolist()} are answered as 0, 1, 2, … are: explicit positions are ignored"
    return Finding(NAME, "leak", message, case, Location(0, 1), 0.0, "equal bit for bit, where positions must matter")


def _invariant(context: AuditContext, batch: Batch, shifted: Batch, spaced: Batch, shift: int) -> Finding:
    """One number added to all positions moves next to nothing of what moving tokens apart does."""
    case, run = f"shifted by {shift}", context.runs[-1]
    before = run.plain(batch)
    try:
        sizes_BT = max_abs_diff(before, run.logits(shifted))
    except Exception as error:  # noqa: BLE001 (a bound that it does not state: refusing is right)
        message = f"position {shift + _SLOTS - 1} is refused: {type(error).__name__}"
        return Finding(NAME, "not_applicable", message, case)
    size, apart_size = float(sizes_BT.max()), float(max_abs_diff(before, run.plain(spaced)).max())
    coarse = context.native.dtype in (torch.bfloat16, torch.float16)  # tables may be held in so few bits
    floor = (1e-9 if run.dtype == torch.float64 else run.rounding) * logit_scale(before) + 20 * run.noise
    limit = floor + (0.1 if coarse else 1e-3) * apart_size
    decided = f"{run.name} moves by {size:.1e}, by {apart_size:.1e} when tokens stand {_SPREAD} apart"
    if size <= limit:
        return Finding(NAME, "pass", f"adding {shift} to all positions changes nothing", case, None, size, decided)
    row, query = (sizes_BT > limit).nonzero()[0].tolist()
    if getattr(context.probe, "assumes_shift_invariance", False) and _scaled_behind(run, batch, shifted, size):
        message = (
            "queries or keys are scaled feature by feature behind the rotation, so that places count by design: "
            "with one number in each vector of weights the same shift moves nothing"
        )
        return Finding(NAME, "not_applicable", message, case, Location(row, query), size, decided)
    message = f"adding {shift} to all positions moves the output at {query}, although only distances should count"
    return Finding(NAME, "leak", message, case, Location(row, query), size, decided)


def _scaled_behind(run: TargetRun, batch: Batch, shifted: Batch, size: float) -> bool:
    """Whether the shift moves next to nothing of ``size`` in a copy whose vectors of weights hold one number each."""
    module = copy.deepcopy(run.probe.module)
    assert module is not None
    with torch.no_grad():
        for weight in module.parameters():
            if weight.dim() == 1:
                weight.fill_(float(weight.mean()))
    flat = TargetRun(run.probe.with_module(module), run.source)
    before = flat.logits(batch)
    return float(max_abs_diff(before, flat.logits(shifted)).max()) <= max(
        1e-3 * size, flat.rounding * logit_scale(before)
    )


def _own_rows(context: AuditContext, batch: Batch, spaced: Batch) -> Finding:
    """Equal rows with other positions answer as each does alone (angles of one row must not reach another)."""
    positions_BT = torch.cat([batch.positions, spaced.positions, batch.positions])
    three = batch.replace(
        tokens=batch.tokens.expand(3, -1).clone(),
        positions=positions_BT,
        segments=batch.segments.expand(3, -1).clone(),
    )

    def measure(run: TargetRun) -> Deviation:
        want = torch.cat([run.plain(three.row(row)) for row in range(3)])
        return Deviation(run, max_abs_diff(want, run.logits(three)), logit_scale(want))

    place = at("row {row} answers otherwise at {query} beside rows that have other positions")
    good = "each row obeys its own positions"
    return finding(context, NAME, "rows of other positions", context.read(measure), bits=False, good=good, place=place)


def _of_pads(context: AuditContext) -> Finding:
    """What positions pads are said to have does not matter."""
    side = context.probe.sides[0]
    batch = Batch.from_rows(rows_of(context), side=side, length=7)
    after = batch.replace(positions=torch.where(batch.token_mask, batch.positions, 3))

    place = at("the token in slot {query} moves when only the positions of pads are others")
    good = "positions of pads move nothing"
    return not_moved(context, NAME, "positions of pads", batch, after, batch.token_mask, good=good, place=place)


CHECK = Check(
    NAME,
    "Do positions count from 0 in every document, are they obeyed, and is there an error past their end?",
    run,
    length=_SLOTS,
)
