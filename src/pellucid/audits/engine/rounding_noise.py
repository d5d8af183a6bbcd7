"""The rounding that a float64 copy of a target still shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

STEP = 2.0**-22
"""Some of float32's own steps, so that a cast to it inside cannot hide."""

Ask = Callable[[], Tensor]


def rounding_noise(module: nn.Module, asks: Sequence[Ask]) -> float:
    """The rounding a float64 copy still shows: large when the module casts to less precision inside.

    ``asks`` are ways to ask it the same; the largest counts. Three runs each, with weights scaled by 1, 1 + e and
    1 + 2e: for e = 2⁻²² a smooth function's second difference is about e² = 6e-14, while inner roundings to
    float32 do not cancel and show up at their own size.
    """
    weights = [p for p in module.parameters() if p.is_floating_point()]
    kept = [p.detach().clone() for p in weights]
    answers = [[ask() for ask in asks]]
    try:
        for number in (1, 2):
            _scale(weights, kept, 1 + number * STEP)
            answers.append([ask() for ask in asks])
    finally:
        _scale(weights, kept, 1.0)
    bends = ((third - 2 * second + first).abs() for first, second, third in zip(*answers, strict=True))
    return max((float(bend.nan_to_num(0.0, 0.0, 0.0).max()) for bend in bends), default=0.0)


def _scale(weights: Sequence[Tensor], kept: Sequence[Tensor], factor: float) -> None:
    with torch.no_grad():
        for weight, value in zip(weights, kept, strict=True):
            torch.mul(value, factor, out=weight)  # by 1: bit for bit what it was
