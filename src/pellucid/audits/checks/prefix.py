"""Is what may be seen ahead (a prefix, a right context, a block) seen, all of it and nothing more?"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from pellucid.audits.checks.check import Check
from pellucid.audits.checks.future import later_keys
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.influence import InfluenceMatrix, assert_no_influence, flow_of
from pellucid.audits.engine.layer_isolation import assert_isolated, isolated_layers
from pellucid.audits.engine.layers import first_broken_layer, layer_names
from pellucid.records import Finding, Location

NAME = "prefix"


def run(context: AuditContext) -> Iterator[Finding]:
    """Change one token at a time and watch the queries that may look ahead."""
    if all(rule.lookahead == 0 for rule in context.probe.rules):
        yield Finding(NAME, "not_applicable", "no declared rule lets a token look ahead")
        return
    flow = flow_of(context)
    looks_TT = later_keys(flow.may) & flow.may
    looking_T = looks_TT.any(1)
    near_TT = later_keys(flow.may) & looking_T[:, None]
    yield assert_no_influence(
        context, flow, near_TT, NAME, "no further", lambda q, k: first_broken_layer(context, flow.row, q, k)
    )
    yield _all_of_it(context, flow, looks_TT)
    if context.probe.rules_declared and layer_names(context):
        good = "each layer, looked at alone, sees all that is ahead and that its rule shows, and nothing else"
        yield assert_isolated(context, lambda: isolated_layers(context), later_keys, NAME, "each layer", good)


def _all_of_it(context: AuditContext, flow: InfluenceMatrix, looks_TT: Tensor) -> Finding:
    case = "all of it"
    unseen = (flow.unseen & looks_TT).nonzero().tolist()
    if not unseen:
        pairs = int((looks_TT & flow.watched).sum())
        return Finding(NAME, "pass", f"{pairs} tokens ahead that may be seen are seen", case, size=0.0)
    query, key = unseen[0]
    message = f"query {query} may see token {key}, {key - query} ahead, but changing it moves nothing"
    return Finding(
        NAME, context.status_of_unseen, message, case, Location(0, query, key), 0.0, "no bit of its output moved"
    )


CHECK = Check(
    NAME, "Is all that may be seen ahead seen, and nothing more, in the whole and in each layer?", run, length=2
)
