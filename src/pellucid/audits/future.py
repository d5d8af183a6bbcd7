"""Does any output move by a token that its query must not see? Plain, through a cache, and by gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pellucid.audits.bench import Bench, Reading, Run
from pellucid.audits.changes import Changes, sample
from pellucid.audits.check import Check
from pellucid.audits.expected import expected_flow
from pellucid.audits.judge import Index, finding, judge, unless_refused
from pellucid.probe import Request
from pellucid.records import Finding, Where

NAME = "future"
_CACHED = "through a cache"


def run(bench: Bench) -> Iterator[Finding]:
    """Change one token at a time and watch all outputs."""
    row = bench.tokens(bench.length)
    may_TT = expected_flow(bench.probe.rules, Request.from_rows([row]))[0]
    if bool(may_TT.all()):
        rules = ", ".join(dict.fromkeys(rule.describe() for rule in bench.probe.rules))
        yield Finding(NAME, "not_applicable", f"the declared rules ({rules}) hide nothing of {len(row)} tokens")
        return
    changes = Changes(bench, row, Run.logits)
    readings = _readings(changes, may_TT, always_exact=True)
    result = _flow_finding(bench, changes, readings, may_TT, "tokens")
    yield result
    yield _reaction(readings, changes.keys, may_TT)
    if bench.can("cache"):
        yield unless_refused(NAME, _CACHED, lambda: _cached(bench, row, may_TT))
    if bench.can("embeddings") and not result.failed:
        yield _gradient(bench, row, may_TT)


def _readings(changes: Changes, may_TT: Tensor, always_exact: bool) -> list[Reading]:
    """The target's own dtype; float64 with other tokens too, and with the same ones where something moved."""
    native = changes.native()
    exact = changes.exact(like_native=False) if always_exact else None
    if always_exact and exact is None:
        native.sizes = torch.maximum(native.sizes, changes.native(special=True).sizes)
    suspect = bool(torch.where(may_TT, 0.0, native.sizes).any())
    if suspect:
        alike = changes.exact(like_native=True)
        if exact is not None and alike is not None:
            alike.sizes = torch.maximum(alike.sizes, exact.sizes)
        exact = alike
    return [native] if exact is None else [native, exact]


def _flow_finding(bench: Bench, changes: Changes, readings: list[Reading], may_TT: Tensor, case: str) -> Finding:
    hidden = [Reading(r.run, torch.where(may_TT, 0.0, r.sizes), r.scale) for r in readings]

    def place(run: Run, index: Index) -> tuple[Where, str]:
        del run
        query, key = index
        side = f"{key - query} ahead" if key > query else f"{query - key} back, beyond the declared rules"
        return Where(0, query, key), f"the output at {query} moves when token {key} is changed, {side}"

    good = f"no output moved by a token that it must not see ({changes.coverage})"
    result = finding(bench, NAME, case, hidden, bits=True, good=good, place=place)
    if result.status != "leak":
        return result
    verdict = judge(bench, hidden, bits=True)
    pairs = (verdict.reading.sizes > verdict.limit).nonzero().tolist()[:4]
    if any(changes.alone(verdict.reading.run, query, key) for query, key in pairs):
        return result
    message = "outputs moved only because other rows of the batch changed: the rows mix (see batch)"
    return Finding(NAME, "fragile", message, case, result.where, result.size, result.decided)


def _cached(bench: Bench, row: list[int], may_TT: Tensor) -> Finding:
    """Some tokens through a cache in three chunks; every token, where one of them moved what it must not."""
    some = Changes(bench, row, _chunked, most=8)
    readings = _readings(some, may_TT, always_exact=False)
    result = _flow_finding(bench, some, readings, may_TT, _CACHED)
    if not result.failed or len(some.keys) == len(row):
        return result
    every = Changes(bench, row, _chunked)
    return _flow_finding(bench, every, _readings(every, may_TT, always_exact=True), may_TT, _CACHED)


def _chunked(run: Run, request: Request) -> Tensor:
    slots = request.shape[1]
    first = max(1, slots // 3)
    return run.chunked(request, [size for size in (first, slots - first - 1, 1) if size > 0])


def _reaction(readings: list[Reading], keys: list[int], may_TT: Tensor) -> Finding:
    """A target that ignores its input hides everything: what is visible has to move something."""
    case, length = "visible tokens", len(may_TT)
    watched_TT = may_TT & torch.zeros_like(may_TT).index_fill_(1, torch.tensor(keys), True)
    moved_TT = readings[0].sizes > 0
    for reading in readings[1:]:
        moved_TT = moved_TT | (reading.sizes > 1e-14 * reading.scale)
    reacts_TT = watched_TT & moved_TT
    if not bool(reacts_TT.any()):
        return Finding(
            NAME,
            "fragile",
            "no token moved any output: the target ignores its input, so nothing was shown",
            case,
        )
    dead = [
        back for back in range(1 - length, length)  # query - key
        if bool(watched_TT.diagonal(-back).any()) and not bool(reacts_TT.diagonal(-back).any())
    ]  # fmt: skip
    if not dead:
        return Finding(NAME, "pass", "at every visible distance some token moved some output", case)
    nearest = min(dead, key=abs)
    query = max(nearest, 0) + int(watched_TT.diagonal(-nearest).nonzero()[0])
    side = "ahead" if nearest < 0 else "back"
    message = (
        f"tokens {abs(nearest)} {side} may be seen by the declared rules, but changing them moved nothing"
        f" ({len(dead)} such distances): the target sees less than it declares"
    )
    return Finding(NAME, "fragile", message, case, Where(0, query, query - nearest))


def _gradient(bench: Bench, row: list[int], may_TT: Tensor) -> Finding:
    """d out[i] / d x[j] is exactly 0 for every j that i must not see: each row asks for one output."""
    run, queries = bench.native, torch.tensor(sample(len(row), 8))
    request = Request.from_rows([row] * len(queries))
    embeddings = run.embed(request).requires_grad_()
    logits = run.differentiable(request.with_embeddings(embeddings))
    (logits[torch.arange(len(queries)), queries] * bench.directions(logits)).sum().backward(inputs=[embeddings])
    assert embeddings.grad is not None
    sizes_QT = embeddings.grad.abs().amax(-1).double().cpu()
    largest, hidden_QT = float(sizes_QT.max()), torch.where(may_TT[queries], 0.0, sizes_QT)
    size = float(hidden_QT.max())
    if size <= 1e-3 * run.rounding * largest:
        decided = f"{size:.0e} beside {largest:.0e}" if size else "exactly 0"
        message = f"no gradient flows from {len(queries)} outputs to a token that they must not see"
        return Finding(NAME, "pass", message, "gradient", size=size, decided=decided)
    number, key = (hidden_QT > 1e-3 * run.rounding * largest).nonzero()[0].tolist()
    query = int(queries[number])
    message = f"a gradient flows from the output at {query} to token {key}, although changing it moved nothing"
    return Finding(NAME, "fragile", message, "gradient", Where(0, query, key), size)


CHECK = Check(NAME, "Does any output move by a token that it must not see?", run, length=2)
