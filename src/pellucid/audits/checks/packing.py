"""Do documents packed into one row stay apart: outputs, losses and gradients?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from pellucid.audits.checks.check import Check
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.decision import (
    Change,
    Index,
    against_alone,
    as_alone,
    caused,
    documents,
    finding,
    not_moved,
    rows_of,
    skip_if_no_gradient,
)
from pellucid.audits.engine.deviation import (
    Deviation,
    Gradients,
    TargetRun,
    directions,
    first_difference,
    gradients_of,
    logit_scale,
    max_abs_diff,
    tolerance_of,
    weights_of,
)
from pellucid.batch import Batch
from pellucid.records import Finding, Location

NAME = "packing"


def run(context: AuditContext) -> Iterator[Finding]:
    """Documents of 3, 5 and 1 tokens in one row against each alone; every other case changes one thing."""
    docs = rows_of(context)
    packed = Batch.packed(docs)
    yield _against_alone(context, "3 + 5 + 1", docs, packed)
    yield _against_alone(context, "with padding behind", docs, Batch.packed(docs, length=12))
    beside = [[docs[2], docs[0]], [docs[1]]]
    yield _against_alone(context, "two packed rows", [docs[2], docs[0], docs[1]], Batch.from_documents(beside))
    for way in context.probe.call_modes:
        yield _outcome(context, way, docs, packed)
    yield _copy(context, docs)
    for number in range(1, 4):
        yield _change_one(context, packed, number)
    yield skip_if_no_gradient(NAME, "gradients", lambda: _gradients(context, docs, packed))


def _against_alone(context: AuditContext, case: str, docs: list[list[int]], batch: Batch) -> Finding:
    def message(where: Location) -> str:
        cause = (
            f"token {where.key} of document {int(batch.segments[where.row, where.key])} moves it"
            if where.key is not None
            else "no other document's tokens move it, so its position in the row does"
        )
        own = int(batch.segments[where.row, where.query])
        return f"document {own} answers otherwise than alone at slot {where.query}; {cause}"

    place = caused(context, batch, partial(_others, batch), message)
    return as_alone(context, NAME, case, batch, docs, good="each document answers as it does alone", place=place)


def _outcome(context: AuditContext, way: str, docs: list[list[int]], batch: Batch) -> Finding:
    """The same pack, asked for in another way that means the same."""

    def measure(run: TargetRun) -> Deviation:
        with run.probe.call_mode(way):
            got = run.logits(batch)
        return against_alone(run, batch, docs, got)

    def message(where: Location) -> str:
        own = int(batch.segments[where.row, where.query])
        return f"packed documents are no longer apart {way}: document {own} answers otherwise than alone"

    def place(run: TargetRun, index: Index) -> tuple[Location, str]:
        with run.probe.call_mode(way):
            return caused(context, batch, partial(_others, batch), message)(run, index)

    good = f"each document answers as it does alone {way}"
    return finding(context, NAME, way, context.read(measure), bits=False, good=good, place=place)


def _copy(context: AuditContext, docs: list[list[int]]) -> Finding:
    """The same document twice in a row: a second copy that could see the first would know what comes next."""
    batch = Batch.packed([docs[1], docs[0], docs[1]])
    (_, first), _, (_, second) = documents(batch)

    def measure(run: TargetRun) -> Deviation:
        logits = run.logits(batch)
        sizes_BT = torch.zeros(batch.shape, dtype=torch.float64)
        sizes_BT[0, second] = max_abs_diff(logits[0, first][None], logits[0, second][None])[0]
        return Deviation(run, sizes_BT, logit_scale(logits))

    place = caused(
        context, batch, lambda row, query: [(0, int(slot)) for slot in range(int(second[0]))],
        lambda where: f"the second copy of a document answers otherwise at slot {where.query}",
    )  # fmt: skip
    good = "a second copy of a document answers like the first"
    return finding(context, NAME, "copy", context.read(measure), bits=False, good=good, place=place)


def _change_one(context: AuditContext, batch: Batch, number: int) -> Finding:
    inside_BT = batch.segments == number
    after = context.fresh(batch, inside_BT)

    def message(where: Location) -> str:
        document = int(batch.segments[where.row, where.query])
        return f"document {document} moves at slot {where.query} when document {number} is changed"

    place = caused(context, batch, lambda row, query: [(0, int(s)) for s in batch.slots(0, number)], message)
    case, good = f"document {number} changed", f"changing document {number} moves no other"
    return not_moved(context, NAME, case, batch, after, batch.token_mask & ~inside_BT, good=good, place=place)


def _others(batch: Batch, row: int, query: int) -> list[Change]:
    """The slots of the row that do not belong to the query's document."""
    return [(row, slot) for slot in (batch.segments[row] != batch.segments[row, query]).nonzero()[:, 0].tolist()]


def _gradients(context: AuditContext, docs: list[list[int]], packed: Batch) -> Finding:
    """The loss and every parameter's gradient are sums over the documents."""
    run = context.loss_run if context.can("loss") else context.runs[-1]
    named = weights_of(run)
    if not named:
        return Finding(NAME, "not_applicable", "the target has no parameters that take gradients", "gradients")
    total, grads = _objective(context, run, [packed], named)
    single = [doc for doc in docs if len(doc) > 1 or not context.can("loss")]  # one teaches nothing
    total_apart, want = _objective(context, run, [Batch.from_rows([doc]) for doc in single], named)
    what = "loss" if context.can("loss") else "weighted sum of the logits"
    size = abs(total - total_apart)
    if size > tolerance_of(run) * (1 + abs(total_apart)):
        message = f"the {what} of the pack is {total:.6g}, but its documents alone add up to {total_apart:.6g}"
        return Finding(NAME, "leak", message, "gradients", Location(0), size)
    wrong = first_difference(run, want, grads)
    if wrong is not None:
        message = f"the gradient of {wrong[0]} is not the sum over the documents"
        return Finding(NAME, "leak", message, "gradients", Location(0), wrong[1])
    good = f"the {what} and the gradients of all {len(named)} parameters are sums over the documents"
    return Finding(NAME, "pass", good, "gradients", size=size)


def _objective(
    context: AuditContext, run: TargetRun, requests: list[Batch], named: dict[str, Tensor]
) -> tuple[float, Gradients]:
    """The sum over some requests, and its gradients."""

    def one(batch: Batch) -> Tensor:
        if context.can("loss"):
            return run.differentiable_loss(batch)
        logits = run.differentiable(batch)
        return (logits * directions(logits))[batch.token_mask.to(logits.device)].sum()

    total = torch.stack([one(batch) for batch in requests]).sum()
    if not total.requires_grad:
        return float(total), {name: torch.zeros_like(weight) for name, weight in named.items()}
    return float(total.detach()), gradients_of(total, named)


CHECK = Check(
    NAME,
    "Do documents packed into one row answer, and learn, as they do alone?",
    run,
    frozenset({"packing"}),
    length=5,
)
