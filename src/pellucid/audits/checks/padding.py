"""Does padding change what real tokens say: its side, its amount, its ids, what its embeddings hold?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from pellucid.audits.checks.check import question
from pellucid.audits.engine.compare import (
    Suspects,
    compare,
    compare_with_alone,
    decide,
    deviation,
    fragile,
    leak,
    not_applicable,
    passed,
    skip_if_no_gradient,
)
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.target_run import (
    TargetRun,
    embedding_gradient,
    first_not_finite,
    gradients_of,
    logit_scale,
    max_abs_diff,
    weights_of,
)
from pellucid.batch import Batch, Side
from pellucid.records import Finding, Location

LAYOUTS: tuple[tuple[str, Side, int], ...] = (
    ("right", "right", 5),
    ("left", "left", 5),
    ("right to 8", "right", 8),
    ("left to 8", "left", 8),
    ("both sides to 8", "both", 8),
)


@question("Do real tokens answer as they do alone, whatever padding is around them?", needs={"padding"}, length=5)
def check(context: AuditContext) -> Iterator[Finding]:
    """Rows of three lengths, padded in every way, against each row alone."""
    rows, probe = context.rows(), context.probe
    shifted = getattr(probe, "position_shifting_sides", ())
    left_out: list[Side] = [side for side in ("right", "left", "both") if side not in (*probe.sides, *shifted)]
    if left_out:
        refused = getattr(probe, "refused", {})
        raised = next((f": it raises {refused[side]}" for side in left_out if side in refused), "")
        message = f"{probe.name} is not padded on these sides: {', '.join(left_out)}{raised}"
        yield not_applicable(" and ".join(left_out), message)
    for case, side, length in LAYOUTS:
        if side in probe.sides:
            yield _against_alone(context, case, rows, Batch.from_rows(rows, side=side, length=length * context.step))
    if "left" in shifted:
        yield _shifting(context, "left", rows)
    for side in context.hiding_sides:
        batch = Batch.from_rows(rows, side=side, length=8 * context.step)
        yield compare(
            context, f"other ids in {side} pads", batch, context.fresh(batch, ~batch.token_mask), bits=True,
            good="ids in pads move nothing", wrong="the token in slot {query} moves with the ids of the pads",
            suspects=_pads(batch),
        )  # fmt: skip
        if context.can("embeddings"):
            yield _huge(context, f"1e4 in {side} pads", batch)
            yield _not_finite(context, f"NaN in {side} pads", batch)
            yield _gradient(context, f"gradient to {side} pads", batch)


def _against_alone(context: AuditContext, case: str, rows: list[list[int]], batch: Batch) -> Finding:
    good, wrong = "real tokens answer as they do alone", "the token in slot {query} differs from its output alone"
    never = "; where it is never padded so, declare it: padding_side = 'right' on the module, or sides of its probe"
    advice = "" if case.startswith("right") else never
    return compare_with_alone(context, case, batch, rows, good=good, wrong=wrong, advice=advice)


def _pads(batch: Batch) -> Suspects:
    """All padded slots, those of the row first."""
    pads = [(r, s) for r, s in (batch.segments == 0).nonzero().tolist()]
    return lambda row, _: sorted(pads, key=lambda pad: (pad[0] != row, pad))


def _shifting(context: AuditContext, case: str, rows: list[list[int]]) -> Finding:
    """Padding on the left of a target that counts slots and takes no positions, which no caller can correct."""
    allowed = context.probe.shift_allowed
    found = _against_alone(context, case, rows, Batch.from_rows(rows, side="left", length=5 * context.step))
    if found.status == "pass":
        return found
    way_out = (
        "pad on the right" if allowed
        else "take position_ids, count them by the mask, or refuse it (padding_side = 'right' on the model does)"
    )  # fmt: skip
    message = f"left padding shifts its positions, and it takes no positions that would correct this: {way_out}"
    return replace(found, status="fragile" if allowed else "leak", message=message)


def _filled(run: TargetRun, batch: Batch, value: float, where_BT: Tensor) -> Batch:
    embeddings = run.embed(batch)
    return batch.replace(inputs_embeds=torch.where(where_BT[:, :, None].to(embeddings.device), value, embeddings))


def _huge(context: AuditContext, case: str, batch: Batch) -> Finding:
    """Embeddings of 1e4 in all pads; where that moves a token, in one pad after the other."""
    nothing_BT = torch.zeros_like(batch.token_mask)

    def place(run: TargetRun, index: tuple[int, ...]) -> tuple[Location, str]:
        row, query = index
        before = run.logits(batch)[row, query]
        for pad_row, pad in _pads(batch)(row, query):
            one_BT = nothing_BT.clone()
            one_BT[pad_row, pad] = True
            if float(max_abs_diff(before, run.logits(_filled(run, batch, 1e4, one_BT))[row, query])) > 1e-12:
                where = Location(row, query, pad, None if pad_row == row else pad_row)
                return where, f"the token in slot {query} moves when the pad's embedding is 1e4"
        return Location(row, query), f"the token in slot {query} moves when the pads' embeddings are 1e4"

    readings = context.read(
        lambda run: deviation(
            run, _filled(run, batch, 0.0, nothing_BT), _filled(run, batch, 1e4, ~batch.token_mask), batch.token_mask
        )
    )
    return decide(context, case, readings, good="pads whose embeddings are 1e4 move nothing", place=place, bits=True)


@skip_if_no_gradient
def _not_finite(context: AuditContext, case: str, batch: Batch) -> Finding:
    """NaN and infinity in pads: outputs may not move, gradients of the weights must stay finite."""
    run, real_BT = context.native, batch.token_mask
    before = run.differentiable(batch).detach().cpu()
    named = weights_of(run)
    for value in (math.nan, math.inf):
        logits = run.differentiable(_filled(run, batch, value, ~real_BT))
        sizes_BT = torch.where(real_BT, max_abs_diff(before, logits.detach().cpu()), 0.0)
        if bool(sizes_BT.any()):
            row, query = sizes_BT.nonzero()[0].tolist()
            message = f"the token in slot {query} moves when pads hold {value}: 0 · {value} is not 0"
            return fragile(case, message, Location(row, query), float(sizes_BT.max()))
        if not named:
            continue
        bad = first_not_finite(gradients_of(logits[real_BT.to(logits.device)].sum(), named))
        if bad:
            return fragile(case, f"with {value} in pads the gradient of {bad} is not finite, although no output moves")
    return passed(case, "NaN and infinity in pads move nothing, and gradients stay finite", 0.0)


@skip_if_no_gradient
def _gradient(context: AuditContext, case: str, batch: Batch) -> Finding:
    grad_BTD = embedding_gradient(context.runs[-1], batch)
    assert grad_BTD is not None
    sizes_BT = torch.where(batch.token_mask, 0.0, grad_BTD.abs().amax(-1).cpu())
    size = float(sizes_BT.max())
    if size <= 1e-12 * logit_scale(grad_BTD):
        return passed(case, "no gradient flows into pads", size)
    row, pad = sizes_BT.nonzero()[0].tolist()
    message = f"a gradient flows from real tokens into the pad in slot {pad}"
    return leak(case, message, Location(row, None, pad), size, "a gradient is a move by a small change")
