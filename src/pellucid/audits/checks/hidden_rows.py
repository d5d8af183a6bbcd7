"""Are rows and queries that see nothing harmless, and outputs of whole rows free of padding?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from pellucid.audits.checks.check import question
from pellucid.audits.engine.capture import outputs_of
from pellucid.audits.engine.compare import (
    alone,
    decide,
    deviation,
    fragile,
    judge,
    leak,
    not_applicable,
    passed,
    skip_if_no_gradient,
)
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.target_run import (
    Deviation,
    TargetRun,
    embedding_gradient,
    first_not_finite,
    gradients_of,
    logit_scale,
    weighted_sum,
    weights_of,
)
from pellucid.batch import Batch, Side
from pellucid.records import Finding, Location

_EMPTY = 1  # the row that is all padding


@question(
    "Are rows and queries that see nothing harmless to real rows, outputs and gradients?", needs={"padding"}, length=5
)
def check(context: AuditContext) -> Iterator[Finding]:
    """A row of nothing but padding beside real ones; padded on the left, a real row's first slots see nothing too."""
    short, long = context.rows((3, 5))
    for side in context.one_sided:
        batch = Batch.from_rows([short, [], long], side=side)
        try:
            context.native.plain(batch)
        except Exception as error:  # noqa: BLE001 (refusing such a row is right too)
            yield not_applicable(f"{side} padding", f"a row without tokens is refused: {type(error).__name__}")
            continue
        yield _real_rows(context, f"{side} padding, real rows", batch, short, long)
        yield _gradients(context, f"{side} padding, gradients", batch)
        yield _pads(context, f"{side} padding, hidden slots", batch)
    yield from _pooled(context, context.rows((3, 5)))


def _real_rows(context: AuditContext, case: str, batch: Batch, short: list[int], long: list[int]) -> Finding:
    def read(request: Batch, rows: list[list[int]]) -> list[Deviation]:
        return context.read(lambda run: deviation(run, alone(request, rows), request, request.token_mask), shapes=True)

    readings = read(batch, [short, long])
    if judge(context, readings).status != "pass":
        full = [short, context.tokens(5), long]
        if judge(context, read(Batch.from_rows(full), full)).status != "pass":
            message = "these rows differ from their outputs alone beside a full row too (see padding and batch)"
            return not_applicable(case, message)

    def place(run: TargetRun, index: tuple[int, ...]) -> tuple[Location, str]:
        row, query = index
        finite = bool(run.logits(batch)[row, query].isfinite().all())
        how = "differs from its output alone" if finite else "is NaN or infinite"
        return Location(row, query, None, _EMPTY), f"the token in slot {query} {how} beside a row that is all padding"

    good = "real rows answer as they do alone beside a row that is all padding"
    return decide(context, case, readings, good=good, place=place)


@skip_if_no_gradient
def _gradients(context: AuditContext, case: str, batch: Batch) -> Finding:
    """The gradients of real tokens must be finite: 0 · NaN on the way back is NaN."""
    if not weights_of(context.native):
        return not_applicable(case, "the target has no parameters that take gradients")
    bad = _not_finite(context, batch)
    if bad is None:
        return passed(case, "the real tokens give every weight a finite gradient")
    message = f"the gradient of {bad} is not finite beside queries that see nothing: one step destroys the weights"
    return leak(case, message, Location(_EMPTY), float("inf"), "gradients are finite or not")


def _not_finite(context: AuditContext, batch: Batch) -> str | None:
    """By the outputs and by the loss: one sum, for what is not finite in a part is not finite in the whole."""
    run = context.native
    total = weighted_sum(run.differentiable(batch), batch)
    if context.can("loss"):
        loss = run.differentiable_loss(batch)
        if not bool(loss.isfinite()):
            return "the loss (itself not finite)"
        total = total + loss
    bad = first_not_finite(gradients_of(total, weights_of(run))) if total.requires_grad else None
    if bad is None and context.can("embeddings"):
        grad = embedding_gradient(run, batch)
        bad = "the embeddings" if grad is not None and not bool(grad.isfinite().all()) else None
    return bad


def _pads(context: AuditContext, case: str, batch: Batch) -> Finding:
    """Nobody looks there, but NaN that stands there is one product away from everything."""
    bad_BT: Tensor = ~context.native.plain(batch).isfinite().all(-1) & ~batch.token_mask
    if not bool(bad_BT.any()):
        return passed(case, "outputs at slots that see nothing are finite")
    where = Location(*bad_BT.nonzero()[0].tolist())
    message = f"the output at slot {where.query}, which sees nothing, is NaN or infinite: undefined hidden rows"
    return fragile(case, message, where, float("inf"))


# ------------------------------------------------------------------------------------------ one output for a whole row


def _pooled(context: AuditContext, rows: list[list[int]]) -> Iterator[Finding]:
    """Each row's own output for the whole of it must be what it is alone: beside a longer row and much padding.

    A class that takes the first slot for the whole can be padded on the right only, one that takes the last on the
    left only: what holds on one side is no leak on the other.
    """
    if context.probe.module is None or context.draws:
        return
    side = context.probe.sides[0]
    shorter, longer = (
        _outputs(context.native, Batch.from_rows(rows, side=side, length=n * context.step)) for n in (5, 8)
    )
    # those that keep their width in longer rows: the others are of single slots
    for name in [name for name, value in shorter.items() if name in longer and longer[name].shape == value.shape]:
        verdicts = {
            side: judge(context, context.read(lambda run, side=side, name=name: _moved(run, name, rows, side)))  # type: ignore[misc]
            for side in context.one_sided
        }
        sound = [side for side, verdict in verdicts.items() if verdict.status != "leak"]
        for side, verdict in verdicts.items():
            case, size, status = f"{name}, {side} padding", verdict.size, verdict.status
            if status == "pass":
                yield passed(case, f"{name} is of real tokens only", size, verdict.decided)
                continue
            message = f"{name} of a row differs beside padding, although it stands for the row's own tokens"
            if status == "leak" and sound:
                status = "not_applicable"
                message = f"{name} is taken from a slot that padding on the {side} moves; pad on the {sound[0]}"
            yield Finding("", status, message, case, Location(*verdict.first[:1]), size, verdict.decided)


def _moved(run: TargetRun, name: str, rows: list[list[int]], side: Side) -> Deviation:
    """``[rows]``: how far the value of each is from that alone, in company and with more padding."""
    alone = [_outputs(run, Batch.from_rows([row]))[name] for row in rows]
    sizes = torch.zeros(len(rows), dtype=torch.float64)
    run.dtype = alone[0].dtype
    for length in (max(map(len, rows)), max(map(len, rows)) + 3):
        together = _outputs(run, Batch.from_rows(rows, side=side, length=length))[name]
        for number, want in enumerate(alone):
            size = (together[number] - want[0]).abs().double().max()
            sizes[number] = torch.maximum(sizes[number], size.nan_to_num(nan=torch.inf))
    return Deviation(run, sizes, max(map(logit_scale, alone)))


def _outputs(run: TargetRun, batch: Batch) -> dict[str, Tensor]:
    """Float tensors ``[B, D]`` of the module's output, by name."""
    outputs = outputs_of(run, "", batch, _named)
    return {
        name: value.detach().cpu()
        for name, value in (outputs[-1] if outputs else {}).items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 2
        and value.shape[0] == batch.shape[0] and value.shape[1] > 1
    }  # fmt: skip


def _named(output: object) -> dict[str, Any]:
    if isinstance(output, Mapping):
        return {str(key): value for key, value in output.items()}
    if is_dataclass(output):
        return {field.name: getattr(output, field.name) for field in fields(output)}
    return {f"output {number}": value for number, value in enumerate(output)} if isinstance(output, tuple) else {}
