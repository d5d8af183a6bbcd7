"""Does a row answer the same whoever is in the batch with it?"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pellucid.audits.checks.check import Check
from pellucid.audits.method.bench import Bench
from pellucid.audits.method.judge import Index
from pellucid.audits.method.measure import Run
from pellucid.audits.method.rows import LENGTHS, as_alone, culprit, not_moved, rows_of
from pellucid.probe import Request
from pellucid.records import Finding, Where

NAME = "batch"


def run(bench: Bench) -> Iterator[Finding]:
    """Mates of other lengths where the target can be told of padding."""
    lengths = LENGTHS if bench.can("padding") else (5, 5, 5)
    kind = "of other lengths" if bench.can("padding") else "of the same length"
    rows = rows_of(bench, lengths)
    yield _with_mates(bench, f"mates {kind}", rows)
    yield _with_mates(bench, f"mates {kind}, other order", rows[::-1])
    for victim in range(3):
        yield _mates_changed(bench, _together(bench, rows), victim)


def _together(bench: Bench, rows: list[list[int]]) -> Request:
    """Padded on a side on which it can be."""
    return Request.from_rows(rows, side=bench.probe.sides[0])


def _with_mates(bench: Bench, case: str, rows: list[list[int]]) -> Finding:
    request = _together(bench, rows)

    def place(run: Run, index: Index) -> tuple[Where, str]:
        where = _who(bench, run, request, *index)
        cause = (
            f"token {where.key} of row {where.key_row} moves it" if where.key_row is not None
            else "no other row's tokens move it, so their number or length does"
        )  # fmt: skip
        return where, f"row {where.row} answers otherwise than alone at {where.query}; {cause}"

    return as_alone(bench, NAME, case, request, rows, good="every row answers as it does alone", place=place)


def _mates_changed(bench: Bench, request: Request, victim: int) -> Finding:
    mine_BT = torch.zeros_like(request.real)
    mine_BT[victim] = True
    after = bench.fresh(request, ~mine_BT & request.real)

    def place(run: Run, index: Index) -> tuple[Where, str]:
        where = _who(bench, run, request, *index)
        return where, f"row {where.row} moves at {where.query} when the other rows' tokens are changed"

    case, good = f"mates of row {victim} changed", f"row {victim} does not move when the other rows are changed"
    return not_moved(bench, NAME, case, request, after, mine_BT & request.real, good=good, place=place)


def _who(bench: Bench, run: Run, request: Request, row: int, query: int) -> Where:
    mates = [(r, s) for r, s in request.real.nonzero().tolist() if r != row]
    found = culprit(bench, run, request, row, query, mates)
    return Where(row, query) if found is None else Where(row, query, found[1], found[0])


CHECK = Check(NAME, "Does a row answer the same, alone and in any company?", run, length=5)
