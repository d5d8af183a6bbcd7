"""Everything behind a cut changed at once: every pair across the cut is looked at by one run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.decision import Index, finding, judge
from pellucid.audits.engine.deviation import Deviation, TargetRun, max_abs_diff
from pellucid.audits.engine.perturbation import Perturbations
from pellucid.batch import Batch
from pellucid.records import Finding, Location

_NAMED = 8  # more cuts are counted


def perturb_suffixes(
    context: AuditContext, changes: Perturbations, cuts: Sequence[int], check: str, case: str, *, exact: bool = False
) -> Finding:
    """Whether an output up to a cut moves when all that comes behind it is changed.

    float64 is asked where something moved; by ``exact`` in one place, with other tokens, in any case.
    """
    length = len(changes.base)
    behind_CT = torch.arange(length)[None] > torch.tensor(cuts)[:, None]

    def read(run: TargetRun, places: Sequence[int], special: bool = False) -> Deviation:
        sizes_CT = torch.zeros(len(cuts), length, dtype=torch.float64)
        moves_CT, scale = changes.moves(run, [changes.with_tail(cuts[place], special) for place in places])
        sizes_CT[list(places)] = moves_CT
        return Deviation(run, sizes_CT.masked_fill(behind_CT, 0.0), scale)

    def place(run: TargetRun, index: Index) -> tuple[Location, str]:
        number, query = index
        key = _first_that_moves(changes, run, query, cuts[number])
        message = f"the output at {query} moves when all tokens after {cuts[number]} are changed"
        return Location(0, query, key), message + ("" if key is None else f", token {key} the first that does it")

    every = range(len(cuts))
    readings = [read(context.native, every)]
    if context.exact is not None and (readings[0].largest or exact):
        middle = [len(cuts) // 2]
        readings.append(
            read(context.exact, every) if readings[0].largest else read(context.exact, middle, special=True)
        )
    good = f"no output moved when all that comes after it was changed ({_places(cuts, length)})"
    result = finding(context, check, case, readings, bits=True, good=good, place=place)
    verdict = judge(context, readings, bits=True)
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


def _alone(changes: Perturbations, run: TargetRun, cuts: Sequence[int], index: Index) -> bool:
    """Whether it moves with nothing else in the batch."""
    number, query = index
    return _moves(changes, run, changes.with_tail(cuts[number]), query) or _moves(
        changes, run, changes.with_tail(cuts[number], special=True), query
    )


def _moves(changes: Perturbations, run: TargetRun, row: Sequence[int], query: int) -> bool:
    after: Tensor = changes.forward(run, Batch.from_rows([row]))
    return float(max_abs_diff(changes.unchanged(run, 1), after)[0, query]) > 0


def _first_that_moves(changes: Perturbations, run: TargetRun, query: int, cut: int) -> int | None:
    """The first token behind the cut that, changed with those before it, moves the query: found by halving."""
    tail, low, high = changes.with_tail(cut), cut + 1, len(changes.base) - 1
    if not _moves(changes, run, tail, query):
        return None
    while low < high:
        middle = (low + high) // 2
        row = [*tail[: middle + 1], *changes.base[middle + 1 :]]
        low, high = (low, middle) if _moves(changes, run, row, query) else (middle + 1, high)
    return low
