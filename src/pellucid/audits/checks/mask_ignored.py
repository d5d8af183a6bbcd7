"""Does a padding mask that is accepted do anything, holes included?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pellucid.audits.checks.check import Check
from pellucid.audits.method.bench import Bench
from pellucid.audits.method.expected import expected_flow
from pellucid.audits.method.judge import Index, unless_refused
from pellucid.audits.method.measure import Run, moved, scale_of
from pellucid.audits.method.rows import culprit, not_moved
from pellucid.probe import Request, Side
from pellucid.records import Finding, Where

NAME = "mask_ignored"
_SLOTS = 6
_HIDDEN = {"a hole": (2,), "a wider hole": (2, 3), "from the left": (0, 1), "from the right": (4, 5)}

_SIDES: dict[str, set[Side]] = {
    "a hole": {"left", "right"},
    "a wider hole": {"left", "right"},
    "from the left": {"left"},
    "from the right": {"right"},
}  # what a target must say it can be padded on


def run(bench: Bench) -> Iterator[Finding]:
    """Two equal rows; in the second some real tokens, which others see, are declared padding."""
    row = bench.tokens(_SLOTS)
    for case, hidden in _HIDDEN.items():
        if not _SIDES[case] <= set(bench.hiding_sides):
            continue
        yield unless_refused(NAME, case, partial(_hiding, bench, case, row, hidden))


def _hiding(bench: Bench, case: str, row: list[int], hidden: tuple[int, ...]) -> Finding:
    full = Request.from_rows([row, row])
    hidden_BT = torch.zeros_like(full.real)
    hidden_BT[1, list(hidden)] = True
    watched_BT = expected_flow(bench.probe.rules, full)[:, :, list(hidden)].any(-1) & ~hidden_BT
    watched_BT[0] = False
    if not bool(watched_BT.any()):
        return Finding(NAME, "not_applicable", "by the declared rules nobody sees these tokens in any case", case)
    masked = replace(full, segments=torch.where(hidden_BT, 0, full.segments))
    if not _moves(bench, full, bench.fresh(full, hidden_BT), watched_BT):
        message = "these tokens move no other even when they are visible, so hiding them shows nothing"
        return Finding(NAME, "fragile", message, case)
    if not _moves(bench, full, masked, watched_BT):
        query = int(watched_BT[1].nonzero()[0])
        message = f"declaring tokens {_listed(hidden)} padding changes nothing: the mask is accepted and ignored"
        where = Where(1, query, hidden[0])
        return Finding(
            NAME, "leak", message, case, where, 0.0, "with and without the mask equal, the tokens being seen"
        )
    return _content(bench, case, _counted(masked), hidden_BT)


def _moves(bench: Bench, before: Request, after: Request, watched_BT: Tensor) -> bool:
    """Whether any watched output differs, by the most exact run."""
    run = bench.runs[-1]
    first = run.plain(before)
    size = float(torch.where(watched_BT, moved(first, run.logits(after)), 0.0).max())
    return size > (1e-14 * scale_of(first) if run.dtype == torch.float64 else 0.0)


def _counted(masked: Request) -> Request:
    """Positions that count real tokens only, as they do in every request."""
    real = masked.real.long()
    return replace(masked, positions=torch.where(masked.real, real.cumsum(1) - 1, 0))


def _content(bench: Bench, case: str, masked: Request, hidden_BT: Tensor) -> Finding:
    """What the mask hides moves nothing."""
    after = bench.fresh(masked, hidden_BT)

    def place(run: Run, index: Index) -> tuple[Where, str]:
        row, query = index
        found = culprit(bench, run, masked, row, query, [(1, int(slot)) for slot in hidden_BT[1].nonzero()[:, 0]])
        key = None if found is None else found[1]
        return Where(row, query, key, None if row == 1 else 1), f"the token in slot {query} moves with a hidden token"

    good = "hiding tokens changes what others say, and what is hidden moves nothing"
    return not_moved(bench, NAME, case, masked, after, masked.real, good=good, place=place)


def _listed(slots: tuple[int, ...]) -> str:
    return " and ".join(map(str, slots))


CHECK = Check(
    NAME,
    "Does hiding tokens that others see change what those say, and hide them?",
    run,
    frozenset({"padding"}),
    length=_SLOTS,
)
