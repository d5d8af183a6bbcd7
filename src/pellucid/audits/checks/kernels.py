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

from pellucid.audits.checks.check import Check
from pellucid.audits.method.bench import Bench
from pellucid.audits.method.gradients import Gradients, first_difference, gradients
from pellucid.audits.method.judge import at, finding
from pellucid.audits.method.measure import Reading, Run, moved, scale_of
from pellucid.audits.method.noise import kept_noise
from pellucid.audits.method.rows import rows_of
from pellucid.errors import UnsupportedError, one_line
from pellucid.probe import Request
from pellucid.records import Finding, Where

NAME = "kernels"
_REFUSES = re.compile(r"support|not implemented|not available|no available|unavailable|install", re.IGNORECASE)
_COARSE = (torch.bfloat16, torch.float16)
_LARGER = 8.0  # so many times larger weights make scores 64 times larger: caps and scales that were lost show up


@dataclass(frozen=True)
class _Answer:
    """``[B, T, V]`` logits, and the gradient of every weight where it was asked for."""

    logits: Tensor
    gradients: Gradients


@dataclass(frozen=True)
class _Layout:
    """A request that every implementation is asked, in one way."""

    name: str
    request: Request
    cached: bool = False
    graded: bool = True  # gradients are compared too

    def ask(self, bench: Bench, run: Run, kernel: str, graded: bool) -> _Answer:
        """By one implementation; one without a backward pass gives no gradients."""
        slots = self.request.shape[1]
        with run.probe.kernel(kernel):
            if self.cached:
                chunks = [size for size in (slots - 3, 2, 1) if size > 0]
                return _Answer(run.chunked(self.request, chunks), {})
            if graded:
                with suppress(NotImplementedError, RuntimeError):  # it may have no backward pass
                    return _Answer(*gradients(bench, run, self.request))
            return _Answer(run.logits(self.request), {})


def run(bench: Bench) -> Iterator[Finding]:
    """Every layout by every implementation, against the first that answers."""
    names = bench.probe.kernels
    if len(names) < 2:
        yield Finding(NAME, "not_applicable", f"the target offers {len(names)} attention implementation(s)")
        return
    runs = [_with_noise(run, names, bench) for run in bench.runs]
    for layout in _layouts(bench):
        yield from _compared(bench, layout, names, runs)
    yield from _large_weights(bench, names)


def _with_noise(run: Run, names: tuple[str, ...], bench: Bench) -> Run:
    """The float64 run with the rounding of the implementation that keeps most: one may cast where another does not.

    Where one casts to float32 inside, that is the rounding of all; a coarser one is excused in 16 bits only.
    """
    module = run.probe.module
    if module is None or run.dtype != torch.float64:
        return run
    twin, request = copy.copy(run), Request.from_rows([bench.tokens(min(9, bench.length))])

    def by(name: str) -> Tensor:
        try:
            with run.probe.kernel(name):
                return run.logits(request)
        except (UnsupportedError, NotImplementedError, ImportError, ValueError, RuntimeError):
            return torch.zeros(1)  # it refuses, which is told later

    twin.noise = max(twin.noise, kept_noise(module, [partial(by, name) for name in names]))
    if twin.noise > 1e-10:
        float32 = 1e-7 * scale_of(run.logits(request))
        twin.noise = max(twin.noise, float32) if bench.native.dtype in _COARSE else float32
    return twin


def _layouts(bench: Bench) -> Iterator[_Layout]:
    long = Request.from_rows([bench.tokens(_long(bench))])
    yield _Layout("full rows", long)
    rows = rows_of(bench, (3, min(9, bench.length), 1))
    if bench.can("padding"):
        for side in bench.one_sided:
            graded = side == bench.one_sided[-1]
            yield _Layout(f"{side} padding", Request.from_rows(rows, side=side), graded=graded)
    if bench.can("packing"):
        yield _Layout("packed", Request.packed(rows), graded=False)
        yield _Layout("packed, padding behind", Request.packed(rows[1:], length=12))
    if bench.can("cache"):
        yield _Layout("through a cache", long, cached=True, graded=False)


def _long(bench: Bench) -> int:
    """Past every window that is declared, and no longer than that takes."""
    reaches = [rule.lookback[0] or 0 for rule in bench.probe.rules]
    return min(bench.length, max(16, *reaches) + 4)


def _compared(bench: Bench, layout: _Layout, names: tuple[str, ...], runs: list[Run]) -> Iterator[Finding]:
    """``answers`` holds, for each implementation that does not refuse, what each run gave by it."""
    answers: dict[str, list[_Answer | None]] = {}
    for name in names:
        case = f"{name}, {layout.name}"
        why, given = _asked(bench, layout, name, runs)
        if why:
            yield Finding(NAME, "not_applicable", f"{name} refuses: {why}", case)
            continue
        answers[name] = given
        first = next(iter(answers))
        if name != first:
            yield _against(bench, layout, (first, answers[first]), (name, given), runs)
    if len(answers) < 2:
        yield Finding(NAME, "not_applicable", f"{len(answers)} implementation(s) answer {layout.name}", layout.name)


def _asked(bench: Bench, layout: _Layout, name: str, runs: list[Run]) -> tuple[str, list[_Answer | None]]:
    """Why the target's own dtype is refused, and what each run gave (None: refused in that precision)."""
    given: list[_Answer | None] = []
    for run in runs:
        try:
            given.append(layout.ask(bench, run, name, graded=layout.graded and run is runs[-1]))
        except (UnsupportedError, NotImplementedError, ImportError, ValueError, RuntimeError) as error:
            plain = isinstance(error, (ValueError, RuntimeError)) and not isinstance(
                error, (UnsupportedError, NotImplementedError)
            )
            if plain and not _REFUSES.search(str(error)):
                raise
            if run is runs[0]:
                return one_line(error), given
            given.append(None)
    return "", given


_Given = tuple[str, list[_Answer | None]]


def _against(bench: Bench, layout: _Layout, first: _Given, other: _Given, runs: list[Run]) -> Finding:
    real_BT, case = layout.request.real, f"{other[0]}, {layout.name}"
    readings, wrong = [], None
    for run, want, got in zip(runs, first[1], other[1], strict=True):
        if want is None or got is None:
            continue
        sizes_BT = torch.where(real_BT, moved(want.logits, got.logits), 0.0)
        readings.append(Reading(run, sizes_BT, scale_of(want.logits[real_BT])))
        if want.gradients and got.gradients:
            wrong = first_difference(run, want.gradients, got.gradients)
            if wrong is not None and run is not runs[0] and not math.isfinite(wrong[1]):
                wrong = None  # a mask made for float32 can leave a float64 copy without numbers: no fault of the target

    place = at(f"{other[0]} answers otherwise than {first[0]} at slot {{query}}, {layout.name}")
    good = f"{other[0]} answers as {first[0]} does"
    result = finding(bench, NAME, case, readings, bits=False, good=good, place=place)
    if result.status != "pass" or wrong is None:
        return result
    message = f"{other[0]} gives {wrong[0]} another gradient than {first[0]}, although the outputs agree"
    return Finding(NAME, "leak", message, case, Where(0), wrong[1], "beyond rounding of the same sum")


def _large_weights(bench: Bench, names: tuple[str, ...]) -> Iterator[Finding]:
    """Scores large enough for what bends or scales them; in float64 only, where rounding stays far below."""
    exact, request = bench.runs[-1], Request.from_rows([bench.tokens(min(9, bench.length))])
    module = exact.probe.module
    if module is None or exact.dtype != torch.float64:
        return
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for weight in twin.parameters():
            if weight.dim() > 1:
                weight.mul_(_LARGER)
    run = Run(exact.probe.over(twin), exact.source)
    if not bool(run.logits(request).isfinite().all()):
        return
    run.dtype = exact.dtype
    own = kept_noise(twin, [partial(_by_first, run, names[0], request)])
    run = _with_noise(run, names, bench)
    run.noise *= 10  # far from where it was measured
    if own > 1e-10:  # casts of its own, whatever the implementation, which large weights blow up
        run.noise = max(run.noise, own)
    yield from _compared(bench, _Layout("large weights", request, graded=False), names, [run])


def _by_first(run: Run, name: str, request: Request) -> Tensor:
    with run.probe.kernel(name):
        return run.logits(request)


CHECK = Check(NAME, "Do all attention implementations give one answer, or refuse?", run, frozenset({"kernels"}), 9)
