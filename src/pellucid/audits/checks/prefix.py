"""Is what may be seen ahead (a prefix, a right context, a block) seen, all of it and nothing more?"""

from __future__ import annotations

from collections.abc import Iterator

from pellucid.audits.checks.check import question
from pellucid.audits.engine.compare import not_applicable, not_seen, passed
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.influence import assert_no_influence, flow_of, later
from pellucid.audits.engine.layer_isolation import assert_isolated, isolated_layers
from pellucid.audits.engine.layers import decoder_stack, first_broken_layer
from pellucid.records import Finding, Location


@question("Is all that may be seen ahead seen, and nothing more, in the whole and in each layer?", length=2)
def check(context: AuditContext) -> Iterator[Finding]:
    """Change one token at a time and watch the queries that may look ahead."""
    if all(rule.lookahead == 0 for rule in context.probe.rules):
        yield not_applicable("", "no declared rule lets a token look ahead")
        return
    flow = flow_of(context)
    looks_TT = later(flow.may) & flow.may
    near_TT = later(flow.may) & looks_TT.any(1)[:, None]
    yield assert_no_influence(context, "no further", flow, near_TT, explain=first_broken_layer)
    unseen = (flow.unseen & looks_TT).nonzero().tolist()
    if unseen:
        query, key = unseen[0]
        message = f"query {query} may see token {key}, {key - query} ahead, but changing it moves nothing"
        yield not_seen("all of it", context.status_of_unseen, message, Location(0, query, key))
    else:
        pairs = int((looks_TT & flow.watched).sum())
        yield passed("all of it", f"{pairs} tokens ahead that may be seen are seen", 0.0)
    if context.probe.rules_declared and decoder_stack(context).names:
        good = "each layer, tested alone, sees all that is ahead and that its rule shows, and nothing else"
        yield assert_isolated(context, "each layer", isolated_layers, later, good)
