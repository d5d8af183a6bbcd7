"""Does a target answer through its cache as it does without: chunked, padded, reordered, cropped, copied?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pellucid.audits.checks.check import Check
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.decision import Index, against_alone, at, finding, skip_if_unsupported
from pellucid.audits.engine.deviation import TargetRun, logit_scale, max_abs_diff
from pellucid.batch import Batch
from pellucid.errors import UnsupportedError
from pellucid.probe import Capability
from pellucid.records import Finding, Location

NAME = "cache"
LENGTH = 9
CHUNKS = ([9], [4, 5], [1] * 9, [3, 1, 5], [8, 1])

_MORE: tuple[Capability, ...] = ("reorder", "crop", "snapshot")

Cached = Callable[[TargetRun, Batch], Tensor]


def run(context: AuditContext) -> Iterator[Finding]:
    """Everything is compared with the same tokens run alone, whole, and without a cache."""
    row = context.tokens(LENGTH)
    failed = False
    for case, batch, chunks, spare in _ways(context, row):
        ask = partial(_chunks, context, case, batch, chunks, spare, explain=not failed)
        found = skip_if_unsupported(NAME, case, ask)
        failed = failed or found.failed
        yield found
    if context.can("reorder"):
        yield _reordered(context)
    if context.can("crop"):
        yield from _cropped(context, row)
    if context.can("snapshot"):
        yield _snapshot(context, row)
    unasked = [name for name in _MORE if not context.can(name)]
    if unasked:
        message = f"{context.probe.name} does not say that its cache can do this: capabilities name it"
        yield Finding(NAME, "not_applicable", message, " and ".join(unasked))
    if context.can("unused"):
        yield _unused(context, row, 1e4)
        yield _unused(context, row, math.nan)


def _ways(context: AuditContext, row: list[int]) -> Iterator[tuple[str, Batch, Sequence[int], int]]:
    """Cases: requests, the chunks in which they go through a cache, and its spare slots."""
    whole = Batch.from_rows([row])
    for chunks in CHUNKS:
        yield ("chunks " + _sum(chunks) if len(chunks) < LENGTH else "one by one"), whole, chunks, 0
    yield "spare room", whole, [4, 5], 7
    if context.can("padding") and "left" in context.probe.sides:
        rows = [context.tokens(length) for length in (7, LENGTH, 5)]
        left = Batch.from_rows(rows, side="left")
        for chunks in ([4, 5], [5, 1, 1, 1, 1]):
            yield f"left padded, {_sum(chunks)}", left, chunks, 0
        yield "right padded prompts, then 4 steps", right_padded_prompts(rows, 4), [5, 1, 1, 1, 1], 0


def _sum(chunks: Sequence[int]) -> str:
    return " + ".join(map(str, chunks))


def right_padded_prompts(rows: Sequence[Sequence[int]], steps: int) -> Batch:
    """Prompts padded on the right, followed by ``steps`` more tokens of each row: padding in the middle."""
    prompts = Batch.from_rows([row[:-steps] for row in rows])
    rest = Batch.from_rows([row[-steps:] for row in rows])
    offsets = torch.tensor([[len(row) - steps] for row in rows])
    return Batch(
        torch.cat([prompts.tokens, rest.tokens], 1),
        torch.cat([prompts.positions, rest.positions + offsets], 1),
        torch.cat([prompts.segments, rest.segments], 1),
    )


def _chunks(
    context: AuditContext, case: str, batch: Batch, chunks: Sequence[int], spare: int, explain: bool
) -> Finding:
    """``explain``: look for the token that is seen otherwise, which takes two runs a token."""
    alone = [batch.tokens[row, batch.slots(row)].tolist() for row in range(batch.shape[0])]

    def cached(run: TargetRun, request: Batch) -> Tensor:
        rows, slots = request.shape
        return run.chunked(request, chunks, run.probe.new_cache(rows, slots + spare))

    def place(run: TargetRun, index: Index) -> tuple[Location, str]:
        row, query = index
        if not explain:
            return Location(row, query), f"slot {query} answers otherwise through the cache"
        return _seen_otherwise(context, run, batch, cached, row, query)

    readings = context.read(lambda run: against_alone(run, batch, alone, cached(run, batch)))
    good = "every position answers as without a cache"
    return finding(context, NAME, case, readings, bits=False, good=good, place=place)


def _seen_otherwise(
    context: AuditContext, run: TargetRun, batch: Batch, cached: Cached, row: int, query: int
) -> tuple[Location, str]:
    """The first token that moves the query through the cache but not without, or the other way round."""
    slots = batch.slots(row)
    number = int((slots == query).nonzero()[0])
    limit = 1e-12 if run.dtype == torch.float64 else 0.1 * run.rounding

    def moves(before: Tensor, after: Tensor) -> bool:
        return float(max_abs_diff(before, after)) > limit * logit_scale(before)

    def alone(request: Batch) -> Tensor:
        return run.logits(Batch.from_rows([request.tokens[row, slots].tolist()]))[0, number]

    whole, through = alone(batch), cached(run, batch)[row, query]
    places = sorted(batch.token_mask.nonzero().tolist(), key=lambda place: (place[0] != row, place))
    for key_row, slot in places:
        changed = batch.with_token(key_row, slot, context.other(int(batch.tokens[key_row, slot])))
        seen = moves(through, cached(run, changed)[row, query])
        if seen == moves(whole, alone(changed)):
            continue
        where = Location(row, query, slot, None if key_row == row else key_row)
        how = "seen through the cache only" if seen else "not seen through the cache"
        return where, f"slot {query} answers otherwise through the cache: token {slot} is {how}"
    cause = "although it sees the same tokens: positions or contents differ"
    return Location(row, query), f"slot {query} answers otherwise through the cache, {cause}"


def _after(
    context: AuditContext, case: str, got: Callable[[TargetRun], Tensor], alone: list[list[int]], start: int, good: str
) -> Finding:
    """Outputs from slot ``start`` on, against whole rows run without a cache."""
    batch = Batch.from_rows(alone, side="left")

    def full(run: TargetRun) -> Tensor:
        tail = got(run)
        head = torch.zeros(tail.shape[0], start, tail.shape[2], dtype=tail.dtype)
        return torch.cat([head, tail], 1)

    def measure(run: TargetRun) -> Any:
        reading = against_alone(run, batch, alone, full(run))
        reading.sizes[:, :start] = 0.0
        return reading

    place = at(case + ": row {row} answers otherwise at slot {query} than the same tokens without a cache")
    return skip_if_unsupported(
        NAME,
        case,
        lambda: finding(context, NAME, case, context.read(measure), bits=False, good=good, place=place),
    )


def _reordered(context: AuditContext) -> Finding:
    """Beams change places: row r goes on as row ``order[r]``."""
    lengths = (3, 5, 1) if context.can("padding") and "left" in context.probe.sides else (5, 5, 5)
    prompts = [context.tokens(length) for length in lengths]
    order, steps = [1, 1, 0], [context.tokens(2) for _ in range(3)]
    first = Batch.from_rows(prompts, side="left")
    rows = [prompts[old] + new for old, new in zip(order, steps, strict=True)]
    offsets = torch.tensor([[len(prompts[old])] for old in order])
    step = Batch.from_rows(steps)
    step = Batch(step.tokens, step.positions + offsets, step.segments)

    def got(run: TargetRun) -> Tensor:
        cache = run.probe.new_cache(3, 7)
        run.extend(first, cache)
        cache.reorder(torch.tensor(order, device=run.device))
        return run.extend(step, cache)

    return _after(context, "reorder", got, rows, 5, "reordered rows go on as the rows they came from")


def _cropped(context: AuditContext, row: list[int]) -> Iterator[Finding]:
    """Take back 4 of 9 tokens, or all, and go on with others."""
    for case, keep, kept in (
        ("crop to 5", 5, 5),
        ("crop by 4", -4, 5),
        ("crop to 0", 0, 0),
        ("crop by more than there is", -99, 0),
    ):
        tokens = row[:kept] + context.tokens(LENGTH - kept)
        batch = Batch.from_rows([tokens])

        def got(run: TargetRun, keep: int = keep, kept: int = kept, batch: Batch = batch) -> Tensor:
            cache = run.probe.new_cache(1, 2 * LENGTH)
            run.extend(Batch.from_rows([row]), cache)
            if not _taken_back(cache, keep):
                cache = run.probe.new_cache(1, 2 * LENGTH)
            return run.extend(batch.part(kept, LENGTH), cache)

        yield _after(context, case, got, [tokens], kept, "after a crop it goes on as from the shorter text")


def _taken_back(cache: Any, keep: int) -> bool:
    """Crop; False where more was to be taken back than there is and the cache refused, as it may."""
    try:
        cache.crop(keep)
    except (ValueError, IndexError) as error:
        if keep >= 0:
            raise
        if keep >= -LENGTH:
            raise UnsupportedError(f"its crop takes no {keep}") from error
        return False
    return True


def _snapshot(context: AuditContext, row: list[int]) -> Finding:
    """A copy and its original go two ways, the original first and last."""
    other = row[:5] + context.tokens(LENGTH - 5)
    batch, branch = Batch.from_rows([row]), Batch.from_rows([other])

    def got(run: TargetRun) -> Tensor:
        cache = run.probe.new_cache(1, 2 * LENGTH)
        run.extend(batch.part(0, 5), cache)
        copy = cache.snapshot()
        first = run.extend(batch.part(5, 7), cache)
        away = run.extend(branch.part(5, LENGTH), copy)
        return torch.cat([torch.cat([first, run.extend(batch.part(7, LENGTH), cache)], 1), away])

    return _after(context, "snapshot", got, [row, other], 5, "a copy and its original do not touch each other")


def _unused(context: AuditContext, row: list[int], value: float) -> Finding:
    case = f"{value:g} in unused slots"
    batch = Batch.from_rows([row])

    def got(run: TargetRun) -> Tensor:
        cache = run.probe.new_cache(1, LENGTH + 7)
        first = run.extend(batch.part(0, 4), cache)
        cache.fill_unused(value)
        return torch.cat([first, run.extend(batch.part(4, LENGTH), cache)], 1)

    result = _after(context, case, got, [row], 0, "what lies in unused slots moves nothing")
    if result.status != "leak" or math.isfinite(value):
        return result
    return Finding(NAME, "fragile", result.message, case, result.where, result.size, result.decided)


CHECK = Check(
    NAME, "Does it answer through its cache as it does without one?", run, frozenset({"cache"}), length=LENGTH
)
