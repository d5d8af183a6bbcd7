"""Is what came before seen exactly as far as declared: in the whole model, and layer by layer?"""

from __future__ import annotations

from collections.abc import Iterator

from pellucid.audits.checks.check import Check
from pellucid.audits.checks.future import gradient_kept
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.decision import skip_if_no_gradient
from pellucid.audits.engine.deviation import TargetRun
from pellucid.audits.engine.influence import InfluenceMatrix, assert_no_influence, expected_flow, flow_of, measured
from pellucid.audits.engine.layer_isolation import IsolatedLayers, assert_isolated, back_of, isolated_layers, layer_held
from pellucid.audits.engine.layers import first_broken_layer, layer_flows, layer_names
from pellucid.audits.engine.perturbation import Perturbations
from pellucid.batch import Batch
from pellucid.probe import Visibility
from pellucid.records import Finding, Location

NAME = "window"
_LONGEST = 512  # longer windows are looked at only where the audit's own length reaches them

Reach = tuple[int, int]


def run(context: AuditContext) -> Iterator[Finding]:
    """A token that came before must move the query where it may be seen, and must not where it is hidden."""
    reaches = [_reach(rule) for rule in context.probe.rules]
    hides = any(reaches) or _hides_back(context)
    if hides:
        yield from _whole(context)
    if context.probe.rules_declared and layer_names(context):
        good = "each layer, looked at alone, sees all that came before and that its rule shows, and nothing else"
        yield assert_isolated(context, lambda: isolated_layers(context), back_of, NAME, "each layer", good)
    elif not hides:
        yield Finding(NAME, "not_applicable", "no declared rule bounds how far back it looks")
    for reach in sorted({reach for reach in reaches if reach is not None}):
        yield _edge(context, reach)


def _reach(rule: Visibility) -> Reach | None:
    """How far back a rule looks, and how many first tokens it shows besides; None: there is no such bound."""
    back, first = rule.lookback
    return None if back is None else (back, first)


def _hides_back(context: AuditContext) -> bool:
    """Whether any rule hides something that came before, within the length of the audit."""
    batch = Batch.from_rows([context.row])
    flows = (expected_flow([rule], batch)[0] for rule in dict.fromkeys(context.probe.rules))
    return any(bool((back_of(may_TT) & ~may_TT).any()) for may_TT in flows)


def _whole(context: AuditContext) -> Iterator[Finding]:
    """All layers together."""
    flow = flow_of(context)
    past_TT = back_of(flow.may)
    result = assert_no_influence(
        context, flow, past_TT, NAME, "tokens", lambda q, k: first_broken_layer(context, flow.row, q, k)
    )
    yield result
    if context.can("embeddings") and not result.failed and bool((past_TT & ~flow.may).any()):
        yield skip_if_no_gradient(NAME, "gradient", lambda: gradient_kept(context, flow, past_TT, NAME))


def _edge(context: AuditContext, reach: Reach) -> Finding:
    """The layers that look so far back, on a sequence a little longer than that."""
    back, first = reach
    case = f"edge of {back + 1}" + (f" beside the first {first}" if first else "")
    length = back + first + 4
    longest = max(context.length, min(_LONGEST, context.probe.max_length or _LONGEST))
    if length > longest:
        message = f"a window of {back + 1} tokens needs {length} to be seen, but {longest} are looked at; raise length"
        return Finding(NAME, "not_applicable", message, case)
    keys = sorted({0, 1, 2, *range(max(first - 1, 0), first + 3)} & set(range(length)))
    if layer_names(context):
        return _layers(context, reach, length, keys, case)
    if len(context.probe.rules) > 1:
        message = "the layers cannot be told apart from outside, so their own edges are not looked at"
        return Finding(NAME, "not_applicable", message, case)
    return _alone(
        context,
        measured(context, Perturbations(context, context.tokens(length), TargetRun.logits, most=8, first=keys)),
        back,
        case,
    )


def _layers(context: AuditContext, reach: Reach, length: int, keys: list[int], case: str) -> Finding:
    """Each layer of this reach alone."""
    back, first = reach
    watched = IsolatedLayers(context, lambda draw, keys: layer_flows(context, context.tokens(length), keys, draw), keys)
    flows = [flow for flow in watched.flows if _reach(context.probe.rules[flow.number]) == reach]
    for flow in flows:
        found = layer_held(context, watched, flow, back_of(flow.may), NAME, case, back)
        if found is not None:
            return found
    besides = f", the first {first} besides," if first else ""
    message = f"{len(flows)} layers see {back} tokens back{besides} and no further, each looked at alone"
    return Finding(NAME, "pass", message, case, size=0.0)


def _alone(context: AuditContext, flow: InfluenceMatrix, back: int, case: str) -> Finding:
    past_TT = back_of(flow.may)
    result = assert_no_influence(context, flow, past_TT, NAME, case, lambda q, k: "")
    unseen = (flow.unseen & past_TT).nonzero().tolist()
    if result.status != "pass" or not unseen:
        return result
    query, key = unseen[0]
    message = f"query {query} does not see token {key}, {query - key} back, but {back} back are declared"
    return Finding(
        NAME, context.status_of_unseen, message, case, Location(0, query, key), 0.0, "no bit of its output moved"
    )


CHECK = Check(
    NAME, "Is what came before seen exactly as far as declared, in the whole and in each layer?", run, length=2
)
