"""What one call of ``attend`` asks, and the two guards that every fused kernel needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pellucid.shapes import Tensor
from pellucid.visibility import Coordinates, Rule


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """The arguments of :func:`pellucid.nn.attend.attend`."""

    q: Tensor
    k: Tensor
    v: Tensor
    rule: Rule
    queries: Coordinates
    keys: Coordinates
    scale: float | None
    softcap: float | None
    bias: Tensor | None
    sink_logits: Tensor | None
    dropout: float

    @property
    def factor(self) -> float:
        """What scores are multiplied by."""
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def is_self(self) -> bool:
        """Whether queries and keys are the same tokens (no cache, no memory)."""
        return self.queries is self.keys


def made_finite(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """``(k, v, bad_BS)`` with every NaN and Inf replaced by 0, and which keys had one (None: none had).

    A fused kernel multiplies a hidden value by a weight of 0, and 0 · NaN is NaN. On a CPU one sum tells
    whether there is anything to do; elsewhere asking would stall the device, so the replacing is always done.
    """
    if k.device.type == "cpu" and not torch.compiler.is_compiling():
        total = k.detach().sum(dtype=torch.float32) + v.detach().sum(dtype=torch.float32)
        if bool(torch.isfinite(total)):
            return k, v, None
    bad_BS = ~(torch.isfinite(k).all(-1) & torch.isfinite(v).all(-1)).all(-1)
    zero = torch.zeros((), dtype=k.dtype, device=k.device)
    return torch.where(torch.isfinite(k), k, zero), torch.where(torch.isfinite(v), v, zero), bad_BS


def made_loud(out_BTNU: Tensor, bad_BS: Tensor | None, mask_B1TS: Tensor) -> Tensor:
    """NaN where a query sees a key that was not finite: what is visible stays loud."""
    if bad_BS is None:
        return out_BTNU
    loud_BT = (mask_B1TS[:, 0] & bad_BS[:, None, :]).any(-1)
    return out_BTNU.masked_fill(loud_BT[:, :, None, None], float("nan"))
