"""Does a row answer the same whoever is in the batch with it?"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pellucid.audits.checks.check import question
from pellucid.audits.engine.compare import Suspects, alone, compare
from pellucid.audits.engine.context import LENGTHS, AuditContext
from pellucid.batch import Batch
from pellucid.records import Finding, Location


@question("Does a row answer the same, alone and in any company?", length=5)
def check(context: AuditContext) -> Iterator[Finding]:
    """Rows beside others, of other lengths where the target can be padded; then with the others' tokens changed."""
    lengths = LENGTHS if context.can("padding") else (5, 5, 5)
    kind = "beside rows of other lengths" if context.can("padding") else "beside rows of the same length"
    rows, side = context.rows(lengths), context.probe.sides[0]
    for case, order in ((kind, rows), (f"{kind}, other order", rows[::-1])):
        batch = Batch.from_rows(order, side=side)
        yield compare(
            context, case, alone(batch, order), batch,
            good="every row answers as it does alone", wrong=_in_company, suspects=_tokens_of_others(batch),
        )  # fmt: skip
    batch = Batch.from_rows(rows, side=side)
    for row in range(3):
        own_BT = torch.zeros_like(batch.token_mask)
        own_BT[row] = True
        yield compare(
            context, f"rows other than {row} changed", batch, context.fresh(batch, ~own_BT & batch.token_mask),
            watch=own_BT & batch.token_mask, bits=True, suspects=_tokens_of_others(batch),
            good=f"row {row} does not move when the other rows are changed",
            wrong="row {row} moves at {query} when the other rows' tokens are changed",
        )  # fmt: skip


def _in_company(where: Location) -> str:
    cause = (
        "no other row's tokens move it, so their number or length does" if where.key_row is None
        else f"token {where.key} of row {where.key_row} moves it"
    )  # fmt: skip
    return f"row {where.row} differs from its output alone at {where.query}; {cause}"


def _tokens_of_others(batch: Batch) -> Suspects:
    return lambda row, _: [(r, slot) for r, slot in batch.token_mask.nonzero().tolist() if r != row]
