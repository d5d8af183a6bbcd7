"""Are masks obeyed the right way round: what is declared visible is seen, what is declared hidden is not?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid.audits.checks.check import question
from pellucid.audits.engine.compare import fragile, leak, not_applicable, passed, skip_if_unsupported
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.expected_flow import expected_flow
from pellucid.audits.engine.influence import others
from pellucid.audits.engine.layers import decoder_stack
from pellucid.audits.engine.target_run import TargetRun, logit_scale, max_abs_diff
from pellucid.batch import Batch, Side
from pellucid.records import Finding, Location

_SLOTS = 6


@question("Is what is declared visible seen, and what is declared hidden not?", length=_SLOTS)
def check(context: AuditContext) -> Iterator[Finding]:
    """Change tokens one by one in a plain row, and in rows padded on either side."""
    yield _rules(context, "rules", Batch.from_rows([context.tokens(_SLOTS)]))
    real = context.rows((4,))[0]
    for side in context.hiding_sides if context.can("padding") else []:
        yield _padding(context, f"{side} padding", side, real)


@dataclass(frozen=True)
class _Seen:
    """How far tokens that may be seen moved outputs, how far hidden ones did, and the first hidden pair that did."""

    visible: float
    hidden: float
    limit: float
    first: tuple[int, int] | None

    @property
    def reversed(self) -> bool:
        return self.visible <= self.limit < self.hidden


def _look(run: TargetRun, context: AuditContext, batch: Batch, visible_TT: Tensor, hidden_TT: Tensor) -> _Seen:
    """One row, run alone; ``visible`` and ``hidden`` are the pairs [query, key] to look at."""
    before = run.plain(batch)
    sizes_TT = torch.zeros(batch.shape[1], batch.shape[1], dtype=torch.float64)
    for key in (visible_TT | hidden_TT).any(0).nonzero()[:, 0].tolist():
        after = batch.with_token(0, key, context.other(int(batch.tokens[0, key])))
        sizes_TT[:, key] = max_abs_diff(before, run.logits(after))[0]
    limit = (1e-12 if run.dtype == torch.float64 else run.rounding / 10) * logit_scale(before)
    return _seen(sizes_TT, visible_TT, hidden_TT, limit)


def _seen(sizes_TT: Tensor, visible_TT: Tensor, hidden_TT: Tensor, limit: float) -> _Seen:
    visible, hidden = (float(torch.where(where_TT, sizes_TT, 0.0).max()) for where_TT in (visible_TT, hidden_TT))
    wrong = (hidden_TT & (sizes_TT > limit)).nonzero().tolist()
    return _Seen(visible, hidden, limit, (wrong[0][0], wrong[0][1]) if wrong else None)


def _rules(context: AuditContext, case: str, batch: Batch) -> Finding:
    """The declared rules: a causal mask read upside down shows the future and nothing else."""
    may_TT = expected_flow(context.probe.rules, batch)[0]
    if bool(may_TT.all()) or not bool((may_TT & others(may_TT)).any()):
        return not_applicable(case, "the declared rules hide nothing, or everything but the token")
    seen = _look(context.runs[-1], context, batch, _shown(may_TT), ~may_TT)
    if min(seen.visible, seen.hidden) > seen.limit:
        reversed_layer = _layer_reversed(context, case, batch)
        if reversed_layer is not None:
            return reversed_layer
    return _finding(context, case, seen, "what the rules hide", "what they show", "future")


def _shown(may_TT: Tensor) -> Tensor:
    """What others are shown to queries from which something is hidden.

    A query from which nothing is hidden sees nothing at all by a mask that is upside down, and then, as softmax over
    one lowest number has it, everything.
    """
    others_TT = may_TT & others(may_TT)
    shown_TT = others_TT & ~may_TT.all(-1, keepdim=True)
    return shown_TT if bool(shown_TT.any()) else others_TT


def _layer_reversed(context: AuditContext, case: str, batch: Batch) -> Finding | None:
    """Through several layers everything may reach everything: the first layer whose own mask is upside down."""
    for flow in decoder_stack(context).flows(context.runs[-1], batch.tokens[0].tolist(), range(batch.shape[1])):
        limit = (1e-12 if flow.reading.run.dtype == torch.float64 else 1e-6) * flow.reading.scale
        seen = _seen(flow.reading.sizes, _shown(flow.may), ~flow.may, limit)
        if seen.reversed and seen.first is not None:
            message = f"{flow.name}: what the rules hide is seen, what they show is not. Its mask is read upside down"
            decided = f"in its own output tokens that are shown move {seen.visible:.1e}, hidden ones {seen.hidden:.1e}"
            return leak(case, message, Location(0, *seen.first), seen.hidden, decided)
    return None


@skip_if_unsupported
def _padding(context: AuditContext, case: str, side: Side, real: list[int]) -> Finding:
    """Four real tokens, and two pads that hold tokens as well."""
    batch = Batch.from_rows([real], side=side, length=_SLOTS * context.step)
    batch = batch.replace(tokens=torch.where(batch.token_mask, batch.tokens, context.tokens(1)[0]))
    real_T = batch.token_mask[0]
    may_TT = expected_flow(context.probe.rules, batch)[0]
    visible_TT = may_TT & others(may_TT) & real_T[:, None] & real_T[None, :]
    if not bool(visible_TT.any()):
        return not_applicable(case, "by the declared rules no token sees another")
    run = context.runs[-1]
    if not bool(run.plain(batch)[0, real_T].isfinite().all()):
        return not_applicable(case, "beside pads the outputs of real tokens are NaN or infinite (see padding)")
    seen = _look(run, context, batch, visible_TT, real_T[:, None] & ~real_T[None, :])
    if seen.visible <= seen.limit and not seen.reversed:
        alone = Batch.from_rows([real])
        may_TT = expected_flow(context.probe.rules, alone)[0]
        if _look(run, context, alone, may_TT & others(may_TT), torch.zeros_like(may_TT)).visible > seen.limit:
            message = "beside pads no real token moves another, although it does without: the mask hides real tokens"
            where = Location(0, *visible_TT.nonzero()[0].tolist())
            return leak(case, message, where, seen.visible, "exactly no move where there must be one")
    return _finding(context, case, seen, "tokens declared padding", "real tokens", "padding")


def _finding(context: AuditContext, case: str, seen: _Seen, hidden: str, visible: str, other: str) -> Finding:
    decided = f"in {context.runs[-1].name} {visible} move outputs by {seen.visible:.1e}, {hidden} by {seen.hidden:.1e}"
    if seen.hidden <= seen.limit < seen.visible:
        return passed(case, f"{visible} move outputs, {hidden} do not", seen.hidden, decided)
    if seen.reversed and seen.first is not None:
        message = f"{hidden}: seen; {visible}: not seen. The mask is read upside down"
        return leak(case, message, Location(0, *seen.first), seen.hidden, decided)
    if seen.hidden > seen.limit:
        message = f"both {visible} and {hidden} move outputs: a leak, but not by polarity (see {other})"
        return Finding("", "not_applicable", message, case, None, seen.hidden, decided)
    return fragile(case, "no token moves another, so the mask's direction cannot be seen")
