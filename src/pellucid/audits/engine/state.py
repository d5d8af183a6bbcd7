"""What calling a module may change, compared and restored: tensors, flags, hooks, torch's switches, random states."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

Leaves = dict[str, Any]
"""Plain values by where they are."""
Kind = Literal["weights", "buffers", "training", "requires_grad", "gradients", "hooks", "attributes"]


class Snapshot:
    """What a module is and has at one moment, so that a later moment can be compared with it or turned back.

    ``weights=False``: of a copy that is used nowhere else, whose weights need no second copy. Plain ``attributes``
    (see :func:`~pellucid.audits.engine.attributes.snapshot_attributes`) are compared only.
    """

    def __init__(self, module: nn.Module | None, *, weights: bool = True, attributes: Leaves | None = None) -> None:
        parts = dict(() if module is None else module.named_modules())
        self.parameters = dict(() if module is None else module.named_parameters())
        live_buffers = dict(() if module is None else module.named_buffers())
        self.weights = {name: weight.detach().clone() for name, weight in self.parameters.items() if weights}
        self.buffers = {name: buffer.detach().clone() for name, buffer in live_buffers.items()}
        self.training = {name: part.training for name, part in parts.items()}
        self.requires_grad = {name: weight.requires_grad for name, weight in self.parameters.items()}
        self.gradients = {name: weight.grad for name, weight in self.parameters.items()}
        self.attributes = attributes or {}
        live: dict[str, Tensor] = {**self.parameters, **live_buffers}
        self._tensors = [(live[name], values) for name, values in (*self.weights.items(), *self.buffers.items())]
        self._parts = [(part, _flags(part), dict(getattr(part, "_buffers", None) or {})) for part in parts.values()]
        self._hooks = {
            f"{name or 'the module'}{key}": (hooks, dict(hooks))
            for name, part in parts.items()
            for key, hooks in vars(part).items()
            if is_hooks(key) and isinstance(hooks, dict)  # not of a scripted module
        }

    @property
    def hooks(self) -> dict[str, int]:
        """How many hooks each part carries."""
        return {name: len(before) for name, (_, before) in self._hooks.items()}

    def diff(self, later: Snapshot, kind: Kind) -> list[str]:
        """The names that differ in a later snapshot.

        Of tensors those known here that changed or are gone, of flags those that are in both, of hooks those of which
        there are more, of attributes also those that are new or gone.
        """
        was, now = getattr(self, kind), getattr(later, kind)
        match kind:
            case "weights" | "buffers":
                return [name for name, tensor in was.items() if not same_tensor(tensor, now.get(name))]
            case "gradients":
                return [name for name, grad in was.items() if now.get(name) is not grad]
            case "hooks":
                return [name for name, count in now.items() if count > was.get(name, 0)]
            case "attributes":
                return [name for name in {**was, **now} if was.get(name, self) != now.get(name, self)]
        return [name for name, flag in was.items() if now.get(name, flag) != flag]

    def restore(self) -> None:
        """Put back values, gradients, modes, flags and hooks, each whatever another raises.

        Buffers that were registered since stay: other attributes may name them.
        """
        with ExitStack() as stack:
            for tensor, before in self._tensors:
                stack.callback(_put_back_values, tensor, before)
            for name, weight in self.parameters.items():
                stack.callback(weight.requires_grad_, self.requires_grad[name])
                stack.callback(setattr, weight, "grad", self.gradients[name])
            for (part, flags, buffers), training in zip(self._parts, self.training.values(), strict=True):
                stack.callback(setattr, part, "training", training)
                stack.callback(_put_back_flags, part, flags)
                if isinstance(getattr(part, "_buffers", None), dict):
                    stack.callback(part._buffers.update, buffers)
            for hooks, entries in self._hooks.values():
                stack.callback(_put_back_entries, hooks, entries)


def is_hooks(key: str) -> bool:
    return "_hooks" in key and key.startswith("_")


def shallow_weight_copy(module: object) -> nn.Module | None:
    """A copy that shares the weights and nothing else, so that it stays what it is now; None where none can be made."""
    if not isinstance(module, nn.Module):
        return None
    try:
        return copy.deepcopy(module, {id(weight): weight for weight in module.parameters()})
    except Exception:  # noqa: BLE001 (anybody's code)
        return None


def same_tensor(before: Tensor, after: object) -> bool:
    """Shape, dtype and content, NaN equal to NaN; what cannot be read (sparse, quantized, nested) counts as equal."""
    if not isinstance(after, Tensor) or before.shape != after.shape or before.dtype != after.dtype:
        return False
    try:
        if torch.equal(before, after):
            return True
        return before.is_floating_point() and bool(((before == after) | (before.isnan() & after.isnan())).all())
    except (RuntimeError, NotImplementedError):
        return True


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


def _put_back_entries(state: dict[Any, Any], before: dict[Any, Any]) -> None:
    if state.keys() != before.keys() or any(state[name] is not value for name, value in before.items()):
        state.clear()
        state.update(before)


# -------------------------------------------------------------------------------------- torch's switches, random states

# name -> (read, write back)
_SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "whether gradients are taken": (torch.is_grad_enabled, torch.set_grad_enabled),
    "deterministic algorithms": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda before: torch.use_deterministic_algorithms(before[0], warn_only=before[1]),
    ),
    "the precision of float32 products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "anomaly detection": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "autocast": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda before: torch.set_autocast_enabled("cpu", before),
    ),
}


def switches() -> dict[str, Any]:
    """Torch's global switches, by what they are."""
    return {name: read() for name, (read, _) in _SWITCHES.items()}


def restore_switches(before: dict[str, Any]) -> list[str]:
    """Restore the switches that moved; their names."""
    moved = [name for name, (read, _) in _SWITCHES.items() if read() != before[name]]
    for name in moved:
        _SWITCHES[name][1](before[name])
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


def reseed(seed: int) -> None:
    """Other random numbers from every generator that a model is likely to use."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


@contextmanager
def preserve_state(module: nn.Module | None, *, weights: bool = True) -> Iterator[None]:
    """Eval mode inside; afterwards the module (see :class:`Snapshot`), switches and random states are as before."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.callback(restore_switches, switches())
        stack.enter_context(torch.random.fork_rng(devices=range(torch.cuda.device_count())))
        stack.callback(random.setstate, random.getstate())
        if "numpy" in sys.modules:
            numpy_random = sys.modules["numpy"].random
            stack.callback(numpy_random.set_state, numpy_random.get_state())
        if module is not None:
            stack.callback(Snapshot(module, weights=weights).restore)
            module.eval()
        yield
