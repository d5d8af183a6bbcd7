"""Does a padding mask that is accepted do anything, holes included?"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pellucid.audits.checks.check import question
from pellucid.audits.engine.compare import compare, deviation, fragile, leak, not_applicable, skip_if_unsupported
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.expected_flow import expected_flow
from pellucid.batch import Batch, Side
from pellucid.records import Finding, Location

_SLOTS = 6
_HIDDEN: dict[str, tuple[tuple[int, ...], set[Side]]] = {
    "a hole": ((2,), {"left", "right"}),
    "a wider hole": ((2, 3), {"left", "right"}),
    "from the left": ((0, 1), {"left"}),
    "from the right": ((-2, -1), {"right"}),
}
"""The tokens that are hidden, and the sides that a target must say it can be padded on."""


@question("Does hiding tokens that others see change what those say, and hide them?", needs={"padding"}, length=_SLOTS)
def check(context: AuditContext) -> Iterator[Finding]:
    """Two equal rows; in the second some real tokens, which others see, are declared padding."""
    row = context.tokens(_SLOTS)
    for case, (hidden, sides) in _HIDDEN.items():
        if sides <= set(context.hiding_sides):
            yield _hiding(context, case, row, [slot % len(row) for slot in hidden])


@skip_if_unsupported
def _hiding(context: AuditContext, case: str, row: list[int], hidden: list[int]) -> Finding:
    full = Batch.from_rows([row, row])
    hidden_BT = torch.zeros_like(full.token_mask)
    hidden_BT[1, hidden] = True
    watched_BT = expected_flow(context.probe.rules, full)[:, :, hidden].any(-1) & ~hidden_BT
    watched_BT[0] = False
    if not bool(watched_BT.any()):
        return not_applicable(case, "by the declared rules these tokens are seen by no other")
    masked = full.replace(segments=torch.where(hidden_BT, 0, full.segments))

    def moves(after: Batch) -> bool:
        moved = deviation(context.runs[-1], full, after, watched_BT)
        return moved.largest > (1e-14 * moved.scale if moved.run.dtype == torch.float64 else 0.0)

    if not moves(context.fresh(full, hidden_BT)):
        return fragile(case, "these tokens move no other even when they are visible, so hiding them shows nothing")
    if not moves(masked):
        which = " and ".join(map(str, hidden))
        message = f"declaring tokens {which} padding changes nothing: the mask is accepted and ignored"
        where = Location(1, int(watched_BT[1].nonzero()[0]), hidden[0])
        return leak(case, message, where, 0.0, "with and without the mask equal, the tokens being seen")
    real_BT = masked.token_mask  # positions count real tokens only, as they do in every request
    counted = masked.replace(positions=torch.where(real_BT, real_BT.long().cumsum(1) - 1, 0))
    return compare(
        context, case, counted, context.fresh(counted, hidden_BT), bits=True,
        good="hiding tokens changes what others say, and what is hidden moves nothing",
        wrong="the token in slot {query} moves with a hidden token", suspects=lambda *_: [(1, slot) for slot in hidden],
    )  # fmt: skip
