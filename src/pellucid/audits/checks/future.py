"""Does any output move by a token ahead that it must not see? Plain, through a cache, and by gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pellucid.audits.checks.check import question
from pellucid.audits.engine.compare import (
    decide,
    fragile,
    leak,
    not_applicable,
    passed,
    skip_if_no_gradient,
    skip_if_unsupported,
)
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.influence import (
    InfluenceMatrix,
    assert_no_influence,
    flow_of,
    gradients,
    later,
    measured,
    reached,
)
from pellucid.audits.engine.layers import first_broken_layer
from pellucid.audits.engine.perturbation import (
    Perturbations,
    even_cuts,
    informative_cuts,
    longer_lengths,
    perturb_suffixes,
)
from pellucid.audits.engine.target_run import Deviation, TargetRun, logit_scale, max_abs_diff
from pellucid.batch import Batch
from pellucid.records import Finding, Location

_ROWS = 4
_SHORT = 64  # of longer rows less is run twice


@question("Does any output move by a token ahead that it must not see?", length=2)
def check(context: AuditContext) -> Iterator[Finding]:
    """Change one token at a time and watch all outputs before it."""
    flow, rules = flow_of(context), context.probe.rules
    if not bool((later(flow.may) & ~flow.may).any()):
        names = ", ".join(dict.fromkeys(rule.describe() for rule in rules))
        yield not_applicable("", f"the declared rules ({names}) hide nothing ahead")
        return
    result = assert_no_influence(context, "tokens", flow, later(flow.may), explain=first_broken_layer)
    yield result
    yield _reaction(context, flow)
    if all(rule.lookahead == 0 for rule in rules):
        yield from _behind_cuts(context, flow)
    if context.can("cache"):
        yield _cached(context, "through a cache", flow.row)
    if context.can("embeddings") and not result.failed:
        yield no_gradient(context, "gradient", flow, later(flow.may))


def _behind_cuts(context: AuditContext, flow: InfluenceMatrix) -> Iterator[Finding]:
    """Tokens behind a cut, and whether there are any: for targets in which no token looks ahead."""
    slots, rows = len(flow.row), context.most_tokens // len(flow.row) // 2
    if not flow.changes.whole:
        yield perturb_suffixes(context, "whole tails", flow.changes, informative_cuts(slots, max(4, rows)), exact=True)
    for mode in context.probe.call_modes:

        def in_mode(run: TargetRun, batch: Batch, mode: str = mode) -> Tensor:
            with run.probe.call_mode(mode):
                return run.logits(batch)

        cuts = informative_cuts(slots, max(4, min(8, rows)))
        yield perturb_suffixes(context, mode, Perturbations(context, flow.row, in_mode, most=1), cuts)
    if slots > 3 and context.step < slots:
        yield _shorter(context, "cut short", flow.changes)
    for length in longer_lengths(context):
        yield _longer(context, f"rows of {length}", length)
    yield _many_rows(context, "other rows", slots)


@skip_if_unsupported
def _longer(context: AuditContext, case: str, length: int) -> Finding:
    """Where something begins at some length, such as a table that ends or a window that is lost: a few whole tails."""
    changes = Perturbations(context, context.tokens(length), TargetRun.logits, most=1)
    return perturb_suffixes(context, case, changes, even_cuts(length, 3))


def _many_rows(context: AuditContext, case: str, slots: int) -> Finding:
    """What only some tokens bring to light, such as a maximum over the row: whole tails of a few more rows."""
    found = passed(case, "nothing moved in other rows either")
    for _ in range(_ROWS):
        changes = Perturbations(context, context.tokens(slots), TargetRun.logits, most=1)
        found = perturb_suffixes(context, case, changes, even_cuts(slots, 6))
        if found.status != "pass":
            break
    return found


@skip_if_unsupported
def _cached(context: AuditContext, case: str, row: list[int]) -> Finding:
    """The rest of a chunk, changed at once; token by token where that moves what it must not."""
    chunks = [size for size in (max(1, len(row) // 3), len(row) - max(1, len(row) // 3) - 1, 1) if size > 0]

    def chunked(run: TargetRun, batch: Batch) -> Tensor:
        return run.chunked(batch, chunks)

    cuts, start = [], 0
    for size in chunks:
        inner = even_cuts(size, 3 if len(row) <= _SHORT else 1) if size > 1 else []
        cuts += [start + cut for cut in inner]
        start += size
    result = perturb_suffixes(context, case, Perturbations(context, row, chunked, most=1), cuts or [0])
    if result.status == "pass":
        return result
    near = [] if result.where is None or result.where.key is None else [result.where.key]
    flow = measured(context, Perturbations(context, row, chunked, first=near))
    cached = assert_no_influence(context, case, flow, later(flow.may))
    # where no token looks ahead, nothing behind a cut may move an output
    return result if cached.status == "pass" and all(r.lookahead == 0 for r in context.probe.rules) else cached


def _reaction(context: AuditContext, flow: InfluenceMatrix) -> Finding:
    """A target that ignores its input hides everything: what is visible has to move something."""
    case, length = "visible tokens", len(flow.row)
    watched_TT = flow.watched & flow.direct
    reacts_TT = watched_TT & flow.moved
    if not bool(reacts_TT.any()):
        message = "no token moved any output: the target ignores its input, so nothing can be shown"
        return Finding("", "error", message, case)
    dead = [
        back for back in range(1 - length, length)  # query - key
        if bool(watched_TT.diagonal(-back).any()) and not bool(reacts_TT.diagonal(-back).any())
    ]  # fmt: skip
    if not dead:
        return passed(case, "at every visible distance some token moved some output")
    nearest = min(dead, key=abs)
    if not context.probe.rules_declared:
        message = f"tokens {abs(nearest)} away moved nothing, nor need they: no rule was declared, causal was assumed"
        return passed(case, message)
    query = max(nearest, 0) + int(watched_TT.diagonal(-nearest).nonzero()[0])
    message = (
        f"tokens {abs(nearest)} {'ahead' if nearest < 0 else 'back'} may be seen by the declared rules, but changing "
        f"them moved nothing ({len(dead)} such distances): the target sees less than it declares"
    )
    return fragile(case, message, Location(0, query, query - nearest))


@skip_if_no_gradient
def no_gradient(context: AuditContext, case: str, flow: InfluenceMatrix, among_TT: Tensor) -> Finding:
    """d out[i] / d x[j] is exactly 0 for every j of the pairs ``among`` that i must not see."""
    queries_RT, sizes_RT = gradients(context, flow.row)
    largest, hidden_RT = float(sizes_RT.max()), torch.where(reached(flow.may, queries_RT), 0.0, sizes_RT)
    hidden_RT = torch.where(reached(~among_TT, queries_RT), 0.0, hidden_RT)  # such as no query here has elsewhere
    size, limit = float(hidden_RT.max()), 1e-3 * context.native.rounding * largest
    if size <= limit:
        decided = f"{size:.0e} beside {largest:.0e}" if size else "exactly 0"
        message = "no gradient flows to a token that must not be seen, from single outputs and from all before a cut"
        return passed(case, message, size, decided)
    number, key = (hidden_RT > limit).nonzero()[0].tolist()
    queries = queries_RT[number].nonzero()[:, 0].tolist()
    which = f"outputs up to {queries[-1]}" if len(queries) > 1 else f"output at {queries[0]}"
    message = f"a gradient flows from the {which} to token {key}"
    moved = [query for query in flow.changes.queries_moved_by(context.runs[-1], key) if query in queries]
    if moved:
        message += f", and changing it moves the output at {moved[-1]}"
        return leak(case, message, Location(0, moved[-1], key), size)
    return fragile(case, f"{message}, although changing it moved nothing", Location(0, queries[-1], key), size)


@skip_if_unsupported
def _shorter(context: AuditContext, case: str, changes: Perturbations) -> Finding:
    """A row that ends earlier: how many tokens follow is news from the future too."""
    row = changes.base
    cuts = [context.round(cut + 1) for cut in even_cuts(len(row), 3 if len(row) <= _SHORT else 1)]
    cuts = [cut for cut in dict.fromkeys(cuts) if cut < len(row)]

    def measure(run: TargetRun) -> Deviation:
        whole, sizes_CT = changes.unchanged(run, 1), torch.zeros(len(cuts), len(row), dtype=torch.float64)
        for number, cut in enumerate(cuts):
            sizes_CT[number, :cut] = max_abs_diff(whole[:, :cut], run.logits(Batch.from_rows([row[:cut]])))[0]
        return Deviation(run, sizes_CT, logit_scale(whole))

    def place(run: TargetRun, index: tuple[int, ...]) -> tuple[Location, str]:
        del run
        number, query = index
        return Location(0, query), f"the output at {query} is another when the row ends after {cuts[number]} tokens"

    good = f"outputs are the same when the row ends after {', '.join(map(str, cuts))} tokens"
    return decide(context, case, context.read(measure, shapes=True), good=good, place=place)
