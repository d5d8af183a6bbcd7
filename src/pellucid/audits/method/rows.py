"""Rows of different lengths, alone and together: what the checks of padding, batches and packs share."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from pellucid.audits.method.bench import Bench
from pellucid.audits.method.judge import Place, finding
from pellucid.audits.method.measure import Reading, Run, moved, scale_of
from pellucid.probe import Request
from pellucid.records import Finding

LENGTHS = (3, 5, 1)
Change = tuple[int, int]  # row and slot of a token to change


def rows_of(bench: Bench, lengths: Iterable[int] = LENGTHS) -> list[list[int]]:
    """Random rows; the longest ends with token 0 (where it may), which is also what stands in padded slots."""
    rows = [bench.tokens(length) for length in lengths]
    longest = max(rows, key=len)
    longest[-1] = bench.ends[0]
    return rows


def documents(request: Request) -> list[tuple[int, Tensor]]:
    """``(row, slots)`` of each document, row by row."""
    return [
        (row, request.slots(row, segment))
        for row in range(request.shape[0])
        for segment in range(1, int(request.segments[row].max()) + 1)
    ]


def against_alone(run: Run, request: Request, alone: list[list[int]], got_BTV: Tensor | None = None) -> Reading:
    """``sizes[row, slot]``: how far each document's outputs are from those of the same tokens run alone.

    ``got_BTV`` are the outputs to compare; left out, they are the plain logits of the request.
    """
    got_BTV = run.plain(request) if got_BTV is None else got_BTV
    sizes_BT, scale = torch.zeros(request.shape, dtype=torch.float64), 1.0
    for (row, slots), tokens in zip(documents(request), [t for t in alone if t], strict=True):
        want = run.alone(tokens)
        sizes_BT[row, slots] = moved(want, got_BTV[row, slots])
        scale = max(scale, scale_of(want))
    return Reading(run, sizes_BT, scale)


def unmoved(run: Run, before: Request, after: Request, watched_BT: Tensor) -> Reading:
    """``sizes[row, slot]``: how far the watched outputs moved between two requests of one shape."""
    first, second = run.plain(before), run.logits(after)
    return Reading(run, torch.where(watched_BT, moved(first, second), 0.0), scale_of(first[watched_BT]))


def as_alone(
    bench: Bench, check: str, case: str, request: Request, alone: list[list[int]], *, good: str, place: Place
) -> Finding:
    """Whether each document answers as the same tokens do alone."""
    readings = bench.read(lambda run: against_alone(run, request, alone))
    return finding(bench, check, case, readings, bits=False, good=good, place=place)


def not_moved(
    bench: Bench, check: str, case: str, before: Request, after: Request, watched_BT: Tensor, *, good: str, place: Place
) -> Finding:
    """Whether the watched outputs are the same for both requests, bit for bit."""
    readings = bench.read(lambda run: unmoved(run, before, after, watched_BT))
    return finding(bench, check, case, readings, bits=True, good=good, place=place)


def culprit(
    bench: Bench, run: Run, request: Request, row: int, query: int, suspects: Iterable[Change]
) -> Change | None:
    """The first suspect slot whose own change moves the output at (row, query); None when none does alone."""
    before = run.logits(request)
    limit = 1e-12 * scale_of(before) if run.dtype == torch.float64 else 0.0
    for suspect in suspects:
        after = request.with_token(*suspect, bench.other(int(request.tokens[suspect])))
        if float(moved(before[row, query], run.logits(after)[row, query])) > limit:
            return suspect
    return None
