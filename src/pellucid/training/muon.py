"""Muon with all matrices of one shape orthogonalised together, in a number format that suits the machine.

``torch.optim.Muon`` works through its matrices one by one and always in bfloat16. A processor that has to
emulate bfloat16 spends ten times longer on that than on the whole training step. Everything else (what is
remembered, how a rate follows from a shape, decay) is as in the class that this one extends.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from pellucid.shapes import Float

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024, "Muon": steepest slope at 0


class Muon(torch.optim.Muon):
    """``torch.optim.Muon`` (momentum, orthogonalised update, decoupled decay), computed in ``dtype``.

    A parameter ``[E, M, N]`` is E matrices, each orthogonalised by itself; at least one must be a plain matrix.
    """

    def __init__(self, parameters: Iterable[Tensor], *, dtype: torch.dtype = torch.float32, **settings: Any) -> None:
        given = list(parameters)
        super().__init__([p for p in given if p.dim() != 3], **settings)
        self.param_groups[0]["params"] += [p for p in given if p.dim() == 3]  # torch's class takes no stacks
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Change every matrix that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for parameters in by_shape.values():
                self._change(parameters, group)
        return loss

    def _change(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """One step of parameters of one shape."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        updates = torch._foreach_lerp(gradients, buffers, group["momentum"]) if group["nesterov"] else buffers
        stacked = torch.stack(list(updates)).to(self.dtype)
        update_XMN = stacked.flatten(0, -3)
        directions = orthogonalised(update_XMN, steps=group["ns_steps"], eps=group["eps"]).view_as(stacked)
        rate = group["lr"] * _shape_factor(parameters[0].shape[-2:], group["adjust_lr_fn"])
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, list(directions.to(parameters[0].dtype).unbind()), alpha=-rate)


def orthogonalised(g_XMN: Float[Tensor, "X M N"], *, steps: int = 5, eps: float = 1e-7) -> Float[Tensor, "X M N"]:
    """Each matrix with its singular values brought near 1, by Newton–Schulz steps in its own number format.

    A step turns each singular value s into ``a·s + b·s³ + c·s⁵``, by products alone; a Frobenius norm of 1 at
    the start keeps all of them below 1. Near 1, not at it: these coefficients trade exactness (about 0.7 to
    1.2) for few steps.
    """
    a, b, c = _COEFFICIENTS
    tall = g_XMN.shape[-2] > g_XMN.shape[-1]
    x = g_XMN.mT if tall else g_XMN
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _shape_factor(shape: torch.Size, adjust: str | None) -> float:
    """How a matrix's shape changes its rate, as in ``torch.optim.Muon``."""
    rows, columns = shape
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))
