"""Do train (without dropout), eval, no_grad, inference mode and checkpointing give the same?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from pellucid.audits.checks.check import Check
from pellucid.audits.method.bench import Bench
from pellucid.audits.method.care import left_as_found
from pellucid.audits.method.copies import NoDropout, copied, module_of, reseeded, set_dropout
from pellucid.audits.method.gradients import first_difference, gradients
from pellucid.audits.method.judge import at, finding, judge, unless_refused
from pellucid.audits.method.measure import Reading, Run, moved, scale_of
from pellucid.audits.method.rows import rows_of
from pellucid.errors import UnsupportedError, one_line
from pellucid.probe import Request
from pellucid.records import Finding, Where

NAME = "modes"
_WRONG = "the token in slot {query} answers otherwise "
Ask = Callable[[Run, Request], Tensor]


def run(bench: Bench) -> Iterator[Finding]:
    """Every mode against eval with gradients on, for full rows and for padded ones."""
    quiet = _Quiet(bench)
    try:
        _graded(bench.native, Request.from_rows([bench.tokens(5)]))
    except RuntimeError as error:
        yield Finding(NAME, "not_applicable", f"it cannot be asked with gradients on: {one_line(error)}")
        return
    for layout, request in _layouts(bench):
        yield from _modes(bench, quiet, layout, request)


def _modes(bench: Bench, quiet: _Quiet, layout: str, request: Request) -> Iterator[Finding]:
    yield _same(bench, f"no_grad, {layout}", request, Run.logits, "without gradients", _graded)
    asks = {"inference mode": _inference, "train": _train}
    if bench.can("checkpointing"):
        asks["checkpointing"] = _checkpointing
    for name, ask in asks.items():
        case = f"{name}, {layout}"
        yield unless_refused(NAME, case, partial(ask, bench, quiet, case, request))


def _layouts(bench: Bench) -> Iterator[tuple[str, Request]]:
    yield "full rows", Request.from_rows([bench.tokens(5) for _ in range(3)])
    if bench.can("padding"):
        side = bench.probe.sides[0]
        yield f"{side} padding", Request.from_rows(rows_of(bench), side=side)


class _Quiet:
    """Copies of every run in which nothing is dropped, made when first asked for, and their answers in eval mode."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._made: dict[int, Run] = {}
        self._graded: dict[tuple[int, int], Tensor] = {}

    def __call__(self, run: Run) -> Run:
        if id(run) not in self._made:
            twin = copied(run)
            set_dropout(module_of(twin), lambda _: 0.0)
            self._made[id(run)] = twin
        return self._made[id(run)]

    def graded(self, run: Run, request: Request) -> Tensor:
        """What all others are compared with, asked once."""
        key = (id(run), id(request))
        if key not in self._graded:
            self._graded[key] = _graded(self(run), request).clone()
        return self._graded[key]


def _graded(run: Run, request: Request) -> Tensor:
    """The answer in eval mode with gradients on: what all others are compared with."""
    return run.differentiable(request).detach().cpu()


def _same(bench: Bench, case: str, request: Request, ask: Ask, how: str, want: Ask) -> Finding:
    def measure(run: Run) -> Reading:
        return _reading(run, want(run, request), ask(run, request), request)

    return finding(bench, NAME, case, bench.read(measure), bits=False, good=_good(how), place=at(_WRONG + how))


def _good(how: str) -> str:
    return f"real tokens answer {how} as they do in eval mode with gradients on"


def _reading(run: Run, want_BTV: Tensor, got_BTV: Tensor, request: Request) -> Reading:
    return Reading(run, torch.where(request.real, moved(want_BTV, got_BTV), 0.0), scale_of(want_BTV[request.real]))


def _inference(bench: Bench, quiet: _Quiet, case: str, request: Request) -> Finding:
    """On a copy: a table that is built on the way must not stay an inference tensor in the target."""

    copies = bench.probe.module is not None

    def ask(run: Run, asked: Request) -> Tensor:
        with torch.inference_mode():
            return (quiet(run) if copies else run).differentiable(asked).cpu().clone()

    return _same(bench, case, request, ask, "in inference mode", quiet.graded if copies else _graded)


def _train(bench: Bench, quiet: _Quiet, case: str, request: Request) -> Finding:
    """Train mode with every dropout at 0; where that differs, say whether noise or batch statistics do it."""
    how = "in train mode with dropout 0"

    def read(frozen: bool = False) -> list[Reading]:
        return [_reading(r, quiet.graded(r, request), _trained(quiet(r), request, frozen), request) for r in runs]

    runs = bench.runs
    readings = read()
    verdict = judge(bench, readings, bits=False)
    if verdict.status != "pass":
        first, second = (_trained(quiet(runs[0]), request, seed=seed) for seed in (1, 2))
        if not torch.equal(first, second):
            raise UnsupportedError("in train mode it draws random numbers that no probability of 0 switches off")
        learns = _learns(quiet(runs[0]), request)
        norms = [m for m in module_of(quiet(runs[0])).modules() if isinstance(m, _NormBase)]
        if norms and judge(bench, read(frozen=True), bits=False).status == "pass":
            said = f"in train mode {type(norms[0]).__name__} takes its statistics over the batch: rows are coupled"
            return Finding(NAME, "fragile", said, case, Where(*verdict.first), verdict.size, verdict.decided)
        if learns and not norms:
            said = f"in train mode every request changes {learns}, so its answers differ from those of eval mode"
            return Finding(NAME, "fragile", said, case, Where(*verdict.first), verdict.size, verdict.decided)
    return finding(bench, NAME, case, readings, bits=False, good=_good(how), place=at(_WRONG + how))


def _training(run: Run, seed: int = 0, frozen: bool = False) -> AbstractContextManager[object]:
    """Switches a copy to train mode; dropout is off. ``frozen``: its norms over the batch stay in eval mode."""
    module = module_of(run)
    module.train()
    for part in module.modules():
        if frozen and isinstance(part, _NormBase):
            part.eval()
    reseeded(seed)
    return NoDropout() if not isinstance(module, torch.jit.ScriptModule) else nullcontext()


def _trained(run: Run, request: Request, frozen: bool = False, seed: int = 0) -> Tensor:
    with left_as_found(module_of(run), weights=False), _training(run, seed, frozen):
        try:
            return _graded(run, request)
        except Exception as error:
            raise UnsupportedError(f"in train mode it raises {type(error).__name__}: {one_line(error)}") from error


def _learns(run: Run, request: Request) -> str | None:
    """The first buffer that a request in train mode changes."""
    module = module_of(run)
    with left_as_found(module, weights=False):
        before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        with _training(run):
            _graded(run, request)
        after = dict(module.named_buffers())
        return next((n for n, held in before.items() if not torch.equal(held, after.get(n, held))), None)


def _checkpointing(bench: Bench, quiet: _Quiet, case: str, request: Request) -> Finding:
    """Outputs and the gradient of every weight, with and without recomputing activations."""

    def measure(run: Run) -> Reading:
        twin = quiet(run)
        answers = []
        for recomputed in (nullcontext, twin.probe.checkpointing):
            with left_as_found(module_of(twin), weights=False), _training(twin), recomputed():
                decides = run is bench.runs[-1]
                answers.append(gradients(bench, twin, request) if decides else (_graded(twin, request), {}))
        (want, expected), (got, found) = answers
        spoilt.append(first_difference(run, expected, found))
        return _reading(run, want, got, request)

    spoilt: list[tuple[str, float] | None] = []
    how = "when activations are recomputed"
    result = finding(bench, NAME, case, bench.read(measure), bits=False, good=_good(how), place=at(_WRONG + how))
    if result.failed or spoilt[-1] is None:
        return result
    name, size = spoilt[-1]
    message = f"the gradient of {name} is another one when activations are recomputed, although the outputs agree"
    return Finding(NAME, "leak", message, case, Where(0), size, "beyond rounding of the same sum")


CHECK = Check(NAME, "Do train without dropout, eval, no_grad, inference mode and checkpointing agree?", run, length=5)
