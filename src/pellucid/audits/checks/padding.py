"""Does padding change what real tokens say: its side, its amount, its ids, what its embeddings hold?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pellucid.audits.checks.check import Check
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.decision import (
    Change,
    Index,
    as_alone,
    caused,
    finding,
    not_moved,
    rows_of,
    skip_if_no_gradient,
    unmoved,
)
from pellucid.audits.engine.deviation import (
    Deviation,
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

NAME = "padding"
LAYOUTS: tuple[tuple[str, Side, int], ...] = (
    ("right", "right", 5),
    ("left", "left", 5),
    ("right to 8", "right", 8),
    ("left to 8", "left", 8),
    ("both sides to 8", "both", 8),
)


def run(context: AuditContext) -> Iterator[Finding]:
    """Rows of three lengths, padded in every way, against each row alone."""
    rows = rows_of(context)
    sides = context.probe.sides
    shifted = getattr(context.probe, "position_shifting_sides", ())
    left_out: list[Side] = [side for side in ("right", "left", "both") if side not in (*sides, *shifted)]
    if left_out:
        yield Finding(NAME, "not_applicable", _unpadded(context, left_out), " and ".join(left_out))
    for case, side, length in LAYOUTS:
        if side not in sides:
            continue
        yield _against_alone(context, case, rows, Batch.from_rows(rows, side=side, length=length))
    if "left" in shifted:
        yield _shifting(context, rows)
    for side in context.hiding_sides:
        batch = Batch.from_rows(rows, side=side, length=8)
        yield _other_ids(context, f"other ids in {side} pads", batch)
        if context.can("embeddings"):
            yield _huge(context, f"1e4 in {side} pads", batch)
            for ask, case in ((_not_finite, f"NaN in {side} pads"), (_gradient, f"gradient to {side} pads")):
                yield skip_if_no_gradient(NAME, case, partial(ask, context, case, batch))


def _unpadded(context: AuditContext, sides: list[Side]) -> str:
    """Why it is not asked on these sides: what it raised, or that it says so."""
    raised = getattr(context.probe, "refused", {})
    message = next((f": it raises {raised[side]}" for side in sides if side in raised), "")
    return f"{context.probe.name} is not padded on these sides: {', '.join(sides)}{message}"


def _shifting(context: AuditContext, rows: list[list[int]]) -> Finding:
    """Padding on the left of a target that counts slots, and cannot be told positions: nobody can make it right."""
    allowed, case = context.probe.shift_allowed, "left"
    found = _against_alone(context, case, rows, Batch.from_rows(rows, side="left", length=5))
    if found.status == "pass":
        return found
    way_out = (
        "pad on the right" if allowed
        else "take position_ids, count them by the mask, or refuse it (padding_side = 'right' on the model does)"
    )  # fmt: skip
    message = f"left padding shifts its positions, and there is no way to tell it otherwise: {way_out}"
    return replace(found, status="fragile" if allowed else "leak", message=message)


def _against_alone(context: AuditContext, case: str, rows: list[list[int]], batch: Batch) -> Finding:
    def message(where: Location) -> str:
        cause = (
            f"token id of the pad in slot {where.key} moves it" if where.key is not None
            else "no pad's content moves it, so its position or the number of slots does"
        )  # fmt: skip
        return f"the token in slot {where.query} answers otherwise than alone; {cause}"

    place = caused(context, batch, partial(_pads, batch), message)
    return as_alone(context, NAME, case, batch, rows, good="real tokens answer as they do alone", place=place)


def _pads(batch: Batch, row: int, query: int = 0) -> list[Change]:
    """All padded slots, those of ``row`` first."""
    del query
    pads = [(r, s) for r, s in (batch.segments == 0).nonzero().tolist()]
    return sorted(pads, key=lambda pad: (pad[0] != row, pad))


def _other_ids(context: AuditContext, case: str, batch: Batch) -> Finding:
    after = context.fresh(batch, ~batch.token_mask)

    def message(where: Location) -> str:
        return f"the token in slot {where.query} moves with the ids of the pads"

    place = caused(context, batch, partial(_pads, batch), message)
    return not_moved(context, NAME, case, batch, after, batch.token_mask, good="ids in pads move nothing", place=place)


def _filled(run: TargetRun, batch: Batch, value: float, where_BT: Tensor) -> Batch:
    embeddings = run.embed(batch)
    return batch.replace(inputs_embeds=torch.where(where_BT[:, :, None].to(embeddings.device), value, embeddings))


def _huge(context: AuditContext, case: str, batch: Batch) -> Finding:
    def measure(run: TargetRun) -> Deviation:
        nothing = torch.zeros_like(batch.token_mask)
        return unmoved(
            run, _filled(run, batch, 0.0, nothing), _filled(run, batch, 1e4, ~batch.token_mask), batch.token_mask
        )

    def place(run: TargetRun, index: Index) -> tuple[Location, str]:
        row, query = index
        before = run.logits(batch)[row, query]
        for pad_row, pad in _pads(batch, row):
            one = torch.zeros_like(batch.token_mask)
            one[pad_row, pad] = True
            if float(max_abs_diff(before, run.logits(_filled(run, batch, 1e4, one))[row, query])) > 1e-12:
                where = Location(row, query, pad, None if pad_row == row else pad_row)
                return where, f"the token in slot {query} moves when the pad's embedding is 1e4"
        return Location(row, query), f"the token in slot {query} moves when the pads' embeddings are 1e4"

    good = "pads whose embeddings are 1e4 move nothing"
    return finding(context, NAME, case, context.read(measure), bits=True, good=good, place=place)


def _not_finite(context: AuditContext, case: str, batch: Batch) -> Finding:
    """NaN and infinity in pads: outputs may not move, gradients of the weights must stay finite."""
    run, real_BT = context.native, batch.token_mask
    before = run.differentiable(batch).detach().cpu()
    for value in (math.nan, math.inf):
        logits = run.differentiable(_filled(run, batch, value, ~real_BT))
        sizes_BT = torch.where(real_BT, max_abs_diff(before, logits.detach().cpu()), 0.0)
        if bool(sizes_BT.any()):
            row, query = sizes_BT.nonzero()[0].tolist()
            message = f"the token in slot {query} moves when pads hold {value}: 0 · {value} is not 0"
            return Finding(NAME, "fragile", message, case, Location(row, query), float(sizes_BT.max()))
        spoilt = _spoilt_weights(run, logits, real_BT)
        if spoilt:
            message = f"with {value} in pads the gradient of {spoilt} is not finite, although no output moves"
            return Finding(NAME, "fragile", message, case)
    return Finding(NAME, "pass", "NaN and infinity in pads move nothing, and gradients stay finite", case, size=0.0)


def _spoilt_weights(run: TargetRun, logits: Tensor, real_BT: Tensor) -> str | None:
    """The first parameter whose gradient from the real tokens is not finite."""
    named = weights_of(run)
    if not named:
        return None
    return first_not_finite(gradients_of(logits[real_BT.to(logits.device)].sum(), named))


def _gradient(context: AuditContext, case: str, batch: Batch) -> Finding:
    grad_BTD = embedding_gradient(context.runs[-1], batch)
    assert grad_BTD is not None
    sizes_BT = torch.where(batch.token_mask, 0.0, grad_BTD.abs().amax(-1).cpu())
    size = float(sizes_BT.max())
    if size <= 1e-12 * logit_scale(grad_BTD):
        return Finding(NAME, "pass", "no gradient flows into pads", case, size=size)
    row, pad = sizes_BT.nonzero()[0].tolist()
    message = f"a gradient flows from real tokens into the pad in slot {pad}"
    return Finding(
        NAME, "leak", message, case, Location(row, None, pad), size, "a gradient is a move by a small change"
    )


CHECK = Check(
    NAME,
    "Do real tokens answer as they do alone, whatever padding is around them?",
    run,
    frozenset({"padding"}),
    length=5,
)
