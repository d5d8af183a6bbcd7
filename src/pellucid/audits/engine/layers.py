"""Who moves whom within each layer alone, seen from outside by hooks: where a flow first leaves its rule.

Every layer is given the hidden stream of an unchanged run with one token of it changed; its output is compared with
that of the unchanged run and then replaced by it, so that the next layer starts from the unchanged stream again. One
pass over the model so measures all layers, and each by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pellucid.audits.engine.capture import CaptureIO, PerturbInput, watching
from pellucid.audits.engine.compare import judge
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.expected_flow import expected_flow
from pellucid.audits.engine.influence import others
from pellucid.audits.engine.target_run import Deviation, TargetRun
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
        sizes_TT = torch.where(among_TT & ~self.may, self.reading.sizes, 0.0)
        verdict = judge(context, [Deviation(self.reading.run, sizes_TT, self.reading.scale)], bits=True)
        return (sizes_TT > verdict.limit).nonzero().tolist() if verdict.status == "leak" else []

    def unseen(self, among_TT: Tensor) -> list[list[int]]:
        """Pairs of ``among_TT`` that its rule lets through, but in which nothing moved."""
        watched_TT = torch.zeros_like(self.may).index_fill_(1, torch.tensor(self.keys), True)
        return (watched_TT & among_TT & self.may & (self.reading.sizes == 0)).nonzero().tolist()

    @property
    def moves(self) -> Tensor:
        """The sizes of pairs of two tokens."""
        return torch.where(others(self.may), self.reading.sizes, 0.0)


@dataclass(frozen=True, eq=False)
class LayerStack:
    """The layers of a decoder, or of the encoder that it reads; no names where they cannot be distinguished.

    ``request`` makes a batch of copies of a row; ``declared``: the rules are stated, so seeing less than they show is
    a fault.
    """

    names: tuple[str, ...]
    rules: tuple[Visibility, ...]
    request: Callable[[list[list[int]]], Batch] = Batch.from_rows
    declared: bool = True

    def flows(self, run: TargetRun, row: Sequence[int], keys: Sequence[int], draw: int = 0) -> list[LayerFlow]:
        """The flow of every layer; ``draw`` numbers the changes: another is another step in another direction."""
        module = run.probe.module
        if not self.names or module is None:
            return []
        keys = [*keys, keys[0]] if len(keys) == len(row) else keys  # else rows and slots could not be distinguished
        named, batch = dict(module.named_modules()), self.request([list(row)] * len(keys))
        parts = [named[name] for name in self.names]
        unchanged = [CaptureIO() for _ in parts]
        with watching(parts, unchanged):
            run.logits(batch)
        changed = [PerturbInput(each, keys, len(row), draw) for each in unchanged]
        with watching(parts, changed):
            run.logits(batch)
        one = Batch.from_rows([list(row)])
        return [
            LayerFlow(
                number, name, expected_flow([rule], one)[0], tuple(keys), Deviation(run, change.sizes_TT, change.scale)
            )
            for number, (name, rule, change) in enumerate(zip(self.names, self.rules, changed, strict=True))
        ]


def decoder_stack(context: AuditContext) -> LayerStack:
    """The layers that the logits come from: named by the probe, or found by watching one run."""

    def find() -> LayerStack:
        probe, rules = context.probe, tuple(context.probe.rules)
        if probe.layer_names is not None:
            names = probe.layer_names if len(probe.layer_names) == len(rules) else ()
        else:
            row = context.tokens(min(4, context.length))  # a source is 5 long
            every = _outermost(stacks(context.native, Batch.from_rows([row])))
            found = [each for each in every if len(each) == len(rules)]
            names = _that_mixes(context.native, found, row, Batch.from_rows, sure=len(every) == 1)
        return LayerStack(names, rules, declared=probe.rules_declared)

    return context.once("decoder layers", find)


def encoder_stack(context: AuditContext, target: int = 3) -> LayerStack:
    """The layers of the encoder that the target reads; one rule stands for all of them.

    ``target`` is the number of its tokens: another than any source has.
    """

    def find() -> LayerStack:
        rules, tokens, row = tuple(context.probe.source_rules), context.tokens(target), context.tokens(4)

        def request(rows: list[list[int]]) -> Batch:
            return Batch.from_pairs(rows, [tokens] * len(rows))

        every = _outermost(stacks(context.native, request([row]), (1, len(row))))
        found = [names for names in every if len(names) == len(rules)]
        if not found and len(rules) == 1:
            found = every[:1] if len(every) == 1 else []
        names = _that_mixes(context.native, found, row, request, sure=len(every) == 1)
        declared = context.probe.rules_declared and getattr(context.probe, "source_rules_declared", True)
        return LayerStack(names, rules * len(names) if len(rules) == 1 and names else rules, request, declared)

    return context.once("encoder layers", find)


def first_broken_layer(context: AuditContext, row: Sequence[int], query: int, key: int) -> str:
    """In words: the first layer that lets ``key`` through to anything that must not see it."""
    stack = decoder_stack(context)
    if not stack.names:
        return ""
    for flow in stack.flows(context.runs[-1], row, [key]):
        pairs = flow.leaks(context, torch.ones_like(flow.may))
        if pairs:
            first = min(pairs, key=lambda pair: (pair[0] != query, pair))
            return f"; the first layer to break its rule is {flow.name}, at query {first[0]}, key {first[1]}"
    return "; each layer keeps to its rule, so it happens before, between or after them"


def _outermost(found: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Those that lie within no layer of another."""
    holders = [f"{name}." for names in found for name in names]
    return [names for names in found if not any(names[0].startswith(holder) for holder in holders)]


def _that_mixes(
    run: TargetRun,
    found: Sequence[tuple[str, ...]],
    row: Sequence[int],
    request: Callable[[list[list[int]]], Batch],
    sure: bool,
) -> tuple[str, ...]:
    """The list whose modules carry something from token to token, as layers do and norms do not.

    ``sure``: there is no other list of modules, so the one that was found is taken.
    """
    if not found or sure:
        return found[0] if found else ()
    mixing = {}
    for names in found:
        flows = LayerStack(names, (causal(),) * len(names), request).flows(run, row, [0, len(row) - 1])
        mixing[names] = [bool((flow.moves > 0).any()) for flow in flows]
    some = [names for names in found if any(mixing[names])]
    return some[0] if len(some) == 1 else next((names for names in some if all(mixing[names])), ())


def stacks(run: TargetRun, batch: Batch, shape: tuple[int, int] | None = None) -> list[tuple[str, ...]]:
    """Lists of modules, each called once with a hidden stream and returning one: what layers look like from outside.

    ``shape`` is that of the tokens which the stream belongs to; None: of the request's own.
    """
    module = run.probe.module
    if module is None:
        return []
    parts = dict(module.named_modules())
    lists = [
        tuple(f"{name}.{number}".removeprefix(".") for number, child in part.named_children())
        for name, part in parts.items()
        if isinstance(part, nn.ModuleList | nn.Sequential)
    ]
    lists = [names for names in lists if names and parts.keys() >= set(names)]  # a list may hold None, or a part twice
    calls = {name: CaptureIO() for each in lists for name in each}
    with watching([parts[name] for name in calls], list(calls.values())):
        run.logits(batch)
    wanted = batch.shape if shape is None else shape
    streams = {name for name, each in calls.items() if each.calls == 1 and each.is_stream(wanted)}
    return [each for each in lists if streams.issuperset(each)]
