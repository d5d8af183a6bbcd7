"""From deviations to findings: what moved is a leak unless more precision makes it vanish.

The second half compares rows of different lengths, alone and together: what padding, batches and packs share.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.deviation import Deviation, TargetRun, logit_scale, max_abs_diff
from pellucid.batch import Batch
from pellucid.errors import UnsupportedError, one_line
from pellucid.records import Finding, Location, Status

_CLEAR = 10.0  # so many times the rounding it must be where no float64 copy decides
_GROSS = 50.0  # so many times the rounding of its dtype is a change that no rounding explains

Index = tuple[int, ...]
Place = Callable[[TargetRun, Index], tuple[Location, str]]


def at(message: str | Callable[[int, int], str]) -> Place:
    """The place by row and query, which the message may name: ``{row}``, ``{query}``, or a function of both."""

    def place(run: TargetRun, index: Index) -> tuple[Location, str]:
        del run
        row, query = index
        return Location(row, query), message(row, query) if callable(message) else message.format(row=row, query=query)

    return place


@dataclass(frozen=True)
class Verdict:
    """A status, the size that decided, how, and which reading's first wrong entry to name."""

    status: Status
    size: float
    decided: str
    reading: Deviation
    limit: float

    @property
    def first(self) -> Index:
        """The first entry beyond the limit, in row-major order."""
        beyond = (self.reading.sizes > self.limit).nonzero()
        return tuple(int(i) for i in beyond[0])


def judge(context: AuditContext, readings: list[Deviation], *, bits: bool) -> Verdict:
    """Decide over the same measurement in one or two precisions.

    ``bits``: the two runs had the same shapes and differed in hidden content only, so nothing but a kernel
    that chooses its order of summation by content may move anything at all.
    """
    native, last = readings[0], readings[-1]
    if math.isinf(last.largest) and math.isfinite(native.largest):
        last = native  # only the copy has numbers that are not finite: code that float64 does not suit
    if last.run.dtype == torch.float64:
        limit = max((1e-12 if bits else 1e-10) * last.scale, 20 * last.run.noise)
        if last.largest > limit:
            return Verdict("leak", last.largest, _seen(readings) + f", beyond rounding ({limit:.0e})", last, limit)
    if native is last:
        return _by_one(context, native, bits)
    tolerance = native.run.rounding * native.scale
    if native.largest > _GROSS * tolerance:
        how = _seen(readings) + ": too much for rounding, so the two precisions run different code"
        return Verdict("leak", native.largest, how, native, tolerance)
    if native.largest > tolerance:
        how = _seen(readings) + f": rounding, but more than the {tolerance:.0e} that {native.run.name} should need"
        return Verdict("fragile", native.largest, how, native, tolerance)
    return _no_influence(readings)


def _by_one(context: AuditContext, native: Deviation, bits: bool) -> Verdict:
    if native.run.dtype == torch.float64:
        return _no_influence([native])
    tolerance = native.run.rounding * native.scale
    why = f" ({context.exact_reason})" if context.exact_reason else ""
    if native.largest > _CLEAR * tolerance or (bits and native.largest > tolerance):
        how = _seen([native]) + f", beyond rounding ({tolerance:.0e}){why}"
        return Verdict("leak", native.largest, how, native, tolerance)
    if native.largest > tolerance:
        how = _seen([native]) + f", a little beyond rounding ({tolerance:.0e}): only float64 could tell{why}"
        return Verdict("fragile", native.largest, how, native, tolerance)
    if bits and native.largest:
        how = _seen([native]) + f": only float64 could tell this from rounding{why}"
        return Verdict("fragile", native.largest, how, native, 0.0)
    return _no_influence([native])


def _no_influence(readings: list[Deviation]) -> Verdict:
    native = readings[0]
    how = f"{_seen(readings)}: rounding" if native.largest else f"equal bit for bit in {native.run.name}"
    return Verdict("pass", native.largest, how, native, native.largest)


def _seen(readings: list[Deviation]) -> str:
    return ", ".join(f"{reading.run.name} moves by {reading.largest:.1e}" for reading in readings)


_NO_GRADIENT = re.compile("grad|backward|derivative|inplace", re.IGNORECASE)


def skip_if_unsupported(check: str, case: str, answer: Callable[[], Finding]) -> Finding:
    """The answer; *not applicable* where the target says that it does not do this: a refusal is no fault."""
    try:
        return answer()
    except (UnsupportedError, NotImplementedError) as error:
        return Finding(check, "not_applicable", f"the target refuses: {one_line(error)}", case)


def skip_if_no_gradient(check: str, case: str, answer: Callable[[], Finding]) -> Finding:
    """The answer; *not applicable* where the target takes no gradient, as one that works in place may not."""
    try:
        return answer()
    except RuntimeError as error:
        message = one_line(error)
        if not _NO_GRADIENT.search(message):
            raise
        return Finding(check, "not_applicable", f"no gradient can be taken: {message}", case)


def finding(
    context: AuditContext, check: str, case: str, readings: list[Deviation], *, bits: bool, good: str, place: Place
) -> Finding:
    """The finding of one measurement: ``good`` is said when it holds, ``place`` names what is wrong."""
    verdict = judge(context, readings, bits=bits)
    if verdict.status == "pass":
        return Finding(check, "pass", good, case, size=verdict.size, decided=verdict.decided)
    where, message = place(verdict.reading.run, verdict.first)
    if verdict.size == math.inf:
        message += " (it becomes NaN or infinite)"
    return Finding(check, verdict.status, message, case, where, verdict.size, verdict.decided)


LENGTHS = (3, 5, 1)
Change = tuple[int, int]  # row and slot of a token to change


def rows_of(context: AuditContext, lengths: Iterable[int] = LENGTHS) -> list[list[int]]:
    """Random rows; the longest ends with token 0 (where it may), which is also what stands in padded slots."""
    rows = [context.tokens(length) for length in lengths]
    longest = max(rows, key=len)
    longest[-1] = context.ends[0]
    return rows


def documents(batch: Batch) -> list[tuple[int, Tensor]]:
    """``(row, slots)`` of each document, row by row."""
    return [
        (row, batch.slots(row, segment))
        for row in range(batch.shape[0])
        for segment in range(1, int(batch.segments[row].max()) + 1)
    ]


def against_alone(run: TargetRun, batch: Batch, alone: list[list[int]], got_BTV: Tensor | None = None) -> Deviation:
    """``sizes[row, slot]``: how far each document's outputs are from those of the same tokens run alone.

    ``got_BTV`` are the outputs to compare; left out, they are the plain logits of the request.
    """
    got_BTV = run.plain(batch) if got_BTV is None else got_BTV
    sizes_BT, scale = torch.zeros(batch.shape, dtype=torch.float64), 1.0
    for (row, slots), tokens in zip(documents(batch), [t for t in alone if t], strict=True):
        want = run.alone(tokens)
        sizes_BT[row, slots] = max_abs_diff(want, got_BTV[row, slots])
        scale = max(scale, logit_scale(want))
    return Deviation(run, sizes_BT, scale)


def unmoved(run: TargetRun, before: Batch, after: Batch, watched_BT: Tensor) -> Deviation:
    """``sizes[row, slot]``: how far the watched outputs moved between two requests of one shape."""
    first, second = run.plain(before), run.logits(after)
    return Deviation(run, torch.where(watched_BT, max_abs_diff(first, second), 0.0), logit_scale(first[watched_BT]))


def as_alone(
    context: AuditContext, check: str, case: str, batch: Batch, alone: list[list[int]], *, good: str, place: Place
) -> Finding:
    """Whether each document answers as the same tokens do alone."""
    readings = context.read(lambda run: against_alone(run, batch, alone))
    return finding(context, check, case, readings, bits=False, good=good, place=place)


def not_moved(
    context: AuditContext,
    check: str,
    case: str,
    before: Batch,
    after: Batch,
    watched_BT: Tensor,
    *,
    good: str,
    place: Place,
) -> Finding:
    """Whether the watched outputs are the same for both requests, bit for bit."""
    readings = context.read(lambda run: unmoved(run, before, after, watched_BT))
    return finding(context, check, case, readings, bits=True, good=good, place=place)


def find_cause(
    context: AuditContext, run: TargetRun, batch: Batch, row: int, query: int, suspects: Iterable[Change]
) -> Change | None:
    """The first suspect slot whose own change moves the output at (row, query); None when none does alone."""
    before = run.logits(batch)
    limit = 1e-12 * logit_scale(before) if run.dtype == torch.float64 else 0.0
    for suspect in suspects:
        after = batch.with_token(*suspect, context.other(int(batch.tokens[suspect])))
        if float(max_abs_diff(before[row, query], run.logits(after)[row, query])) > limit:
            return suspect
    return None


def caused(
    context: AuditContext,
    batch: Batch,
    suspects: Callable[[int, int], Iterable[Change]],
    message: Callable[[Location], str],
) -> Place:
    """The place by row and query, and as its key the first of the ``suspects`` of (row, query) that moves it alone."""

    def place(run: TargetRun, index: Index) -> tuple[Location, str]:
        row, query = index
        found = find_cause(context, run, batch, row, query, suspects(row, query))
        where = Location(row, query)
        if found is not None:
            where = Location(row, query, found[1], None if found[0] == row else found[0])
        return where, message(where)

    return place
