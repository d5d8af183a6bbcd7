"""Do all attention implementations that the target offers give one answer, or refuse?"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pellucid.audits.checks.check import question
from pellucid.audits.engine.compare import at, decide, deviation, leak, not_applicable
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.target_run import (
    Gradients,
    TargetRun,
    first_difference,
    gradients,
    logit_scale,
    rounding_noise,
)
from pellucid.batch import Batch
from pellucid.errors import UnsupportedError, one_line
from pellucid.records import Finding, Location

_REFUSES = re.compile(r"support|not implemented|not available|no available|unavailable|install", re.IGNORECASE)
_COARSE = (torch.bfloat16, torch.float16)
_LARGER = 8.0  # so many times larger weights make scores 64 times larger: caps and scales that were lost show up


@dataclass(frozen=True)
class _Answer:
    """``[B, T, V]`` logits, and the gradient of every weight where they are compared."""

    logits: Tensor
    gradients: Gradients


@dataclass(frozen=True)
class _Layout:
    """A request for every implementation."""

    name: str
    batch: Batch
    cached: bool = False
    graded: bool = True  # gradients are compared too

    def ask(self, context: AuditContext, run: TargetRun, kernel: str, graded: bool) -> _Answer:
        """By one implementation; one without a backward pass gives no gradients."""
        slots = self.batch.shape[1]
        with run.probe.kernel(kernel):
            if self.cached:
                chunks = [size for size in (slots - 3, 2, 1) if size > 0]
                return _Answer(run.chunked(self.batch, chunks), {})
            if graded:
                with suppress(NotImplementedError, RuntimeError):  # it may have no backward pass
                    return _Answer(*gradients(run, self.batch))
            return _Answer(run.logits(self.batch), {})


@question("Do all attention implementations give one answer, or refuse?", needs={"kernels"})
def check(context: AuditContext) -> Iterator[Finding]:
    """Every layout by every implementation, against the first that answers."""
    names = context.probe.kernels
    if len(names) < 2:
        yield not_applicable("", f"the target offers {len(names)} attention implementation(s)")
        return
    runs = [_with_noise(run, names, context) for run in context.runs]
    for layout in _layouts(context):
        yield from _compared(context, layout, names, runs)
    yield from _large_weights(context, names)


def _with_noise(run: TargetRun, names: tuple[str, ...], context: AuditContext) -> TargetRun:
    """The float64 run with the rounding of the implementation that keeps most: one may cast where another does not.

    Where one casts to float32 inside, that is the rounding of all; a coarser one is excused in 16 bits only.
    """
    module = run.probe.module
    if module is None or run.dtype != torch.float64:
        return run
    copied, batch = copy.copy(run), Batch.from_rows([context.tokens(min(9, context.length))])

    def by(name: str) -> Tensor:
        try:
            with run.probe.kernel(name):
                return run.logits(batch)
        except (UnsupportedError, NotImplementedError, ImportError, ValueError, RuntimeError):
            return torch.zeros(1)  # it refuses, which is reported later

    copied.noise = max(copied.noise, rounding_noise(module, [partial(by, name) for name in names]))
    if copied.noise > 1e-10:
        float32 = 1e-7 * logit_scale(run.logits(batch))
        copied.noise = max(copied.noise, float32) if context.native.dtype in _COARSE else float32
    return copied


def _layouts(context: AuditContext) -> Iterator[_Layout]:
    long = Batch.from_rows([context.tokens(_long(context))])
    yield _Layout("full rows", long)
    rows = context.rows((3, min(9, context.length), 1))
    if context.can("padding"):
        for side in context.one_sided:
            graded = side == context.one_sided[-1]
            yield _Layout(f"{side} padding", Batch.from_rows(rows, side=side), graded=graded)
    if context.can("packing"):
        yield _Layout("packed", Batch.packed(rows), graded=False)
        yield _Layout("packed, padding behind", Batch.packed(rows[1:], length=12 * context.step))
    if context.can("cache"):
        yield _Layout("through a cache", long, cached=True, graded=False)


def _long(context: AuditContext) -> int:
    """Past every window that is declared, and no longer than that takes."""
    reaches = [rule.lookback[0] or 0 for rule in context.probe.rules]
    return min(context.length, max(16, *reaches) + 4)


def _compared(
    context: AuditContext, layout: _Layout, names: tuple[str, ...], runs: list[TargetRun]
) -> Iterator[Finding]:
    """``answers`` holds, for each implementation that does not refuse, what each run gave by it."""
    answers: dict[str, list[_Answer | None]] = {}
    for name in names:
        case = f"{name}, {layout.name}"
        try:
            answers[name] = [_answer(context, layout, name, runs, run) for run in runs]
        except UnsupportedError as error:
            yield not_applicable(case, f"{name} refuses: {one_line(error)}")
            continue
        first = next(iter(answers))
        if name != first:
            yield _against(case, context, layout, runs, (first, answers[first]), (name, answers[name]))
    if len(answers) < 2:
        yield not_applicable(layout.name, f"{len(answers)} implementation(s) answer {layout.name}")


def _answer(context: AuditContext, layout: _Layout, name: str, runs: list[TargetRun], run: TargetRun) -> _Answer | None:
    """None where the implementation refuses a precision that is not the target's own.

    Raises:
        UnsupportedError: it refuses the target's own.
    """
    try:
        return layout.ask(context, run, name, graded=layout.graded and run is runs[-1])
    except (UnsupportedError, NotImplementedError, ImportError, ValueError, RuntimeError) as error:
        refuses = isinstance(error, UnsupportedError | NotImplementedError | ImportError)
        if not refuses and not _REFUSES.search(str(error)):
            raise
        if run is runs[0]:
            raise UnsupportedError(one_line(error)) from error
        return None


_Outcome = tuple[str, list[_Answer | None]]


def _against(
    case: str, context: AuditContext, layout: _Layout, runs: list[TargetRun], first: _Outcome, other: _Outcome
) -> Finding:
    readings, wrong = [], None
    for run, want, got in zip(runs, first[1], other[1], strict=True):
        if want is None or got is None:
            continue
        readings.append(deviation(run, want.logits, got.logits, layout.batch.token_mask))
        if want.gradients and got.gradients:
            wrong = first_difference(run, want.gradients, got.gradients)
            if wrong is not None and run is not runs[0] and not math.isfinite(wrong[1]):
                wrong = None  # a mask made for float32 can leave a float64 copy without numbers: no fault of the target
    place = at(f"{other[0]} differs than {first[0]} at slot {{query}}, {layout.name}")
    result = decide(context, case, readings, good=f"{other[0]} answers as {first[0]} does", place=place)
    if result.status != "pass" or wrong is None:
        return result
    message = f"{other[0]} gives {wrong[0]} another gradient than {first[0]}, although the outputs agree"
    return leak(case, message, Location(0), wrong[1], "beyond rounding of the same sum")


def _large_weights(context: AuditContext, names: tuple[str, ...]) -> Iterator[Finding]:
    """Scores large enough for what bends or scales them; in float64 only, where rounding stays far below."""
    exact, batch = context.runs[-1], Batch.from_rows([context.tokens(min(9, context.length))])
    module = exact.probe.module
    if module is None or exact.dtype != torch.float64:
        return
    copied = copy.deepcopy(module)
    with torch.no_grad():
        for weight in copied.parameters():
            if weight.dim() > 1:
                weight.mul_(_LARGER)
    run = TargetRun(exact.probe.with_module(copied), exact.source)
    if not bool(run.logits(batch).isfinite().all()):
        return
    run.dtype = exact.dtype

    def by_first() -> Tensor:
        with run.probe.kernel(names[0]):
            return run.logits(batch)

    own = rounding_noise(copied, [by_first])
    run = _with_noise(run, names, context)
    run.noise *= 10  # far from where it was measured
    if own > 1e-10:  # casts of its own, whatever the implementation, which large weights blow up
        run.noise = max(run.noise, own)
    yield from _compared(context, _Layout("large weights", batch, graded=False), names, [run])
