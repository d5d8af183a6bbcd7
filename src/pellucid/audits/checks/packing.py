"""Do documents packed into one row stay separate: outputs, losses and gradients?"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pellucid.audits.checks.check import question
from pellucid.audits.engine.compare import (
    DRAWS,
    alone,
    caused,
    compare,
    compare_with_alone,
    decide,
    deviation,
    documents,
    hidden_tokens,
    leak,
    not_applicable,
    passed,
    skip_if_no_gradient,
)
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.target_run import (
    Gradients,
    TargetRun,
    first_difference,
    gradients_of,
    tolerance_of,
    weighted_sum,
    weights_of,
)
from pellucid.batch import Batch
from pellucid.records import Finding, Location


@question("Do documents packed into one row answer, and learn, as they do alone?", needs={"packing"}, length=5)
def check(context: AuditContext) -> Iterator[Finding]:
    """Documents of 3, 5 and 1 tokens in one row against each alone; every other case changes one thing."""
    docs = context.rows()
    packed = Batch.packed(docs)
    yield _against_alone(context, "3 + 5 + 1", docs, packed)
    yield _against_alone(context, "with padding behind", docs, Batch.packed(docs, length=12 * context.step))
    two_rows = Batch.from_documents([[docs[2], docs[0]], [docs[1]]])
    yield _against_alone(context, "two packed rows", [docs[2], docs[0], docs[1]], two_rows)
    for mode in context.probe.call_modes:
        yield _in_mode(context, mode, docs, packed)
    yield _copy(context, Batch.packed([docs[1], docs[0], docs[1]]))
    for number in range(1, 4):
        yield _change_one(context, packed, number)
    yield _gradients(context, "gradients", docs, packed)


def _against_alone(context: AuditContext, case: str, docs: list[list[int]], batch: Batch) -> Finding:
    good, wrong = "each document answers as it does alone", "row {row}, slot {query} differs from its document alone"
    return compare_with_alone(context, case, batch, docs, good=good, wrong=wrong)


def _document(batch: Batch, where: Location) -> int:
    return int(batch.segments[where.row, where.query])


def _in_mode(context: AuditContext, mode: str, docs: list[list[int]], batch: Batch) -> Finding:
    """The same pack, called in another way that means the same."""

    def got(run: TargetRun) -> Tensor:
        with run.probe.call_mode(mode):
            return run.logits(batch)

    def place(run: TargetRun, index: tuple[int, ...]) -> tuple[Location, str]:
        with run.probe.call_mode(mode):
            return caused(context, batch, hidden_tokens(context, batch), wrong)(run, index)

    def wrong(where: Location) -> str:
        own = _document(batch, where)
        return f"packed documents are no longer separate {mode}: document {own} differs from its output alone"

    readings = context.read(lambda run: deviation(run, alone(batch, docs), got, batch.token_mask))
    return decide(context, mode, readings, good=f"each document answers as it does alone {mode}", place=place)


def _copy(context: AuditContext, batch: Batch) -> Finding:
    """The same document twice in a row: a second copy that could see the first would know what comes next."""
    (_, first), _, (_, second) = documents(batch)
    copy_BT = batch.segments == 3

    def as_first(run: TargetRun) -> Tensor:
        logits_BTV = run.plain(batch).clone()
        logits_BTV[0, second] = logits_BTV[0, first]
        return logits_BTV

    good, wrong = "a second copy of a document answers like the first", "the second copy differs at slot {query}"
    return compare(
        context, "copy", as_first, batch, watch=copy_BT, good=good, wrong=wrong,
        suspects=lambda *_: [(0, slot) for slot in range(int(second[0]))],
    )  # fmt: skip


def _change_one(context: AuditContext, batch: Batch, number: int) -> Finding:
    inside_BT = batch.segments == number
    after = context.fresh(batch, inside_BT)
    return compare(
        context, f"document {number} changed", batch, after, watch=batch.token_mask & ~inside_BT, bits=True,
        good=f"changing document {number} moves no other",
        wrong=lambda where: (
            f"document {_document(batch, where)} moves at slot {where.query} when document {number} is changed"
        ),
        suspects=lambda *_: [(0, int(slot)) for slot in batch.slots(0, number)],
    )  # fmt: skip


@skip_if_no_gradient
def _gradients(context: AuditContext, case: str, docs: list[list[int]], packed: Batch) -> Finding:
    """The loss and every parameter's gradient are sums over the documents."""
    run = context.loss_run if context.can("loss") else context.runs[-1]
    named = weights_of(run)
    if context.draws:
        return not_applicable(case, DRAWS)
    if not named:
        return not_applicable(case, "the target has no parameters that take gradients")
    total, grads = _objective(context, run, [packed], named)
    single = [doc for doc in docs if len(doc) > 1 or not context.can("loss")]  # one teaches nothing
    sum_alone, want = _objective(context, run, [Batch.from_rows([doc]) for doc in single], named)
    what = "loss" if context.can("loss") else "weighted sum of the logits"
    size = abs(total - sum_alone)
    if size > tolerance_of(run) * (1 + abs(sum_alone)):
        message = f"the {what} of the pack is {total:.6g}, but its documents alone add up to {sum_alone:.6g}"
        return leak(case, message, Location(0), size)
    wrong = first_difference(run, want, grads)
    if wrong is not None:
        return leak(case, f"the gradient of {wrong[0]} is not the sum over the documents", Location(0), wrong[1])
    return passed(
        case, f"the {what} and the gradients of all {len(named)} parameters are sums over the documents", size
    )


def _objective(
    context: AuditContext, run: TargetRun, requests: list[Batch], named: dict[str, Tensor]
) -> tuple[float, Gradients]:
    """The sum over some requests, and its gradients."""
    one = (
        run.differentiable_loss if context.can("loss") else lambda batch: weighted_sum(run.differentiable(batch), batch)
    )
    total = torch.stack([one(batch) for batch in requests]).sum()
    if not total.requires_grad:
        return float(total), {name: torch.zeros_like(weight) for name, weight in named.items()}
    return float(total.detach()), gradients_of(total, named)
