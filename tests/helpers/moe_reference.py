"""The mixture of experts as on paper, a token and an expert at a time: the truth that the fast one must equal."""

from __future__ import annotations

import torch

from pellucid.nn.moe.layer import MoE, SharedMoE
from pellucid.shapes import Float, Tensor
from pellucid.visibility import Coordinates


def reference(moe: MoE, x_BTD: Float[Tensor, "B T D"], coords: Coordinates | None = None) -> Float[Tensor, "B T D"]:
    """What ``moe(x, coords)`` must give."""
    rows, slots, _ = x_BTD.shape
    real_BT = torch.ones(rows, slots, dtype=torch.bool) if coords is None else coords.real
    taken = [0] * moe.router.num_experts
    out = [[torch.zeros_like(x_BTD[b, t]) for t in range(slots)] for b in range(rows)]
    for t in range(slots):
        for b in range(rows):
            if not real_BT[b, t]:
                continue
            x_1D = x_BTD[b, t][None]
            if isinstance(moe, SharedMoE):
                out[b][t] = out[b][t] + moe.shared(x_1D)[0]
            routing = moe.router(x_1D)
            for expert, weight in zip(routing.experts[0].tolist(), routing.weights[0], strict=True):
                if moe.expert_capacity is None or taken[expert] < moe.expert_capacity:
                    taken[expert] += 1
                    out[b][t] = out[b][t] + _one(moe, expert, x_1D[0], weight)
    return torch.stack([torch.stack(row) for row in out])


def _one(moe: MoE, expert: int, x_D: Tensor, weight: Tensor) -> Tensor:
    own = [None if stack is None else stack[expert] for stack in moe.experts.stacks()]
    if moe.experts.apply_weight_on_input:
        return moe.experts.expert((weight * x_D)[None], *own)[0]
    return weight * moe.experts.expert(x_D[None], *own)[0]
