"""The number format of a forward pass. Weights, their gradients and the optimizer stay float32."""

from __future__ import annotations

import time
from typing import Literal

import torch

Precision = Literal["float32", "bfloat16"]

_SIZE = 512
_TRIES = 3


def autocast(precision: Precision, device: torch.device | str) -> torch.autocast:
    """The context for a forward pass: matrix products in bfloat16, or everything as it is."""
    kind = torch.device(device).type
    return torch.autocast(kind, dtype=torch.bfloat16, enabled=precision == "bfloat16")


def fastest_precision(device: torch.device | str = "cpu") -> Precision:
    """bfloat16 where this machine multiplies matrices faster in it; measured, in well under a second.

    Processors without 16-bit units emulate them, tens of times slower than float32.
    """
    faster = operations_per_second("bfloat16", device) > operations_per_second("float32", device)
    return "bfloat16" if faster else "float32"


def operations_per_second(precision: Precision, device: torch.device | str = "cpu") -> float:
    """Floating-point operations of a matrix product on this machine, measured."""
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    matrix = torch.ones(_SIZE, _SIZE, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(_TRIES):
        started = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # reading one number waits for the device
        best = min(best, time.perf_counter() - started)
    return 2 * _SIZE**3 / best
