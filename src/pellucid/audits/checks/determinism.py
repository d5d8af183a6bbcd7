"""Does the same request get the same answer, bit for bit, whatever was asked, drawn or copied before?"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pellucid.audits.checks.check import Check
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.decision import Index, finding, skip_if_unsupported
from pellucid.audits.engine.deviation import Deviation, TargetRun, logit_scale, max_abs_diff
from pellucid.audits.engine.module_copies import deep_copy, reseeded, run_on, shallow_weight_copy
from pellucid.audits.engine.preserve_state import preserve_state
from pellucid.batch import Batch
from pellucid.records import Finding, Location

NAME = "determinism"
_ORDER = [2, 0, 3, 1]


def run(context: AuditContext) -> Iterator[Finding]:
    """Twice, after another request, with other random numbers, on a copy, in another order of rows."""
    native = context.native
    batch = Batch.from_rows([context.tokens(5) for _ in range(4)])
    first = native.logits(batch).clone()
    with preserve_state(context.probe.module):
        cases = [_compared(native, "twice", first, native.logits(batch), "when asked again at once")]
        native.logits(Batch.from_rows([context.tokens(3)]))
        _longest(context)
        native.logits(context.fresh(batch))
        after = native.logits(batch)
        cases.append(_compared(native, "after other requests", first, after, "after other requests"))
        reseeded(12345)
        cases.append(_compared(native, "other seeds", first, native.logits(batch), "after other random numbers"))
    yield from cases
    yield skip_if_unsupported(NAME, "on a copy", lambda: _on_a_copy(native, batch, first))
    yield from _other_lengths(context)
    if not any(case.failed for case in cases):
        yield _other_order(context, batch)


def _longest(context: AuditContext) -> None:
    """Ask for more than any other check does: what grows with the longest request grows here."""
    longer = min(context.length + 8, context.probe.max_length or context.length + 8)
    try:
        context.native.logits(Batch.from_rows([context.tokens(longer)]))
    except Exception:  # noqa: BLE001 (a bound that it does not state: refusing is right)
        return


def _compared(run: TargetRun, case: str, first: Tensor, answer: Tensor, when: str) -> Finding:
    sizes_BT = max_abs_diff(first, answer)
    size = float(sizes_BT.max())
    if not size:
        return Finding(NAME, "pass", f"the same request is answered the same {when}, bit for bit", case, size=0.0)
    row, query = sizes_BT.nonzero()[0].tolist()
    rounding = size <= run.rounding * logit_scale(first)
    message = f"the same request is answered otherwise {when}, first at {query}"
    note = "no more than rounding: a kernel whose order varies" if rounding else "more than rounding"
    return Finding(NAME, "fragile" if rounding else "leak", message, case, Location(row, query), size, note)


def _on_a_copy(native: TargetRun, batch: Batch, first: Tensor) -> Finding:
    """A copy that answers otherwise keeps something outside of itself."""
    return _compared(native, "on a copy", first, deep_copy(native).logits(batch), "by a deep copy")


def _other_lengths(context: AuditContext) -> Iterator[Finding]:
    """Two copies of what the target was before it was ever asked: one hears a short row first, one a long one.

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
            reseeded(1)
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
    yield Finding(NAME, "pass", "a row is answered the same after shorter and after longer ones", case)


def _other_order(context: AuditContext, batch: Batch) -> Finding:
    """Rows in another order are answered in that order."""
    order = torch.tensor(_ORDER)
    shuffled = batch.replace(tokens=batch.tokens[order])

    def measure(run: TargetRun) -> Deviation:
        want = run.logits(batch)[order]
        return Deviation(run, max_abs_diff(want, run.logits(shuffled)), logit_scale(want))

    def place(run: TargetRun, index: Index) -> tuple[Location, str]:
        del run
        row, query = index
        message = f"the row answers otherwise at {query} as row {row} of the batch than as row {_ORDER[row]}"
        return Location(row, query), message

    good = "rows in another order are answered the same, in that order"
    return finding(context, NAME, "rows in another order", context.read(measure), bits=False, good=good, place=place)


CHECK = Check(
    NAME,
    "Does the same request get the same answer, whatever was asked, drawn or copied before?",
    run,
    length=5,
    steady=False,
)
