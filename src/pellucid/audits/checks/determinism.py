"""Does the same request get the same answer, bit for bit, whatever was asked, drawn or copied before?"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pellucid.audits.checks.check import Check
from pellucid.audits.method.bench import Bench
from pellucid.audits.method.care import left_as_found
from pellucid.audits.method.copies import as_it_is, copied, over, reseeded
from pellucid.audits.method.judge import Index, finding, unless_refused
from pellucid.audits.method.measure import Reading, Run, moved, scale_of
from pellucid.probe import Request
from pellucid.records import Finding, Where

NAME = "determinism"
_ORDER = [2, 0, 3, 1]


def run(bench: Bench) -> Iterator[Finding]:
    """Twice, after another request, with other random numbers, on a copy, in another order of rows."""
    native = bench.native
    request = Request.from_rows([bench.tokens(5) for _ in range(4)])
    first = native.logits(request).clone()
    with left_as_found(bench.probe.module):
        cases = [_compared(native, "twice", first, native.logits(request), "when asked again at once")]
        native.logits(Request.from_rows([bench.tokens(3)]))
        _longest(bench)
        native.logits(bench.fresh(request))
        after = native.logits(request)
        cases.append(_compared(native, "after other requests", first, after, "after other requests"))
        reseeded(12345)
        cases.append(_compared(native, "other seeds", first, native.logits(request), "after other random numbers"))
    yield from cases
    yield unless_refused(NAME, "on a copy", lambda: _on_a_copy(native, request, first))
    yield from _other_lengths(bench)
    if not any(case.failed for case in cases):
        yield _other_order(bench, request)


def _longest(bench: Bench) -> None:
    """Ask for more than any other check does: what grows with the longest request grows here."""
    longer = min(bench.length + 8, bench.probe.max_length or bench.length + 8)
    try:
        bench.native.logits(Request.from_rows([bench.tokens(longer)]))
    except Exception:  # noqa: BLE001 (a bound that it does not state: refusing is right)
        return


def _compared(run: Run, case: str, first: Tensor, answer: Tensor, when: str) -> Finding:
    sizes_BT = moved(first, answer)
    size = float(sizes_BT.max())
    if not size:
        return Finding(NAME, "pass", f"the same request is answered the same {when}, bit for bit", case, size=0.0)
    row, query = sizes_BT.nonzero()[0].tolist()
    rounding = size <= run.rounding * scale_of(first)
    message = f"the same request is answered otherwise {when}, first at {query}"
    note = "no more than rounding: a kernel whose order varies" if rounding else "more than rounding"
    return Finding(NAME, "fragile" if rounding else "leak", message, case, Where(row, query), size, note)


def _on_a_copy(native: Run, request: Request, first: Tensor) -> Finding:
    """A copy that answers otherwise keeps something outside of itself."""
    return _compared(native, "on a copy", first, copied(native).logits(request), "by a deep copy")


def _other_lengths(bench: Bench) -> Iterator[Finding]:
    """Two copies of what the target was before it was ever asked: one hears a short row first, one a long one.

    Tables of angles, masks and biases are built by the first request and grown by a longer one, each in its own code.
    """
    case = "shorter and longer"
    if bench.untouched is None:
        return
    sizes = (min(3, bench.length), max(bench.length // 2, 1), bench.length)
    short, middle, long = (Request.from_rows([bench.tokens(size)]) for size in sizes)
    padded = Request.from_rows([bench.tokens(sizes[-1] - 1)], length=sizes[-1])  # of the long row's shape
    right = bench.can("padding") and "right" in bench.probe.sides
    answers: list[dict[int, Tensor]] = []
    with left_as_found(bench.probe.module):
        for order in ([short, *([padded] if right else []), middle, long], [long, middle, short]):
            module = as_it_is(bench.untouched)
            if module is None:
                return
            run = over(bench.native, module.eval())
            reseeded(1)
            answers.append({id(request): run.logits(request).clone() for request in order})
    rising, falling = answers
    for request, first, then, when in (
        (long, falling, rising, "after shorter requests than when it comes first"),
        (middle, rising, falling, "after a longer request than after shorter ones"),
        (short, rising, falling, "after longer requests than when it comes first"),
    ):
        found = _compared(bench.native, case, first[id(request)], then[id(request)], when)
        if found.failed:
            yield found
            return
    yield Finding(NAME, "pass", "a row is answered the same after shorter and after longer ones", case)


def _other_order(bench: Bench, request: Request) -> Finding:
    """Rows in another order are answered in that order."""
    order = torch.tensor(_ORDER)
    shuffled = request.with_tokens(request.tokens[order])

    def measure(run: Run) -> Reading:
        want = run.logits(request)[order]
        return Reading(run, moved(want, run.logits(shuffled)), scale_of(want))

    def place(run: Run, index: Index) -> tuple[Where, str]:
        del run
        row, query = index
        message = f"the row answers otherwise at {query} as row {row} of the batch than as row {_ORDER[row]}"
        return Where(row, query), message

    good = "rows in another order are answered the same, in that order"
    return finding(bench, NAME, "rows in another order", bench.read(measure), bits=False, good=good, place=place)


CHECK = Check(
    NAME,
    "Does the same request get the same answer, whatever was asked, drawn or copied before?",
    run,
    length=5,
    steady=False,
)
