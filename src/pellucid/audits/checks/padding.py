"""Does padding change what real tokens say: its side, its amount, its ids, what its embeddings hold?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pellucid.audits.checks.check import Check
from pellucid.audits.method.bench import Bench
from pellucid.audits.method.gradients import embedding_gradient, first_not_finite, gradients_of, weights_of
from pellucid.audits.method.judge import Index, finding, unless_no_gradient
from pellucid.audits.method.measure import Reading, Run, moved, scale_of
from pellucid.audits.method.rows import Change, as_alone, culprit, not_moved, rows_of, unmoved
from pellucid.probe import Request, Side
from pellucid.records import Finding, Where

NAME = "padding"
LAYOUTS: tuple[tuple[str, Side, int], ...] = (
    ("right", "right", 5),
    ("left", "left", 5),
    ("right to 8", "right", 8),
    ("left to 8", "left", 8),
    ("both sides to 8", "both", 8),
)


def run(bench: Bench) -> Iterator[Finding]:
    """Rows of three lengths, padded in every way, against each row alone."""
    rows = rows_of(bench)
    sides = bench.probe.sides
    shifted = getattr(bench.probe, "shifted", ())
    left_out: list[Side] = [side for side in ("right", "left", "both") if side not in (*sides, *shifted)]
    if left_out:
        yield Finding(NAME, "not_applicable", _unpadded(bench, left_out), " and ".join(left_out))
    for case, side, length in LAYOUTS:
        if side not in sides:
            continue
        yield _against_alone(bench, case, rows, Request.from_rows(rows, side=side, length=length))
    if "left" in shifted:
        yield _shifting(bench, rows)
    for side in bench.hiding_sides:
        request = Request.from_rows(rows, side=side, length=8)
        yield _other_ids(bench, f"other ids in {side} pads", request)
        if bench.can("embeddings"):
            yield _huge(bench, f"1e4 in {side} pads", request)
            for ask, case in ((_not_finite, f"NaN in {side} pads"), (_gradient, f"gradient to {side} pads")):
                yield unless_no_gradient(NAME, case, partial(ask, bench, case, request))


def _unpadded(bench: Bench, sides: list[Side]) -> str:
    """Why it is not asked on these sides: what it raised, or that it says so."""
    raised = getattr(bench.probe, "refused", {})
    said = next((f": it raises {raised[side]}" for side in sides if side in raised), "")
    return f"{bench.probe.name} is not padded on these sides: {', '.join(sides)}{said}"


def _shifting(bench: Bench, rows: list[list[int]]) -> Finding:
    """Padding on the left of a target that counts slots, and cannot be told positions: nobody can make it right."""
    allowed, case = bench.probe.shift_allowed, "left"
    found = _against_alone(bench, case, rows, Request.from_rows(rows, side="left", length=5))
    if found.status == "pass":
        return found
    way_out = (
        "pad on the right" if allowed
        else "take position_ids, count them by the mask, or refuse it (padding_side = 'right' on the model does)"
    )  # fmt: skip
    message = f"left padding shifts its positions, and there is no way to tell it otherwise: {way_out}"
    return replace(found, status="fragile" if allowed else "leak", message=message)


def _against_alone(bench: Bench, case: str, rows: list[list[int]], request: Request) -> Finding:
    def place(run: Run, index: Index) -> tuple[Where, str]:
        where = _pad_that_moves(bench, run, request, *index)
        cause = (
            f"token id of the pad in slot {where.key} moves it" if where.key is not None
            else "no pad's content moves it, so its position or the number of slots does"
        )  # fmt: skip
        return where, f"the token in slot {where.query} answers otherwise than alone; {cause}"

    return as_alone(bench, NAME, case, request, rows, good="real tokens answer as they do alone", place=place)


def _pads(request: Request, row: int) -> list[Change]:
    """All padded slots, those of ``row`` first."""
    pads = [(r, s) for r, s in (request.segments == 0).nonzero().tolist()]
    return sorted(pads, key=lambda pad: (pad[0] != row, pad))


def _pad_that_moves(bench: Bench, run: Run, request: Request, row: int, query: int) -> Where:
    found = culprit(bench, run, request, row, query, _pads(request, row))
    if found is None:
        return Where(row, query)
    return Where(row, query, found[1], None if found[0] == row else found[0])


def _other_ids(bench: Bench, case: str, request: Request) -> Finding:
    after = bench.fresh(request, ~request.real)

    def place(run: Run, index: Index) -> tuple[Where, str]:
        where = _pad_that_moves(bench, run, request, *index)
        return where, f"the token in slot {where.query} moves with the ids of the pads"

    return not_moved(bench, NAME, case, request, after, request.real, good="ids in pads move nothing", place=place)


def _filled(run: Run, request: Request, value: float, where_BT: Tensor) -> Request:
    embeddings = run.embed(request)
    return request.with_embeddings(torch.where(where_BT[:, :, None].to(embeddings.device), value, embeddings))


def _huge(bench: Bench, case: str, request: Request) -> Finding:
    def measure(run: Run) -> Reading:
        nothing = torch.zeros_like(request.real)
        return unmoved(
            run, _filled(run, request, 0.0, nothing), _filled(run, request, 1e4, ~request.real), request.real
        )

    def place(run: Run, index: Index) -> tuple[Where, str]:
        row, query = index
        before = run.logits(request)[row, query]
        for pad_row, pad in _pads(request, row):
            one = torch.zeros_like(request.real)
            one[pad_row, pad] = True
            if float(moved(before, run.logits(_filled(run, request, 1e4, one))[row, query])) > 1e-12:
                where = Where(row, query, pad, None if pad_row == row else pad_row)
                return where, f"the token in slot {query} moves when the pad's embedding is 1e4"
        return Where(row, query), f"the token in slot {query} moves when the pads' embeddings are 1e4"

    good = "pads whose embeddings are 1e4 move nothing"
    return finding(bench, NAME, case, bench.read(measure), bits=True, good=good, place=place)


def _not_finite(bench: Bench, case: str, request: Request) -> Finding:
    """NaN and infinity in pads: outputs may not move, gradients of the weights must stay finite."""
    run, real_BT = bench.native, request.real
    before = run.differentiable(request).detach().cpu()
    for value in (math.nan, math.inf):
        logits = run.differentiable(_filled(run, request, value, ~real_BT))
        sizes_BT = torch.where(real_BT, moved(before, logits.detach().cpu()), 0.0)
        if bool(sizes_BT.any()):
            row, query = sizes_BT.nonzero()[0].tolist()
            message = f"the token in slot {query} moves when pads hold {value}: 0 · {value} is not 0"
            return Finding(NAME, "fragile", message, case, Where(row, query), float(sizes_BT.max()))
        spoilt = _spoilt_weights(run, logits, real_BT)
        if spoilt:
            message = f"with {value} in pads the gradient of {spoilt} is not finite, although no output moves"
            return Finding(NAME, "fragile", message, case)
    return Finding(NAME, "pass", "NaN and infinity in pads move nothing, and gradients stay finite", case, size=0.0)


def _spoilt_weights(run: Run, logits: Tensor, real_BT: Tensor) -> str | None:
    """The first parameter whose gradient from the real tokens is not finite."""
    named = weights_of(run)
    if not named:
        return None
    return first_not_finite(gradients_of(logits[real_BT.to(logits.device)].sum(), named))


def _gradient(bench: Bench, case: str, request: Request) -> Finding:
    grad_BTD = embedding_gradient(bench, bench.runs[-1], request)
    assert grad_BTD is not None
    sizes_BT = torch.where(request.real, 0.0, grad_BTD.abs().amax(-1).cpu())
    size = float(sizes_BT.max())
    if size <= 1e-12 * scale_of(grad_BTD):
        return Finding(NAME, "pass", "no gradient flows into pads", case, size=size)
    row, pad = sizes_BT.nonzero()[0].tolist()
    message = f"a gradient flows from real tokens into the pad in slot {pad}"
    return Finding(NAME, "leak", message, case, Where(row, None, pad), size, "a gradient is a move by a small change")


CHECK = Check(
    NAME,
    "Do real tokens answer as they do alone, whatever padding is around them?",
    run,
    frozenset({"padding"}),
    length=5,
)
