"""From sizes to a verdict: what moved is a leak unless more precision makes it vanish."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.deviation import Deviation, TargetRun
from pellucid.errors import UnsupportedError, one_line
from pellucid.records import Finding, Location, Status

_CLEAR = 10.0  # so many times the rounding it must be where no float64 copy decides
_GROSS = 50.0  # so many times the rounding of its dtype is a change that no rounding explains

Index = tuple[int, ...]
Place = Callable[[TargetRun, Index], tuple[Location, str]]


def at(message: str) -> Place:
    """The place by row and query, which the message may name: ``{row}``, ``{query}``."""

    def place(run: TargetRun, index: Index) -> tuple[Location, str]:
        del run
        row, query = index
        return Location(row, query), message.format(row=row, query=query)

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
    return _held(readings)


def _by_one(context: AuditContext, native: Deviation, bits: bool) -> Verdict:
    if native.run.dtype == torch.float64:
        return _held([native])
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
    return _held([native])


def _held(readings: list[Deviation]) -> Verdict:
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
        said = one_line(error)
        if not _NO_GRADIENT.search(said):
            raise
        return Finding(check, "not_applicable", f"no gradient can be taken: {said}", case)


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
