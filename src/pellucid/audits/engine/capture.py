"""Hooks by which a run is watched from outside: what a module was given and gave, and the same with it changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pellucid.audits.engine.target_run import TargetRun, logit_scale, max_abs_diff
from pellucid.batch import Batch

Kept = TypeVar("Kept")


class CaptureIO:
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
        if self.given is None or out is None or self.given.is_nested or out.is_nested or out.shape != self.given.shape:
            return False
        return tuple(out.shape[:2]) in (shape, shape[::-1])


class PerturbInput:
    """The same layer once more: in row r of the batch the stream of token ``keys[r]`` is another."""

    def __init__(self, taken: CaptureIO, keys: Sequence[int], length: int, draw: int) -> None:
        self.taken, self.keys, self.draw = taken, keys, draw
        self.sizes_TT, self.scale = torch.zeros(length, length, dtype=torch.float64), 1.0

    def enter(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        where, given = _stream_at(args, kwargs), self.taken.given
        assert where is not None
        assert given is not None
        x = given.clone()
        x_BTD = self._rows_first(x)  # a view: what is written there stands in x
        generator = torch.Generator().manual_seed(3 + self.draw)
        size = x_BTD.std() * 2 ** (self.draw % 4)
        step_D = torch.randn(x_BTD.shape[-1], generator=generator, dtype=torch.float64).to(x_BTD)
        for row, key in enumerate(self.keys):
            x_BTD[row, key] += step_D * size
        if isinstance(where, int):
            return (*args[:where], x, *args[where + 1 :]), kwargs
        return args, {**kwargs, where: x}

    def leave(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        before, after = _first(self.taken.gave), _first(output)
        assert before is not None
        assert after is not None
        before_BTD, after_BTD = self._rows_first(before), self._rows_first(after)
        self.sizes_TT[:, list(self.keys)] = max_abs_diff(before_BTD, after_BTD).T.cpu()
        self.scale = logit_scale(before_BTD)
        return _with_first(self.taken.gave, before.clone())

    def _rows_first(self, x: Tensor) -> Tensor:
        return x if x.shape[0] == len(self.keys) and x.shape[1] == len(self.sizes_TT) else x.transpose(0, 1)


@contextmanager
def watching(parts: Sequence[nn.Module], watchers: Sequence[CaptureIO | PerturbInput]) -> Iterator[None]:
    with ExitStack() as stack:
        for part, watcher in zip(parts, watchers, strict=True):
            stack.callback(part.register_forward_pre_hook(watcher.enter, with_kwargs=True).remove)
            stack.callback(part.register_forward_hook(watcher.leave).remove)
        yield


@contextmanager
def encoder_output_changed(run: TargetRun) -> Iterator[None]:
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

    handle = dict(run.probe.module.named_modules())[run.probe.memory_name].register_forward_hook(change)
    try:
        yield
    finally:
        handle.remove()


def output_of(run: TargetRun, name: str, batch: Batch) -> Tensor | None:
    """What the submodule ``name`` gives in a run: its first tensor, on the host. None: it gives none."""

    def first_tensor(output: Any) -> Tensor | None:
        first = _first(output)
        return None if first is None else first.detach().cpu().clone()

    given = outputs_of(run, name, batch, first_tensor)
    return given[-1] if given else None


def outputs_of(run: TargetRun, name: str, batch: Batch, keep: Callable[[Any], Kept]) -> list[Kept]:
    """What ``keep`` returns for each output of the submodule ``name`` (empty: of the whole) in a run."""
    assert run.probe.module is not None
    given: list[Kept] = []
    part = dict(run.probe.module.named_modules())[name]
    handle = part.register_forward_hook(lambda _module, _args, output: given.append(keep(output)))
    try:
        run.logits(batch)
    finally:
        handle.remove()
    return given


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
