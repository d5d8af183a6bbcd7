"""Is the loss the sum that its own logits give: which tokens count, shifted once, never a mean of means?"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from pellucid.audits.checks.check import Check
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.decision import Index, finding, rows_of
from pellucid.audits.engine.deviation import ROUNDING, Deviation, TargetRun, gradients_of, weights_of
from pellucid.batch import Batch
from pellucid.records import Finding, Location

NAME = "loss"


def run(context: AuditContext) -> Iterator[Finding]:
    """The target's sums and counts against sums over its own logits, taken here by the definition."""
    row = context.tokens(7)
    row[3] = context.ends[0]  # token 0 is a token like any other
    plain = Batch.from_rows([row])
    yield from _by_definition(context, "one row", plain)
    answers_BT = torch.arange(plain.shape[1])[None] >= 4
    yield from _by_definition(context, "only the last three tokens", plain.replace(target_mask=answers_BT))
    yield from _by_definition(context, "single token", Batch.from_rows([row[:1]]))
    yield _nothing_to_learn(context, plain.replace(target_mask=torch.zeros_like(answers_BT)))
    if context.can("padding"):
        rows = rows_of(context)  # the longest ends with token 0, the id that stands in pads: a true end token
        for side in context.one_sided:
            yield from _by_definition(
                context, f"{side} padding, end token = pad", Batch.from_rows(rows, side=side, length=8)
            )
        yield _adds_up(context, rows)
    if context.can("packing"):
        yield from _by_definition(context, "packed 3 + 5 + 1", Batch.packed(rows_of(context), length=12))
        yield from _by_definition(context, "packed 3 + 5 + 4", Batch.packed(rows_of(context, (3, 5, 4))))
    yield from _true_ends(context)
    yield from _long(context)


def _true_ends(context: AuditContext) -> Iterator[Finding]:
    """The target's own end token, within a text and at its end: where pads share its id it has to be learnt too."""
    for end in context.end_tokens:
        rows = [context.tokens(size) for size in (6, 4)]
        rows[0][2] = rows[0][-1] = rows[1][-1] = end
        yield from _by_definition(context, f"true end token {end}", Batch.from_rows(rows[:1]))
        if context.can("padding"):
            case, side = f"true end token {end}, padded", context.probe.sides[0]
            yield from _by_definition(context, case, Batch.from_rows(rows, side=side, length=7))


def _long(context: AuditContext) -> Iterator[Finding]:
    """As long as the audit's rows are, which is where losses taken in pieces lose their borders."""
    slots = context.length
    row = context.tokens(slots)
    for slot, token in zip(range(1, slots), context.edges, strict=False):
        row[slot] = token
    if context.can("padding"):
        rows = [row, context.tokens(slots // 2)]
        batch = Batch.from_rows(rows, side=context.probe.sides[0])
        yield from _by_definition(context, f"rows of {slots} and {slots // 2}", batch)
    else:
        yield from _by_definition(context, f"a row of {slots}", Batch.from_rows([row]))
    if context.can("packing") and slots > 12:
        sizes = (slots // 4, slots // 2, slots - slots // 4 - slots // 2)
        case = "packed " + " + ".join(map(str, sizes))
        yield from _by_definition(context, case, Batch.packed([context.tokens(size) for size in sizes]))


def wanted(run: TargetRun, batch: Batch, back: int | None = None) -> Tensor:
    """``[B, T]``: the loss of each token to be learnt, predicted from ``back`` slots before (None: as is right)."""
    back = run.probe.predicts_from if back is None else back
    scores = run.plain(batch.replace(target_mask=None)).double().log_softmax(-1)
    losses_BT = torch.zeros(batch.shape, dtype=torch.float64)
    picked = -scores[:, : batch.shape[1] - back].gather(-1, batch.tokens[:, back:, None])[..., 0]
    losses_BT[:, back:] = picked
    reaches = batch.loss_mask & (batch.positions >= back)
    return torch.where(reaches, losses_BT, 0.0)


def _by_definition(context: AuditContext, case: str, batch: Batch) -> Iterator[Finding]:
    total, count = context.native.loss(batch)
    expected = int(batch.loss_mask.sum())
    if count != expected:
        where = _first_wrong(context.native, batch)
        likely = _likely(context.native, batch, total)
        message = f"{count} tokens were counted, but {expected} have to be predicted{likely}"
        yield Finding(NAME, "leak", message, case, where, float(abs(count - expected)), "counts are exact")
        return

    def measure(run: TargetRun) -> Deviation:
        want = float(wanted(run, batch).sum())
        got = total if run is context.native else run.loss(batch)[0]
        size = abs(got - want) if math.isfinite(got) else math.inf
        return Deviation(run, torch.tensor([_beyond(context, run, size, want)], dtype=torch.float64), 1 + abs(want))

    def place(run: TargetRun, index: Index) -> tuple[Location, str]:
        del index
        got, want = run.loss(batch)[0], float(wanted(run, batch).sum())
        message = f"the loss is {got:.6g}, but the target's own logits give {want:.6g}{_likely(run, batch, got)}"
        return _first_wrong(run, batch), message

    good = f"{expected} tokens counted, each predicted by the slot before it"
    yield finding(context, NAME, case, context.read(measure, of_loss=True), bits=False, good=good, place=place)


def _beyond(context: AuditContext, run: TargetRun, size: float, want: float) -> float:
    """``size``, and 0 where a loss that is taken in float32 whatever the logits are explains it."""
    return 0.0 if context.loss_is_coarse(run) and size <= ROUNDING[torch.float32] * (1 + abs(want)) else size


def _likely(run: TargetRun, batch: Batch, got: float) -> str:
    """What the wrong sum looks like, where it looks like something."""
    right = wanted(run, batch)
    count = int(batch.loss_mask.sum())
    guesses = {
        "each token was predicted from itself: labels are not shifted": wanted(run, batch, 0).sum(),
        "each token was predicted from two before it: labels are shifted twice": wanted(run, batch, 2).sum(),
        "it is the mean, not the sum": right.sum() / max(count, 1),
    }
    for text, guess in guesses.items():
        if count and abs(float(guess) - got) <= 1e-4 * (1 + abs(got)):
            return f" ({text})"
    return ""


def _first_wrong(run: TargetRun, batch: Batch) -> Location:
    """The first token whose own loss is wrong when it alone has to be predicted: query predicts key."""
    want_BT = wanted(run, batch)
    nothing = batch.replace(target_mask=torch.zeros_like(batch.token_mask))
    if run.loss(nothing)[1]:  # counted although nobody asked for it, so no single token can be asked for
        return next((Location(row) for row in range(batch.shape[0]) if run.loss(nothing.row(row))[1]), Location(0))
    for row, slot in batch.token_mask.nonzero().tolist():
        only_BT = torch.zeros_like(batch.token_mask)
        only_BT[row, slot] = True
        total, count = run.loss(batch.replace(target_mask=only_BT))
        right = bool(batch.loss_mask[row, slot])
        if count != int(right) or abs(total - float(want_BT[row, slot])) > 1e-3 * (1 + abs(total)):
            return Location(row, max(slot - 1, 0), slot)
    return Location(0)


def _nothing_to_learn(context: AuditContext, batch: Batch) -> Finding:
    case = "nothing to learn"
    total, count = context.native.loss(batch)
    if count or total != 0:
        message = f"with no token to be predicted the loss is {total} over {count}; it must be 0 over 0"
        return Finding(NAME, "leak", message, case, Location(0), abs(total) if math.isfinite(total) else math.inf)
    spoilt = _spoilt_gradient(context.native, batch)
    if spoilt:
        message = f"with no token to be predicted the gradient of {spoilt} is not 0"
        return Finding(NAME, "leak", message, case, Location(0))
    return Finding(NAME, "pass", "0 over 0, and every gradient is 0", case, size=0.0)


def _spoilt_gradient(run: TargetRun, batch: Batch) -> str | None:
    named, total = weights_of(run), run.differentiable_loss(batch)
    if not named or not total.requires_grad:
        return None
    return next((name for name, grad in gradients_of(total, named).items() if bool((grad != 0).any())), None)


def _adds_up(context: AuditContext, rows: list[list[int]]) -> Finding:
    """Sums are the same however the rows are dealt out; means of means are not."""

    def measure(run: TargetRun) -> Deviation:
        whole = run.loss(Batch.from_rows(rows))[0]
        dealt = ([[rows[0]], [rows[1]], [rows[2]]], [[rows[0], rows[2]], [rows[1]]])
        sums = [sum(run.loss(Batch.from_rows(part))[0] for part in parts) for parts in dealt]
        differences = [_beyond(context, run, abs(whole - total), whole) for total in sums]
        sizes = torch.tensor(differences, dtype=torch.float64)
        return Deviation(run, sizes, 1 + abs(whole))

    def place(run: TargetRun, index: Index) -> tuple[Location, str]:
        del run, index
        message = "the loss of a batch is not the sum over its rows: short rows weigh too much (means of means)"
        return Location(0), message

    good = "the loss of a batch is the sum over its rows, however they are dealt out"
    return finding(context, NAME, "dealt out", context.read(measure, of_loss=True), bits=False, good=good, place=place)


CHECK = Check(
    NAME,
    "Is the loss the sum over the tokens to be predicted, each counted once?",
    run,
    frozenset({"loss"}),
    length=7,
)
