"""Many feed-forward networks with stacked weights ``[E, …]``, each run once on all the tokens that go to it.

Letters here: C real tokens, J experts a token goes to, P pairs of the two (C · J, fewer where experts are full).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from pellucid.nn.ffn import activation as named
from pellucid.nn.ffn import clamped_gate
from pellucid.nn.moe.router import Routing, tokens_of_each
from pellucid.shapes import Float, Tensor


class Experts(nn.Module):
    """What all stacked experts share: pairs sorted by expert, one run of each, the weighted sum for each token.

    Args:
        hidden_size, intermediate_size, num_experts: features of tokens, features inside an expert, how many experts.
        bias: whether every matrix has a bias.
        dropout: probability with which a feature inside an expert is dropped in training.
        apply_weight_on_input: the router's weight multiplies what goes into an expert, not what comes out (Llama 4).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        bias: bool = False,
        dropout: float = 0.0,
        apply_weight_on_input: bool = False,
    ) -> None:
        super().__init__()
        self.apply_weight_on_input = apply_weight_on_input
        self.up_proj = nn.Parameter(torch.empty(num_experts, intermediate_size, hidden_size))
        self.up_bias = nn.Parameter(torch.empty(num_experts, intermediate_size)) if bias else None
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.down_bias = nn.Parameter(torch.empty(num_experts, hidden_size)) if bias else None
        self.inner_dropout = nn.Dropout(dropout)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Each expert's matrices within ±``1/sqrt(fan_in)``, as torch fills ``nn.Linear``; biases 0."""
        for name, stack in self.named_parameters():
            bound = stack.shape[-1] ** -0.5 if name.endswith("_proj") else 0.0
            nn.init.uniform_(stack, -bound, bound)

    def stacks(self) -> tuple[Tensor | None, ...]:
        """The stacked weights in the order in which :meth:`expert` takes those of one expert."""
        raise NotImplementedError

    def expert(self, x_PD: Tensor, *weights: Tensor | None) -> Tensor:
        """One expert on its tokens."""
        raise NotImplementedError

    def forward(
        self, x_CD: Float[Tensor, "C D"], routing: Routing, capacity: int | None = None
    ) -> Float[Tensor, "C D"]:
        """``Σ_j weight_j · expert_j(x)`` for each token.

        Tokens come in the order in which they take places. Past ``capacity`` tokens an expert is full, and those
        that come later get exactly 0 from it; no other expert's weight grows in its place.
        """
        if torch.compiler.is_compiling():  # how many tokens an expert has is data: run as it is, compiled around it
            return torch.compiler.disable(self._mixed)(x_CD, routing, capacity)
        return self._mixed(x_CD, routing, capacity)

    def _mixed(self, x_CD: Tensor, routing: Routing, capacity: int | None) -> Tensor:
        (count, choices), flat = routing.experts.shape, routing.experts.flatten()
        by_expert = flat.argsort(stable=True)  # stable: within an expert, earlier tokens come first
        groups = [pairs[:capacity] for pairs in by_expert.split(tokens_of_each(routing, len(self.down_proj)).tolist())]
        pairs_P = torch.cat(groups)
        x_PD = x_CD[pairs_P // choices]
        if self.apply_weight_on_input:
            x_PD = (x_PD * routing.weights.flatten()[pairs_P, None]).to(x_CD.dtype)
        y_PD = self._run(x_PD, [len(pairs) for pairs in groups])
        y_CJD = y_PD.new_zeros(count * choices, x_CD.shape[-1]).index_copy(0, pairs_P, y_PD)
        y_CJD = y_CJD.unflatten(0, (count, choices))
        if not self.apply_weight_on_input:
            y_CJD = y_CJD * routing.weights[..., None]
        return y_CJD.sum(1).to(x_CD.dtype)

    def _run(self, x_PD: Tensor, loads: Sequence[int]) -> Tensor:
        """Each expert on its own slice; those without tokens are not run."""
        experts = zip(*(_one_by_one(stack, len(loads)) for stack in self.stacks()), strict=True)
        slices = zip(x_PD.split(loads), experts, strict=True)
        return torch.cat([x_PD[:0], *(self.expert(x, *weights) for x, weights in slices if len(x))])

    def extra_repr(self) -> str:
        experts, size, intermediate_size = self.down_proj.shape
        return f"{size}, {intermediate_size}, num_experts={experts}"


class DenseExperts(Experts):
    """Each expert is ``W₂ · act(W₁ x)`` (Fedus et al. 2021 §2.1). Other arguments: :class:`Experts`."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, activation: str, **options: Any) -> None:
        super().__init__(hidden_size, intermediate_size, **options)
        self.activation = named(activation)
        self.reset_parameters()

    def stacks(self) -> tuple[Tensor | None, ...]:
        return self.up_proj, self.up_bias, self.down_proj, self.down_bias

    def expert(self, x_PD: Tensor, *weights: Tensor | None) -> Tensor:
        up, up_bias, down, down_bias = weights
        inner_PF = self.inner_dropout(self.activation(_linear(x_PD, up, up_bias)))
        return _linear(inner_PF, down, down_bias)


class _Gates(Experts):
    """Experts of three matrices."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, num_experts: int, bias: bool, **options: Any
    ) -> None:
        super().__init__(hidden_size, intermediate_size, num_experts=num_experts, bias=bias, **options)
        self.gate_proj = nn.Parameter(torch.empty(num_experts, intermediate_size, hidden_size))
        self.gate_bias = nn.Parameter(torch.empty(num_experts, intermediate_size)) if bias else None
        self.reset_parameters()

    def stacks(self) -> tuple[Tensor | None, ...]:
        return self.gate_proj, self.gate_bias, self.up_proj, self.up_bias, self.down_proj, self.down_bias

    def gated(self, gate_PF: Tensor, up_PF: Tensor) -> Tensor:
        """What the gate lets through."""
        raise NotImplementedError

    def expert(self, x_PD: Tensor, *weights: Tensor | None) -> Tensor:
        gate, gate_bias, up, up_bias, down, down_bias = weights
        inner_PF = self.gated(_linear(x_PD, gate, gate_bias), _linear(x_PD, up, up_bias))
        return _linear(self.inner_dropout(inner_PF), down, down_bias)


class GatedExperts(_Gates):
    """Each expert is ``W₂ · (act(W₁ x) ⊙ W₃ x)``: Mixtral (Jiang et al. 2024 §2.1), Qwen, DeepSeek.

    Other arguments: :class:`Experts`.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "silu",
        bias: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(hidden_size, intermediate_size, bias=bias, **options)
        self.activation = named(activation)

    def gated(self, gate_PF: Tensor, up_PF: Tensor) -> Tensor:
        return self.activation(gate_PF) * up_PF


class ClampedGatedExperts(_Gates):
    """Each expert is ``W₂ · clamped_gate(W₁ x, W₃ x)`` (gpt-oss). Other arguments: :class:`Experts`."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        bias: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(hidden_size, intermediate_size, bias=bias, **options)
        self.limit = limit
        self.alpha = alpha

    def gated(self, gate_PF: Tensor, up_PF: Tensor) -> Tensor:
        return clamped_gate(gate_PF, up_PF, limit=self.limit, alpha=self.alpha)


def _one_by_one(stack: Tensor | None, num_experts: int) -> Sequence[Tensor | None]:
    """A view of each expert's weight (one ``unbind``: its gradient is stacked once, not once for each expert)."""
    return (None,) * num_experts if stack is None else stack.unbind(0)


def _linear(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    assert weight is not None, "only biases may be left out"
    return F.linear(x, weight, bias)
