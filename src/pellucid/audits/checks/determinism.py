"""Does the same request get the same answer, bit for bit, whatever was asked, drawn or copied before?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from torch import Tensor

from pellucid.audits.checks.check import question
from pellucid.audits.engine.compare import compare, fragile, leak, passed, skip_if_unsupported
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.state import preserve_state, reseed, shallow_weight_copy
from pellucid.audits.engine.target_run import TargetRun, deep_copy, logit_scale, max_abs_diff, run_on
from pellucid.batch import Batch
from pellucid.records import Finding, Location

_ORDER = [2, 0, 3, 1]


@question(
    "Does the same request get the same answer, whatever was asked, drawn or copied before?", length=5, steady=False
)
def check(context: AuditContext) -> Iterator[Finding]:
    """Twice, after another request, with other random numbers, on a copy, in another order of rows."""
    native = context.native
    batch = context.with_sources(Batch.from_rows([context.tokens(5) for _ in range(4)]))
    first = native.logits(batch).clone()
    with preserve_state(context.probe.module):
        cases = [_compared(native, "twice", first, native.logits(batch), "when asked again at once")]
        native.logits(Batch.from_rows([context.tokens(3)]))
        longer = min(context.length + 8, context.probe.max_length or context.length + 8)
        with suppress(Exception):  # what grows with the longest request grows here; refusing is right
            native.logits(Batch.from_rows([context.tokens(longer)]))
        native.logits(context.fresh(batch))
        after = native.logits(batch)
        cases.append(_compared(native, "after other requests", first, after, "after other requests"))
        reseed(12345)
        cases.append(_compared(native, "other seeds", first, native.logits(batch), "after other random numbers"))
    yield from cases
    yield _on_a_copy(context, "on a copy", batch, first)
    yield from _other_lengths(context)
    if not any(case.failed for case in cases):
        yield _other_order(context, batch)


def _compared(run: TargetRun, case: str, first: Tensor, answer: Tensor, when: str) -> Finding:
    sizes_BT = max_abs_diff(first, answer)
    size = float(sizes_BT.max())
    if not size:
        return passed(case, f"the same request is answered the same {when}, bit for bit", 0.0)
    where = Location(*sizes_BT.nonzero()[0].tolist())
    message = f"the same request gets another answer {when}, first at {where.query}"
    if size <= run.rounding * logit_scale(first):
        return fragile(case, message, where, size, "no more than rounding: a kernel whose order varies")
    return leak(case, message, where, size, "more than rounding")


@skip_if_unsupported
def _on_a_copy(context: AuditContext, case: str, batch: Batch, first: Tensor) -> Finding:
    """A copy that differs keeps something outside of itself."""
    return _compared(context.native, case, first, deep_copy(context.native).logits(batch), "by a deep copy")


def _other_lengths(context: AuditContext) -> Iterator[Finding]:
    """Two copies of what the target was before it was called: one is given a short row first, one a long one.

    Tables of angles, masks and biases are built by the first request and grown by a longer one, each in its own code.
    """
    case = "shorter and longer"
    if context.untouched is None:
        return
    sizes = (min(3, context.length), max(context.length // 2, 1), context.length)
    short, middle, long = (Batch.from_rows([context.tokens(size)]) for size in sizes)
    padded = Batch.from_rows([context.tokens(sizes[-1] - 1)], length=sizes[-1])  # of the long row's shape
    right = context.can("padding") and "right" in context.probe.sides
    answers: list[dict[int, Tensor]] = []
    with preserve_state(context.probe.module):
        for order in ([short, *([padded] if right else []), middle, long], [long, middle, short]):
            module = shallow_weight_copy(context.untouched)
            if module is None:
                return
            run = run_on(context.native, module.eval())
            reseed(1)
            answers.append({id(batch): run.logits(batch).clone() for batch in order})
    rising, falling = answers
    for batch, first, then, when in (
        (long, falling, rising, "after shorter requests than when it comes first"),
        (middle, rising, falling, "after a longer request than after shorter ones"),
        (short, rising, falling, "after longer requests than when it comes first"),
    ):
        found = _compared(context.native, case, first[id(batch)], then[id(batch)], when)
        if found.failed:
            yield found
            return
    yield passed(case, "a row is answered the same after shorter and after longer ones")


def _other_order(context: AuditContext, batch: Batch) -> Finding:
    """Rows in another order are answered in that order."""
    return compare(
        context, "rows in another order", lambda run: run.logits(batch)[_ORDER],
        batch.replace(
            tokens=batch.tokens[_ORDER],
            source=None if batch.source is None else batch.source.replace(tokens=batch.source.tokens[_ORDER]),
        ),
        good="rows in another order are answered the same, in that order",
        wrong=lambda where: (
            f"the row differs at {where.query} as row {where.row} of the batch than as row "
            f"{_ORDER[where.row]}"
        ),
    )  # fmt: skip
