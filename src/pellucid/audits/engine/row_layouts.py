"""Rows of different lengths, alone and together: what the checks of padding, batches and packs share."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.decision import Place, finding
from pellucid.audits.engine.deviation import Deviation, TargetRun, logit_scale, max_abs_diff
from pellucid.batch import Batch
from pellucid.records import Finding

LENGTHS = (3, 5, 1)
Change = tuple[int, int]  # row and slot of a token to change


def rows_of(context: AuditContext, lengths: Iterable[int] = LENGTHS) -> list[list[int]]:
    """Random rows; the longest ends with token 0 (where it may), which is also what stands in padded slots."""
    rows = [context.tokens(length) for length in lengths]
    longest = max(rows, key=len)
    longest[-1] = context.ends[0]
    return rows


def documents(batch: Batch) -> list[tuple[int, Tensor]]:
    """``(row, slots)`` of each document, row by row."""
    return [
        (row, batch.slots(row, segment))
        for row in range(batch.shape[0])
        for segment in range(1, int(batch.segments[row].max()) + 1)
    ]


def against_alone(run: TargetRun, batch: Batch, alone: list[list[int]], got_BTV: Tensor | None = None) -> Deviation:
    """``sizes[row, slot]``: how far each document's outputs are from those of the same tokens run alone.

    ``got_BTV`` are the outputs to compare; left out, they are the plain logits of the request.
    """
    got_BTV = run.plain(batch) if got_BTV is None else got_BTV
    sizes_BT, scale = torch.zeros(batch.shape, dtype=torch.float64), 1.0
    for (row, slots), tokens in zip(documents(batch), [t for t in alone if t], strict=True):
        want = run.alone(tokens)
        sizes_BT[row, slots] = max_abs_diff(want, got_BTV[row, slots])
        scale = max(scale, logit_scale(want))
    return Deviation(run, sizes_BT, scale)


def unmoved(run: TargetRun, before: Batch, after: Batch, watched_BT: Tensor) -> Deviation:
    """``sizes[row, slot]``: how far the watched outputs moved between two requests of one shape."""
    first, second = run.plain(before), run.logits(after)
    return Deviation(run, torch.where(watched_BT, max_abs_diff(first, second), 0.0), logit_scale(first[watched_BT]))


def as_alone(
    context: AuditContext, check: str, case: str, batch: Batch, alone: list[list[int]], *, good: str, place: Place
) -> Finding:
    """Whether each document answers as the same tokens do alone."""
    readings = context.read(lambda run: against_alone(run, batch, alone))
    return finding(context, check, case, readings, bits=False, good=good, place=place)


def not_moved(
    context: AuditContext,
    check: str,
    case: str,
    before: Batch,
    after: Batch,
    watched_BT: Tensor,
    *,
    good: str,
    place: Place,
) -> Finding:
    """Whether the watched outputs are the same for both requests, bit for bit."""
    readings = context.read(lambda run: unmoved(run, before, after, watched_BT))
    return finding(context, check, case, readings, bits=True, good=good, place=place)


def find_cause(
    context: AuditContext, run: TargetRun, batch: Batch, row: int, query: int, suspects: Iterable[Change]
) -> Change | None:
    """The first suspect slot whose own change moves the output at (row, query); None when none does alone."""
    before = run.logits(batch)
    limit = 1e-12 * logit_scale(before) if run.dtype == torch.float64 else 0.0
    for suspect in suspects:
        after = batch.with_token(*suspect, context.other(int(batch.tokens[suspect])))
        if float(max_abs_diff(before[row, query], run.logits(after)[row, query])) > limit:
            return suspect
    return None
