"""Does any output move by a token ahead that it must not see? Plain, through a cache, and by gradients."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from pellucid.audits.checks.check import Check
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.decision import Index, finding, skip_if_no_gradient, skip_if_unsupported
from pellucid.audits.engine.deviation import Deviation, TargetRun, logit_scale, max_abs_diff
from pellucid.audits.engine.influence import InfluenceMatrix, assert_no_influence, flow_of, gradients, measured, reached
from pellucid.audits.engine.layers import first_broken_layer
from pellucid.audits.engine.perturbation import Perturbations, even_cuts, informative_cuts, perturb_suffixes
from pellucid.batch import Batch
from pellucid.records import Finding, Location

NAME = "future"
_CACHED = "through a cache"
_SHORT = 64  # of longer rows less is run twice


def run(context: AuditContext) -> Iterator[Finding]:
    """Change one token at a time and watch all outputs before it."""
    flow = flow_of(context)
    hidden_TT = later_keys(flow.may) & ~flow.may
    if not bool(hidden_TT.any()):
        rules = ", ".join(dict.fromkeys(rule.describe() for rule in context.probe.rules))
        yield Finding(NAME, "not_applicable", f"the declared rules ({rules}) hide nothing ahead")
        return
    result = assert_no_influence(
        context, flow, hidden_TT, NAME, "tokens", lambda q, k: first_broken_layer(context, flow.row, q, k)
    )
    yield result
    yield _reaction(context, flow)
    if all(rule.lookahead == 0 for rule in context.probe.rules):
        yield from _behind_cuts(context, flow)
    if context.can("cache"):
        yield skip_if_unsupported(NAME, _CACHED, lambda: _cached(context, flow.row))
    if context.can("embeddings") and not result.failed:
        yield skip_if_no_gradient(NAME, "gradient", lambda: gradient_kept(context, flow, later_keys(flow.may), NAME))


def _behind_cuts(context: AuditContext, flow: InfluenceMatrix) -> Iterator[Finding]:
    """What stands behind a cut, and whether anything does: for targets in which nobody looks ahead."""
    rows = context.most_tokens // len(flow.row) // 2
    cuts = informative_cuts(len(flow.row), max(4, min(8, rows)))
    if not flow.changes.whole:
        yield perturb_suffixes(
            context, flow.changes, informative_cuts(len(flow.row), max(4, rows)), NAME, "whole tails", exact=True
        )
    for way in context.probe.call_modes:
        queried = Perturbations(context, flow.row, partial(_in_mode, way), most=1)
        yield perturb_suffixes(context, queried, cuts, NAME, way)
    if len(flow.row) > 3:
        yield _shorter(context, flow.changes)


def _in_mode(way: str, run: TargetRun, batch: Batch) -> Tensor:
    with run.probe.call_mode(way):
        return run.logits(batch)


def later_keys(may_TT: Tensor) -> Tensor:
    """``Bool[T, T]``: pairs whose key comes after the query."""
    return torch.ones_like(may_TT).triu(1)


def _cached(context: AuditContext, row: list[int]) -> Finding:
    """The rest of a chunk, changed at once; token by token where that moves what it must not."""
    cuts, start = [], 0
    for size in _chunks(len(row)):
        inner = even_cuts(size, 3 if len(row) <= _SHORT else 1) if size > 1 else []
        cuts += [start + cut for cut in inner]
        start += size
    some = Perturbations(context, row, _chunked, most=1)
    result = perturb_suffixes(context, some, cuts or [0], NAME, _CACHED)
    if result.status == "pass":
        return result
    near = [] if result.where is None or result.where.key is None else [result.where.key]
    flow = measured(context, Perturbations(context, row, _chunked, first=near))
    cached = assert_no_influence(context, flow, later_keys(flow.may), NAME, _CACHED, lambda q, k: "")
    nobody_looks_ahead = all(
        rule.lookahead == 0 for rule in context.probe.rules
    )  # then nothing behind a cut may move it
    return result if cached.status == "pass" and nobody_looks_ahead else cached


def _chunks(slots: int) -> list[int]:
    first = max(1, slots // 3)
    return [size for size in (first, slots - first - 1, 1) if size > 0]


def _chunked(run: TargetRun, batch: Batch) -> Tensor:
    return run.chunked(batch, _chunks(batch.shape[1]))


def _reaction(context: AuditContext, flow: InfluenceMatrix) -> Finding:
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
    if not context.probe.rules_declared:
        message = f"tokens {abs(nearest)} away moved nothing, nor need they: no rule was declared, causal was assumed"
        return Finding(NAME, "pass", message, case)
    query = max(nearest, 0) + int(watched_TT.diagonal(-nearest).nonzero()[0])
    side = "ahead" if nearest < 0 else "back"
    message = (
        f"tokens {abs(nearest)} {side} may be seen by the declared rules, but changing them moved nothing"
        f" ({len(dead)} such distances): the target sees less than it declares"
    )
    return Finding(NAME, "fragile", message, case, Location(0, query, query - nearest))


def gradient_kept(context: AuditContext, flow: InfluenceMatrix, among_TT: Tensor, check: str) -> Finding:
    """d out[i] / d x[j] is exactly 0 for every j of the pairs ``among`` that i must not see."""
    asked_RT, sizes_RT = gradients(context, flow.row)
    largest, hidden_RT = float(sizes_RT.max()), torch.where(reached(flow.may, asked_RT), 0.0, sizes_RT)
    hidden_RT = torch.where(reached(~among_TT, asked_RT), 0.0, hidden_RT)  # such as no query asked has elsewhere
    size, limit = float(hidden_RT.max()), 1e-3 * context.native.rounding * largest
    if size <= limit:
        decided = f"{size:.0e} beside {largest:.0e}" if size else "exactly 0"
        message = "no gradient flows to a token that must not be seen, from single outputs and from all before a cut"
        return Finding(check, "pass", message, "gradient", size=size, decided=decided)
    number, key = (hidden_RT > limit).nonzero()[0].tolist()
    queried = asked_RT[number].nonzero()[:, 0].tolist()
    which = f"outputs up to {queried[-1]}" if len(queried) > 1 else f"output at {queried[0]}"
    message = f"a gradient flows from the {which} to token {key}"
    felt = [query for query in flow.changes.felt(context.runs[-1], key) if query in queried]
    if felt:
        message += f", and changing it moves the output at {felt[-1]}"
        return Finding(check, "leak", message, "gradient", Location(0, felt[-1], key), size)
    message += ", although changing it moved nothing"
    return Finding(check, "fragile", message, "gradient", Location(0, queried[-1], key), size)


def _shorter(context: AuditContext, changes: Perturbations) -> Finding:
    """A row that ends earlier: how many tokens follow is news from the future too."""
    row = changes.base
    case, cuts = "cut short", [cut + 1 for cut in even_cuts(len(row), 3 if len(row) <= _SHORT else 1)]

    def measure(run: TargetRun) -> Deviation:
        whole, sizes_CT = changes.unchanged(run, 1), torch.zeros(len(cuts), len(row), dtype=torch.float64)
        for number, cut in enumerate(cuts):
            sizes_CT[number, :cut] = max_abs_diff(whole[:, :cut], run.logits(Batch.from_rows([row[:cut]])))[0]
        return Deviation(run, sizes_CT, logit_scale(whole))

    def place(run: TargetRun, index: Index) -> tuple[Location, str]:
        del run
        number, query = index
        return Location(0, query), f"the output at {query} is another when the row ends after {cuts[number]} tokens"

    good = f"outputs are the same when the row ends after {', '.join(map(str, cuts))} tokens"
    return finding(context, NAME, case, context.read(measure), bits=False, good=good, place=place)


CHECK = Check(NAME, "Does any output move by a token ahead that it must not see?", run, length=2)
