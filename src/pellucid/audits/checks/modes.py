"""Do train (without dropout), eval, no_grad, inference mode and checkpointing give the same?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from pellucid.audits.checks.check import question
from pellucid.audits.engine.compare import (
    Answer,
    at,
    compare,
    decide,
    deviation,
    judge,
    leak,
    not_applicable,
    skip_if_unsupported,
)
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.dropout_probabilities import NoDropout, set_dropout
from pellucid.audits.engine.state import Snapshot, preserve_state, reseed
from pellucid.audits.engine.target_run import Deviation, TargetRun, deep_copy, first_difference, gradients, module_of
from pellucid.batch import Batch
from pellucid.errors import UnsupportedError, one_line
from pellucid.records import Finding, Location

_GOOD = "real tokens answer {how} as they do in eval mode with gradients on"
_WRONG = "the token in slot {{query}} differs {how}"


@question("Do train without dropout, eval, no_grad, inference mode and checkpointing agree?", length=5)
def check(context: AuditContext) -> Iterator[Finding]:
    """Every mode against eval with gradients on, for full rows and for padded ones."""
    full = Batch.from_rows([context.tokens(5) for _ in range(3)])
    try:
        _graded(context.native, full)
    except Exception as error:  # noqa: BLE001 (the target is anybody's code)
        yield not_applicable("", f"it cannot run with gradients on: {one_line(error)}")
        return
    copies, layouts = _WithoutDropout(), [("full rows", full)]
    rows = context.rows()
    if context.can("padding"):  # padded on the left, the first slots of a causal row see nothing
        layouts += [(f"{side} padding", Batch.from_rows(rows, side=side)) for side in context.one_sided]
    if context.can("packing"):
        layouts.append(("packed", Batch.packed(rows)))
    for layout, batch in layouts:
        yield _same(context, f"no_grad, {layout}", batch, batch, "without gradients")
        yield _inference(context, f"inference mode, {layout}", copies, batch)
        yield _train(context, f"train, {layout}", copies, batch)
        if context.can("checkpointing"):
            yield _checkpointing(context, f"checkpointing, {layout}", copies, batch)


def _graded(run: TargetRun, batch: Batch) -> Tensor:
    """The answer in eval mode with gradients on: what all others are compared with."""
    return run.differentiable(batch).detach().cpu()


class _WithoutDropout:
    """Copies of every run in which nothing is dropped, made when first used, and their answers in eval mode."""

    def __init__(self) -> None:
        self._copies: dict[int, TargetRun] = {}
        self._graded: dict[tuple[int, int], Tensor] = {}

    def of(self, run: TargetRun) -> TargetRun:
        if id(run) not in self._copies:
            copied = deep_copy(run)
            set_dropout(module_of(copied), 0.0)
            self._copies[id(run)] = copied
        return self._copies[id(run)]

    def graded(self, run: TargetRun, batch: Batch) -> Tensor:
        key = (id(run), id(batch))
        if key not in self._graded:
            self._graded[key] = _graded(self.of(run), batch).clone()
        return self._graded[key]


def _same(
    context: AuditContext,
    case: str,
    batch: Batch,
    got: Answer,
    how: str,
    want: Callable[[TargetRun, Batch], Tensor] = _graded,
) -> Finding:
    return compare(
        context, case, lambda run: want(run, batch), got, watch=batch.token_mask,
        good=_GOOD.format(how=how), wrong=_WRONG.format(how=how),
    )  # fmt: skip


@skip_if_unsupported
def _inference(context: AuditContext, case: str, copies: _WithoutDropout, batch: Batch) -> Finding:
    """On a copy: a table that is built on the way must not stay an inference tensor in the target."""
    copied = context.probe.module is not None

    def got(run: TargetRun) -> Tensor:
        with torch.inference_mode():
            return (copies.of(run) if copied else run).differentiable(batch).cpu().clone()

    return _same(context, case, batch, got, "in inference mode", copies.graded if copied else _graded)


@skip_if_unsupported
def _train(context: AuditContext, case: str, copies: _WithoutDropout, batch: Batch) -> Finding:
    """Train mode with every dropout at 0; where that differs, say whether noise or batch statistics do it."""
    how = "in train mode with dropout 0"

    def read(frozen: bool = False) -> list[Deviation]:
        return [
            deviation(run, copies.graded(run, batch), _trained(copies.of(run), batch, frozen), batch.token_mask)
            for run in context.runs
        ]

    readings = read()
    verdict = judge(context, readings)
    if verdict.status != "pass":
        copied = copies.of(context.native)
        first, second = (_trained(copied, batch, seed=seed) for seed in (1, 2))
        if not torch.equal(first, second):
            raise UnsupportedError("in train mode it draws random numbers that no probability of 0 switches off")
        changed = _changed_buffer(copied, batch)
        norms = [m for m in module_of(copied).modules() if isinstance(m, _NormBase)]
        message = ""
        if norms and judge(context, read(frozen=True)).status == "pass":
            message = f"in train mode {type(norms[0]).__name__} takes its statistics over the batch: rows are coupled"
        elif changed and not norms:
            message = f"in train mode every request changes {changed}, so its answers differ from those of eval mode"
        if message:
            where = Location(*verdict.first)
            return Finding("", "fragile", message, case, where, verdict.size, verdict.decided)
    return decide(context, case, readings, good=_GOOD.format(how=how), place=at(_WRONG.format(how=how)))


def _training(run: TargetRun, seed: int = 0, frozen: bool = False) -> AbstractContextManager[object]:
    """Switches a copy to train mode; dropout is off. ``frozen``: its norms over the batch stay in eval mode."""
    module = module_of(run)
    module.train()
    for part in module.modules():
        if frozen and isinstance(part, _NormBase):
            part.eval()
    reseed(seed)
    return NoDropout() if not isinstance(module, torch.jit.ScriptModule) else nullcontext()


def _trained(run: TargetRun, batch: Batch, frozen: bool = False, seed: int = 0) -> Tensor:
    with preserve_state(module_of(run), weights=False), _training(run, seed, frozen):
        try:
            return _graded(run, batch)
        except Exception as error:
            raise UnsupportedError(f"in train mode it raises {type(error).__name__}: {one_line(error)}") from error


def _changed_buffer(run: TargetRun, batch: Batch) -> str | None:
    """The first buffer that a request in train mode changes."""
    module = module_of(run)
    with preserve_state(module, weights=False):
        before = Snapshot(module, weights=False)
        with _training(run):
            _graded(run, batch)
        return next(iter(before.diff(Snapshot(module, weights=False), "buffers")), None)


@skip_if_unsupported
def _checkpointing(context: AuditContext, case: str, copies: _WithoutDropout, batch: Batch) -> Finding:
    """Outputs and the gradient of every weight, with and without recomputing activations."""
    differences: list[tuple[str, float] | None] = []

    def measure(run: TargetRun) -> Deviation:
        copied, answers = copies.of(run), []
        for recomputed in (nullcontext, copied.probe.checkpointing):
            with preserve_state(module_of(copied), weights=False), _training(copied), recomputed():
                decides = run is context.runs[-1]
                answers.append(gradients(copied, batch) if decides else (_graded(copied, batch), {}))
        (want, expected), (got, found) = answers
        differences.append(first_difference(run, expected, found))
        return deviation(run, want, got, batch.token_mask)

    how = "when activations are recomputed"
    readings = context.read(measure)
    result = decide(context, case, readings, good=_GOOD.format(how=how), place=at(_WRONG.format(how=how)))
    if result.failed or differences[-1] is None:
        return result
    name, size = differences[-1]
    message = f"the gradient of {name} differs when activations are recomputed, although the outputs agree"
    return leak(case, message, Location(0), size, "beyond rounding of the same sum")
