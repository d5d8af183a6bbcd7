"""Everything behind a cut changed at once: every pair across the cut is looked at by one run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pellucid.audits.method.bench import Bench
from pellucid.audits.method.changes import Changes
from pellucid.audits.method.judge import Index, finding, judge
from pellucid.audits.method.measure import Reading, Run, moved
from pellucid.probe import Request
from pellucid.records import Finding, Where

_NAMED = 8  # more cuts are counted


def tails(
    bench: Bench, changes: Changes, cuts: Sequence[int], check: str, case: str, *, exact: bool = False
) -> Finding:
    """Whether an output up to a cut moves when all that comes behind it is changed.

    float64 is asked where something moved; by ``exact`` in one place, with other tokens, in any case.
    """
    length = len(changes.base)
    behind_CT = torch.arange(length)[None] > torch.tensor(cuts)[:, None]

    def read(run: Run, places: Sequence[int], special: bool = False) -> Reading:
        sizes_CT = torch.zeros(len(cuts), length, dtype=torch.float64)
        moves_CT, scale = changes.moves(run, [changes.with_tail(cuts[place], special) for place in places])
        sizes_CT[list(places)] = moves_CT
        return Reading(run, sizes_CT.masked_fill(behind_CT, 0.0), scale)

    def place(run: Run, index: Index) -> tuple[Where, str]:
        number, query = index
        key = _first_that_moves(changes, run, query, cuts[number])
        message = f"the output at {query} moves when all tokens after {cuts[number]} are changed"
        return Where(0, query, key), message + ("" if key is None else f", token {key} the first that does it")

    every = range(len(cuts))
    readings = [read(bench.native, every)]
    if bench.exact is not None and (readings[0].largest or exact):
        middle = [len(cuts) // 2]
        readings.append(read(bench.exact, every) if readings[0].largest else read(bench.exact, middle, special=True))
    good = f"no output moved when all that comes after it was changed ({_places(cuts, length)})"
    result = finding(bench, check, case, readings, bits=True, good=good, place=place)
    verdict = judge(bench, readings, bits=True)
    if result.status != "leak" or _alone(changes, verdict.reading.run, cuts, verdict.first):
        return result
    return mixed_rows(result)


def _places(cuts: Sequence[int], length: int) -> str:
    """Where was cut, in words."""
    if len(cuts) >= length - 1:
        return "cut behind every token"
    named = ", ".join(map(str, cuts)) if len(cuts) <= _NAMED else f"{len(cuts)} of {length - 1} tokens"
    return f"cut behind {named}"


def mixed_rows(result: Finding) -> Finding:
    """What is said where outputs moved beside other rows only."""
    message = "outputs moved only because other rows of the batch changed: the rows mix (see batch)"
    return Finding(result.check, "fragile", message, result.case, result.where, result.size, result.decided)


def _alone(changes: Changes, run: Run, cuts: Sequence[int], index: Index) -> bool:
    """Whether it moves with nothing else in the batch."""
    number, query = index
    return _moves(changes, run, changes.with_tail(cuts[number]), query) or _moves(
        changes, run, changes.with_tail(cuts[number], special=True), query
    )


def _moves(changes: Changes, run: Run, row: Sequence[int], query: int) -> bool:
    after: Tensor = changes.forward(run, Request.from_rows([row]))
    return float(moved(changes.unchanged(run, 1), after)[0, query]) > 0


def _first_that_moves(changes: Changes, run: Run, query: int, cut: int) -> int | None:
    """The first token behind the cut that, changed with those before it, moves the query: found by halving."""
    tail, low, high = changes.with_tail(cut), cut + 1, len(changes.base) - 1
    if not _moves(changes, run, tail, query):
        return None
    while low < high:
        middle = (low + high) // 2
        row = [*tail[: middle + 1], *changes.base[middle + 1 :]]
        low, high = (low, middle) if _moves(changes, run, row, query) else (middle + 1, high)
    return low
