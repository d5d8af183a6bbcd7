"""Does every target token see the whole source, its own only, and never the source's padding?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from pellucid.audits.checks.check import Check
from pellucid.audits.engine.capture import memory_changed
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.decision import at, finding, skip_if_unsupported
from pellucid.audits.engine.deviation import Deviation, TargetRun, logit_scale, max_abs_diff
from pellucid.audits.engine.encoder_isolation import encoder_held
from pellucid.audits.engine.perturbation import Forward
from pellucid.audits.engine.row_layouts import not_moved, rows_of
from pellucid.batch import Batch, Side
from pellucid.records import Finding, Location

NAME = "cross"
TARGET = 4
SOURCE = 6
_PLAIN = 1e-3
SIDES: tuple[Side, ...] = ("right", "left")


def run(context: AuditContext) -> Iterator[Finding]:
    """Change the source, or what the encoder made of it, and watch the target's outputs."""
    sources, targets = rows_of(context, (3, SOURCE, 1)), [context.tokens(TARGET) for _ in range(3)]
    yield _whole(context, "whole source", sources[1], targets[1], TargetRun.logits)
    if context.can("cache"):
        case = "through a cache"
        yield skip_if_unsupported(NAME, case, lambda: _whole(context, case, sources[1], targets[1], _stepwise))
    if context.probe.memory_name is not None:
        yield _memory(context, sources[1], targets[1])
    yield from encoder_held(context, NAME)
    if not context.can("padding"):
        return
    for side in [side for side in SIDES if side in context.probe.sides]:
        yield skip_if_unsupported(NAME, f"source padded {side}", partial(_alone, context, side, sources, targets))
        yield skip_if_unsupported(
            NAME, f"other ids in {side} pads", partial(_other_ids, context, side, sources, targets)
        )
    yield _mates(context, sources, targets)


def _stepwise(run: TargetRun, batch: Batch) -> Tensor:
    return run.chunked(batch, [1] * batch.shape[1])


def _pairs(sources: list[list[int]], targets: list[list[int]], side: Side, length: int = SOURCE + 2) -> Batch:
    return Batch.from_rows(targets).replace(source=Batch.from_rows(sources, side=side, length=length))


def _whole(context: AuditContext, case: str, source: list[int], target: list[int], forward: Forward) -> Finding:
    """Each token of the source moves every output of the target, the first one too."""
    changed = [source, *([*source[:j], context.other(source[j]), *source[j + 1 :]] for j in range(SOURCE))]
    batch = Batch.from_pairs(changed, [target] * len(changed))
    sizes_TS = torch.zeros(TARGET, SOURCE, dtype=torch.float64)
    for run in context.runs:
        logits = forward(run, batch)
        moves_TS = max_abs_diff(logits[:1].expand(SOURCE, -1, -1), logits[1:]).T
        sizes_TS = torch.maximum(sizes_TS, moves_TS / logit_scale(logits))
    return _all_seen(context, case, sizes_TS, "token {} of the source")


def _memory(context: AuditContext, source: list[int], target: list[int]) -> Finding:
    """Each slot of the memory by itself: an encoder that mixes would hide what cross-attention does not see."""
    batch, run = Batch.from_pairs([source] * SOURCE, [target] * SOURCE), context.runs[-1]
    before = run.logits(batch)
    with memory_changed(run):
        after = run.logits(batch)
    return _all_seen(
        context, "each memory slot", max_abs_diff(before, after).T / logit_scale(before), "slot {} of the memory"
    )


def _all_seen(context: AuditContext, case: str, sizes_TS: Tensor, what: str) -> Finding:
    """Sizes are relative; where other pairs move far above rounding, one that does not move at all is not seen."""
    seen_TS = sizes_TS > 1e-14
    plain = context.probe.rules_declared and bool(seen_TS.any()) and float(sizes_TS[seen_TS].median()) > _PLAIN
    status = "leak" if plain else context.status_of_unseen
    unseen = (~seen_TS).nonzero().tolist()
    if not unseen:
        return Finding(NAME, "pass", f"each of {SOURCE} slots moves each of {TARGET} outputs", case, size=0.0)
    query, key = unseen[0]
    why = ": cross-attention is causal" if torch.equal(seen_TS, torch.ones_like(seen_TS).tril()) else ""
    message = f"target query {query} does not see {what.format(key)} ({len(unseen)} such pairs){why}"
    return Finding(NAME, status, message, case, Location(0, query, key), 0.0, "no bit of its output moved")


def _alone(context: AuditContext, side: Side, sources: list[list[int]], targets: list[list[int]]) -> Finding:
    """Rows beside padded sources against each pair alone."""
    batch = _pairs(sources, targets, side)

    def measure(run: TargetRun) -> Deviation:
        got = run.logits(batch)
        alone = (Batch.from_pairs([s], [t]) for s, t in zip(sources, targets, strict=True))
        want = torch.cat([run.logits(pair) for pair in alone])
        return Deviation(run, max_abs_diff(want, got), logit_scale(want))

    place = at("the output at {query} answers otherwise than beside its source alone")
    good = "targets answer as they do beside their source alone"
    return finding(context, NAME, f"source padded {side}", context.read(measure), bits=False, good=good, place=place)


def _other_ids(context: AuditContext, side: Side, sources: list[list[int]], targets: list[list[int]]) -> Finding:
    batch = _pairs(sources, targets, side)
    assert batch.source is not None
    after = batch.replace(source=context.fresh(batch.source, ~batch.source.token_mask))
    return _unmoved(
        context,
        f"other ids in {side} pads",
        batch,
        after,
        torch.ones_like(batch.token_mask),
        "the ids of the source's pads",
    )


def _mates(context: AuditContext, sources: list[list[int]], targets: list[list[int]]) -> Finding:
    batch = _pairs(sources, targets, "right")
    assert batch.source is not None
    others_BS, mine_BT = batch.source.token_mask.clone(), torch.zeros_like(batch.token_mask)
    others_BS[1], mine_BT[1] = False, True
    after = batch.replace(source=context.fresh(batch.source, others_BS))
    return _unmoved(context, "sources of other rows", batch, after, mine_BT, "the sources of other rows")


def _unmoved(context: AuditContext, case: str, before: Batch, after: Batch, watched_BT: Tensor, what: str) -> Finding:
    place = at(f"the output at {{query}} moves with {what}")
    return not_moved(context, NAME, case, before, after, watched_BT, good=f"{what} move nothing", place=place)


CHECK = Check(
    NAME,
    "Does every target token see all of its own source, none of its padding, and the encoder keep to its rules?",
    run,
    frozenset({"source"}),
    length=TARGET,
)
