"""Is the loss the sum that its own logits give: which tokens count, shifted once, never a mean of means?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from pellucid.audits.checks.check import question
from pellucid.audits.engine.compare import decide, leak, passed
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.target_run import ROUNDING, Deviation, TargetRun, gradients_of, weights_of
from pellucid.batch import Batch
from pellucid.records import Finding, Location

_EXACT = "counts are exact"


@question("Is the loss the sum over the tokens to be predicted, each counted once?", needs={"loss"}, length=7)
def check(context: AuditContext) -> Iterator[Finding]:
    """The target's sums and counts against sums over its own logits, taken here by the definition."""
    row = context.tokens(7)
    row[3] = context.ends[0]  # token 0 is a token like any other
    plain = Batch.from_rows([row])
    rows = context.rows() if context.can("padding") else []
    smoothing = _label_smoothing(context, plain)
    for case, batch in _requests(context, plain, rows):
        found = _by_definition(context, case, batch, smoothing)
        if case == "one row" and found.status == "leak" and found.decided != _EXACT and not _likely(context, plain):
            message = f"{found.message}: it is no plain cross-entropy, so only its sums are tested"
            yield replace(found, status="fragile", message=message)
            break
        yield found
    yield _nothing_to_learn(context, "nothing to learn", plain.replace(target_mask=torch.zeros_like(plain.token_mask)))
    if rows:
        yield _adds_up(context, "split in other ways", rows)


def _requests(context: AuditContext, plain: Batch, rows: list[list[int]]) -> Iterator[tuple[str, Batch]]:
    yield "one row", plain
    yield "only the last three tokens", plain.replace(target_mask=torch.arange(plain.shape[1])[None] >= 4)
    yield "single token", plain.part(0, 1)
    for side in context.one_sided if rows else []:  # the longest ends with token 0, the id that stands in pads
        yield f"{side} padding, end token = pad", Batch.from_rows(rows, side=side, length=8 * context.step)
    if context.can("packing"):
        yield "packed 3 + 5 + 1", Batch.packed(context.rows(), length=12 * context.step)
        yield "packed 3 + 5 + 4", Batch.packed(context.rows((3, 5, 4)))
    for end in context.end_tokens:  # the target's own: where pads share its id it has to be learned too
        long, short = (context.tokens(size) for size in (6, 4))
        long[2] = long[-1] = short[-1] = end
        yield f"true end token {end}", Batch.from_rows([long])
        if rows:
            padded = Batch.from_rows([long, short], side=context.probe.sides[0], length=context.round(7))
            yield f"true end token {end}, padded", padded
    # as long as the audit's rows are, where losses taken in pieces lose their borders
    slots = context.length
    row = context.tokens(slots)
    for slot, token in zip(range(1, slots), context.edges, strict=False):
        row[slot] = token
    if rows:
        padded = Batch.from_rows([row, context.tokens(slots // 2)], side=context.probe.sides[0])
        yield f"rows of {slots} and {slots // 2}", padded
    else:
        yield f"a row of {slots}", Batch.from_rows([row])
    if context.can("packing") and slots > 12:
        sizes = (slots // 4, slots // 2, slots - slots // 4 - slots // 2)
        yield "packed " + " + ".join(map(str, sizes)), Batch.packed([context.tokens(size) for size in sizes])


def expected_losses(run: TargetRun, batch: Batch, back: int | None = None, smoothing: float = 0.0) -> Tensor:
    """``[B, T]``: the loss of each token to be learned, predicted from ``back`` slots before (None: as is right).

    ``smoothing`` of the labels as in ``torch.nn.CrossEntropyLoss`` (Szegedy et al. 2016, §7).
    """
    back = run.probe.predicts_from if back is None else back
    scores = run.plain(batch.replace(target_mask=None)).double().log_softmax(-1)[:, : batch.shape[1] - back]
    losses_BT = torch.zeros(batch.shape, dtype=torch.float64)
    picked_BT = -scores.gather(-1, batch.tokens[:, back:, None])[..., 0]
    losses_BT[:, back:] = (1 - smoothing) * picked_BT - smoothing * scores.mean(-1) if smoothing else picked_BT
    return torch.where(batch.loss_mask & (batch.positions >= back), losses_BT, 0.0)


def _label_smoothing(context: AuditContext, plain: Batch) -> float:
    """The smoothing that explains the loss of a row and of its end alike; 0 where none does."""
    found = []
    for batch in (plain, plain.replace(target_mask=torch.arange(plain.shape[1])[None] >= 4)):
        run = context.loss_run
        got, hard, even = run.loss(batch)[0], *(float(expected_losses(run, batch, None, s).sum()) for s in (0.0, 1.0))
        found.append((got - hard) / (even - hard) if even != hard else 0.0)
    first, second = found
    return round(first, 6) if 1e-4 < first < 1 and abs(first - second) < 1e-4 else 0.0


def _by_definition(context: AuditContext, case: str, batch: Batch, smoothing: float) -> Finding:
    total, count = context.native.loss(batch)
    expected = int(batch.loss_mask.sum())
    if count != expected:
        message = f"{count} tokens were counted, but {expected} have to be predicted{_likely(context, batch)}"
        return leak(case, message, _first_wrong(context.native, batch), float(abs(count - expected)), _EXACT)

    def want(run: TargetRun) -> float:
        return float(expected_losses(run, batch, smoothing=smoothing).sum())

    def measure(run: TargetRun) -> Deviation:
        got = total if run is context.native else run.loss(batch)[0]
        size = abs(got - want(run)) if math.isfinite(got) else math.inf
        sizes = torch.tensor([_beyond(context, run, size, want(run))], dtype=torch.float64)
        return Deviation(run, sizes, 1 + abs(want(run)))

    def place(run: TargetRun, index: tuple[int, ...]) -> tuple[Location, str]:
        del index
        message = f"the loss is {run.loss(batch)[0]:.6g}, but the target's own logits give {want(run):.6g}"
        return _first_wrong(run, batch), message + _likely(context, batch)

    smoothed = f", with labels smoothed by {smoothing:g}" if smoothing else ""
    good = f"{expected} tokens counted, each predicted by the slot before it{smoothed}"
    return decide(context, case, context.read(measure, of_loss=True), good=good, place=place)


def _beyond(context: AuditContext, run: TargetRun, size: float, want: float) -> float:
    """``size``, and 0 where a loss that is taken in float32 whatever the logits are explains it."""
    return 0.0 if context.loss_is_coarse(run) and size <= ROUNDING[torch.float32] * (1 + abs(want)) else size


def _likely(context: AuditContext, batch: Batch) -> str:
    """What the wrong sum looks like, where it looks like something."""
    run, count = context.native, int(batch.loss_mask.sum())
    got = run.loss(batch)[0]
    right, first = expected_losses(run, batch).sum(), expected_losses(run, batch)[:, :2].sum()
    guesses = {
        "each token was predicted from itself: labels are not shifted": expected_losses(run, batch, 0).sum(),
        "each token was predicted from two before it: labels are shifted twice": expected_losses(run, batch, 2).sum(),
        "it is the mean, not the sum": right / max(count, 1),
        "the first token is never learned": (right - first) * count / max(count - 1, 1),
        "it is divided by all slots, not by the tokens that count": right * count / batch.tokens.numel(),
    }
    likely = [text for text, guess in guesses.items() if count and abs(float(guess) - got) <= 1e-4 * (1 + abs(got))]
    return f" ({likely[0]})" if likely else ""


def _first_wrong(run: TargetRun, batch: Batch) -> Location:
    """The first token whose own loss is wrong when it alone has to be predicted: query predicts key."""
    want_BT = expected_losses(run, batch)
    nothing = batch.replace(target_mask=torch.zeros_like(batch.token_mask))
    if run.loss(nothing)[1]:  # tokens without a label count, so no single token can be tried
        return next((Location(row) for row in range(batch.shape[0]) if run.loss(nothing.row(row))[1]), Location(0))
    for row, slot in batch.token_mask.nonzero().tolist():
        only_BT = torch.zeros_like(batch.token_mask)
        only_BT[row, slot] = True
        total, count = run.loss(batch.replace(target_mask=only_BT))
        right = bool(batch.loss_mask[row, slot])
        if count != int(right) or abs(total - float(want_BT[row, slot])) > 1e-3 * (1 + abs(total)):
            return Location(row, max(slot - 1, 0), slot)
    return Location(0)


def _nothing_to_learn(context: AuditContext, case: str, batch: Batch) -> Finding:
    run = context.native
    total, count = run.loss(batch)
    if count or total != 0:
        message = f"with no token to be predicted the loss is {total} over {count}; it must be 0 over 0"
        return leak(case, message, Location(0), abs(total) if math.isfinite(total) else math.inf)
    named, loss = weights_of(run), run.differentiable_loss(batch)
    grads = gradients_of(loss, named) if named and loss.requires_grad else {}
    bad = next((name for name, grad in grads.items() if bool((grad != 0).any())), None)
    if bad is not None:
        return leak(case, f"with no token to be predicted the gradient of {bad} is not 0", Location(0))
    return passed(case, "0 over 0, and every gradient is 0", 0.0)


def _adds_up(context: AuditContext, case: str, rows: list[list[int]]) -> Finding:
    """Sums are the same however the rows are split in other ways; means of means are not."""

    def measure(run: TargetRun) -> Deviation:
        whole = run.loss(Batch.from_rows(rows))[0]
        dealt = ([[rows[0]], [rows[1]], [rows[2]]], [[rows[0], rows[2]], [rows[1]]])
        sums = [sum(run.loss(Batch.from_rows(part))[0] for part in parts) for parts in dealt]
        differences = [_beyond(context, run, abs(whole - total), whole) for total in sums]
        return Deviation(run, torch.tensor(differences, dtype=torch.float64), 1 + abs(whole))

    wrong = "the loss of a batch is not the sum over its rows: short rows weigh too much (means of means)"
    good = "the loss of a batch is the sum over its rows, however they are split"
    readings = context.read(measure, of_loss=True)
    return decide(context, case, readings, good=good, place=lambda *_: (Location(0), wrong))
