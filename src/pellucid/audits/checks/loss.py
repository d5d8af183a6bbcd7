"""Is the loss the sum that its own logits give: which tokens count, shifted once, never a mean of means?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from pellucid.audits.checks.check import Check
from pellucid.audits.method.bench import Bench
from pellucid.audits.method.gradients import gradients_of, weights_of
from pellucid.audits.method.judge import Index, finding
from pellucid.audits.method.measure import ROUNDING, Reading, Run
from pellucid.audits.method.rows import rows_of
from pellucid.probe import Request
from pellucid.records import Finding, Where

NAME = "loss"


def run(bench: Bench) -> Iterator[Finding]:
    """The target's sums and counts against sums over its own logits, taken here by the definition."""
    row = bench.tokens(7)
    row[3] = bench.ends[0]  # token 0 is a token like any other
    plain = Request.from_rows([row])
    yield from _by_definition(bench, "one row", plain)
    answers_BT = torch.arange(plain.shape[1])[None] >= 4
    yield from _by_definition(bench, "only the last three tokens", plain.with_targets(answers_BT))
    yield from _by_definition(bench, "single token", Request.from_rows([row[:1]]))
    yield _nothing_to_learn(bench, plain.with_targets(torch.zeros_like(answers_BT)))
    if bench.can("padding"):
        rows = rows_of(bench)  # the longest ends with token 0, the id that stands in pads: a true end token
        for side in bench.one_sided:
            yield from _by_definition(
                bench, f"{side} padding, end token = pad", Request.from_rows(rows, side=side, length=8)
            )
        yield _adds_up(bench, rows)
    if bench.can("packing"):
        yield from _by_definition(bench, "packed 3 + 5 + 1", Request.packed(rows_of(bench), length=12))
        yield from _by_definition(bench, "packed 3 + 5 + 4", Request.packed(rows_of(bench, (3, 5, 4))))
    yield from _true_ends(bench)
    yield from _long(bench)


def _true_ends(bench: Bench) -> Iterator[Finding]:
    """The target's own end token, within a text and at its end: where pads share its id it has to be learnt too."""
    for end in bench.end_tokens:
        rows = [bench.tokens(size) for size in (6, 4)]
        rows[0][2] = rows[0][-1] = rows[1][-1] = end
        yield from _by_definition(bench, f"true end token {end}", Request.from_rows(rows[:1]))
        if bench.can("padding"):
            case, side = f"true end token {end}, padded", bench.probe.sides[0]
            yield from _by_definition(bench, case, Request.from_rows(rows, side=side, length=7))


def _long(bench: Bench) -> Iterator[Finding]:
    """As long as the audit's rows are, which is where losses taken in pieces lose their borders."""
    slots = bench.length
    row = bench.tokens(slots)
    for slot, token in zip(range(1, slots), bench.edges, strict=False):
        row[slot] = token
    if bench.can("padding"):
        rows = [row, bench.tokens(slots // 2)]
        request = Request.from_rows(rows, side=bench.probe.sides[0])
        yield from _by_definition(bench, f"rows of {slots} and {slots // 2}", request)
    else:
        yield from _by_definition(bench, f"a row of {slots}", Request.from_rows([row]))
    if bench.can("packing") and slots > 12:
        sizes = (slots // 4, slots // 2, slots - slots // 4 - slots // 2)
        case = "packed " + " + ".join(map(str, sizes))
        yield from _by_definition(bench, case, Request.packed([bench.tokens(size) for size in sizes]))


def wanted(run: Run, request: Request, back: int | None = None) -> Tensor:
    """``[B, T]``: the loss of each token to be learnt, predicted from ``back`` slots before (None: as is right)."""
    back = run.probe.predicts_from if back is None else back
    scores = run.plain(replace(request, targets=None)).double().log_softmax(-1)
    losses_BT = torch.zeros(request.shape, dtype=torch.float64)
    picked = -scores[:, : request.shape[1] - back].gather(-1, request.tokens[:, back:, None])[..., 0]
    losses_BT[:, back:] = picked
    reaches = request.learnt & (request.positions >= back)
    return torch.where(reaches, losses_BT, 0.0)


def _by_definition(bench: Bench, case: str, request: Request) -> Iterator[Finding]:
    total, count = bench.native.loss(request)
    learnt = int(request.learnt.sum())
    if count != learnt:
        where = _first_wrong(bench.native, request)
        likely = _likely(bench.native, request, total)
        message = f"{count} tokens were counted, but {learnt} have to be predicted{likely}"
        yield Finding(NAME, "leak", message, case, where, float(abs(count - learnt)), "counts are exact")
        return

    def measure(run: Run) -> Reading:
        want = float(wanted(run, request).sum())
        got = total if run is bench.native else run.loss(request)[0]
        size = abs(got - want) if math.isfinite(got) else math.inf
        return Reading(run, torch.tensor([_beyond(bench, run, size, want)], dtype=torch.float64), 1 + abs(want))

    def place(run: Run, index: Index) -> tuple[Where, str]:
        del index
        got, want = run.loss(request)[0], float(wanted(run, request).sum())
        message = f"the loss is {got:.6g}, but the target's own logits give {want:.6g}{_likely(run, request, got)}"
        return _first_wrong(run, request), message

    good = f"{learnt} tokens counted, each predicted by the slot before it"
    yield finding(bench, NAME, case, bench.read(measure, of_loss=True), bits=False, good=good, place=place)


def _beyond(bench: Bench, run: Run, size: float, want: float) -> float:
    """``size``, and 0 where a loss that is taken in float32 whatever the logits are explains it."""
    return 0.0 if bench.loss_is_coarse(run) and size <= ROUNDING[torch.float32] * (1 + abs(want)) else size


def _likely(run: Run, request: Request, got: float) -> str:
    """What the wrong sum looks like, where it looks like something."""
    right = wanted(run, request)
    count = int(request.learnt.sum())
    guesses = {
        "each token was predicted from itself: labels are not shifted": wanted(run, request, 0).sum(),
        "each token was predicted from two before it: labels are shifted twice": wanted(run, request, 2).sum(),
        "it is the mean, not the sum": right.sum() / max(count, 1),
    }
    for text, guess in guesses.items():
        if count and abs(float(guess) - got) <= 1e-4 * (1 + abs(got)):
            return f" ({text})"
    return ""


def _first_wrong(run: Run, request: Request) -> Where:
    """The first token whose own loss is wrong when it alone has to be predicted: query predicts key."""
    want_BT = wanted(run, request)
    nothing = request.with_targets(torch.zeros_like(request.real))
    if run.loss(nothing)[1]:  # counted although nobody asked for it, so no single token can be asked for
        return next((Where(row) for row in range(request.shape[0]) if run.loss(nothing.row(row))[1]), Where(0))
    for row, slot in request.real.nonzero().tolist():
        only_BT = torch.zeros_like(request.real)
        only_BT[row, slot] = True
        total, count = run.loss(request.with_targets(only_BT))
        right = bool(request.learnt[row, slot])
        if count != int(right) or abs(total - float(want_BT[row, slot])) > 1e-3 * (1 + abs(total)):
            return Where(row, max(slot - 1, 0), slot)
    return Where(0)


def _nothing_to_learn(bench: Bench, request: Request) -> Finding:
    case = "nothing to learn"
    total, count = bench.native.loss(request)
    if count or total != 0:
        message = f"with no token to be predicted the loss is {total} over {count}; it must be 0 over 0"
        return Finding(NAME, "leak", message, case, Where(0), abs(total) if math.isfinite(total) else math.inf)
    spoilt = _spoilt_gradient(bench.native, request)
    if spoilt:
        message = f"with no token to be predicted the gradient of {spoilt} is not 0"
        return Finding(NAME, "leak", message, case, Where(0))
    return Finding(NAME, "pass", "0 over 0, and every gradient is 0", case, size=0.0)


def _spoilt_gradient(run: Run, request: Request) -> str | None:
    named, total = weights_of(run), run.differentiable_loss(request)
    if not named or not total.requires_grad:
        return None
    return next((name for name, grad in gradients_of(total, named).items() if bool((grad != 0).any())), None)


def _adds_up(bench: Bench, rows: list[list[int]]) -> Finding:
    """Sums are the same however the rows are dealt out; means of means are not."""

    def measure(run: Run) -> Reading:
        whole = run.loss(Request.from_rows(rows))[0]
        dealt = ([[rows[0]], [rows[1]], [rows[2]]], [[rows[0], rows[2]], [rows[1]]])
        sums = [sum(run.loss(Request.from_rows(part))[0] for part in parts) for parts in dealt]
        differences = [_beyond(bench, run, abs(whole - total), whole) for total in sums]
        sizes = torch.tensor(differences, dtype=torch.float64)
        return Reading(run, sizes, 1 + abs(whole))

    def place(run: Run, index: Index) -> tuple[Where, str]:
        del run, index
        message = "the loss of a batch is not the sum over its rows: short rows weigh too much (means of means)"
        return Where(0), message

    good = "the loss of a batch is the sum over its rows, however they are dealt out"
    return finding(bench, NAME, "dealt out", bench.read(measure, of_loss=True), bits=False, good=good, place=place)


CHECK = Check(
    NAME,
    "Is the loss the sum over the tokens to be predicted, each counted once?",
    run,
    frozenset({"loss"}),
    length=7,
)
