"""Does a target answer through its cache as it does without: chunked, padded, reordered, cropped, copied?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pellucid.audits.checks.check import question
from pellucid.audits.engine.compare import alone, compare, decide, deviation, not_applicable, skip_if_unsupported
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.target_run import TargetRun, logit_scale, max_abs_diff
from pellucid.batch import Batch
from pellucid.errors import UnsupportedError
from pellucid.probe import Capability
from pellucid.records import Finding, Location

LENGTH = 9
CHUNKS = ([9], [4, 5], [1] * 9, [3, 1, 5], [8, 1])

_MORE: tuple[Capability, ...] = ("reorder", "crop", "snapshot")


@question("Does it answer through its cache as it does without one?", needs={"cache"}, length=LENGTH)
def check(context: AuditContext) -> Iterator[Finding]:
    """Everything is compared with the same tokens run alone, whole, and without a cache."""
    row = context.tokens(LENGTH)
    failed = False
    for case, batch, chunks, spare in _ways(context, row):
        found = _chunks(context, case, batch, chunks, spare, explain=not failed)
        failed = failed or found.failed
        yield found
    if context.can("reorder"):
        yield _reordered(context)
    if context.can("crop"):
        yield from _cropped(context, row)
    if context.can("snapshot"):
        yield _snapshot(context, row)
    missing = [name for name in _MORE if not context.can(name)]
    if missing:
        message = f"{context.probe.name} does not declare that its cache can do this: capabilities name it"
        yield not_applicable(" and ".join(missing), message)
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
        for chunks in ([4, 5], [5, 1, 1, 1, 1]):
            yield f"left padded, {_sum(chunks)}", Batch.from_rows(rows, side="left"), chunks, 0
        yield "right padded prompts, then 4 steps", right_padded_prompts(rows, 4), [5, 1, 1, 1, 1], 0


def _sum(chunks: Sequence[int]) -> str:
    return " + ".join(map(str, chunks))


def right_padded_prompts(rows: Sequence[Sequence[int]], steps: int) -> Batch:
    """Prompts padded on the right, followed by ``steps`` more tokens of each row: padding in the middle."""
    prompts, rest = (Batch.from_rows([row[part] for row in rows]) for part in (slice(-steps), slice(-steps, None)))
    offsets = torch.tensor([[len(row) - steps] for row in rows])
    return Batch(
        torch.cat([prompts.tokens, rest.tokens], 1),
        torch.cat([prompts.positions, rest.positions + offsets], 1),
        torch.cat([prompts.segments, rest.segments], 1),
    )


@skip_if_unsupported
def _chunks(
    context: AuditContext, case: str, batch: Batch, chunks: Sequence[int], spare: int, explain: bool
) -> Finding:
    """``explain``: look for the token that is seen differently, which takes two runs a token."""
    batch = context.with_sources(batch)
    rows = [batch.tokens[row, batch.slots(row)].tolist() for row in range(batch.shape[0])]

    def cached(run: TargetRun, request: Batch = batch) -> Tensor:
        return run.chunked(request, chunks, run.probe.new_cache(request.shape[0], request.shape[1] + spare))

    def place(run: TargetRun, index: tuple[int, ...]) -> tuple[Location, str]:
        where, message = Location(*index), f"slot {index[1]} differs through the cache"
        return _seen_otherwise(context, run, batch, cached, where, message) if explain else (where, message)

    readings = context.read(lambda run: deviation(run, alone(batch, rows), cached, batch.token_mask), shapes=True)
    return decide(context, case, readings, good="every position answers as without a cache", place=place)


def _seen_otherwise(
    context: AuditContext,
    run: TargetRun,
    batch: Batch,
    cached: Callable[[TargetRun, Batch], Tensor],
    where: Location,
    message: str,
) -> tuple[Location, str]:
    """The first token that moves the query through the cache but not without, or the other way round."""
    row, query = where.row, where.query
    slots = batch.slots(row)
    number = slots.tolist().index(query)
    limit = 1e-12 if run.dtype == torch.float64 else 0.1 * run.rounding

    def moves(before: Tensor, after: Tensor) -> bool:
        return float(max_abs_diff(before, after)) > limit * logit_scale(before)

    def without(request: Batch) -> Tensor:
        return run.alone(request.tokens[row, slots].tolist(), request.source, row)[number]

    whole, through = without(batch), cached(run, batch)[row, query]
    for key_row, slot in sorted(batch.token_mask.nonzero().tolist(), key=lambda key: (key[0] != row, key)):
        changed = batch.with_token(key_row, slot, context.other(int(batch.tokens[key_row, slot])))
        seen = moves(through, cached(run, changed)[row, query])
        if seen != moves(whole, without(changed)):
            how = "seen through the cache only" if seen else "not seen through the cache"
            where = Location(row, query, slot, None if key_row == row else key_row)
            return where, f"{message}: token {slot} is {how}"
    return where, f"{message}, although it sees the same tokens: positions or contents differ"


@skip_if_unsupported
def _after(
    context: AuditContext,
    case: str,
    got: Callable[[TargetRun], Tensor],
    rows: list[list[int]],
    start: int,
    good: str,
    source: Batch | None = None,
) -> Finding:
    """Outputs from slot ``start`` on, against whole rows run without a cache."""
    batch = Batch.from_rows(rows, side="left").replace(source=source)
    tail_BT = batch.token_mask & (torch.arange(batch.shape[1]) >= start)

    def with_head(run: TargetRun) -> Tensor:
        tail_BTV = got(run)
        return torch.cat([tail_BTV.new_zeros(tail_BTV.shape[0], start, tail_BTV.shape[2]), tail_BTV], 1)

    wrong = f"{case}: row {{row}} differs at slot {{query}} than the same tokens without a cache"
    return compare(context, case, alone(batch, rows), with_head, watch=tail_BT, good=good, wrong=wrong)


def _reordered(context: AuditContext) -> Finding:
    """Beams change places: row r continues as row ``order[r]``."""
    lengths = (3, 5, 1) if context.can("padding") and "left" in context.probe.sides else (5, 5, 5)
    prompts = [context.tokens(length) for length in lengths]
    order, steps = [1, 1, 0], [context.tokens(2) for _ in range(3)]
    first, step = context.with_sources(Batch.from_rows(prompts, side="left")), Batch.from_rows(steps)
    source = None if first.source is None else first.source.replace(tokens=first.source.tokens[order])
    offsets = torch.tensor([[len(prompts[old])] for old in order])
    step = step.replace(positions=step.positions + offsets, source=source)

    def got(run: TargetRun) -> Tensor:
        cache = run.probe.new_cache(3, 7)
        run.extend(first, cache)
        cache.reorder(torch.tensor(order, device=run.device))
        return run.extend(step, cache)

    rows = [prompts[old] + new for old, new in zip(order, steps, strict=True)]
    return _after(context, "reorder", got, rows, 5, "reordered rows continue as the rows they came from", source)


def _cropped(context: AuditContext, row: list[int]) -> Iterator[Finding]:
    """Take back 4 of 9 tokens, or all, and continue with others."""
    for case, keep, kept in (
        ("crop to 5", 5, 5),
        ("crop by 4", -4, 5),
        ("crop to 0", 0, 0),
        ("crop by more than there is", -99, 0),
    ):
        tokens = row[:kept] + context.tokens(LENGTH - kept)
        rest = Batch.from_rows([tokens]).part(kept, LENGTH)

        def got(run: TargetRun, keep: int = keep, rest: Batch = rest) -> Tensor:
            cache = run.probe.new_cache(1, 2 * LENGTH)
            run.extend(Batch.from_rows([row]), cache)
            if not _taken_back(cache, keep):
                cache = run.probe.new_cache(1, 2 * LENGTH)
            return run.extend(rest, cache)

        yield _after(context, case, got, [tokens], kept, "after a crop it continues as from the shorter text")


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
    """A copy and its original are continued in two ways, the original first and last."""
    other = row[:5] + context.tokens(LENGTH - 5)
    batch, branch = Batch.from_rows([row]), Batch.from_rows([other])

    def got(run: TargetRun) -> Tensor:
        cache = run.probe.new_cache(1, 2 * LENGTH)
        run.extend(batch.part(0, 5), cache)
        copy = cache.snapshot()
        first = run.extend(batch.part(5, 7), cache)
        copied = run.extend(branch.part(5, LENGTH), copy)
        return torch.cat([torch.cat([first, run.extend(batch.part(7, LENGTH), cache)], 1), copied])

    return _after(context, "snapshot", got, [row, other], 5, "a copy and its original do not touch each other")


def _unused(context: AuditContext, row: list[int], value: float) -> Finding:
    batch = Batch.from_rows([row])

    def got(run: TargetRun) -> Tensor:
        cache = run.probe.new_cache(1, LENGTH + 7)
        first = run.extend(batch.part(0, 4), cache)
        cache.fill_unused(value)
        return torch.cat([first, run.extend(batch.part(4, LENGTH), cache)], 1)

    result = _after(context, f"{value:g} in unused slots", got, [row], 0, "what lies in unused slots moves nothing")
    only_nan = result.status == "leak" and not math.isfinite(value)
    return replace(result, status="fragile") if only_nan else result
