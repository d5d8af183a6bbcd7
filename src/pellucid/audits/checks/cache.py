"""Does a target answer through its cache as it does without: chunked, padded, reordered, cropped, copied?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pellucid.audits.checks.check import Check
from pellucid.audits.method.bench import Bench
from pellucid.audits.method.judge import Index, at, finding, unless_refused
from pellucid.audits.method.measure import Run, moved, scale_of
from pellucid.audits.method.rows import against_alone
from pellucid.errors import UnsupportedError
from pellucid.probe import Capability, Request
from pellucid.records import Finding, Where

NAME = "cache"
LENGTH = 9
CHUNKS = ([9], [4, 5], [1] * 9, [3, 1, 5], [8, 1])

_MORE: tuple[Capability, ...] = ("reorder", "crop", "snapshot")

Cached = Callable[[Run, Request], Tensor]


def run(bench: Bench) -> Iterator[Finding]:
    """Everything is compared with the same tokens run alone, whole, and without a cache."""
    row = bench.tokens(LENGTH)
    failed = False
    for case, request, chunks, spare in _ways(bench, row):
        ask = partial(_chunks, bench, case, request, chunks, spare, explain=not failed)
        found = unless_refused(NAME, case, ask)
        failed = failed or found.failed
        yield found
    if bench.can("reorder"):
        yield _reordered(bench)
    if bench.can("crop"):
        yield from _cropped(bench, row)
    if bench.can("snapshot"):
        yield _snapshot(bench, row)
    unasked = [name for name in _MORE if not bench.can(name)]
    if unasked:
        message = f"{bench.probe.name} does not say that its cache can do this: capabilities name it"
        yield Finding(NAME, "not_applicable", message, " and ".join(unasked))
    if bench.can("unused"):
        yield _unused(bench, row, 1e4)
        yield _unused(bench, row, math.nan)


def _ways(bench: Bench, row: list[int]) -> Iterator[tuple[str, Request, Sequence[int], int]]:
    """Cases: requests, the chunks in which they go through a cache, and its spare slots."""
    whole = Request.from_rows([row])
    for chunks in CHUNKS:
        yield ("chunks " + _sum(chunks) if len(chunks) < LENGTH else "one by one"), whole, chunks, 0
    yield "spare room", whole, [4, 5], 7
    if bench.can("padding") and "left" in bench.probe.sides:
        rows = [bench.tokens(length) for length in (7, LENGTH, 5)]
        left = Request.from_rows(rows, side="left")
        for chunks in ([4, 5], [5, 1, 1, 1, 1]):
            yield f"left padded, {_sum(chunks)}", left, chunks, 0
        yield "right padded prompts, then 4 steps", right_padded_prompts(rows, 4), [5, 1, 1, 1, 1], 0


def _sum(chunks: Sequence[int]) -> str:
    return " + ".join(map(str, chunks))


def right_padded_prompts(rows: Sequence[Sequence[int]], steps: int) -> Request:
    """Prompts padded on the right, followed by ``steps`` more tokens of each row: padding in the middle."""
    prompts = Request.from_rows([row[:-steps] for row in rows])
    rest = Request.from_rows([row[-steps:] for row in rows])
    offsets = torch.tensor([[len(row) - steps] for row in rows])
    return Request(
        torch.cat([prompts.tokens, rest.tokens], 1),
        torch.cat([prompts.positions, rest.positions + offsets], 1),
        torch.cat([prompts.segments, rest.segments], 1),
    )


def _chunks(bench: Bench, case: str, request: Request, chunks: Sequence[int], spare: int, explain: bool) -> Finding:
    """``explain``: look for the token that is seen otherwise, which takes two runs a token."""
    alone = [request.tokens[row, request.slots(row)].tolist() for row in range(request.shape[0])]

    def cached(run: Run, asked: Request) -> Tensor:
        rows, slots = asked.shape
        return run.chunked(asked, chunks, run.probe.new_cache(rows, slots + spare))

    def place(run: Run, index: Index) -> tuple[Where, str]:
        row, query = index
        if not explain:
            return Where(row, query), f"slot {query} answers otherwise through the cache"
        return _seen_otherwise(bench, run, request, cached, row, query)

    readings = bench.read(lambda run: against_alone(run, request, alone, cached(run, request)))
    good = "every position answers as without a cache"
    return finding(bench, NAME, case, readings, bits=False, good=good, place=place)


def _seen_otherwise(
    bench: Bench, run: Run, request: Request, cached: Cached, row: int, query: int
) -> tuple[Where, str]:
    """The first token that moves the query through the cache but not without, or the other way round."""
    slots = request.slots(row)
    number = int((slots == query).nonzero()[0])
    limit = 1e-12 if run.dtype == torch.float64 else 0.1 * run.rounding

    def moves(before: Tensor, after: Tensor) -> bool:
        return float(moved(before, after)) > limit * scale_of(before)

    def alone(asked: Request) -> Tensor:
        return run.logits(Request.from_rows([asked.tokens[row, slots].tolist()]))[0, number]

    whole, through = alone(request), cached(run, request)[row, query]
    places = sorted(request.real.nonzero().tolist(), key=lambda place: (place[0] != row, place))
    for key_row, slot in places:
        changed = request.with_token(key_row, slot, bench.other(int(request.tokens[key_row, slot])))
        seen = moves(through, cached(run, changed)[row, query])
        if seen == moves(whole, alone(changed)):
            continue
        where = Where(row, query, slot, None if key_row == row else key_row)
        how = "seen through the cache only" if seen else "not seen through the cache"
        return where, f"slot {query} answers otherwise through the cache: token {slot} is {how}"
    cause = "although it sees the same tokens: positions or contents differ"
    return Where(row, query), f"slot {query} answers otherwise through the cache, {cause}"


def _after(
    bench: Bench, case: str, got: Callable[[Run], Tensor], alone: list[list[int]], start: int, good: str
) -> Finding:
    """Outputs from slot ``start`` on, against whole rows run without a cache."""
    request = Request.from_rows(alone, side="left")

    def full(run: Run) -> Tensor:
        tail = got(run)
        head = torch.zeros(tail.shape[0], start, tail.shape[2], dtype=tail.dtype)
        return torch.cat([head, tail], 1)

    def measure(run: Run) -> Any:
        reading = against_alone(run, request, alone, full(run))
        reading.sizes[:, :start] = 0.0
        return reading

    place = at(case + ": row {row} answers otherwise at slot {query} than the same tokens without a cache")
    return unless_refused(
        NAME,
        case,
        lambda: finding(bench, NAME, case, bench.read(measure), bits=False, good=good, place=place),
    )


def _reordered(bench: Bench) -> Finding:
    """Beams change places: row r goes on as row ``order[r]``."""
    lengths = (3, 5, 1) if bench.can("padding") and "left" in bench.probe.sides else (5, 5, 5)
    prompts = [bench.tokens(length) for length in lengths]
    order, steps = [1, 1, 0], [bench.tokens(2) for _ in range(3)]
    first = Request.from_rows(prompts, side="left")
    rows = [prompts[old] + new for old, new in zip(order, steps, strict=True)]
    offsets = torch.tensor([[len(prompts[old])] for old in order])
    step = Request.from_rows(steps)
    step = Request(step.tokens, step.positions + offsets, step.segments)

    def got(run: Run) -> Tensor:
        cache = run.probe.new_cache(3, 7)
        run.extend(first, cache)
        cache.reorder(torch.tensor(order, device=run.device))
        return run.extend(step, cache)

    return _after(bench, "reorder", got, rows, 5, "reordered rows go on as the rows they came from")


def _cropped(bench: Bench, row: list[int]) -> Iterator[Finding]:
    """Take back 4 of 9 tokens, or all, and go on with others."""
    for case, keep, kept in (
        ("crop to 5", 5, 5),
        ("crop by 4", -4, 5),
        ("crop to 0", 0, 0),
        ("crop by more than there is", -99, 0),
    ):
        tokens = row[:kept] + bench.tokens(LENGTH - kept)
        request = Request.from_rows([tokens])

        def got(run: Run, keep: int = keep, kept: int = kept, request: Request = request) -> Tensor:
            cache = run.probe.new_cache(1, 2 * LENGTH)
            run.extend(Request.from_rows([row]), cache)
            if not _taken_back(cache, keep):
                cache = run.probe.new_cache(1, 2 * LENGTH)
            return run.extend(request.part(kept, LENGTH), cache)

        yield _after(bench, case, got, [tokens], kept, "after a crop it goes on as from the shorter text")


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


def _snapshot(bench: Bench, row: list[int]) -> Finding:
    """A copy and its original go two ways, the original first and last."""
    other = row[:5] + bench.tokens(LENGTH - 5)
    request, branch = Request.from_rows([row]), Request.from_rows([other])

    def got(run: Run) -> Tensor:
        cache = run.probe.new_cache(1, 2 * LENGTH)
        run.extend(request.part(0, 5), cache)
        copy = cache.snapshot()
        first = run.extend(request.part(5, 7), cache)
        away = run.extend(branch.part(5, LENGTH), copy)
        return torch.cat([torch.cat([first, run.extend(request.part(7, LENGTH), cache)], 1), away])

    return _after(bench, "snapshot", got, [row, other], 5, "a copy and its original do not touch each other")


def _unused(bench: Bench, row: list[int], value: float) -> Finding:
    case = f"{value:g} in unused slots"
    request = Request.from_rows([row])

    def got(run: Run) -> Tensor:
        cache = run.probe.new_cache(1, LENGTH + 7)
        first = run.extend(request.part(0, 4), cache)
        cache.fill_unused(value)
        return torch.cat([first, run.extend(request.part(4, LENGTH), cache)], 1)

    result = _after(bench, case, got, [row], 0, "what lies in unused slots moves nothing")
    if result.status != "leak" or math.isfinite(value):
        return result
    return Finding(NAME, "fragile", result.message, case, result.where, result.size, result.decided)


CHECK = Check(
    NAME, "Does it answer through its cache as it does without one?", run, frozenset({"cache"}), length=LENGTH
)
