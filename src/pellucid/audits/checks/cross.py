"""Does every target token see the whole source, its own only, and never the source's padding?"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pellucid.audits.checks.check import question
from pellucid.audits.engine.capture import encoder_output_changed
from pellucid.audits.engine.compare import Answer, compare, not_seen, passed, skip_if_unsupported
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.layer_isolation import check_encoder, is_plain
from pellucid.audits.engine.perturbation import Forward
from pellucid.audits.engine.target_run import TargetRun, logit_scale, max_abs_diff
from pellucid.batch import Batch, Side
from pellucid.records import Finding, Location

TARGET = 4
SOURCE = 6
SIDES: tuple[Side, ...] = ("right", "left")


@question(
    "Does every target token see all of its own source, none of its padding, and the encoder keep to its rules?",
    needs={"source"},
    length=TARGET,
)
def check(context: AuditContext) -> Iterator[Finding]:
    """Change the source, or what the encoder made of it, and watch the target's outputs."""
    sources, targets = context.rows((3, SOURCE, 1)), [context.tokens(TARGET) for _ in range(3)]
    yield _whole(context, "whole source", sources[1], targets[1], TargetRun.logits)
    if context.can("cache"):
        yield _whole(context, "through a cache", sources[1], targets[1], _stepwise)
    if context.probe.memory_name is not None:
        yield _encoder_output(context, sources[1], targets[1])
    yield from check_encoder(context)
    if not context.can("padding"):
        return
    for side in [side for side in SIDES if side in context.probe.sides]:
        batch = Batch.from_rows(targets).replace(source=Batch.from_rows(sources, side=side, length=SOURCE + 2))
        yield _compared(
            context, f"source padded {side}", _alone(sources, targets), batch,
            "targets answer as they do beside their source alone",
            "the output at {query} differs from that beside its source alone",
        )  # fmt: skip
        yield _unmoved(context, f"other ids in {side} pads", batch, "the ids of the source's pads")
    batch = Batch.from_rows(targets).replace(source=Batch.from_rows(sources, length=SOURCE + 2))
    yield _unmoved(context, "sources of other rows", batch, "the sources of other rows", row=1)


def _stepwise(run: TargetRun, batch: Batch) -> Tensor:
    return run.chunked(batch, [1] * batch.shape[1])


@skip_if_unsupported
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


def _encoder_output(context: AuditContext, source: list[int], target: list[int]) -> Finding:
    """Each slot of the encoder's output alone: an encoder that mixes would hide what cross-attention does not see."""
    batch, run = Batch.from_pairs([source] * SOURCE, [target] * SOURCE), context.runs[-1]
    before = run.logits(batch)
    with encoder_output_changed(run):
        after = run.logits(batch)
    sizes_TS = max_abs_diff(before, after).T / logit_scale(before)
    return _all_seen(context, "each memory slot", sizes_TS, "slot {} of the memory")


def _all_seen(context: AuditContext, case: str, sizes_TS: Tensor, what: str) -> Finding:
    """Sizes are relative; where other pairs move far above rounding, one that does not move at all is not seen."""
    seen_TS = sizes_TS > 1e-14
    unseen = (~seen_TS).nonzero().tolist()
    if not unseen:
        return passed(case, f"each of {SOURCE} slots moves each of {TARGET} outputs", 0.0)
    query, key = unseen[0]
    why = ": cross-attention is causal" if torch.equal(seen_TS, torch.ones_like(seen_TS).tril()) else ""
    message = f"target query {query} does not see {what.format(key)} ({len(unseen)} such pairs){why}"
    status = "leak" if is_plain(context, sizes_TS[seen_TS]) else context.status_of_unseen
    return not_seen(case, status, message, Location(0, query, key))


@skip_if_unsupported
def _compared(context: AuditContext, case: str, want: Answer, got: Batch, good: str, wrong: str) -> Finding:
    return compare(context, case, want, got, good=good, wrong=wrong)


def _alone(sources: list[list[int]], targets: list[list[int]]) -> Answer:
    """Each pair by itself."""
    pairs = [Batch.from_pairs([source], [target]) for source, target in zip(sources, targets, strict=True)]
    return lambda run: torch.cat([run.logits(pair) for pair in pairs])


@skip_if_unsupported
def _unmoved(context: AuditContext, case: str, batch: Batch, what: str, row: int | None = None) -> Finding:
    """The pads of all sources change; with ``row``, the sources of all other rows."""
    assert batch.source is not None
    changed_BS, watched_BT = ~batch.source.token_mask, torch.ones_like(batch.token_mask)
    if row is not None:
        changed_BS, watched_BT = ~changed_BS, ~watched_BT
        changed_BS[row], watched_BT[row] = False, True
    after = batch.replace(source=context.fresh(batch.source, changed_BS))
    good, wrong = f"{what} move nothing", f"the output at {{query}} moves with {what}"
    return compare(context, case, batch, after, watch=watched_BT, bits=True, good=good, wrong=wrong)
