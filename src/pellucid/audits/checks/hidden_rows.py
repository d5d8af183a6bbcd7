"""Are rows and queries that see nothing harmless, and outputs of whole rows free of padding?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pellucid.audits.checks.check import Check
from pellucid.audits.engine.capture import outputs_of
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.decision import Index, Verdict, against_alone, finding, judge, rows_of, skip_if_no_gradient
from pellucid.audits.engine.deviation import (
    Deviation,
    TargetRun,
    directions,
    embedding_gradient,
    first_not_finite,
    gradients_of,
    logit_scale,
    weights_of,
)
from pellucid.batch import Batch, Side
from pellucid.records import Finding, Location

NAME = "hidden_rows"
_EMPTY = 1  # the row that is all padding


def run(context: AuditContext) -> Iterator[Finding]:
    """A row of nothing but padding beside real ones; padded on the left, a real row's first slots see nothing too."""
    short, long = rows_of(context, (3, 5))
    for side in context.one_sided:
        batch = Batch.from_rows([short, [], long], side=side)
        try:
            context.native.plain(batch)
        except Exception as error:  # noqa: BLE001 (refusing such a row is right too)
            message = f"a row without tokens is refused: {type(error).__name__}"
            yield Finding(NAME, "not_applicable", message, f"{side} padding")
            continue
        yield _real_rows(context, f"{side} padding, real rows", batch, [short, long])
        case = f"{side} padding, gradients"
        yield skip_if_no_gradient(NAME, case, partial(_gradients, context, case, batch))
        yield _pads(context, f"{side} padding, hidden slots", batch)
    yield from pooled(context, NAME)


def _real_rows(context: AuditContext, case: str, batch: Batch, rows: list[list[int]]) -> Finding:
    readings = context.read(lambda run: against_alone(run, batch, rows))
    if judge(context, readings, bits=False).status != "pass":
        full = context.tokens(5)
        instead = Batch.from_rows([rows[0], full, rows[1]])
        beside = context.read(lambda run: against_alone(run, instead, [rows[0], full, rows[1]]))
        if judge(context, beside, bits=False).status != "pass":
            message = "these rows answer otherwise than alone beside a full row too (see padding and batch)"
            return Finding(NAME, "not_applicable", message, case)

    def place(run: TargetRun, index: Index) -> tuple[Location, str]:
        row, query = index
        finite = bool(run.logits(batch)[row, query].isfinite().all())
        how = "answers otherwise than alone" if finite else "is NaN or infinite"
        return Location(row, query, None, _EMPTY), f"the token in slot {query} {how} beside a row that is all padding"

    good = "real rows answer as they do alone beside a row that is all padding"
    return finding(context, NAME, case, readings, bits=False, good=good, place=place)


def _gradients(context: AuditContext, case: str, batch: Batch) -> Finding:
    """What the real tokens teach must be finite: 0 · NaN on the way back is NaN."""
    run = context.native
    if not weights_of(run):
        return Finding(NAME, "not_applicable", "the target has no parameters that take gradients", case)
    spoilt = _spoilt_weights(context, batch)
    if spoilt is None and context.can("embeddings"):
        spoilt = _spoilt_embeddings(context, batch)
    if spoilt is None:
        good = "the real tokens give every weight a finite gradient"
        return Finding(NAME, "pass", good, case)
    message = f"the gradient of {spoilt} is not finite beside queries that see nothing: one step destroys the weights"
    return Finding(NAME, "leak", message, case, Location(_EMPTY), float("inf"), "gradients are finite or not")


def _spoilt_weights(context: AuditContext, batch: Batch) -> str | None:
    """By the outputs and by the loss: one sum, for what is not finite in a part is not finite in the whole."""
    run = context.native
    logits = run.differentiable(batch)
    total = (logits * directions(logits))[batch.token_mask.to(logits.device)].sum()
    if context.can("loss"):
        loss = run.differentiable_loss(batch)
        if not bool(loss.isfinite()):
            return "the loss (itself not finite)"
        total = total + loss
    return first_not_finite(gradients_of(total, weights_of(run))) if total.requires_grad else None


def _spoilt_embeddings(context: AuditContext, batch: Batch) -> str | None:
    grad = embedding_gradient(context.native, batch)
    return "the embeddings" if grad is not None and not bool(grad.isfinite().all()) else None


def _pads(context: AuditContext, case: str, batch: Batch) -> Finding:
    """Nobody looks there, but NaN that stands there is one product away from everything."""
    bad_BT: Tensor = ~context.native.plain(batch).isfinite().all(-1) & ~batch.token_mask
    if not bool(bad_BT.any()):
        return Finding(NAME, "pass", "outputs at slots that see nothing are finite", case)
    row, query = bad_BT.nonzero()[0].tolist()
    message = f"the output at slot {query}, which sees nothing, is NaN or infinite: undefined hidden rows"
    return Finding(NAME, "fragile", message, case, Location(row, query), float("inf"))


CHECK = Check(
    NAME,
    "Are rows and queries that see nothing harmless to real rows, outputs and gradients?",
    run,
    frozenset({"padding"}),
    length=5,
)


Pooled = dict[str, Tensor]


def pooled(context: AuditContext, check: str) -> Iterator[Finding]:
    """Each row's own answer for the whole of it must be what it is alone: beside a longer row and much padding.

    A class that takes the first slot for the whole can be padded on the right only, one that takes the last on the
    left only: what holds on one side is no leak on the other.
    """
    rows = rows_of(context, (3, 5))
    for name in _names(context, rows):
        verdicts = {side: _verdict(context, name, rows, side) for side in context.one_sided}
        sound = [side for side, verdict in verdicts.items() if verdict.status != "leak"]
        for side, verdict in verdicts.items():
            yield _finding(check, name, side, verdict, sound)


def _names(context: AuditContext, rows: list[list[int]]) -> list[str]:
    """Those that keep their width in longer rows: the others are of single slots."""
    if context.probe.module is None:
        return []
    side = context.probe.sides[0]
    shorter, longer = (_pooled_of(context.native, Batch.from_rows(rows, side=side, length=n)) for n in (5, 8))
    return [name for name, value in shorter.items() if name in longer and longer[name].shape == value.shape]


def _finding(check: str, name: str, side: Side, verdict: Verdict, sound: list[Side]) -> Finding:
    case, size = f"{name}, {side} padding", verdict.size
    if verdict.status == "pass":
        return Finding(check, "pass", f"{name} is of real tokens only", case, size=size, decided=verdict.decided)
    message = f"{name} of a row is another beside padding than alone, although it stands for the row's own tokens"
    if verdict.status == "leak" and sound:
        message = f"{name} is taken from a slot that padding on the {side} moves; pad on the {sound[0]}"
        return Finding(check, "not_applicable", message, case, Location(*verdict.first[:1]), size, verdict.decided)
    return Finding(check, verdict.status, message, case, Location(*verdict.first[:1]), size, verdict.decided)


def _verdict(context: AuditContext, name: str, rows: list[list[int]], side: Side) -> Verdict:
    readings = context.read(lambda run: _moved(run, name, rows, side))
    return judge(context, readings, bits=False)


def _moved(run: TargetRun, name: str, rows: list[list[int]], side: Side) -> Deviation:
    """``[rows]``: how far the value of each is from that alone, in company and with more padding."""
    alone = [_pooled_of(run, Batch.from_rows([row]))[name] for row in rows]
    sizes = torch.zeros(len(rows), dtype=torch.float64)
    run.dtype = alone[0].dtype
    for length in (max(map(len, rows)), max(map(len, rows)) + 3):
        together = _pooled_of(run, Batch.from_rows(rows, side=side, length=length))[name]
        for number, want in enumerate(alone):
            size = (together[number] - want[0]).abs().double().max()
            sizes[number] = torch.maximum(sizes[number], size.nan_to_num(nan=torch.inf))
    return Deviation(run, sizes, max(map(logit_scale, alone)))


def _pooled_of(run: TargetRun, batch: Batch) -> Pooled:
    """Float tensors ``[B, D]`` of the module's answer, by name."""
    outputs = outputs_of(run, "", batch, _named)
    found = outputs[-1] if outputs else {}
    return {
        name: value.detach().cpu()
        for name, value in found.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 2
        and value.shape[0] == batch.shape[0] and value.shape[1] > 1
    }  # fmt: skip


def _named(output: object) -> dict[str, Any]:
    if isinstance(output, Mapping):
        return {str(key): value for key, value in output.items()}
    if is_dataclass(output):
        return {field.name: getattr(output, field.name) for field in fields(output)}
    return {f"output {number}": value for number, value in enumerate(output)} if isinstance(output, tuple) else {}
