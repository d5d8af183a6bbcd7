"""The rounding that a float64 copy of a target still shows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pellucid.audits.method.measure import Run
from pellucid.probe import Request


def kept_noise(run: Run, module: nn.Module, request: Request, step: float = 2.0**-22) -> float:
    """The rounding a float64 copy still shows: large when the module casts to less precision inside.

    Three runs with weights scaled by 1, 1 + e and 1 + 2e: for e = 2⁻²², some of float32's own steps, a smooth
    function's second difference is about e² = 6e-14, while inner roundings to float32 do not cancel and show up at
    their own size.
    """
    weights = [p for p in module.parameters() if p.is_floating_point()]
    kept = [p.detach().clone() for p in weights]
    outputs = []
    try:
        for number in range(3):
            _set(weights, [value * (1 + number * step) for value in kept])
            outputs.append(run.logits(request))
    finally:
        _set(weights, kept)
    noise = (outputs[2] - 2 * outputs[1] + outputs[0]).abs().nan_to_num(0.0, 0.0, 0.0)
    return float(noise.max())


def _set(weights: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for weight, value in zip(weights, values, strict=True):
            weight.copy_(value)
