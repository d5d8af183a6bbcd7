"""Are rows and queries that see nothing harmless: other rows unmoved, outputs and gradients finite?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from pellucid.audits.checks.check import Check
from pellucid.audits.checks.pooled import pooled
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.decision import Index, finding, judge, skip_if_no_gradient
from pellucid.audits.engine.deviation import TargetRun
from pellucid.audits.engine.gradients import (
    embedding_gradient,
    first_not_finite,
    gradients_of,
    weights_of,
)
from pellucid.audits.engine.row_layouts import against_alone, rows_of
from pellucid.batch import Batch
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
    total = (logits * context.directions(logits))[batch.token_mask.to(logits.device)].sum()
    if context.can("loss"):
        loss = run.differentiable_loss(batch)
        if not bool(loss.isfinite()):
            return "the loss (itself not finite)"
        total = total + loss
    return first_not_finite(gradients_of(total, weights_of(run))) if total.requires_grad else None


def _spoilt_embeddings(context: AuditContext, batch: Batch) -> str | None:
    grad = embedding_gradient(context, context.native, batch)
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
