"""Does a row answer the same whoever is in the batch with it?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from pellucid.audits.checks.check import Check
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.decision import LENGTHS, Change, as_alone, caused, not_moved, rows_of
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

    def message(where: Location) -> str:
        cause = (
            f"token {where.key} of row {where.key_row} moves it" if where.key_row is not None
            else "no other row's tokens move it, so their number or length does"
        )  # fmt: skip
        return f"row {where.row} answers otherwise than alone at {where.query}; {cause}"

    place = caused(context, batch, partial(_mates, batch), message)
    return as_alone(context, NAME, case, batch, rows, good="every row answers as it does alone", place=place)


def _mates_changed(context: AuditContext, batch: Batch, victim: int) -> Finding:
    mine_BT = torch.zeros_like(batch.token_mask)
    mine_BT[victim] = True
    after = context.fresh(batch, ~mine_BT & batch.token_mask)

    def message(where: Location) -> str:
        return f"row {where.row} moves at {where.query} when the other rows' tokens are changed"

    place = caused(context, batch, partial(_mates, batch), message)
    case, good = f"mates of row {victim} changed", f"row {victim} does not move when the other rows are changed"
    return not_moved(context, NAME, case, batch, after, mine_BT & batch.token_mask, good=good, place=place)


def _mates(batch: Batch, row: int, query: int) -> list[Change]:
    del query
    return [(r, s) for r, s in batch.token_mask.nonzero().tolist() if r != row]


CHECK = Check(NAME, "Does a row answer the same, alone and in any company?", run, length=5)
