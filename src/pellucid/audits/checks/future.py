"""Does any output move by a token ahead that it must not see? Plain, through a cache, and by gradients."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from pellucid.audits.checks.check import Check
from pellucid.audits.method.bench import Bench
from pellucid.audits.method.changes import Changes, inside, telling
from pellucid.audits.method.flow import MeasuredFlow, flow_of, gradients, kept, measured, reached
from pellucid.audits.method.judge import Index, finding, unless_no_gradient, unless_refused
from pellucid.audits.method.layers import first_broken_layer
from pellucid.audits.method.measure import Reading, Run, moved, scale_of
from pellucid.audits.method.tails import tails
from pellucid.probe import Request
from pellucid.records import Finding, Where

NAME = "future"
_CACHED = "through a cache"
_SHORT = 64  # of longer rows less is run twice


def run(bench: Bench) -> Iterator[Finding]:
    """Change one token at a time and watch all outputs before it."""
    flow = flow_of(bench)
    hidden_TT = ahead_of(flow.may) & ~flow.may
    if not bool(hidden_TT.any()):
        rules = ", ".join(dict.fromkeys(rule.describe() for rule in bench.probe.rules))
        yield Finding(NAME, "not_applicable", f"the declared rules ({rules}) hide nothing ahead")
        return
    result = kept(bench, flow, hidden_TT, NAME, "tokens", lambda q, k: first_broken_layer(bench, flow.row, q, k))
    yield result
    yield _reaction(bench, flow)
    if all(rule.lookahead == 0 for rule in bench.probe.rules):
        yield from _behind_cuts(bench, flow)
    if bench.can("cache"):
        yield unless_refused(NAME, _CACHED, lambda: _cached(bench, flow.row))
    if bench.can("embeddings") and not result.failed:
        yield unless_no_gradient(NAME, "gradient", lambda: gradient_kept(bench, flow, ahead_of(flow.may), NAME))


def _behind_cuts(bench: Bench, flow: MeasuredFlow) -> Iterator[Finding]:
    """What stands behind a cut, and whether anything does: for targets in which nobody looks ahead."""
    rows = bench.most_tokens // len(flow.row) // 2
    cuts = telling(len(flow.row), max(4, min(8, rows)))
    if not flow.changes.whole:
        yield tails(bench, flow.changes, telling(len(flow.row), max(4, rows)), NAME, "whole tails", exact=True)
    for way in bench.probe.ways:
        asked = Changes(bench, flow.row, partial(_asked, way), most=1)
        yield tails(bench, asked, cuts, NAME, way)
    if len(flow.row) > 3:
        yield _shorter(bench, flow.changes)


def _asked(way: str, run: Run, request: Request) -> Tensor:
    with run.probe.asked(way):
        return run.logits(request)


def ahead_of(may_TT: Tensor) -> Tensor:
    """``Bool[T, T]``: pairs whose key comes after the query."""
    return torch.ones_like(may_TT).triu(1)


def _cached(bench: Bench, row: list[int]) -> Finding:
    """The rest of a chunk, changed at once; token by token where that moves what it must not."""
    cuts, start = [], 0
    for size in _chunks(len(row)):
        inner = inside(size, 3 if len(row) <= _SHORT else 1) if size > 1 else []
        cuts += [start + cut for cut in inner]
        start += size
    some = Changes(bench, row, _chunked, most=1)
    result = tails(bench, some, cuts or [0], NAME, _CACHED)
    if result.status == "pass":
        return result
    near = [] if result.where is None or result.where.key is None else [result.where.key]
    flow = measured(bench, Changes(bench, row, _chunked, first=near))
    told = kept(bench, flow, ahead_of(flow.may), NAME, _CACHED, lambda q, k: "")
    nobody_looks_ahead = all(rule.lookahead == 0 for rule in bench.probe.rules)  # then nothing behind a cut may move it
    return result if told.status == "pass" and nobody_looks_ahead else told


def _chunks(slots: int) -> list[int]:
    first = max(1, slots // 3)
    return [size for size in (first, slots - first - 1, 1) if size > 0]


def _chunked(run: Run, request: Request) -> Tensor:
    return run.chunked(request, _chunks(request.shape[1]))


def _reaction(bench: Bench, flow: MeasuredFlow) -> Finding:
    """A target that ignores its input hides everything: what is visible has to move something."""
    case, length = "visible tokens", len(flow.row)
    watched_TT = flow.watched & flow.direct
    reacts_TT = watched_TT & flow.moved
    if not bool(reacts_TT.any()):
        message = "no token moved any output: the target ignores its input, so nothing was shown"
        return Finding(NAME, "fragile", message, case)
    dead = [
        back for back in range(1 - length, length)  # query - key
        if bool(watched_TT.diagonal(-back).any()) and not bool(reacts_TT.diagonal(-back).any())
    ]  # fmt: skip
    if not dead:
        return Finding(NAME, "pass", "at every visible distance some token moved some output", case)
    nearest = min(dead, key=abs)
    if not bench.probe.declared:
        message = f"tokens {abs(nearest)} away moved nothing, nor need they: no rule was declared, causal was assumed"
        return Finding(NAME, "pass", message, case)
    query = max(nearest, 0) + int(watched_TT.diagonal(-nearest).nonzero()[0])
    side = "ahead" if nearest < 0 else "back"
    message = (
        f"tokens {abs(nearest)} {side} may be seen by the declared rules, but changing them moved nothing"
        f" ({len(dead)} such distances): the target sees less than it declares"
    )
    return Finding(NAME, "fragile", message, case, Where(0, query, query - nearest))


def gradient_kept(bench: Bench, flow: MeasuredFlow, among_TT: Tensor, check: str) -> Finding:
    """d out[i] / d x[j] is exactly 0 for every j of the pairs ``among`` that i must not see."""
    asked_RT, sizes_RT = gradients(bench, flow.row)
    largest, hidden_RT = float(sizes_RT.max()), torch.where(reached(flow.may, asked_RT), 0.0, sizes_RT)
    hidden_RT = torch.where(reached(~among_TT, asked_RT), 0.0, hidden_RT)  # such as no query asked has elsewhere
    size, limit = float(hidden_RT.max()), 1e-3 * bench.native.rounding * largest
    if size <= limit:
        decided = f"{size:.0e} beside {largest:.0e}" if size else "exactly 0"
        message = "no gradient flows to a token that must not be seen, from single outputs and from all before a cut"
        return Finding(check, "pass", message, "gradient", size=size, decided=decided)
    number, key = (hidden_RT > limit).nonzero()[0].tolist()
    asked = asked_RT[number].nonzero()[:, 0].tolist()
    which = f"outputs up to {asked[-1]}" if len(asked) > 1 else f"output at {asked[0]}"
    said = f"a gradient flows from the {which} to token {key}"
    felt = [query for query in flow.changes.felt(bench.runs[-1], key) if query in asked]
    if felt:
        said += f", and changing it moves the output at {felt[-1]}"
        return Finding(check, "leak", said, "gradient", Where(0, felt[-1], key), size)
    said += ", although changing it moved nothing"
    return Finding(check, "fragile", said, "gradient", Where(0, asked[-1], key), size)


def _shorter(bench: Bench, changes: Changes) -> Finding:
    """A row that ends earlier: how many tokens follow is news from the future too."""
    row = changes.base
    case, cuts = "cut short", [cut + 1 for cut in inside(len(row), 3 if len(row) <= _SHORT else 1)]

    def measure(run: Run) -> Reading:
        whole, sizes_CT = changes.unchanged(run, 1), torch.zeros(len(cuts), len(row), dtype=torch.float64)
        for number, cut in enumerate(cuts):
            sizes_CT[number, :cut] = moved(whole[:, :cut], run.logits(Request.from_rows([row[:cut]])))[0]
        return Reading(run, sizes_CT, scale_of(whole))

    def place(run: Run, index: Index) -> tuple[Where, str]:
        del run
        number, query = index
        return Where(0, query), f"the output at {query} is another when the row ends after {cuts[number]} tokens"

    good = f"outputs are the same when the row ends after {', '.join(map(str, cuts))} tokens"
    return finding(bench, NAME, case, bench.read(measure), bits=False, good=good, place=place)


CHECK = Check(NAME, "Does any output move by a token ahead that it must not see?", run, length=2)
