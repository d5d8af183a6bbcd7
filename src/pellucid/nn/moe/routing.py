"""What a router decided, and the sums that say how evenly it spread the tokens.

Letters here: C real tokens, J experts that each token goes to, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pellucid.nn.losses import Loss
from pellucid.shapes import Float, Int, Tensor


class Routing(NamedTuple):
    """For each real token its J experts, best first, the weight of each, and the router's logits for all experts."""

    experts: Int[Tensor, "C J"]
    weights: Float[Tensor, "C J"]
    logits: Float[Tensor, "C E"]


class LoadBalanceStats(NamedTuple):
    """Sums over real tokens; those of micro-batches and devices add up, and only then are they divided."""

    tokens: Int[Tensor, "E"]
    """How many tokens chose each expert."""
    kept: Int[Tensor, "E"]
    """How many of them had a place there (all, without a capacity)."""
    probability: Float[Tensor, "E"]
    """The router's probability of each expert, summed over tokens; the only one with a gradient."""
    count: Int[Tensor, ""]  # type: ignore[assignment]  # hides tuple.count, which nobody asks of sums
    """How many real tokens there were."""

    def plus(self, other: LoadBalanceStats) -> LoadBalanceStats:
        """Both together."""
        return LoadBalanceStats(*(ours + theirs for ours, theirs in zip(self, other, strict=True)))

    def loss(self, load: LoadBalanceStats | None = None) -> Loss:
        """The balance loss ``E · Σ_e f_e P_e`` (Fedus et al. 2021 eq. 4), as a sum over real tokens and their count.

        f is the share of tokens that chose an expert, P the mean probability that the router gave it. An even spread
        over J experts a token gives J (1 for top-1), as in Mixtral. A token's share is linear in its probabilities
        once f is fixed: with ``load`` = the sums of a whole step, the losses of its micro-batches add up to the
        step's own loss and gradient. Without it, f is that of these sums.
        """
        whole = self if load is None else load
        share_E = whole.tokens / whole.count.clamp(min=1)
        return Loss(len(share_E) * (share_E * self.probability).sum(), self.count)

    def balance(self) -> Float[Tensor, ""]:
        """The balance loss of everything added up so far, and 0 where nothing was routed."""
        return self.loss().mean()


def tokens_of_each(routing: Routing, num_experts: int) -> Int[Tensor, "E"]:
    """How many tokens chose each expert (a count of shape [E] whatever the data, which bincount is not)."""
    flat = routing.experts.flatten()
    return flat.new_zeros(num_experts).scatter_add(0, flat, torch.ones_like(flat))


class RouterStatsSink:
    """Where a layer that routes leaves its :class:`LoadBalanceStats`: one a layer and pass, made by the caller.

    A layer that runs again for its gradients (checkpointing) leaves the same sums again, so nothing counts twice. A
    layer that does not route leaves ``sums`` None.
    """

    def __init__(self) -> None:
        self.sums: LoadBalanceStats | None = None
