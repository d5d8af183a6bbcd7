"""Do train (without dropout), eval, no_grad, inference mode and checkpointing give the same?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from pellucid.audits.checks.check import Check
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.decision import at, finding, judge, rows_of, skip_if_unsupported
from pellucid.audits.engine.deviation import (
    Deviation,
    TargetRun,
    first_difference,
    gradients,
    logit_scale,
    max_abs_diff,
)
from pellucid.audits.engine.module_copies import NoDropout, deep_copy, module_of, reseeded, set_dropout
from pellucid.audits.engine.preserve_state import preserve_state
from pellucid.batch import Batch
from pellucid.errors import UnsupportedError, one_line
from pellucid.records import Finding, Location

NAME = "modes"
_WRONG = "the token in slot {query} answers otherwise "
Ask = Callable[[TargetRun, Batch], Tensor]


def run(context: AuditContext) -> Iterator[Finding]:
    """Every mode against eval with gradients on, for full rows and for padded ones."""
    quiet = _Quiet(context)
    try:
        _graded(context.native, Batch.from_rows([context.tokens(5)]))
    except RuntimeError as error:
        yield Finding(NAME, "not_applicable", f"it cannot be asked with gradients on: {one_line(error)}")
        return
    for layout, batch in _layouts(context):
        yield from _modes(context, quiet, layout, batch)


def _modes(context: AuditContext, quiet: _Quiet, layout: str, batch: Batch) -> Iterator[Finding]:
    yield _same(context, f"no_grad, {layout}", batch, TargetRun.logits, "without gradients", _graded)
    asks = {"inference mode": _inference, "train": _train}
    if context.can("checkpointing"):
        asks["checkpointing"] = _checkpointing
    for name, ask in asks.items():
        case = f"{name}, {layout}"
        yield skip_if_unsupported(NAME, case, partial(ask, context, quiet, case, batch))


def _layouts(context: AuditContext) -> Iterator[tuple[str, Batch]]:
    yield "full rows", Batch.from_rows([context.tokens(5) for _ in range(3)])
    if context.can("padding"):
        side = context.probe.sides[0]
        yield f"{side} padding", Batch.from_rows(rows_of(context), side=side)


class _Quiet:
    """Copies of every run in which nothing is dropped, made when first asked for, and their answers in eval mode."""

    def __init__(self, context: AuditContext) -> None:
        self.context = context
        self._made: dict[int, TargetRun] = {}
        self._graded: dict[tuple[int, int], Tensor] = {}

    def __call__(self, run: TargetRun) -> TargetRun:
        if id(run) not in self._made:
            copied = deep_copy(run)
            set_dropout(module_of(copied), lambda _: 0.0)
            self._made[id(run)] = copied
        return self._made[id(run)]

    def graded(self, run: TargetRun, batch: Batch) -> Tensor:
        """What all others are compared with, asked once."""
        key = (id(run), id(batch))
        if key not in self._graded:
            self._graded[key] = _graded(self(run), batch).clone()
        return self._graded[key]


def _graded(run: TargetRun, batch: Batch) -> Tensor:
    """The answer in eval mode with gradients on: what all others are compared with."""
    return run.differentiable(batch).detach().cpu()


def _same(context: AuditContext, case: str, batch: Batch, ask: Ask, how: str, want: Ask) -> Finding:
    def measure(run: TargetRun) -> Deviation:
        return _reading(run, want(run, batch), ask(run, batch), batch)

    return finding(context, NAME, case, context.read(measure), bits=False, good=_good(how), place=at(_WRONG + how))


def _good(how: str) -> str:
    return f"real tokens answer {how} as they do in eval mode with gradients on"


def _reading(run: TargetRun, want_BTV: Tensor, got_BTV: Tensor, batch: Batch) -> Deviation:
    return Deviation(
        run,
        torch.where(batch.token_mask, max_abs_diff(want_BTV, got_BTV), 0.0),
        logit_scale(want_BTV[batch.token_mask]),
    )


def _inference(context: AuditContext, quiet: _Quiet, case: str, batch: Batch) -> Finding:
    """On a copy: a table that is built on the way must not stay an inference tensor in the target."""

    copies = context.probe.module is not None

    def ask(run: TargetRun, request: Batch) -> Tensor:
        with torch.inference_mode():
            return (quiet(run) if copies else run).differentiable(request).cpu().clone()

    return _same(context, case, batch, ask, "in inference mode", quiet.graded if copies else _graded)


def _train(context: AuditContext, quiet: _Quiet, case: str, batch: Batch) -> Finding:
    """Train mode with every dropout at 0; where that differs, say whether noise or batch statistics do it."""
    how = "in train mode with dropout 0"

    def read(frozen: bool = False) -> list[Deviation]:
        return [_reading(r, quiet.graded(r, batch), _trained(quiet(r), batch, frozen), batch) for r in runs]

    runs = context.runs
    readings = read()
    verdict = judge(context, readings, bits=False)
    if verdict.status != "pass":
        first, second = (_trained(quiet(runs[0]), batch, seed=seed) for seed in (1, 2))
        if not torch.equal(first, second):
            raise UnsupportedError("in train mode it draws random numbers that no probability of 0 switches off")
        learns = _learns(quiet(runs[0]), batch)
        norms = [m for m in module_of(quiet(runs[0])).modules() if isinstance(m, _NormBase)]
        if norms and judge(context, read(frozen=True), bits=False).status == "pass":
            message = f"in train mode {type(norms[0]).__name__} takes its statistics over the batch: rows are coupled"
            return Finding(NAME, "fragile", message, case, Location(*verdict.first), verdict.size, verdict.decided)
        if learns and not norms:
            message = f"in train mode every request changes {learns}, so its answers differ from those of eval mode"
            return Finding(NAME, "fragile", message, case, Location(*verdict.first), verdict.size, verdict.decided)
    return finding(context, NAME, case, readings, bits=False, good=_good(how), place=at(_WRONG + how))


def _training(run: TargetRun, seed: int = 0, frozen: bool = False) -> AbstractContextManager[object]:
    """Switches a copy to train mode; dropout is off. ``frozen``: its norms over the batch stay in eval mode."""
    module = module_of(run)
    module.train()
    for part in module.modules():
        if frozen and isinstance(part, _NormBase):
            part.eval()
    reseeded(seed)
    return NoDropout() if not isinstance(module, torch.jit.ScriptModule) else nullcontext()


def _trained(run: TargetRun, batch: Batch, frozen: bool = False, seed: int = 0) -> Tensor:
    with preserve_state(module_of(run), weights=False), _training(run, seed, frozen):
        try:
            return _graded(run, batch)
        except Exception as error:
            raise UnsupportedError(f"in train mode it raises {type(error).__name__}: {one_line(error)}") from error


def _learns(run: TargetRun, batch: Batch) -> str | None:
    """The first buffer that a request in train mode changes."""
    module = module_of(run)
    with preserve_state(module, weights=False):
        before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        with _training(run):
            _graded(run, batch)
        after = dict(module.named_buffers())
        return next((n for n, value in before.items() if not torch.equal(value, after.get(n, value))), None)


def _checkpointing(context: AuditContext, quiet: _Quiet, case: str, batch: Batch) -> Finding:
    """Outputs and the gradient of every weight, with and without recomputing activations."""

    def measure(run: TargetRun) -> Deviation:
        copied = quiet(run)
        answers = []
        for recomputed in (nullcontext, copied.probe.checkpointing):
            with preserve_state(module_of(copied), weights=False), _training(copied), recomputed():
                decides = run is context.runs[-1]
                answers.append(gradients(copied, batch) if decides else (_graded(copied, batch), {}))
        (want, expected), (got, found) = answers
        spoilt.append(first_difference(run, expected, found))
        return _reading(run, want, got, batch)

    spoilt: list[tuple[str, float] | None] = []
    how = "when activations are recomputed"
    result = finding(context, NAME, case, context.read(measure), bits=False, good=_good(how), place=at(_WRONG + how))
    if result.failed or spoilt[-1] is None:
        return result
    name, size = spoilt[-1]
    message = f"the gradient of {name} is another one when activations are recomputed, although the outputs agree"
    return Finding(NAME, "leak", message, case, Location(0), size, "beyond rounding of the same sum")


CHECK = Check(NAME, "Do train without dropout, eval, no_grad, inference mode and checkpointing agree?", run, length=5)
