"""Are positions counted from 0 in every document, obeyed where given, relative where promised, and bounded?"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pellucid.audits.checks.check import Check
from pellucid.audits.method.bench import Bench
from pellucid.audits.method.judge import Index, at, finding, judge, unless_refused
from pellucid.audits.method.measure import Reading, Run, moved, scale_of
from pellucid.audits.method.past import past_the_end
from pellucid.audits.method.rows import against_alone, culprit, not_moved, rows_of
from pellucid.probe import Request
from pellucid.records import Finding, Where
from pellucid.visibility import Coordinates

NAME = "positions"
_SHIFTS = (1, 7, 100, 1000)
_SPREAD = 3  # a row whose tokens stand so far apart
_SLOTS = 5


def run(bench: Bench) -> Iterator[Finding]:
    """By place in a row, in a pack and in a cache; by explicit positions; past the end."""
    found = False
    for finding_ in _all(bench):
        found = True
        yield finding_
    if not found:
        message = f"{bench.probe.name} can be given no positions, padding or documents, and states no bound"
        yield Finding(NAME, "not_applicable", message)


def _all(bench: Bench) -> Iterator[Finding]:
    if bench.can("padding") and "left" in bench.probe.sides:
        yield _left_padded(bench)
    if bench.can("packing"):
        yield _packed(bench)
    if bench.can("padding", "cache") and "left" in bench.probe.sides:
        yield unless_refused(NAME, "left padded, through a cache", partial(_cached, bench))
    if bench.can("positions"):
        yield from _explicit(bench)
    if bench.probe.max_length is not None:
        yield from past_the_end(bench, NAME, bench.probe.max_length)


# ------------------------------------------------------------------------------------------ by place in the row


def _left_padded(bench: Bench) -> Finding:
    rows = rows_of(bench)
    request, right = (Request.from_rows(rows, side=side, length=7) for side in ("left", "right"))
    pads = [(r, s) for r, s in (~request.real).nonzero().tolist()]
    return _restarts(bench, "left padded", request, rows, right, rows, pads)


def _packed(bench: Bench) -> Finding:
    """The second document of a row against itself alone; in the control it comes first."""
    docs = rows_of(bench, (3, 5))
    request, control = Request.packed(docs), Request.packed(docs[::-1])
    others = [(0, slot) for slot in request.slots(0, 1).tolist()]
    return _restarts(bench, "packed", request, docs, control, docs[::-1], others, only=2)


def _restarts(
    bench: Bench,
    case: str,
    request: Request,
    rows: list[list[int]],
    control: Request,
    control_rows: list[list[int]],
    others: Sequence[tuple[int, int]],
    only: int | None = None,
) -> Finding:
    """Documents answer as alone; where they do not, no other token moves them and in another place all is well."""
    inside_BT = request.real if only is None else request.segments == only

    def measure(run: Run) -> Reading:
        reading = against_alone(run, request, rows)
        return Reading(run, torch.where(inside_BT, reading.sizes, 0.0), reading.scale)

    readings = bench.read(measure)
    verdict = judge(bench, readings, bits=False)
    good = "every document counts its positions from 0, wherever it stands"
    if verdict.size == math.inf:
        message = "these tokens are answered with NaN or infinity, which says nothing of positions (see padding)"
        return Finding(NAME, "not_applicable", message, case, Where(*verdict.first), verdict.size, verdict.decided)
    if verdict.status != "pass":
        first = control.segments == 1
        sound = bench.read(lambda run: _within(against_alone(run, control, control_rows), first))
        row, query = verdict.first
        moving = culprit(bench, verdict.reading.run, request, row, query, others)
        if moving is not None or judge(bench, sound, bits=False).status != "pass":
            message = (
                "these tokens answer otherwise than alone, but not by their positions only (see padding and packing)"
            )
            return Finding(NAME, "not_applicable", message, case, Where(row, query), verdict.size, verdict.decided)

    def place(run: Run, index: Index) -> tuple[Where, str]:
        del run
        row, query = index
        count = int(request.positions[row, query])
        message = (
            f"token {count} of its document, in slot {query}, answers by its place in the row: positions do not restart"
        )
        return Where(row, query), message

    return finding(bench, NAME, case, readings, bits=False, good=good, place=place)


def _within(reading: Reading, where_BT: Tensor) -> Reading:
    return Reading(reading.run, torch.where(where_BT, reading.sizes, 0.0), reading.scale)


def _cached(bench: Bench) -> Finding:
    """Rows of other lengths go on where each of them stopped, not where the longest did."""
    case = "left padded, through a cache"
    rows = rows_of(bench, (8, 6, 4)) if bench.length >= 8 else rows_of(bench, (5, 3, 2))
    request = Request.from_rows(rows, side="left")
    chunks = [request.shape[1] - 2, 1, 1]

    def measure(run: Run) -> Reading:
        return against_alone(run, request, rows, run.chunked(request, chunks))

    def control(run: Run) -> Reading:
        reading = against_alone(run, request, rows)
        for row in rows:
            alone = Request.from_rows([row])
            apart = against_alone(
                run, alone, [row], run.chunked(alone, [size for size in (len(row) - 2, 1, 1) if size])
            )
            reading = max(reading, apart, key=lambda r: r.largest / r.scale)
        return reading

    readings = bench.read(measure)
    verdict = judge(bench, readings, bits=False)
    if verdict.status != "pass" and judge(bench, bench.read(control), bits=False).status != "pass":
        message = "these tokens answer otherwise than alone, but not by the cache and the padding together (see both)"
        return Finding(NAME, "not_applicable", message, case)

    def place(run: Run, index: Index) -> tuple[Where, str]:
        del run
        row, query = index
        message = (
            f"slot {query} goes on at another position than {int(request.positions[row, query])}: rows share a counter"
        )
        return Where(row, query), message

    good = "every row goes on through the cache where its own last token was"
    return finding(bench, NAME, case, readings, bits=False, good=good, place=place)


# ---------------------------------------------------------------------------------------- by explicit positions


def _explicit(bench: Bench) -> Iterator[Finding]:
    request = Request.from_rows([bench.tokens(_SLOTS)])
    spread = _SPREAD if _fits(bench, request.positions * _SPREAD) else 2
    if not _fits(bench, request.positions * spread):
        message = f"{bench.probe.max_length} positions are too few to try others"
        yield Finding(NAME, "not_applicable", message, "other positions")
        return
    apart = replace(request, positions=request.positions * spread)
    yield _obeyed(bench, request, apart)
    if bench.probe.shift_invariant:
        for shift in _SHIFTS:
            shifted = replace(request, positions=request.positions + shift)
            if _fits(bench, shifted.positions) and _same_masks(bench, request, shifted):
                yield _invariant(bench, request, shifted, apart, shift)
    yield _own_rows(bench, request, apart)
    if bench.can("padding"):
        yield unless_refused(NAME, "positions of pads", partial(_of_pads, bench))


def _fits(bench: Bench, positions_BT: Tensor) -> bool:
    return bench.probe.max_length is None or int(positions_BT.max()) < bench.probe.max_length


def _same_masks(bench: Bench, request: Request, shifted: Request) -> bool:
    """Chunks, sinks and prefixes are counted from the start: with them a shift may change who is seen."""
    before, after = (Coordinates(r.positions, r.segments) for r in (request, shifted))
    rules = dict.fromkeys(bench.probe.rules)
    return all(torch.equal(rule.mask(before, before), rule.mask(after, after)) for rule in rules)


def _obeyed(bench: Bench, request: Request, apart: Request) -> Finding:
    """Other positions change something: tokens further apart, or, where a shift may matter, all of them shifted."""
    case, runs = "other positions", bench.runs
    others = [apart]
    shifted = replace(request, positions=request.positions + 1)
    if not bench.probe.shift_invariant and _fits(bench, shifted.positions):
        others.append(shifted)
    for run in runs:
        for other in others:
            sizes_BT = moved(run.plain(request), run.plain(other))
            if float(sizes_BT.max()) > 0:
                return Finding(NAME, "pass", "other positions give other answers", case, size=float(sizes_BT.max()))
    message = f"positions {apart.positions[0].tolist()} are answered as 0, 1, 2, … are: explicit positions are ignored"
    return Finding(NAME, "leak", message, case, Where(0, 1), 0.0, "equal bit for bit, where positions must matter")


def _invariant(bench: Bench, request: Request, shifted: Request, apart: Request, shift: int) -> Finding:
    """One number added to all positions moves next to nothing of what moving tokens apart does."""
    case, run = f"shifted by {shift}", bench.runs[-1]
    before = run.plain(request)
    try:
        sizes_BT = moved(before, run.logits(shifted))
    except Exception as error:  # noqa: BLE001 (a bound that it does not state: refusing is right)
        message = f"position {shift + _SLOTS - 1} is refused: {type(error).__name__}"
        return Finding(NAME, "not_applicable", message, case)
    size, apart_size = float(sizes_BT.max()), float(moved(before, run.plain(apart)).max())
    coarse = bench.native.dtype in (torch.bfloat16, torch.float16)  # tables may be held in so few bits
    floor = (1e-9 if run.dtype == torch.float64 else run.rounding) * scale_of(before) + 20 * run.noise
    limit = floor + (0.1 if coarse else 1e-3) * apart_size
    decided = f"{run.name} moves by {size:.1e}, by {apart_size:.1e} when tokens stand {_SPREAD} apart"
    if size <= limit:
        return Finding(NAME, "pass", f"adding {shift} to all positions changes nothing", case, None, size, decided)
    row, query = (sizes_BT > limit).nonzero()[0].tolist()
    if getattr(bench.probe, "assumes_shift_invariance", False) and _scaled_behind(run, request, shifted, size):
        message = (
            "queries or keys are scaled feature by feature behind the rotation, so that places count by design: "
            "with one number in each vector of weights the same shift moves nothing"
        )
        return Finding(NAME, "not_applicable", message, case, Where(row, query), size, decided)
    message = f"adding {shift} to all positions moves the output at {query}, although only distances should count"
    return Finding(NAME, "leak", message, case, Where(row, query), size, decided)


def _scaled_behind(run: Run, request: Request, shifted: Request, size: float) -> bool:
    """Whether the shift moves next to nothing of ``size`` in a copy whose vectors of weights hold one number each."""
    module = copy.deepcopy(run.probe.module)
    assert module is not None
    with torch.no_grad():
        for weight in module.parameters():
            if weight.dim() == 1:
                weight.fill_(float(weight.mean()))
    flat = Run(run.probe.over(module), run.source)
    before = flat.logits(request)
    return float(moved(before, flat.logits(shifted)).max()) <= max(1e-3 * size, flat.rounding * scale_of(before))


def _own_rows(bench: Bench, request: Request, apart: Request) -> Finding:
    """Equal rows with other positions answer as each does alone (angles of one row must not reach another)."""
    positions_BT = torch.cat([request.positions, apart.positions, request.positions])
    three = replace(
        request,
        tokens=request.tokens.expand(3, -1).clone(),
        positions=positions_BT,
        segments=request.segments.expand(3, -1).clone(),
    )

    def measure(run: Run) -> Reading:
        want = torch.cat([run.plain(three.row(row)) for row in range(3)])
        return Reading(run, moved(want, run.logits(three)), scale_of(want))

    place = at("row {row} answers otherwise at {query} beside rows that have other positions")
    good = "each row obeys its own positions"
    return finding(bench, NAME, "rows of other positions", bench.read(measure), bits=False, good=good, place=place)


def _of_pads(bench: Bench) -> Finding:
    """What positions pads are said to have does not matter."""
    side = bench.probe.sides[0]
    request = Request.from_rows(rows_of(bench), side=side, length=7)
    after = replace(request, positions=torch.where(request.real, request.positions, 3))

    place = at("the token in slot {query} moves when only the positions of pads are others")
    good = "positions of pads move nothing"
    return not_moved(bench, NAME, "positions of pads", request, after, request.real, good=good, place=place)


CHECK = Check(
    NAME,
    "Do positions count from 0 in every document, are they obeyed, and is there an error past their end?",
    run,
    length=_SLOTS,
)
