"""How evenly a step's tokens are spread over experts: the balance loss, expert biases, and what the log says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pellucid.batch import Batch
from pellucid.nn.moe import LoadBalanceStats, Router, SigmoidRouter
from pellucid.training.config import LoadBalancingConfig


class RoutingStats(NamedTuple):
    """How evenly a step's real tokens were spread over experts."""

    balance_loss: float
    """Mean over layers of ``E · Σ f P``, both over the whole step; an even spread gives the experts of a token."""
    most: float
    """The largest share of tokens that one expert of one layer got."""
    mean: float
    """The share that each would get if all got as much (mean over layers)."""
    dropped: float
    """The share of choices that found their expert full."""


class StepRouting:
    """Sums over the micro-batches of one step, a :class:`LoadBalanceStats` for each layer that routes.

    The share f of tokens that chose an expert is that of a micro-batch, because no later one has run when its gradient
    is taken; what is summed over tokens is divided once, by the real tokens of the whole step. So with equal f the loss
    of a step is that of one big batch.
    """

    def __init__(
        self,
        routers: tuple[Sequence[Router], Sequence[Router]],
        micro_batches: Sequence[Batch],
        load_balancing: LoadBalancingConfig | None,
    ) -> None:
        """``routers``: those of an encoder, and those of the model's own layers."""
        self.routers = [*routers[0], *routers[1]]
        self.load_balancing = load_balancing
        self._sums: list[LoadBalanceStats | None] = [None] * len(self.routers)
        read, own = (sum(map(_tokens, side)) for side in ([b.source for b in micro_batches], micro_batches))
        self._tokens = [read] * len(routers[0]) + [own] * len(routers[1])

    def add(self, found: Sequence[LoadBalanceStats]) -> Tensor | float:
        """Note what a micro-batch routed; returns its part of the step's loss."""
        assert len(found) == len(self.routers), f"{len(found)} layers routed, the model has {len(self.routers)}"
        for layer, sums in enumerate(found):
            plain, before = LoadBalanceStats(*(value.detach() for value in sums)), self._sums[layer]
            self._sums[layer] = plain if before is None else before.plus(plain)
        if self.load_balancing is None or not self.load_balancing.router_aux_loss_coef:
            return 0.0
        parts = [sums.loss().total / max(all_, 1) for sums, all_ in zip(found, self._tokens, strict=True)]
        return self.load_balancing.router_aux_loss_coef * torch.stack(parts).sum()

    def update_expert_bias(self) -> None:
        """Move choice biases by the loads of the whole step; a router that several layers share moves once."""
        if self.load_balancing is None or not self.load_balancing.router_bias_update_rate:
            return
        loads: dict[Router, Tensor] = {}
        for router, sums in zip(self.routers, self._sums, strict=True):
            if sums is not None:
                loads[router] = loads[router] + sums.tokens if router in loads else sums.tokens
        for router, tokens_E in loads.items():
            if isinstance(router, SigmoidRouter):
                router.update_expert_bias(tokens_E, self.load_balancing.router_bias_update_rate)

    def stats(self) -> RoutingStats | None:
        """What the log says; nothing where nothing was routed."""
        sums = [one for one in self._sums if one is not None]
        if not sums:
            return None
        shares = [one.tokens / one.count.clamp(min=1) for one in sums]
        chosen = torch.stack([one.tokens.sum() for one in sums]).sum().clamp(min=1)
        kept = torch.stack([one.kept.sum() for one in sums]).sum()
        numbers = torch.stack(
            [
                torch.stack([one.balance() for one in sums]).mean().double(),
                torch.stack([share.max() for share in shares]).max().double(),
                torch.stack([share.mean() for share in shares]).mean().double(),
                1 - kept.double() / chosen,
            ]
        )
        return RoutingStats(*numbers.tolist())


def _tokens(batch: Batch | None) -> int:
    """Real tokens, known on the host."""
    return 0 if batch is None else sum(sum(row.values()) for row in batch.document_lengths)
