"""Every layer alone against its own rule, on both sides: what it lets through, and what it does not see."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.deviation import Deviation
from pellucid.audits.engine.expected import expected_flow
from pellucid.audits.engine.layers import LayerFlow, layer_flows
from pellucid.batch import Batch
from pellucid.errors import one_line
from pellucid.records import Finding, Location, Status

Ask = Callable[[int, Sequence[int]], list[LayerFlow]]
"""The layers' flows by the number of the draw (of tokens and changes) and the keys that are changed."""

_SHORT = 12  # tokens in a row of which all are changed
_LONG = 64
_DRAWS = 12  # before a pair counts as unseen: sparse layers show a token to some others only
_VANISHING = 1e-10  # where moves get so small, one more that is nothing proves nothing
_PLAIN = 1e-3


class IsolatedLayers:
    """The layers on one row; ``ask`` runs them again with other tokens and other changes."""

    def __init__(self, context: AuditContext, ask: Ask, keys: Sequence[int]) -> None:
        self.context, self.ask = context, ask
        self.flows = ask(0, keys)

    def unseen(self, flow: LayerFlow, among_TT: Tensor) -> list[list[int]]:
        """Pairs that the layer's rule shows and that moved nothing, whatever was drawn."""
        pairs = flow.unseen(among_TT) if self._mixes(flow) else []
        for draw in range(1, _DRAWS):
            if not pairs:
                break
            keys = sorted({key for _, key in pairs})[:_SHORT]
            sizes_TT = self.ask(draw, keys)[flow.number].reading.sizes
            pairs = [[query, key] for query, key in pairs if key in keys and sizes_TT[query, key] == 0]
        return pairs

    def _mixes(self, flow: LayerFlow) -> bool:
        """Whether it carries anything from token to token, or one built like it does: a list may hold other parts."""
        module = self.context.probe.module
        assert module is not None
        made = {each.number: [type(m) for m in module.get_submodule(each.name).modules()] for each in self.flows}
        return any(_moves(each) for each in self.flows if made[each.number] == made[flow.number])


def _moves(flow: LayerFlow) -> bool:
    return bool((_apart(flow) > 0).any())


def _apart(flow: LayerFlow) -> Tensor:
    """The sizes of pairs of two tokens."""
    return flow.reading.sizes.masked_fill(torch.eye(len(flow.may), dtype=torch.bool), 0.0)


def back_of(may_TT: Tensor) -> Tensor:
    """``Bool[T, T]``: pairs whose key comes before the query."""
    return torch.ones_like(may_TT).tril(-1)


def layers_alone(context: AuditContext) -> list[IsolatedLayers]:
    """All layers of the target on a short row, and on the audit's own where that is longer: measured once."""

    def measure() -> list[IsolatedLayers]:
        short = min(_SHORT, context.length)
        rows = [
            IsolatedLayers(
                context, lambda draw, keys: layer_flows(context, context.tokens(short), keys, draw), range(short)
            )
        ]
        slots = min(_LONG, context.length)
        if slots > short:
            keys = _telling(context, slots)
            rows.append(
                IsolatedLayers(
                    context, lambda draw, keys: layer_flows(context, context.tokens(slots), keys, draw), keys
                )
            )
        return rows

    return context.once("layers alone", measure)


def _telling(context: AuditContext, slots: int) -> list[int]:
    """The first and the last token, and those beside which the first or the last query's sight ends."""
    batch = Batch.from_rows([context.tokens(slots)])
    keys = {0, slots - 1}
    for rule in dict.fromkeys(context.probe.rules):
        may_TT = expected_flow([rule], batch)[0]
        for row_T in (may_TT[0], may_TT[-1]):
            ends = (row_T[1:] != row_T[:-1]).nonzero()[:, 0].tolist()
            keys |= {side for end in ends[:2] for side in (end, end + 1)}
    return sorted(keys)[:_SHORT]


def held_alone(
    context: AuditContext,
    watch: Callable[[], Sequence[IsolatedLayers]],
    among: Callable[[Tensor], Tensor],
    check: str,
    case: str,
    good: str,
    declared: bool = True,
) -> Finding:
    """Whether each layer shows what its rule shows, and hides what that hides, looking at pairs ``among`` only."""
    try:
        rows = watch()
    except Exception as error:  # noqa: BLE001 (anybody's code, called with streams that it did not make)
        return Finding(check, "not_applicable", f"the layers cannot be watched: {one_line(error)}", case)
    found: list[Finding] = []
    for row in rows:
        for flow in row.flows:
            one = layer_held(context, row, flow, among(flow.may), check, case, declared=declared)
            if one is not None and one.status == "leak":
                return one
            found += [one] if one is not None else []
    return found[0] if found else Finding(check, "pass", good, case, size=0.0)


def layer_held(
    context: AuditContext,
    row: IsolatedLayers,
    flow: LayerFlow,
    among_TT: Tensor,
    check: str,
    case: str,
    back: int | None = None,
    declared: bool = True,
) -> Finding | None:
    """What is wrong with one layer; ``back`` is how far back it may look, where that is to be said.

    Seeing less than a rule that is only assumed is no fault.
    """
    wide = flow.leaks(context, among_TT)
    if wide:
        query, key = wide[0]
        message = f"{flow.name} lets token {key} through to query {query}, {side_of(query, key)}, "
        far = back is not None and query - key > back
        message += f"but may look {back} back" if far else "which its rule hides"
        return Finding(check, "leak", message, case, Location(0, query, key), float(flow.reading.sizes[query, key]))
    unseen = row.unseen(flow, among_TT) if declared and context.probe.rules_declared else []
    if not unseen:
        return None
    query, key = unseen[0]
    message = f"{flow.name} does not see token {key} from query {query}, {side_of(query, key)}, which its rule shows"
    decided = "no bit of its output moved"
    status = status_of_unseen(context, Deviation(flow.reading.run, _apart(flow), flow.reading.scale))
    return Finding(check, status, message, case, Location(0, query, key), 0.0, decided)


def side_of(query: int, key: int) -> str:
    """Where a key stands, in words."""
    return "its own" if query == key else f"{query - key} back" if key < query else f"{key - query} ahead"


def status_of_unseen(context: AuditContext, reading: Deviation) -> Status:
    """How bad a pair is that moved nothing: plain where the others move far above rounding, as in float64 all do.

    Where moves fade out by themselves, the last of them vanish in rounding, which is nobody's fault.
    """
    moves = reading.sizes[reading.sizes > 0] / reading.scale
    least = _VANISHING if reading.run.dtype == torch.float64 else 10 * reading.run.rounding
    if moves.numel() and float(moves.min()) < least:
        return "fragile"
    plain = context.probe.rules_declared and bool(moves.numel()) and float(moves.median()) > _PLAIN
    return "leak" if plain else context.status_of_unseen
