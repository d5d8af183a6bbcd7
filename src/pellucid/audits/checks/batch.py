"""Does a row answer the same whoever is in the batch with it?"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pellucid.audits.checks.check import question
from pellucid.audits.engine.compare import compare, compare_with_alone, hidden_tokens
from pellucid.audits.engine.context import LENGTHS, AuditContext
from pellucid.batch import Batch
from pellucid.records import Finding


@question("Does a row answer the same, alone and in any company?", length=5)
def check(context: AuditContext) -> Iterator[Finding]:
    """Rows beside others, of other lengths where the target can be padded; then with the others' tokens changed."""
    lengths = LENGTHS if context.can("padding") else (5, 5, 5)
    kind = "beside rows of other lengths" if context.can("padding") else "beside rows of the same length"
    rows, side = context.rows(lengths), context.probe.sides[0]
    for case, order in ((kind, rows), (f"{kind}, other order", rows[::-1])):
        batch = context.with_sources(Batch.from_rows(order, side=side))
        good, wrong = "every row answers as it does alone", "row {row} differs from its output alone at {query}"
        yield compare_with_alone(context, case, batch, order, good=good, wrong=wrong)
    # what is shared out among tokens, such as an expert's capacity, runs short where all choose the same
    equal = [context.tokens(1)[:1] * context.round(min(6, context.length))] * 12
    yield compare_with_alone(
        context, "many equal rows", Batch.from_rows(equal), equal, good="equal rows answer as one of them alone",
        wrong="row {row} of many equal ones differs from its output alone at {query}",
    )  # fmt: skip
    batch = context.with_sources(Batch.from_rows(rows, side=side))
    for row in range(3):
        own_BT = torch.zeros_like(batch.token_mask)
        own_BT[row] = True
        yield compare(
            context, f"rows other than {row} changed", batch, context.fresh(batch, ~own_BT & batch.token_mask),
            watch=own_BT & batch.token_mask, bits=True, suspects=hidden_tokens(context, batch),
            good=f"row {row} does not move when the other rows are changed",
            wrong="row {row} moves at {query} when the other rows' tokens are changed",
        )  # fmt: skip
