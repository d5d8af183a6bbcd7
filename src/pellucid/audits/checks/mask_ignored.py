"""Does a padding mask that is accepted do anything, holes included?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from pellucid.audits.checks.check import Check
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.decision import Index, skip_if_unsupported
from pellucid.audits.engine.deviation import TargetRun, logit_scale, max_abs_diff
from pellucid.audits.engine.expected import expected_flow
from pellucid.audits.engine.row_layouts import find_cause, not_moved
from pellucid.batch import Batch, Side
from pellucid.records import Finding, Location

NAME = "mask_ignored"
_SLOTS = 6
_HIDDEN = {"a hole": (2,), "a wider hole": (2, 3), "from the left": (0, 1), "from the right": (4, 5)}

_SIDES: dict[str, set[Side]] = {
    "a hole": {"left", "right"},
    "a wider hole": {"left", "right"},
    "from the left": {"left"},
    "from the right": {"right"},
}  # what a target must say it can be padded on


def run(context: AuditContext) -> Iterator[Finding]:
    """Two equal rows; in the second some real tokens, which others see, are declared padding."""
    row = context.tokens(_SLOTS)
    for case, hidden in _HIDDEN.items():
        if not _SIDES[case] <= set(context.hiding_sides):
            continue
        yield skip_if_unsupported(NAME, case, partial(_hiding, context, case, row, hidden))


def _hiding(context: AuditContext, case: str, row: list[int], hidden: tuple[int, ...]) -> Finding:
    full = Batch.from_rows([row, row])
    hidden_BT = torch.zeros_like(full.token_mask)
    hidden_BT[1, list(hidden)] = True
    watched_BT = expected_flow(context.probe.rules, full)[:, :, list(hidden)].any(-1) & ~hidden_BT
    watched_BT[0] = False
    if not bool(watched_BT.any()):
        return Finding(NAME, "not_applicable", "by the declared rules nobody sees these tokens in any case", case)
    masked = full.replace(segments=torch.where(hidden_BT, 0, full.segments))
    if not _moves(context, full, context.fresh(full, hidden_BT), watched_BT):
        message = "these tokens move no other even when they are visible, so hiding them shows nothing"
        return Finding(NAME, "fragile", message, case)
    if not _moves(context, full, masked, watched_BT):
        query = int(watched_BT[1].nonzero()[0])
        message = f"declaring tokens {_listed(hidden)} padding changes nothing: the mask is accepted and ignored"
        where = Location(1, query, hidden[0])
        return Finding(
            NAME, "leak", message, case, where, 0.0, "with and without the mask equal, the tokens being seen"
        )
    return _content(context, case, _counted(masked), hidden_BT)


def _moves(context: AuditContext, before: Batch, after: Batch, watched_BT: Tensor) -> bool:
    """Whether any watched output differs, by the most exact run."""
    run = context.runs[-1]
    first = run.plain(before)
    size = float(torch.where(watched_BT, max_abs_diff(first, run.logits(after)), 0.0).max())
    return size > (1e-14 * logit_scale(first) if run.dtype == torch.float64 else 0.0)


def _counted(masked: Batch) -> Batch:
    """Positions that count real tokens only, as they do in every request."""
    real = masked.token_mask.long()
    return masked.replace(positions=torch.where(masked.token_mask, real.cumsum(1) - 1, 0))


def _content(context: AuditContext, case: str, masked: Batch, hidden_BT: Tensor) -> Finding:
    """What the mask hides moves nothing."""
    after = context.fresh(masked, hidden_BT)

    def place(run: TargetRun, index: Index) -> tuple[Location, str]:
        row, query = index
        found = find_cause(context, run, masked, row, query, [(1, int(slot)) for slot in hidden_BT[1].nonzero()[:, 0]])
        key = None if found is None else found[1]
        return Location(
            row, query, key, None if row == 1 else 1
        ), f"the token in slot {query} moves with a hidden token"

    good = "hiding tokens changes what others say, and what is hidden moves nothing"
    return not_moved(context, NAME, case, masked, after, masked.token_mask, good=good, place=place)


def _listed(slots: tuple[int, ...]) -> str:
    return " and ".join(map(str, slots))


CHECK = Check(
    NAME,
    "Does hiding tokens that others see change what those say, and hide them?",
    run,
    frozenset({"padding"}),
    length=_SLOTS,
)
