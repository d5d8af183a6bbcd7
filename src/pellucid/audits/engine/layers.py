"""Who moves whom within each layer alone, seen from outside by hooks: where a flow first leaves its rule.

Every layer is given the hidden stream of an unchanged run with one token of it changed; what it answers is compared
with what it answered, and then put back, so that the next layer starts from the unchanged stream again. One pass
over the model so measures all layers, and each by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pellucid.audits.engine.capture import CaptureIO, PerturbInput, watching
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.decision import judge
from pellucid.audits.engine.deviation import Deviation, TargetRun
from pellucid.audits.engine.expected import expected_flow
from pellucid.batch import Batch
from pellucid.probe import Visibility
from pellucid.visibility import causal


@dataclass(frozen=True, eq=False)
class LayerFlow:
    """One layer's flow: sizes are ``[query, key]``, for the keys that were changed only."""

    number: int
    name: str
    may: Tensor
    keys: tuple[int, ...]
    reading: Deviation

    def leaks(self, context: AuditContext, among_TT: Tensor) -> list[list[int]]:
        """Pairs of ``among_TT`` in which the layer lets through what its rule hides."""
        hidden = Deviation(
            self.reading.run, torch.where(among_TT & ~self.may, self.reading.sizes, 0.0), self.reading.scale
        )
        verdict = judge(context, [hidden], bits=True)
        return (hidden.sizes > verdict.limit).nonzero().tolist() if verdict.status == "leak" else []

    def unseen(self, among_TT: Tensor) -> list[list[int]]:
        """Pairs of ``among_TT`` that its rule lets through, but in which nothing moved."""
        watched_TT = torch.zeros_like(self.may).index_fill_(1, torch.tensor(self.keys), True)
        return (watched_TT & among_TT & self.may & (self.reading.sizes == 0)).nonzero().tolist()


def layer_flows(context: AuditContext, row: Sequence[int], keys: Sequence[int], draw: int = 0) -> list[LayerFlow]:
    """The flow of every layer in the most exact precision; empty where the layers cannot be told apart.

    ``draw`` numbers the changes: another is another step into another direction.
    """
    names, rules = layer_names(context), context.probe.rules
    return _flows(context.runs[-1], names, rules, row, keys, draw, Batch.from_rows) if names else []


def source_flows(
    context: AuditContext, target: Sequence[int], source: Sequence[int], keys: Sequence[int], draw: int = 0
) -> list[LayerFlow]:
    """The same of an encoder whose memory the target reads."""
    names, rules = source_layers(context)

    def beside(rows: list[list[int]]) -> Batch:
        return Batch.from_pairs(rows, [list(target)] * len(rows))

    return _flows(context.runs[-1], names, rules, source, keys, draw, beside) if names else []


def _flows(
    run: TargetRun,
    names: Sequence[str],
    rules: Sequence[Visibility],
    row: Sequence[int],
    keys: Sequence[int],
    draw: int,
    ask: Callable[[list[list[int]]], Batch],
) -> list[LayerFlow]:
    module = run.probe.module
    assert module is not None
    keys = [*keys, keys[0]] if len(keys) == len(row) else keys  # else nobody could tell rows from slots
    parts = [module.get_submodule(name) for name in names]
    batch = ask([list(row)] * len(keys))
    taken = [CaptureIO() for _ in parts]
    with watching(parts, taken):
        run.logits(batch)
    changed = [PerturbInput(each, keys, len(row), draw) for each in taken]
    with watching(parts, changed):
        run.logits(batch)
    one = Batch.from_rows([list(row)])
    flows = []
    for number, (name, rule, change) in enumerate(zip(names, rules, changed, strict=True)):
        reading = Deviation(run, change.sizes_TT, change.scale)
        flows.append(LayerFlow(number, name, expected_flow([rule], one)[0], tuple(keys), reading))
    return flows


def first_broken_layer(context: AuditContext, row: Sequence[int], query: int, key: int) -> str:
    """In words: the first layer that lets ``key`` through to anything that must not see it."""
    names = layer_names(context)
    if not names:
        return ""
    anywhere_TT = torch.ones(len(row), len(row), dtype=torch.bool)
    for flow in layer_flows(context, row, [key]):
        pairs = flow.leaks(context, anywhere_TT)
        if pairs:
            first = min(pairs, key=lambda pair: (pair[0] != query, pair))
            return f"; the first layer to break its rule is {flow.name}, at query {first[0]}, key {first[1]}"
    return "; each layer keeps to its rule, so it happens before, between or after them"


def layer_names(context: AuditContext) -> tuple[str, ...]:
    """The submodules that are the layers: named by the probe, or found by watching one run."""

    def find() -> tuple[str, ...]:
        probe, count = context.probe, len(context.probe.rules)
        if probe.layer_names is not None:
            return probe.layer_names if len(probe.layer_names) == count else ()
        row = context.tokens(min(4, context.length))  # a source is 5 long
        found = [names for names in stacks(context.native, Batch.from_rows([row])) if len(names) == count]
        return _that_mixes(context.native, _outermost(found), row, Batch.from_rows)

    return context.once("layer names", find)


def source_layers(context: AuditContext) -> tuple[tuple[str, ...], tuple[Visibility, ...]]:
    """The layers of the encoder, found by watching one run, and their rules; one rule stands for all of them."""

    def find() -> tuple[tuple[str, ...], tuple[Visibility, ...]]:
        rules, target = tuple(context.probe.source_rules), context.tokens(3)
        row = context.tokens(4)

        def beside(rows: list[list[int]]) -> Batch:
            return Batch.from_pairs(rows, [target] * len(rows))

        every = _outermost(stacks(context.native, beside([row]), (1, len(row))))
        found = [names for names in every if len(names) == len(rules)]
        if not found and len(rules) == 1:
            found = every[:1] if len(every) == 1 else []
        names = _that_mixes(context.native, found, row, beside)
        return names, rules * len(names) if len(rules) == 1 and names else rules

    return context.once("source layers", find)


def _outermost(found: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Those that lie within no layer of another."""
    holders = [f"{name}." for names in found for name in names]
    return [names for names in found if not any(names[0].startswith(holder) for holder in holders)]


def _that_mixes(
    run: TargetRun, found: Sequence[tuple[str, ...]], row: Sequence[int], ask: Callable[[list[list[int]]], Batch]
) -> tuple[str, ...]:
    """Of several lists the one whose modules carry something from token to token, as layers do and norms do not."""
    if len(found) < 2:
        return found[0] if found else ()
    keys = [0, len(row) - 1]
    apart_TT = ~torch.eye(len(row), dtype=torch.bool)
    mixing = {}
    for names in found:
        flows = _flows(run, names, [causal()] * len(names), row, keys, 0, ask)
        mixing[names] = [bool((flow.reading.sizes[apart_TT] > 0).any()) for flow in flows]
    some = [names for names in found if any(mixing[names])]
    return some[0] if len(some) == 1 else next((names for names in some if all(mixing[names])), ())


def stacks(run: TargetRun, batch: Batch, shape: tuple[int, int] | None = None) -> list[tuple[str, ...]]:
    """Lists of modules, each called once with a hidden stream and giving one: what layers look like from outside.

    ``shape`` is that of the tokens which the stream belongs to; None: of the request's own.
    """
    module = run.probe.module
    if module is None:
        return []
    lists = [
        tuple(f"{name}.{number}".removeprefix(".") for number in range(len(part)))
        for name, part in module.named_modules()
        if isinstance(part, nn.ModuleList | nn.Sequential) and len(part)
    ]
    names = [name for each in lists for name in each]
    taken = {name: CaptureIO() for name in names}
    with watching([module.get_submodule(name) for name in names], list(taken.values())):
        run.logits(batch)
    wanted = batch.shape if shape is None else shape
    streams = {name for name, each in taken.items() if each.calls == 1 and each.is_stream(wanted)}
    return [each for each in lists if streams.issuperset(each)]
