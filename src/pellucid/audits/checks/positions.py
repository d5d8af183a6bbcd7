"""Are positions counted from 0 in every document, obeyed where given, relative where promised, and bounded?"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pellucid.audits.checks.check import question
from pellucid.audits.engine.compare import (
    Change,
    alone,
    at,
    compare,
    decide,
    deviation,
    find_cause,
    judge,
    leak,
    not_applicable,
    passed,
    skip_if_unsupported,
    unless_it_raises,
)
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.out_of_range import past_the_end
from pellucid.audits.engine.target_run import Deviation, TargetRun, logit_scale, max_abs_diff
from pellucid.batch import Batch
from pellucid.records import Finding, Location
from pellucid.visibility import Coordinates

_SHIFTS = (1, 7, 100, 1000)
_SPREAD = 3  # a row whose tokens stand so far apart
_SLOTS = 5


@question(
    "Do positions count from 0 in every document, are they obeyed, and is there an error past their end?",
    length=_SLOTS,
)
def check(context: AuditContext) -> Iterator[Finding]:
    """By place in a row, in a pack and in a cache; by explicit positions; past the end."""
    left = context.can("padding") and "left" in context.probe.sides
    if left:
        yield _left_padded(context, "left padded")
    if context.can("packing"):
        yield _packed(context, "packed")
    if left and context.can("cache"):
        yield _cached(context, "left padded, through a cache")
    if context.can("positions"):
        yield from _explicit(context)
    if context.probe.max_length is not None:
        yield from past_the_end(context, context.probe.max_length)
    elif not (left or context.can("packing") or context.can("positions")):
        message = f"{context.probe.name} can be given no positions, padding or documents, and states no bound"
        yield not_applicable("", message)


# ------------------------------------------------------------------------------------------ by place in the row


def _left_padded(context: AuditContext, case: str) -> Finding:
    rows = context.rows()
    batch, right = (Batch.from_rows(rows, side=side, length=7 * context.step) for side in ("left", "right"))
    pads = [(r, s) for r, s in (~batch.token_mask).nonzero().tolist()]
    return _restarts(context, case, (batch, rows), (right, rows), pads, batch.token_mask)


def _packed(context: AuditContext, case: str) -> Finding:
    """The second document of a row against itself alone; in the control it comes first."""
    docs = context.rows((3, 5))
    batch, control = Batch.packed(docs), Batch.packed(docs[::-1])
    first = [(0, slot) for slot in batch.slots(0, 1).tolist()]
    return _restarts(context, case, (batch, docs), (control, docs[::-1]), first, batch.segments == 2)


_Request = tuple[Batch, list[list[int]]]
"""A batch, and the tokens of its documents."""


def _against_alone(context: AuditContext, request: _Request, watch_BT: Tensor) -> list[Deviation]:
    batch, rows = request
    return context.read(lambda run: deviation(run, alone(batch, rows), batch, watch_BT), shapes=True)


def _restarts(
    context: AuditContext, case: str, request: _Request, control: _Request, others: Sequence[Change], watch_BT: Tensor
) -> Finding:
    """Documents answer as alone; where they do not, no other token moves them and in another place all is well."""
    batch = request[0]
    readings = _against_alone(context, request, watch_BT)
    verdict = judge(context, readings)
    reason = ""
    if verdict.size == math.inf:
        reason = "the outputs of these tokens are NaN or infinite, which shows nothing about positions (see padding)"
    elif verdict.status != "pass":
        sound = judge(context, _against_alone(context, control, control[0].segments == 1)).status == "pass"
        row, query = verdict.first
        run = verdict.reading.run
        if not sound or unless_it_raises(lambda: find_cause(context, run, batch, row, query, others), None) is not None:
            reason = (
                "these tokens differ from their outputs alone, but not by their positions only (see padding, packing)"
            )
    if reason:
        where = Location(*verdict.first)
        return Finding("", "not_applicable", reason, case, where, verdict.size, verdict.decided)

    def wrong(where: Location) -> str:
        token = f"token {int(batch.positions[where.row, where.query])} of its document, in slot {where.query}"
        return f"{token}, answers by its place in the row: positions do not restart"

    good = "every document counts its positions from 0, wherever it stands"
    return decide(context, case, readings, good=good, place=at(wrong))


@skip_if_unsupported
def _cached(context: AuditContext, case: str) -> Finding:
    """Rows of different lengths continue where each of them stopped, not where the longest did."""
    rows = context.rows((8, 6, 4) if context.length >= 8 else (5, 3, 2))
    batch = Batch.from_rows(rows, side="left")

    def measure(run: TargetRun, request: _Request, chunks: list[int] | None = None) -> Deviation:
        def got(run: TargetRun) -> Tensor:
            return run.logits(request[0]) if chunks is None else run.chunked(request[0], chunks)

        return deviation(run, alone(*request), got, request[0].token_mask)

    def control(run: TargetRun) -> Deviation:
        """The padding without a cache, and each row through a cache without padding."""
        readings = [measure(run, (batch, rows))]
        for row in rows:
            chunks = [size for size in (len(row) - 2, 1, 1) if size]
            readings.append(measure(run, (Batch.from_rows([row]), [row]), chunks))
        return max(readings, key=lambda reading: reading.largest / reading.scale)

    readings = context.read(lambda run: measure(run, (batch, rows), [batch.shape[1] - 2, 1, 1]), shapes=True)
    if judge(context, readings).status != "pass" and judge(context, context.read(control)).status != "pass":
        message = "these tokens differ from their outputs alone, but not by cache and padding together (see both)"
        return not_applicable(case, message)

    def wrong(where: Location) -> str:
        position = int(batch.positions[where.row, where.query])
        return f"slot {where.query} does not continue at position {position}: rows share a counter"

    good = "every row continues through the cache where its own last token was"
    return decide(context, case, readings, good=good, place=at(wrong))


# ---------------------------------------------------------------------------------------- by explicit positions


def _explicit(context: AuditContext) -> Iterator[Finding]:
    batch = Batch.from_rows([context.tokens(_SLOTS)])
    spread = _SPREAD if _fits(context, batch.positions * _SPREAD) else 2
    if not _fits(context, batch.positions * spread):
        yield not_applicable("other positions", f"{context.probe.max_length} positions are too few to try others")
        return
    spaced = batch.replace(positions=batch.positions * spread)
    yield _obeyed(context, "other positions", batch, spaced)
    for shift in _SHIFTS if context.probe.shift_invariant else ():
        shifted = batch.replace(positions=batch.positions + shift)
        if _fits(context, shifted.positions) and _same_masks(context, batch, shifted):
            yield _invariant(context, f"shifted by {shift}", batch, shifted, spaced)
    three = Batch(
        batch.tokens.repeat(3, 1),
        torch.cat([batch.positions, spaced.positions, batch.positions]),
        batch.segments.repeat(3, 1),
    )
    yield compare(  # angles of one row must not reach another
        context, "rows of other positions", lambda run: torch.cat([run.plain(three.row(row)) for row in range(3)]),
        three, good="each row obeys its own positions",
        wrong="row {row} differs at {query} beside rows that have other positions",
    )  # fmt: skip
    if context.can("padding"):
        yield _of_pads(context, "positions of pads")


def _fits(context: AuditContext, positions_BT: Tensor) -> bool:
    return context.probe.max_length is None or int(positions_BT.max()) < context.probe.max_length


def _same_masks(context: AuditContext, batch: Batch, shifted: Batch) -> bool:
    """Chunks, sinks and prefixes are counted from the start: with them a shift may change who is seen."""
    before, after = (Coordinates(each.positions, each.segments) for each in (batch, shifted))
    rules = dict.fromkeys(context.probe.rules)
    return all(torch.equal(rule.mask(before, before), rule.mask(after, after)) for rule in rules)


def _obeyed(context: AuditContext, case: str, batch: Batch, spaced: Batch) -> Finding:
    """Other positions change something: tokens further apart, or, where a shift may matter, all of them shifted."""
    shifted = batch.replace(positions=batch.positions + 1)
    shifts = not context.probe.shift_invariant and _fits(context, shifted.positions)
    for run in context.runs:
        for other in [spaced, shifted] if shifts else [spaced]:
            size = float(max_abs_diff(run.plain(batch), run.plain(other)).max())
            if size > 0:
                return passed(case, "other positions give other answers", size)
    message = f"positions {spaced.positions[0].tolist()} are answered as 0, 1, 2, … are: explicit positions are ignored"
    return leak(case, message, Location(0, 1), 0.0, "equal bit for bit, where positions must matter")


def _invariant(context: AuditContext, case: str, batch: Batch, shifted: Batch, spaced: Batch) -> Finding:
    """One number added to all positions moves next to nothing of what moving tokens apart does."""
    run, shift = context.runs[-1], int(shifted.positions[0, 0])
    before = run.plain(batch)
    try:
        sizes_BT = max_abs_diff(before, run.logits(shifted))
    except Exception as error:  # noqa: BLE001 (a bound that it does not state: refusing is right)
        return not_applicable(case, f"position {shift + _SLOTS - 1} is refused: {type(error).__name__}")
    size, spread = float(sizes_BT.max()), float(max_abs_diff(before, run.plain(spaced)).max())
    coarse = context.native.dtype in (torch.bfloat16, torch.float16)  # tables may be held in so few bits
    floor = (1e-9 if run.dtype == torch.float64 else run.rounding) * logit_scale(before) + 20 * run.noise
    limit = floor + (0.1 if coarse else 1e-3) * spread
    decided = f"{run.name} moves by {size:.1e}, by {spread:.1e} when tokens stand {_SPREAD} apart"
    if size <= limit:
        return passed(case, f"adding {shift} to all positions changes nothing", size, decided)
    where = Location(*(sizes_BT > limit).nonzero()[0].tolist())
    if getattr(context.probe, "assumes_shift_invariance", False) and _scaled_behind(run, batch, shifted, size):
        message = (
            "queries or keys are scaled feature by feature behind the rotation, so that positions count by design: "
            "with one number in each vector of weights the same shift moves nothing"
        )
        return Finding("", "not_applicable", message, case, where, size, decided)
    message = f"adding {shift} to all positions moves the output at {where.query}, although only distances should count"
    return leak(case, message, where, size, decided)


def _scaled_behind(run: TargetRun, batch: Batch, shifted: Batch, size: float) -> bool:
    """Whether the shift moves next to nothing of ``size`` in a copy whose vectors of weights hold one number each."""
    module = copy.deepcopy(run.probe.module)
    assert module is not None
    with torch.no_grad():
        for weight in module.parameters():
            if weight.dim() == 1:
                weight.fill_(float(weight.mean()))
    flat = deviation(TargetRun(run.probe.with_module(module), run.source), batch, shifted)
    return flat.largest <= max(1e-3 * size, flat.run.rounding * flat.scale)


@skip_if_unsupported
def _of_pads(context: AuditContext, case: str) -> Finding:
    """The positions given to pads do not matter."""
    batch = Batch.from_rows(context.rows(), side=context.probe.sides[0], length=7 * context.step)
    after = batch.replace(positions=torch.where(batch.token_mask, batch.positions, 3))
    good, wrong = "positions of pads move nothing", "the token in slot {query} moves when only positions of pads change"
    return compare(context, case, batch, after, bits=True, good=good, wrong=wrong)
