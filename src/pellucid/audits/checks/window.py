"""Is what came before seen exactly as far as declared: in the whole model, and layer by layer?"""

from __future__ import annotations

from collections.abc import Iterator

from pellucid.audits.checks.check import Check
from pellucid.audits.checks.future import gradient_kept
from pellucid.audits.method.alone import Alone, back_of, held_alone, layer_held, layers_alone
from pellucid.audits.method.bench import Bench
from pellucid.audits.method.changes import Changes
from pellucid.audits.method.expected import expected_flow
from pellucid.audits.method.flow import MeasuredFlow, flow_of, kept, measured
from pellucid.audits.method.judge import unless_no_gradient
from pellucid.audits.method.layers import first_broken_layer, layer_flows, layer_names
from pellucid.audits.method.measure import Run
from pellucid.probe import Request, Visibility
from pellucid.records import Finding, Where

NAME = "window"
_LONGEST = 512  # longer windows are looked at only where the audit's own length reaches them

Reach = tuple[int, int]


def run(bench: Bench) -> Iterator[Finding]:
    """A token that came before must move the query where it may be seen, and must not where it is hidden."""
    reaches = [_reach(rule) for rule in bench.probe.rules]
    hides = any(reaches) or _hides_back(bench)
    if hides:
        yield from _whole(bench)
    if bench.probe.declared and layer_names(bench):
        good = "each layer, looked at alone, sees all that came before and that its rule shows, and nothing else"
        yield held_alone(bench, lambda: layers_alone(bench), back_of, NAME, "each layer", good)
    elif not hides:
        yield Finding(NAME, "not_applicable", "no declared rule bounds how far back it looks")
    for reach in sorted({reach for reach in reaches if reach is not None}):
        yield _edge(bench, reach)


def _reach(rule: Visibility) -> Reach | None:
    """How far back a rule looks, and how many first tokens it shows besides; None: there is no such bound."""
    back, first = rule.lookback
    return None if back is None else (back, first)


def _hides_back(bench: Bench) -> bool:
    """Whether any rule hides something that came before, within the length of the audit."""
    request = Request.from_rows([bench.row])
    flows = (expected_flow([rule], request)[0] for rule in dict.fromkeys(bench.probe.rules))
    return any(bool((back_of(may_TT) & ~may_TT).any()) for may_TT in flows)


def _whole(bench: Bench) -> Iterator[Finding]:
    """All layers together."""
    flow = flow_of(bench)
    past_TT = back_of(flow.may)
    result = kept(bench, flow, past_TT, NAME, "tokens", lambda q, k: first_broken_layer(bench, flow.row, q, k))
    yield result
    if bench.can("embeddings") and not result.failed and bool((past_TT & ~flow.may).any()):
        yield unless_no_gradient(NAME, "gradient", lambda: gradient_kept(bench, flow, past_TT, NAME))


def _edge(bench: Bench, reach: Reach) -> Finding:
    """The layers that look so far back, on a sequence a little longer than that."""
    back, first = reach
    case = f"edge of {back + 1}" + (f" beside the first {first}" if first else "")
    length = back + first + 4
    longest = max(bench.length, min(_LONGEST, bench.probe.max_length or _LONGEST))
    if length > longest:
        message = f"a window of {back + 1} tokens needs {length} to be seen, but {longest} are looked at; raise length"
        return Finding(NAME, "not_applicable", message, case)
    keys = sorted({0, 1, 2, *range(max(first - 1, 0), first + 3)} & set(range(length)))
    if layer_names(bench):
        return _layers(bench, reach, length, keys, case)
    if len(bench.probe.rules) > 1:
        message = "the layers cannot be told apart from outside, so their own edges are not looked at"
        return Finding(NAME, "not_applicable", message, case)
    return _alone(
        bench, measured(bench, Changes(bench, bench.tokens(length), Run.logits, most=8, first=keys)), back, case
    )


def _layers(bench: Bench, reach: Reach, length: int, keys: list[int], case: str) -> Finding:
    """Each layer of this reach alone."""
    back, first = reach
    watched = Alone(bench, lambda draw, keys: layer_flows(bench, bench.tokens(length), keys, draw), keys)
    flows = [flow for flow in watched.flows if _reach(bench.probe.rules[flow.number]) == reach]
    for flow in flows:
        found = layer_held(bench, watched, flow, back_of(flow.may), NAME, case, back)
        if found is not None:
            return found
    besides = f", the first {first} besides," if first else ""
    message = f"{len(flows)} layers see {back} tokens back{besides} and no further, each looked at alone"
    return Finding(NAME, "pass", message, case, size=0.0)


def _alone(bench: Bench, flow: MeasuredFlow, back: int, case: str) -> Finding:
    past_TT = back_of(flow.may)
    result = kept(bench, flow, past_TT, NAME, case, lambda q, k: "")
    unseen = (flow.unseen & past_TT).nonzero().tolist()
    if result.status != "pass" or not unseen:
        return result
    query, key = unseen[0]
    message = f"query {query} does not see token {key}, {query - key} back, but {back} back are declared"
    return Finding(NAME, bench.status_of_unseen, message, case, Where(0, query, key), 0.0, "no bit of its output moved")


CHECK = Check(
    NAME, "Is what came before seen exactly as far as declared, in the whole and in each layer?", run, length=2
)
