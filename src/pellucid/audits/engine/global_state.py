"""What lies outside a module and that a module may move: torch's switches and every random state."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch

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
