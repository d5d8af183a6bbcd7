"""Does a row answer the same whoever is in the batch with it?"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pellucid.audits.checks.check import Check
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.decision import Index
from pellucid.audits.engine.deviation import TargetRun
from pellucid.audits.engine.row_layouts import LENGTHS, as_alone, find_cause, not_moved, rows_of
from pellucid.batch import Batch
from pellucid.records import Finding, Location

NAME = "batch"


def run(context: AuditContext) -> Iterator[Finding]:
    """Mates of other lengths where the target can be told of padding."""
    lengths = LENGTHS if context.can("padding") else (5, 5, 5)
    kind = "of other lengths" if context.can("padding") else "of the same length"
    rows = rows_of(context, lengths)
    yield _with_mates(context, f"mates {kind}", rows)
    yield _with_mates(context, f"mates {kind}, other order", rows[::-1])
    for victim in range(3):
        yield _mates_changed(context, _together(context, rows), victim)


def _together(context: AuditContext, rows: list[list[int]]) -> Batch:
    """Padded on a side on which it can be."""
    return Batch.from_rows(rows, side=context.probe.sides[0])


def _with_mates(context: AuditContext, case: str, rows: list[list[int]]) -> Finding:
    batch = _together(context, rows)

    def place(run: TargetRun, index: Index) -> tuple[Location, str]:
        where = _who(context, run, batch, *index)
        cause = (
            f"token {where.key} of row {where.key_row} moves it" if where.key_row is not None
            else "no other row's tokens move it, so their number or length does"
        )  # fmt: skip
        return where, f"row {where.row} answers otherwise than alone at {where.query}; {cause}"

    return as_alone(context, NAME, case, batch, rows, good="every row answers as it does alone", place=place)


def _mates_changed(context: AuditContext, batch: Batch, victim: int) -> Finding:
    mine_BT = torch.zeros_like(batch.token_mask)
    mine_BT[victim] = True
    after = context.fresh(batch, ~mine_BT & batch.token_mask)

    def place(run: TargetRun, index: Index) -> tuple[Location, str]:
        where = _who(context, run, batch, *index)
        return where, f"row {where.row} moves at {where.query} when the other rows' tokens are changed"

    case, good = f"mates of row {victim} changed", f"row {victim} does not move when the other rows are changed"
    return not_moved(context, NAME, case, batch, after, mine_BT & batch.token_mask, good=good, place=place)


def _who(context: AuditContext, run: TargetRun, batch: Batch, row: int, query: int) -> Location:
    mates = [(r, s) for r, s in batch.token_mask.nonzero().tolist() if r != row]
    found = find_cause(context, run, batch, row, query, mates)
    return Location(row, query) if found is None else Location(row, query, found[1], found[0])


CHECK = Check(NAME, "Does a row answer the same, alone and in any company?", run, length=5)
