"""Is each window exactly as wide as it says: in the whole model, and layer by layer?"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pellucid.audits.checks.check import Check
from pellucid.audits.method.bench import Bench
from pellucid.audits.method.changes import Changes
from pellucid.audits.method.flow import MeasuredFlow, flow_of, kept, measured
from pellucid.audits.method.layers import LayerFlow, first_broken_layer, layer_flows, layer_names
from pellucid.audits.method.measure import Run
from pellucid.records import Finding, Where

NAME = "window"
_LONGEST = 512  # longer windows are looked at only where the audit's own length reaches them


def run(bench: Bench) -> Iterator[Finding]:
    """Just inside a window a token must move the query, just outside it must not."""
    bounds = [_back(rule) for rule in bench.probe.rules]
    if all(bound is None for bound in bounds):
        yield Finding(NAME, "not_applicable", "no declared rule bounds how far back it looks")
        return
    flow = flow_of(bench)
    past_TT = torch.ones_like(flow.may).tril(-1)
    yield kept(bench, flow, past_TT, NAME, "tokens", lambda q, k: first_broken_layer(bench, flow.row, q, k))
    for bound in sorted({bound for bound in bounds if bound is not None}):
        yield _edge(bench, bound)


def _back(rule: object) -> int | None:
    """How far back a rule looks, None where there is no such bound (or it keeps the first tokens besides)."""
    back, first = rule.reach  # type: ignore[attr-defined]
    return None if first else back


def _edge(bench: Bench, back: int) -> Finding:
    """The layers that look ``back`` tokens back, on a sequence a little longer than that."""
    length = back + 4
    longest = max(bench.length, min(_LONGEST, bench.probe.max_length or _LONGEST))
    case = f"edge of {back + 1}"
    if length > longest:
        message = f"a window of {back + 1} tokens needs {length} to be seen, but {longest} are looked at; raise length"
        return Finding(NAME, "not_applicable", message, case)
    row = bench.tokens(length)
    numbers = [number for number, rule in enumerate(bench.probe.rules) if _back(rule) == back]
    if layer_names(bench):
        flows = [flow for flow in layer_flows(bench, row, [0, 1, 2]) if flow.number in numbers]
        return next(filter(None, (_layer(bench, flow, back, case) for flow in flows)), _good(case, len(flows), back))
    if len(bench.probe.rules) > 1:
        message = "the layers cannot be told apart from outside, so their own edges are not looked at"
        return Finding(NAME, "not_applicable", message, case)
    return _alone(bench, measured(bench, Changes(bench, row, Run.logits, most=8)), back, case)


def _layer(bench: Bench, flow: LayerFlow, back: int, case: str) -> Finding | None:
    past_TT = torch.ones_like(flow.may).tril(-1)
    wide = flow.leaks(bench, past_TT)
    if wide:
        query, key = wide[0]
        message = f"{flow.name} lets token {key} through to query {query}, {query - key} back, but may look {back} back"
        return Finding(NAME, "leak", message, case, Where(0, query, key), float(flow.reading.sizes[query, key]))
    edge_TT = past_TT & ~torch.ones_like(past_TT).tril(-back - 1)
    unseen = flow.unseen(edge_TT)
    reacts = bool((flow.reading.sizes[past_TT] > 0).any())
    if unseen and reacts:
        query, key = unseen[0]
        message = f"{flow.name} does not see token {key} from query {query}, {query - key} back, but declares {back}"
        return Finding(
            NAME, bench.status_of_unseen, message, case, Where(0, query, key), 0.0, "no bit of its output moved"
        )
    return None


def _alone(bench: Bench, flow: MeasuredFlow, back: int, case: str) -> Finding:
    past_TT = torch.ones_like(flow.may).tril(-1)
    result = kept(bench, flow, past_TT, NAME, case, lambda q, k: "")
    unseen = (flow.unseen & past_TT).nonzero().tolist()
    if result.status != "pass" or not unseen:
        return result
    query, key = unseen[0]
    message = f"query {query} does not see token {key}, {query - key} back, but {back} back are declared"
    return Finding(NAME, bench.status_of_unseen, message, case, Where(0, query, key), 0.0, "no bit of its output moved")


def _good(case: str, layers: int, back: int) -> Finding:
    message = f"{layers} layers see {back} tokens back and no further, each looked at alone"
    return Finding(NAME, "pass", message, case, size=0.0)


CHECK = Check(NAME, "Is every window exactly as wide as it is declared?", run, length=2)
