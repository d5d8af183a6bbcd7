"""Does every target token see the whole source, its own only, and never the source's padding?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from pellucid.audits.checks.check import Check
from pellucid.audits.method.bench import Bench
from pellucid.audits.method.changes import Forward
from pellucid.audits.method.hooks import memory_changed
from pellucid.audits.method.judge import at, finding, unless_refused
from pellucid.audits.method.measure import Reading, Run, moved, scale_of
from pellucid.audits.method.rows import not_moved, rows_of
from pellucid.audits.method.source import encoder_held
from pellucid.probe import Request, Side
from pellucid.records import Finding, Where

NAME = "cross"
TARGET = 4
SOURCE = 6
_PLAIN = 1e-3
SIDES: tuple[Side, ...] = ("right", "left")


def run(bench: Bench) -> Iterator[Finding]:
    """Change the source, or what the encoder made of it, and watch the target's outputs."""
    sources, targets = rows_of(bench, (3, SOURCE, 1)), [bench.tokens(TARGET) for _ in range(3)]
    yield _whole(bench, "whole source", sources[1], targets[1], Run.logits)
    if bench.can("cache"):
        case = "through a cache"
        yield unless_refused(NAME, case, lambda: _whole(bench, case, sources[1], targets[1], _stepwise))
    if bench.probe.memory_name is not None:
        yield _memory(bench, sources[1], targets[1])
    yield from encoder_held(bench, NAME)
    if not bench.can("padding"):
        return
    for side in [side for side in SIDES if side in bench.probe.sides]:
        yield unless_refused(NAME, f"source padded {side}", partial(_alone, bench, side, sources, targets))
        yield unless_refused(NAME, f"other ids in {side} pads", partial(_other_ids, bench, side, sources, targets))
    yield _mates(bench, sources, targets)


def _stepwise(run: Run, request: Request) -> Tensor:
    return run.chunked(request, [1] * request.shape[1])


def _pairs(sources: list[list[int]], targets: list[list[int]], side: Side, length: int = SOURCE + 2) -> Request:
    return Request.from_rows(targets).with_source(Request.from_rows(sources, side=side, length=length))


def _whole(bench: Bench, case: str, source: list[int], target: list[int], forward: Forward) -> Finding:
    """Each token of the source moves every output of the target, the first one too."""
    changed = [source, *([*source[:j], bench.other(source[j]), *source[j + 1 :]] for j in range(SOURCE))]
    request = Request.from_pairs(changed, [target] * len(changed))
    sizes_TS = torch.zeros(TARGET, SOURCE, dtype=torch.float64)
    for run in bench.runs:
        logits = forward(run, request)
        moves_TS = moved(logits[:1].expand(SOURCE, -1, -1), logits[1:]).T
        sizes_TS = torch.maximum(sizes_TS, moves_TS / scale_of(logits))
    return _all_seen(bench, case, sizes_TS, "token {} of the source")


def _memory(bench: Bench, source: list[int], target: list[int]) -> Finding:
    """Each slot of the memory by itself: an encoder that mixes would hide what cross-attention does not see."""
    request, run = Request.from_pairs([source] * SOURCE, [target] * SOURCE), bench.runs[-1]
    before = run.logits(request)
    with memory_changed(run):
        after = run.logits(request)
    return _all_seen(bench, "each memory slot", moved(before, after).T / scale_of(before), "slot {} of the memory")


def _all_seen(bench: Bench, case: str, sizes_TS: Tensor, what: str) -> Finding:
    """Sizes are relative; where other pairs move far above rounding, one that does not move at all is not seen."""
    seen_TS = sizes_TS > 1e-14
    plain = bench.probe.declared and bool(seen_TS.any()) and float(sizes_TS[seen_TS].median()) > _PLAIN
    status = "leak" if plain else bench.status_of_unseen
    unseen = (~seen_TS).nonzero().tolist()
    if not unseen:
        return Finding(NAME, "pass", f"each of {SOURCE} slots moves each of {TARGET} outputs", case, size=0.0)
    query, key = unseen[0]
    why = ": cross-attention is causal" if torch.equal(seen_TS, torch.ones_like(seen_TS).tril()) else ""
    message = f"target query {query} does not see {what.format(key)} ({len(unseen)} such pairs){why}"
    return Finding(NAME, status, message, case, Where(0, query, key), 0.0, "no bit of its output moved")


def _alone(bench: Bench, side: Side, sources: list[list[int]], targets: list[list[int]]) -> Finding:
    """Rows beside padded sources against each pair alone."""
    request = _pairs(sources, targets, side)

    def measure(run: Run) -> Reading:
        got = run.logits(request)
        alone = (Request.from_pairs([s], [t]) for s, t in zip(sources, targets, strict=True))
        want = torch.cat([run.logits(pair) for pair in alone])
        return Reading(run, moved(want, got), scale_of(want))

    place = at("the output at {query} answers otherwise than beside its source alone")
    good = "targets answer as they do beside their source alone"
    return finding(bench, NAME, f"source padded {side}", bench.read(measure), bits=False, good=good, place=place)


def _other_ids(bench: Bench, side: Side, sources: list[list[int]], targets: list[list[int]]) -> Finding:
    request = _pairs(sources, targets, side)
    assert request.source is not None
    after = request.with_source(bench.fresh(request.source, ~request.source.real))
    return _unmoved(
        bench,
        f"other ids in {side} pads",
        request,
        after,
        torch.ones_like(request.real),
        "the ids of the source's pads",
    )


def _mates(bench: Bench, sources: list[list[int]], targets: list[list[int]]) -> Finding:
    request = _pairs(sources, targets, "right")
    assert request.source is not None
    others_BS, mine_BT = request.source.real.clone(), torch.zeros_like(request.real)
    others_BS[1], mine_BT[1] = False, True
    after = request.with_source(bench.fresh(request.source, others_BS))
    return _unmoved(bench, "sources of other rows", request, after, mine_BT, "the sources of other rows")


def _unmoved(bench: Bench, case: str, before: Request, after: Request, watched_BT: Tensor, what: str) -> Finding:
    place = at(f"the output at {{query}} moves with {what}")
    return not_moved(bench, NAME, case, before, after, watched_BT, good=f"{what} move nothing", place=place)


CHECK = Check(
    NAME,
    "Does every target token see all of its own source, none of its padding, and the encoder keep to its rules?",
    run,
    frozenset({"source"}),
    length=TARGET,
)
