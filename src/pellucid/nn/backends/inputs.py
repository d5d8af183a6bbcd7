"""The arguments of one call of ``attend``, and how NaN and Inf stay away from fused kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    """The arguments of :func:`pellucid.nn.attend.attend`.

    Backends get finite keys and values; ``nonfinite`` are the slots whose numbers were not (None: all were).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    rule: Rule
    q_coords: Coordinates
    k_coords: Coordinates
    bias: Tensor | None
    sink_logits: Tensor | None
    options: AttentionOptions
    nonfinite: Tensor | None = None

    @property
    def factor(self) -> float:
        """What scores are multiplied by."""
        scale = self.options.scale
        return float(self.q.shape[-1] ** -0.5) if scale is None else scale

    @property
    def is_self(self) -> bool:
        """Whether queries and keys are the same tokens (no cache, no memory)."""
        return self.q_coords is self.k_coords


def replace_nonfinite(*tensors: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """``[B, S, …]`` tensors with every NaN and Inf replaced by 0, and the slots ``[B, S]`` that had one (None: none).

    A fused kernel multiplies a hidden value by a weight of 0, and 0 · NaN is NaN. On a CPU one sum tells whether
    there is anything to do; elsewhere reading it would stall the device, so values are always replaced.
    """
    if can_read(tensors[0]) and all(bool(x.detach().sum(dtype=torch.float32).isfinite()) for x in tensors):
        return tensors, None
    finite = [x.isfinite() for x in tensors]
    nonfinite_BS = ~torch.stack([x.flatten(2).all(-1) for x in finite]).all(0)
    return tuple(x.where(ok, 0) for x, ok in zip(tensors, finite, strict=True)), nonfinite_BS


def with_finite_inputs(call: AttentionInputs) -> AttentionInputs:
    """``call`` as backends get it: what a cache has marked already is not looked at again."""
    if call.nonfinite is None:
        (k, v), nonfinite_BS = replace_nonfinite(call.k, call.v)
        return call if nonfinite_BS is None else replace(call, k=k, v=v, nonfinite=nonfinite_BS)
    if can_read(call.k) and not call.nonfinite.any():
        return replace(call, nonfinite=None)
    return call


def can_read(x: Tensor) -> bool:
    """Whether the host can read a number of ``x`` without waiting for a device or breaking a graph."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def propagate_nan(out_BTNU: Tensor, nonfinite_BS: Tensor | None, mask_B1TS: Tensor) -> Tensor:
    """NaN where a query sees a key or value that was not finite."""
    if nonfinite_BS is None:
        return out_BTNU
    sees_BT = (mask_B1TS[:, 0] & nonfinite_BS[:, None, :]).any(-1)
    return out_BTNU.masked_fill(sees_BT[:, :, None, None], float("nan"))
