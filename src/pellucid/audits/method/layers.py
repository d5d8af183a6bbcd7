"""Who moves whom within each layer alone, seen from outside by hooks: where a flow first leaves its rule.

Every layer is given the hidden stream of an unchanged run with one token of it changed; what it answers is compared
with what it answered, and then put back, so that the next layer starts from the unchanged stream again. One pass
over the model so measures all layers, and each by itself.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.audits.method.bench import Bench
from pellucid.audits.method.expected import expected_flow
from pellucid.audits.method.judge import judge
from pellucid.audits.method.measure import Reading, Run, moved, scale_of
from pellucid.probe import Request


@dataclass(frozen=True, eq=False)
class LayerFlow:
    """One layer's flow: sizes are ``[query, key]``, for the keys that were changed only."""

    number: int
    name: str
    may: Tensor
    keys: tuple[int, ...]
    reading: Reading

    def leaks(self, bench: Bench, among_TT: Tensor) -> list[list[int]]:
        """Pairs of ``among_TT`` in which the layer lets through what its rule hides."""
        hidden = Reading(
            self.reading.run, torch.where(among_TT & ~self.may, self.reading.sizes, 0.0), self.reading.scale
        )
        verdict = judge(bench, [hidden], bits=True)
        return (hidden.sizes > verdict.limit).nonzero().tolist() if verdict.status == "leak" else []

    def unseen(self, among_TT: Tensor) -> list[list[int]]:
        """Pairs of ``among_TT`` that its rule lets through, but in which nothing moved."""
        watched_TT = torch.zeros_like(self.may).index_fill_(1, torch.tensor(self.keys), True)
        return (watched_TT & among_TT & self.may & (self.reading.sizes == 0)).nonzero().tolist()


def layer_flows(bench: Bench, row: Sequence[int], keys: Sequence[int]) -> list[LayerFlow]:
    """The flow of every layer in the most exact precision; empty where the layers cannot be told apart."""
    names, run = layer_names(bench), bench.runs[-1]
    if not names:
        return []
    module = run.probe.module
    assert module is not None
    parts = [module.get_submodule(name) for name in names]
    request = Request.from_rows([list(row)] * len(keys))
    taken = [_Taken() for _ in parts]
    with _watching(parts, taken):
        run.logits(request)
    changed = [_Changed(each, keys, len(row)) for each in taken]
    with _watching(parts, changed):
        run.logits(request)
    one = Request.from_rows([list(row)])
    flows = []
    for number, (name, rule, change) in enumerate(zip(names, bench.probe.rules, changed, strict=True)):
        reading = Reading(run, change.sizes_TT, change.scale)
        flows.append(LayerFlow(number, name, expected_flow([rule], one)[0], tuple(keys), reading))
    return flows


def first_broken_layer(bench: Bench, row: Sequence[int], query: int, key: int) -> str:
    """In words: the first layer that lets ``key`` through to anything that must not see it."""
    names = layer_names(bench)
    if not names:
        return ""
    anywhere_TT = torch.ones(len(row), len(row), dtype=torch.bool)
    for flow in layer_flows(bench, row, [key]):
        pairs = flow.leaks(bench, anywhere_TT)
        if pairs:
            first = min(pairs, key=lambda pair: (pair[0] != query, pair))
            return f"; the first layer to break its rule is {flow.name}, at query {first[0]}, key {first[1]}"
    return "; each layer keeps to its rule, so it happens before, between or after them"


def layer_names(bench: Bench) -> tuple[str, ...]:
    """The submodules that are the layers: named by the probe, or found by watching one run."""

    def find() -> tuple[str, ...]:
        probe, count = bench.probe, len(bench.probe.rules)
        if probe.layer_names is not None:
            return probe.layer_names if len(probe.layer_names) == count else ()
        request = Request.from_rows([bench.tokens(min(4, bench.length))])  # a source is 5 long
        return next((names for names in stacks(bench.native, request) if len(names) == count), ())

    return bench.once("layer names", find)


def stacks(run: Run, request: Request) -> list[tuple[str, ...]]:
    """Lists of modules, each called once with a hidden stream and giving one: what layers look like from outside."""
    module = run.probe.module
    if module is None:
        return []
    lists = [
        tuple(f"{name}.{number}".removeprefix(".") for number in range(len(part)))
        for name, part in module.named_modules()
        if isinstance(part, nn.ModuleList | nn.Sequential) and len(part)
    ]
    names = [name for each in lists for name in each]
    taken = {name: _Taken() for name in names}
    with _watching([module.get_submodule(name) for name in names], list(taken.values())):
        run.logits(request)
    streams = {name for name, each in taken.items() if each.calls == 1 and each.is_stream(request.shape)}
    return [each for each in lists if streams.issuperset(each)]


class _Taken:
    """A layer's input and output in the unchanged run: copies, for either may be written over later."""

    def __init__(self) -> None:
        self.calls = 0
        self.given: Tensor | None = None
        self.gave: Any = None

    def enter(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.calls += 1
        where = _stream_at(args, kwargs)
        self.given = None if where is None else _stream(args, kwargs, where).clone()
        return args, kwargs

    def leave(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        first = _first(output)
        self.gave = output if first is None else _with_first(output, first.clone())
        return output

    def is_stream(self, shape: tuple[int, int]) -> bool:
        """Whether it is given ``[B, T, D]`` (or ``[T, B, D]``) and gives the same."""
        out = _first(self.gave)
        if self.given is None or out is None or out.shape != self.given.shape:
            return False
        return tuple(out.shape[:2]) in (shape, shape[::-1])


class _Changed:
    """The same layer once more: in row r of the batch the stream of token ``keys[r]`` is another."""

    def __init__(self, taken: _Taken, keys: Sequence[int], length: int) -> None:
        self.taken, self.keys = taken, keys
        self.sizes_TT, self.scale = torch.zeros(length, length, dtype=torch.float64), 1.0

    def enter(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        where, given = _stream_at(args, kwargs), self.taken.given
        assert where is not None
        assert given is not None
        x_BTD = self._rows_first(given.clone())
        generator = torch.Generator().manual_seed(3)
        step_D = torch.randn(x_BTD.shape[-1], generator=generator, dtype=torch.float64).to(x_BTD)
        for row, key in enumerate(self.keys):
            x_BTD[row, key] += step_D * x_BTD.std()
        x = self._rows_first(x_BTD)
        if isinstance(where, int):
            return (*args[:where], x, *args[where + 1 :]), kwargs
        return args, {**kwargs, where: x}

    def leave(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        before, after = _first(self.taken.gave), _first(output)
        assert before is not None
        assert after is not None
        before_BTD, after_BTD = self._rows_first(before), self._rows_first(after)
        self.sizes_TT[:, list(self.keys)] = moved(before_BTD, after_BTD).T.cpu()
        self.scale = scale_of(before_BTD)
        return _with_first(self.taken.gave, before.clone())

    def _rows_first(self, x: Tensor) -> Tensor:
        return x if x.shape[0] == len(self.keys) and x.shape[1] == len(self.sizes_TT) else x.transpose(0, 1)


@contextmanager
def _watching(parts: Sequence[nn.Module], watchers: Sequence[_Taken | _Changed]) -> Iterator[None]:
    with ExitStack() as stack:
        for part, watcher in zip(parts, watchers, strict=True):
            stack.callback(part.register_forward_pre_hook(watcher.enter, with_kwargs=True).remove)
            stack.callback(part.register_forward_hook(watcher.leave).remove)
        yield


@contextmanager
def memory_changed(run: Run) -> Iterator[None]:
    """While inside, slot r of what row r's decoder reads is another."""
    assert run.probe.module is not None
    assert run.probe.memory_name is not None

    def change(_module: nn.Module, _args: Any, output: Any) -> Any:
        memory_BSD = _first(output)
        assert memory_BSD is not None
        changed_BSD = memory_BSD.clone()
        for slot in range(min(changed_BSD.shape[:2])):
            changed_BSD[slot, slot] = changed_BSD[slot, slot].flip(-1) + 1.0
        return _with_first(output, changed_BSD)

    handle = run.probe.module.get_submodule(run.probe.memory_name).register_forward_hook(change)
    try:
        yield
    finally:
        handle.remove()


def _with_first(output: Any, first: Tensor) -> Any:
    """The same kind of output with another tensor in front."""
    if isinstance(output, Tensor):
        return first
    if isinstance(output, dict):
        changed = copy.copy(output)
        changed[next(iter(output))] = first
        return changed
    return type(output)((first, *output[1:]))


def _stream_at(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str | None:
    """Where among the arguments the hidden stream is: the first floating tensor of three dimensions."""
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    streams = (place for place, value in places if isinstance(value, Tensor) and value.is_floating_point())
    return next((place for place in streams if _stream(args, kwargs, place).dim() == 3), None)


def _stream(args: tuple[Any, ...], kwargs: dict[str, Any], where: int | str) -> Tensor:
    found: Tensor = args[where] if isinstance(where, int) else kwargs[where]
    return found.detach()


def _first(output: Any) -> Tensor | None:
    """The tensor that comes first: of a tuple, or of a mapping with names (an output class of transformers)."""
    first = output
    if isinstance(output, tuple | list) and output:
        first = output[0]
    elif isinstance(output, dict) and output:
        first = next(iter(output.values()))
    return first if isinstance(first, Tensor) else None
