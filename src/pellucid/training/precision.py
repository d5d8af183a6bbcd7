"""The number format of a forward pass. Weights, their gradients and the optimizer stay float32."""

from __future__ import annotations

from typing import Literal

import torch

Precision = Literal["float32", "bfloat16"]


def autocast(precision: Precision, device: torch.device | str) -> torch.autocast:
    """The context for a forward pass: matrix products in bfloat16, or everything as it is."""
    kind = torch.device(device).type
    return torch.autocast(kind, dtype=torch.bfloat16, enabled=precision == "bfloat16")
