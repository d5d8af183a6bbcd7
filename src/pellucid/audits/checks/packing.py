"""Do documents packed into one row stay apart: outputs, losses and gradients?"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pellucid.audits.checks.check import Check
from pellucid.audits.method.bench import Bench
from pellucid.audits.method.gradients import Gradients, first_difference, gradients_of, tolerance_of, weights_of
from pellucid.audits.method.judge import Index, finding, unless_no_gradient
from pellucid.audits.method.measure import Reading, Run, moved, scale_of
from pellucid.audits.method.rows import against_alone, as_alone, culprit, documents, not_moved, rows_of
from pellucid.probe import Request
from pellucid.records import Finding, Where

NAME = "packing"


def run(bench: Bench) -> Iterator[Finding]:
    """Documents of 3, 5 and 1 tokens in one row against each alone; every other case changes one thing."""
    docs = rows_of(bench)
    packed = Request.packed(docs)
    yield _against_alone(bench, "3 + 5 + 1", docs, packed)
    yield _against_alone(bench, "with padding behind", docs, Request.packed(docs, length=12))
    beside = [[docs[2], docs[0]], [docs[1]]]
    yield _against_alone(bench, "two packed rows", [docs[2], docs[0], docs[1]], Request.from_documents(beside))
    for way in bench.probe.ways:
        yield _asked(bench, way, docs, packed)
    yield _copy(bench, docs)
    for number in range(1, 4):
        yield _change_one(bench, packed, number)
    yield unless_no_gradient(NAME, "gradients", lambda: _gradients(bench, docs, packed))


def _against_alone(bench: Bench, case: str, docs: list[list[int]], request: Request) -> Finding:
    def place(run: Run, index: Index) -> tuple[Where, str]:
        row, query = index
        own = int(request.segments[row, query])
        others = [(row, slot) for slot in (request.segments[row] != own).nonzero()[:, 0].tolist()]
        found = culprit(bench, run, request, row, query, others)
        cause = (
            f"token {found[1]} of document {int(request.segments[row, found[1]])} moves it" if found
            else "no other document's tokens move it, so its position in the row does"
        )  # fmt: skip
        where = Where(row, query, found[1] if found else None)
        return where, f"document {own} answers otherwise than alone at slot {query}; {cause}"

    return as_alone(bench, NAME, case, request, docs, good="each document answers as it does alone", place=place)


def _asked(bench: Bench, way: str, docs: list[list[int]], request: Request) -> Finding:
    """The same pack, asked for in another way that means the same."""

    def measure(run: Run) -> Reading:
        with run.probe.asked(way):
            got = run.logits(request)
        return against_alone(run, request, docs, got)

    def place(run: Run, index: Index) -> tuple[Where, str]:
        row, query = index
        own = int(request.segments[row, query])
        others = [(row, slot) for slot in (request.segments[row] != own).nonzero()[:, 0].tolist()]
        with run.probe.asked(way):
            found = culprit(bench, run, request, row, query, others)
        where = Where(row, query, found[1] if found else None)
        return where, f"packed documents are no longer apart {way}: document {own} answers otherwise than alone"

    good = f"each document answers as it does alone {way}"
    return finding(bench, NAME, way, bench.read(measure), bits=False, good=good, place=place)


def _copy(bench: Bench, docs: list[list[int]]) -> Finding:
    """The same document twice in a row: a second copy that could see the first would know what comes next."""
    request = Request.packed([docs[1], docs[0], docs[1]])
    (_, first), _, (_, second) = documents(request)

    def measure(run: Run) -> Reading:
        logits = run.logits(request)
        sizes_BT = torch.zeros(request.shape, dtype=torch.float64)
        sizes_BT[0, second] = moved(logits[0, first][None], logits[0, second][None])[0]
        return Reading(run, sizes_BT, scale_of(logits))

    def place(run: Run, index: Index) -> tuple[Where, str]:
        row, query = index
        found = culprit(bench, run, request, row, query, [(0, int(slot)) for slot in range(int(second[0]))])
        return Where(
            row, query, found[1] if found else None
        ), f"the second copy of a document answers otherwise at slot {query}"

    good = "a second copy of a document answers like the first"
    return finding(bench, NAME, "copy", bench.read(measure), bits=False, good=good, place=place)


def _change_one(bench: Bench, request: Request, number: int) -> Finding:
    inside_BT = request.segments == number
    after = bench.fresh(request, inside_BT)

    def place(run: Run, index: Index) -> tuple[Where, str]:
        row, query = index
        found = culprit(bench, run, request, row, query, [(0, int(slot)) for slot in request.slots(0, number)])
        document = int(request.segments[row, query])
        message = f"document {document} moves at slot {query} when document {number} is changed"
        return Where(row, query, found[1] if found else None), message

    case, good = f"document {number} changed", f"changing document {number} moves no other"
    return not_moved(bench, NAME, case, request, after, request.real & ~inside_BT, good=good, place=place)


def _gradients(bench: Bench, docs: list[list[int]], packed: Request) -> Finding:
    """The loss and every parameter's gradient are sums over the documents."""
    run = bench.loss_run if bench.can("loss") else bench.runs[-1]
    named = weights_of(run)
    if not named:
        return Finding(NAME, "not_applicable", "the target has no parameters that take gradients", "gradients")
    total, grads = _objective(bench, run, [packed], named)
    apart = [doc for doc in docs if len(doc) > 1 or not bench.can("loss")]  # one teaches nothing
    total_apart, want = _objective(bench, run, [Request.from_rows([doc]) for doc in apart], named)
    what = "loss" if bench.can("loss") else "weighted sum of the logits"
    size = abs(total - total_apart)
    if size > tolerance_of(run) * (1 + abs(total_apart)):
        message = f"the {what} of the pack is {total:.6g}, but its documents alone add up to {total_apart:.6g}"
        return Finding(NAME, "leak", message, "gradients", Where(0), size)
    wrong = first_difference(run, want, grads)
    if wrong is not None:
        message = f"the gradient of {wrong[0]} is not the sum over the documents"
        return Finding(NAME, "leak", message, "gradients", Where(0), wrong[1])
    good = f"the {what} and the gradients of all {len(named)} parameters are sums over the documents"
    return Finding(NAME, "pass", good, "gradients", size=size)


def _objective(bench: Bench, run: Run, requests: list[Request], named: dict[str, Tensor]) -> tuple[float, Gradients]:
    """The sum over some requests, and its gradients."""

    def one(request: Request) -> Tensor:
        if bench.can("loss"):
            return run.differentiable_loss(request)
        logits = run.differentiable(request)
        return (logits * bench.directions(logits))[request.real.to(logits.device)].sum()

    total = torch.stack([one(request) for request in requests]).sum()
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
