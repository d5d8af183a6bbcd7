"""Are rows and queries that see nothing harmless: other rows unmoved, outputs and gradients finite?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from pellucid.audits.checks.check import Check
from pellucid.audits.checks.pooled import pooled
from pellucid.audits.method.bench import Bench
from pellucid.audits.method.gradients import (
    embedding_gradient,
    first_not_finite,
    gradients_of,
    weights_of,
)
from pellucid.audits.method.judge import Index, finding, judge, unless_no_gradient
from pellucid.audits.method.measure import Run
from pellucid.audits.method.rows import against_alone, rows_of
from pellucid.probe import Request
from pellucid.records import Finding, Where

NAME = "hidden_rows"
_EMPTY = 1  # the row that is all padding


def run(bench: Bench) -> Iterator[Finding]:
    """A row of nothing but padding beside real ones; padded on the left, a real row's first slots see nothing too."""
    short, long = rows_of(bench, (3, 5))
    for side in bench.one_sided:
        request = Request.from_rows([short, [], long], side=side)
        try:
            bench.native.plain(request)
        except Exception as error:  # noqa: BLE001 (refusing such a row is right too)
            message = f"a row without tokens is refused: {type(error).__name__}"
            yield Finding(NAME, "not_applicable", message, f"{side} padding")
            continue
        yield _real_rows(bench, f"{side} padding, real rows", request, [short, long])
        case = f"{side} padding, gradients"
        yield unless_no_gradient(NAME, case, partial(_gradients, bench, case, request))
        yield _pads(bench, f"{side} padding, hidden slots", request)
    yield from pooled(bench, NAME)


def _real_rows(bench: Bench, case: str, request: Request, rows: list[list[int]]) -> Finding:
    readings = bench.read(lambda run: against_alone(run, request, rows))
    if judge(bench, readings, bits=False).status != "pass":
        full = bench.tokens(5)
        instead = Request.from_rows([rows[0], full, rows[1]])
        beside = bench.read(lambda run: against_alone(run, instead, [rows[0], full, rows[1]]))
        if judge(bench, beside, bits=False).status != "pass":
            message = "these rows answer otherwise than alone beside a full row too (see padding and batch)"
            return Finding(NAME, "not_applicable", message, case)

    def place(run: Run, index: Index) -> tuple[Where, str]:
        row, query = index
        finite = bool(run.logits(request)[row, query].isfinite().all())
        how = "answers otherwise than alone" if finite else "is NaN or infinite"
        return Where(row, query, None, _EMPTY), f"the token in slot {query} {how} beside a row that is all padding"

    good = "real rows answer as they do alone beside a row that is all padding"
    return finding(bench, NAME, case, readings, bits=False, good=good, place=place)


def _gradients(bench: Bench, case: str, request: Request) -> Finding:
    """What the real tokens teach must be finite: 0 · NaN on the way back is NaN."""
    run = bench.native
    if not weights_of(run):
        return Finding(NAME, "not_applicable", "the target has no parameters that take gradients", case)
    spoilt = _spoilt_weights(bench, request)
    if spoilt is None and bench.can("embeddings"):
        spoilt = _spoilt_embeddings(bench, request)
    if spoilt is None:
        good = "the real tokens give every weight a finite gradient"
        return Finding(NAME, "pass", good, case)
    message = f"the gradient of {spoilt} is not finite beside queries that see nothing: one step destroys the weights"
    return Finding(NAME, "leak", message, case, Where(_EMPTY), float("inf"), "gradients are finite or not")


def _spoilt_weights(bench: Bench, request: Request) -> str | None:
    """By the outputs and by the loss: one sum, for what is not finite in a part is not finite in the whole."""
    run = bench.native
    logits = run.differentiable(request)
    total = (logits * bench.directions(logits))[request.real.to(logits.device)].sum()
    if bench.can("loss"):
        loss = run.differentiable_loss(request)
        if not bool(loss.isfinite()):
            return "the loss (itself not finite)"
        total = total + loss
    return first_not_finite(gradients_of(total, weights_of(run))) if total.requires_grad else None


def _spoilt_embeddings(bench: Bench, request: Request) -> str | None:
    grad = embedding_gradient(bench, bench.native, request)
    return "the embeddings" if grad is not None and not bool(grad.isfinite().all()) else None


def _pads(bench: Bench, case: str, request: Request) -> Finding:
    """Nobody looks there, but NaN that stands there is one product away from everything."""
    bad_BT: Tensor = ~bench.native.plain(request).isfinite().all(-1) & ~request.real
    if not bool(bad_BT.any()):
        return Finding(NAME, "pass", "outputs at slots that see nothing are finite", case)
    row, query = bad_BT.nonzero()[0].tolist()
    message = f"the output at slot {query}, which sees nothing, is NaN or infinite: undefined hidden rows"
    return Finding(NAME, "fragile", message, case, Where(row, query), float("inf"))


CHECK = Check(
    NAME,
    "Are rows and queries that see nothing harmless to real rows, outputs and gradients?",
    run,
    frozenset({"padding"}),
    length=5,
)
