"""Is what came before seen exactly as far as declared: in the whole model, and layer by layer?"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from pellucid.audits.checks.check import question
from pellucid.audits.checks.future import no_gradient
from pellucid.audits.engine.compare import not_applicable, not_seen
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.expected_flow import expected_flow
from pellucid.audits.engine.influence import assert_no_influence, earlier, flow_of, measured
from pellucid.audits.engine.layer_isolation import IsolatedLayers, assert_isolated, isolated_layers
from pellucid.audits.engine.layers import decoder_stack, first_broken_layer
from pellucid.audits.engine.perturbation import Perturbations, longer_lengths
from pellucid.audits.engine.target_run import TargetRun
from pellucid.batch import Batch
from pellucid.probe import Visibility
from pellucid.records import Finding, Location

_LONGEST = 512  # longer windows are looked at only where the audit's own length reaches them

Reach = tuple[int, int]
"""How far back a rule looks, and how many first tokens it shows besides."""


@question("Is what came before seen exactly as far as declared, in the whole and in each layer?", length=2)
def check(context: AuditContext) -> Iterator[Finding]:
    """A token that came before must move the query where it may be seen, and must not where it is hidden."""
    reaches = [_reach(rule) for rule in context.probe.rules]
    hides = any(reaches) or _hides_earlier(context)
    if hides:
        flow = flow_of(context)
        past_TT = earlier(flow.may)
        result = assert_no_influence(context, "tokens", flow, past_TT, explain=first_broken_layer)
        yield result
        if context.can("embeddings") and not result.failed and bool((past_TT & ~flow.may).any()):
            yield no_gradient(context, "gradient", flow, past_TT)
        for length in longer_lengths(context):
            changes = Perturbations(context, context.tokens(length), TargetRun.logits, most=4)
            longer = measured(context, changes)
            yield assert_no_influence(context, f"rows of {length}", longer, earlier(longer.may))
    if context.probe.rules_declared and decoder_stack(context).names:
        good = "each layer, tested alone, sees all that came before and that its rule shows, and nothing else"
        yield assert_isolated(context, "each layer", isolated_layers, earlier, good)
    elif not hides:
        yield not_applicable("", "no declared rule bounds how far back it looks")
    for reach in sorted({reach for reach in reaches if reach is not None}):
        yield _edge(context, reach)


def _reach(rule: Visibility) -> Reach | None:
    """None: there is no such bound."""
    back, first = rule.lookback
    return None if back is None else (back, first)


def _hides_earlier(context: AuditContext) -> bool:
    """Whether any rule hides something that came before, within the length of the audit."""
    batch = Batch.from_rows([context.row])
    flows = (expected_flow([rule], batch)[0] for rule in dict.fromkeys(context.probe.rules))
    return any(bool((earlier(may_TT) & ~may_TT).any()) for may_TT in flows)


def _edge(context: AuditContext, reach: Reach) -> Finding:
    """The layers that look so far back, each alone, on a sequence a little longer than that."""
    back, first = reach
    case = f"edge of {back + 1}" + (f" beside the first {first}" if first else "")
    length = back + first + 4
    longest = max(context.length, min(_LONGEST, context.probe.max_length or _LONGEST))
    if length > longest:
        message = f"a window of {back + 1} tokens needs {length} to be seen, but {longest} are looked at; raise length"
        return not_applicable(case, message)
    keys = sorted({0, 1, 2, *range(max(first - 1, 0), first + 3)} & set(range(length)))
    stack = decoder_stack(context)
    if not stack.names:
        if len(context.probe.rules) > 1:
            message = "the layers cannot be distinguished from outside, so their own edges are not tested"
            return not_applicable(case, message)
        return _whole(
            context, case, Perturbations(context, context.tokens(length), TargetRun.logits, most=8, first=keys), back
        )

    watched = IsolatedLayers(context, stack, length, keys)
    watched.flows = [flow for flow in watched.flows if _reach(context.probe.rules[flow.number]) == reach]
    besides = f", the first {first} besides," if first else ""
    good = f"{len(watched.flows)} layers see {back} tokens back{besides} and no further, each tested alone"
    return assert_isolated(context, case, lambda _: [watched], earlier, good, back=back)


def _whole(context: AuditContext, case: str, changes: Perturbations, back: int) -> Finding:
    flow = measured(context, changes)
    past_TT: Tensor = earlier(flow.may)
    result = assert_no_influence(context, case, flow, past_TT)
    unseen = (flow.unseen & past_TT).nonzero().tolist()
    if result.status != "pass" or not unseen:
        return result
    query, key = unseen[0]
    message = f"query {query} does not see token {key}, {query - key} back, but {back} back are declared"
    return not_seen(case, context.status_of_unseen, message, Location(0, query, key))
