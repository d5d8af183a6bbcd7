"""Are masks obeyed the right way round: what is declared visible is seen, what is declared hidden is not?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pellucid.audits.checks.check import Check
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.decision import skip_if_unsupported
from pellucid.audits.engine.deviation import TargetRun, logit_scale, max_abs_diff
from pellucid.audits.engine.influence import expected_flow
from pellucid.audits.engine.layers import layer_flows
from pellucid.batch import Batch, Side
from pellucid.records import Finding, Location

NAME = "polarity"
_SLOTS = 6


def run(context: AuditContext) -> Iterator[Finding]:
    """Change tokens one by one in a plain row, and in rows padded on either side."""
    row = context.tokens(_SLOTS)
    plain = Batch.from_rows([row])
    yield _rules(context, plain)
    if context.can("padding"):
        for side in context.hiding_sides:
            case = f"{side} padding"
            yield skip_if_unsupported(NAME, case, partial(_padding, context, case, side, row))


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

    @property
    def right(self) -> bool:
        return self.hidden <= self.limit < self.visible


def _look(run: TargetRun, context: AuditContext, batch: Batch, visible_TT: Tensor, hidden_TT: Tensor) -> _Seen:
    """One row, run alone; ``visible`` and ``hidden`` are the pairs [query, key] to look at."""
    before = run.plain(batch)
    sizes_TT = torch.zeros(batch.shape[1], batch.shape[1], dtype=torch.float64)
    for key in (visible_TT | hidden_TT).any(0).nonzero()[:, 0].tolist():
        after = batch.with_token(0, key, context.other(int(batch.tokens[0, key])))
        sizes_TT[:, key] = max_abs_diff(before, run.logits(after))[0]
    limit = (1e-12 if run.dtype == torch.float64 else run.rounding / 10) * logit_scale(before)
    wrong = (torch.where(hidden_TT, sizes_TT, 0.0) > limit).nonzero().tolist()
    first = (wrong[0][0], wrong[0][1]) if wrong else None
    return _Seen(_largest(sizes_TT, visible_TT), _largest(sizes_TT, hidden_TT), limit, first)


def _largest(sizes_TT: Tensor, where_TT: Tensor) -> float:
    return float(torch.where(where_TT, sizes_TT, 0.0).max())


def _rules(context: AuditContext, batch: Batch) -> Finding:
    """The declared rules: a causal mask read upside down shows the future and nothing else."""
    may_TT = expected_flow(context.probe.rules, batch)[0]
    others_TT = ~torch.eye(_SLOTS, dtype=torch.bool)
    if bool(may_TT.all()) or not bool((may_TT & others_TT).any()):
        return Finding(NAME, "not_applicable", "the declared rules hide nothing, or everything but the token", "rules")
    seen = _look(context.runs[-1], context, batch, _shown(may_TT), ~may_TT)
    if min(seen.visible, seen.hidden) > seen.limit:
        reversed_layer = _layer_reversed(context, batch)
        if reversed_layer is not None:
            return reversed_layer
    return _finding(context, "rules", seen, "what the rules hide", "what they show", "future")


def _shown(may_TT: Tensor) -> Tensor:
    """What others are shown to queries from which something is hidden.

    A query from which nothing is hidden sees nothing at all by a mask that is upside down, and then, as softmax over
    one lowest number has it, everything.
    """
    others_TT = may_TT & ~torch.eye(len(may_TT), dtype=torch.bool)
    told_TT = others_TT & ~may_TT.all(-1, keepdim=True)
    return told_TT if bool(told_TT.any()) else others_TT


def _layer_reversed(context: AuditContext, batch: Batch) -> Finding | None:
    """Through several layers everything may reach everything: the first layer whose own mask is upside down."""
    for flow in layer_flows(context, batch.tokens[0].tolist(), range(_SLOTS)):
        limit = (1e-12 if flow.reading.run.dtype == torch.float64 else 1e-6) * flow.reading.scale
        sizes_TT, hidden_TT = flow.reading.sizes, ~flow.may
        visible, hidden = _largest(sizes_TT, _shown(flow.may)), _largest(sizes_TT, hidden_TT)
        if not visible <= limit < hidden:
            continue
        where = Location(0, *(hidden_TT & (sizes_TT > limit)).nonzero()[0].tolist())
        message = f"{flow.name}: what the rules hide is seen, what they show is not. Its mask is read upside down"
        decided = f"in its own output tokens that are shown move {visible:.1e}, hidden ones {hidden:.1e}"
        return Finding(NAME, "leak", message, "rules", where, hidden, decided)
    return None


def _padding(context: AuditContext, case: str, side: Side, row: list[int]) -> Finding:
    """Four real tokens, and two pads that hold tokens as well."""
    real = row[:4]
    batch = Batch.from_rows([real], side=side, length=_SLOTS)
    batch = batch.replace(tokens=torch.where(batch.token_mask, batch.tokens, context.tokens(1)[0]))
    real_T = batch.token_mask[0]
    others_TT = ~torch.eye(_SLOTS, dtype=torch.bool)
    visible_TT = expected_flow(context.probe.rules, batch)[0] & others_TT & real_T[:, None] & real_T[None, :]
    if not bool(visible_TT.any()):
        return Finding(NAME, "not_applicable", "by the declared rules no token sees another", case)
    run = context.runs[-1]
    if not bool(run.plain(batch)[0, real_T].isfinite().all()):
        message = "beside pads real tokens are answered with NaN or infinity, which moves by nothing (see padding)"
        return Finding(NAME, "not_applicable", message, case)
    seen = _look(run, context, batch, visible_TT, real_T[:, None] & ~real_T[None, :])
    if seen.visible <= seen.limit and not seen.reversed:
        alone = Batch.from_rows([real])
        may_TT = expected_flow(context.probe.rules, alone)[0] & ~torch.eye(len(real), dtype=torch.bool)
        if _look(run, context, alone, may_TT, torch.zeros_like(may_TT)).visible > seen.limit:
            message = (
                "beside pads no real token moves another, although it does without them: the mask hides real tokens"
            )
            where = Location(0, *visible_TT.nonzero()[0].tolist())
            return Finding(NAME, "leak", message, case, where, seen.visible, "exactly no move where there must be one")
    return _finding(context, case, seen, "tokens declared padding", "real tokens", "padding")


def _finding(context: AuditContext, case: str, seen: _Seen, hidden: str, visible: str, other: str) -> Finding:
    name = context.runs[-1].name
    decided = f"in {name} {visible} move outputs by {seen.visible:.1e}, {hidden} by {seen.hidden:.1e}"
    if seen.right:
        return Finding(NAME, "pass", f"{visible} move outputs, {hidden} do not", case, None, seen.hidden, decided)
    if seen.reversed:
        assert seen.first is not None
        message = f"{hidden}: seen; {visible}: not seen. The mask is read upside down"
        return Finding(NAME, "leak", message, case, Location(0, *seen.first), seen.hidden, decided)
    if seen.hidden > seen.limit:
        message = f"both {visible} and {hidden} move outputs: a leak, but not by polarity (see {other})"
        return Finding(NAME, "not_applicable", message, case, None, seen.hidden, decided)
    return Finding(NAME, "fragile", "no token moves another, so the mask's direction cannot be seen", case)


CHECK = Check(NAME, "Is what is declared visible seen, and what is declared hidden not?", run, length=_SLOTS)
