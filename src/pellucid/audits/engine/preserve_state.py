"""Leave a target as it was found."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.audits.engine.global_state import put_back, switches


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
        if isinstance(
            getattr(part, "_buffers", None), dict
        ):  # tables made on the way stay: other attributes tell of them
            stack.callback(part._buffers.update, dict(part._buffers))
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            held = getattr(part, name, None)
            if isinstance(held, dict):  # not of a scripted module
                stack.callback(_put_back_entries, held, dict(held))


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


def _put_back_entries(held: dict[Any, Any], before: dict[Any, Any]) -> None:
    if held.keys() != before.keys() or any(held[name] is not value for name, value in before.items()):
        held.clear()
        held.update(before)
