"""Torch's switches, random states and everything of a module that a call may change, restored afterwards."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# name -> (read, write back)
_SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "whether gradients are taken": (torch.is_grad_enabled, torch.set_grad_enabled),
    "deterministic algorithms": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda kept: torch.use_deterministic_algorithms(kept[0], warn_only=kept[1]),
    ),
    "the precision of float32 products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "anomaly detection": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "autocast": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda kept: torch.set_autocast_enabled("cpu", kept),
    ),
}


def switches() -> dict[str, Any]:
    """Torch's global switches, by what they are."""
    return {name: read() for name, (read, _) in _SWITCHES.items()}


def put_back(kept: dict[str, Any]) -> list[str]:
    """Restore the switches that moved; their names."""
    moved = [name for name, (read, _) in _SWITCHES.items() if read() != kept[name]]
    for name in moved:
        _SWITCHES[name][1](kept[name])
    return moved


def random_states() -> dict[str, Any]:
    """Comparable states of every generator that a model is likely to use."""
    states: dict[str, Any] = {"torch": torch.get_rng_state().tolist(), "Python's random": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["torch on cuda"] = [state.tolist() for state in torch.cuda.get_rng_state_all()]
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = (name, keys.tolist(), *rest)
    return states


@contextmanager
def preserve_state(module: nn.Module | None, *, weights: bool = True) -> Iterator[None]:
    """Eval mode inside; outside, modes, flags, weights, buffers, gradients, hooks and random states are as before.

    ``weights=False``: of a copy that nobody else holds, whose weights need not be kept beside it.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.callback(put_back, switches())
        stack.enter_context(torch.random.fork_rng(devices=range(torch.cuda.device_count())))
        stack.callback(random.setstate, random.getstate())
        if "numpy" in sys.modules:
            numpy_random = sys.modules["numpy"].random
            stack.callback(numpy_random.set_state, numpy_random.get_state())
        if module is not None:
            _restore_later(stack, module, weights)
            module.eval()
        yield


def _restore_later(stack: ExitStack, module: nn.Module, weights: bool) -> None:
    """Everything of a module that answering may change, each put back by itself."""
    for tensor in (*(module.parameters() if weights else ()), *module.buffers()):
        stack.callback(_put_back_values, tensor, tensor.detach().clone())
    for weight in module.parameters():
        stack.callback(_put_back_gradient, weight, weight.requires_grad, weight.grad)
    for part in module.modules():
        stack.callback(setattr, part, "training", part.training)
        stack.callback(_put_back_flags, part, _flags(part))
        if isinstance(getattr(part, "_buffers", None), dict):  # tables made on the way stay: other attributes name them
            stack.callback(part._buffers.update, dict(part._buffers))
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            state = getattr(part, name, None)
            if isinstance(state, dict):  # not of a scripted module
                stack.callback(_put_back_entries, state, dict(state))


def _flags(part: nn.Module) -> dict[str, bool]:
    """A module's own switches: transformers notes in one that its hooks are there, which must go with the hooks."""
    return {name: value for name, value in vars(part).items() if isinstance(value, bool) and name != "training"}


def _put_back_flags(part: nn.Module, before: dict[str, bool]) -> None:
    for name in _flags(part).keys() - before.keys():
        del vars(part)[name]
    vars(part).update(before)


def _put_back_values(tensor: Tensor, before: Tensor) -> None:
    with torch.no_grad():
        if not torch.equal(tensor, before):
            tensor.copy_(before)


def _put_back_gradient(weight: nn.Parameter, required: bool, grad: Tensor | None) -> None:
    weight.requires_grad_(required)
    weight.grad = grad


def _put_back_entries(state: dict[Any, Any], before: dict[Any, Any]) -> None:
    if state.keys() != before.keys() or any(state[name] is not value for name, value in before.items()):
        state.clear()
        state.update(before)
