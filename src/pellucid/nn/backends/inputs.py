"""What one call of ``attend`` asks, and the two guards that every fused kernel needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from pellucid.errors import ShapeError
from pellucid.shapes import Tensor
from pellucid.visibility import Coordinates, Rule

Backend = Literal["auto", "reference", "sdpa", "varlen"]


@dataclass(frozen=True)
class AttentionOptions:
    """How scores are computed, and by which kernel.

    ``scale`` multiplies scores (None: ``H ** -0.5``). ``softcap`` c bends them to ``c · tanh(score / c)`` (Gemma 2).
    ``dropout`` is the probability with which a weight is dropped *in this call*: pass 0 outside training.
    ``backend="auto"`` takes the fastest kernel that supports the call.

    Raises:
        ShapeError: a softcap that is not above 0, or a dropout that is no probability below 1.
    """

    scale: float | None = None
    softcap: float | None = None
    dropout: float = 0.0
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        if self.softcap is not None and not self.softcap > 0:
            raise ShapeError(f"softcap is {self.softcap}, but must be above 0; leave it out for none")
        if not 0 <= self.dropout < 1:
            raise ShapeError(f"dropout is {self.dropout}, but a probability below 1 is needed")


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """The arguments of :func:`pellucid.nn.attend.attend`."""

    q: Tensor
    k: Tensor
    v: Tensor
    rule: Rule
    q_coords: Coordinates
    k_coords: Coordinates
    bias: Tensor | None
    sink_logits: Tensor | None
    options: AttentionOptions

    @property
    def factor(self) -> float:
        """What scores are multiplied by."""
        scale = self.options.scale
        return float(self.q.shape[-1] ** -0.5) if scale is None else scale

    @property
    def is_self(self) -> bool:
        """Whether queries and keys are the same tokens (no cache, no memory)."""
        return self.q_coords is self.k_coords


def replace_nonfinite(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
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


def propagate_nan(out_BTNU: Tensor, bad_BS: Tensor | None, mask_B1TS: Tensor) -> Tensor:
    """NaN where a query sees a key that was not finite: what is visible stays loud."""
    if bad_BS is None:
        return out_BTNU
    loud_BT = (mask_B1TS[:, 0] & bad_BS[:, None, :]).any(-1)
    return out_BTNU.masked_fill(loud_BT[:, :, None, None], float("nan"))
