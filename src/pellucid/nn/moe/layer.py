"""A feed-forward half of many experts, of which each token uses a few.

Letters here: C real tokens, J experts a token goes to.
"""

from __future__ import annotations

import torch
from torch import nn

from pellucid.errors import ShapeError
from pellucid.nn.moe.experts import Experts
from pellucid.nn.moe.router import LoadBalanceStats, Router, Routing, tokens_of_each
from pellucid.shapes import Float, Int, Tensor
from pellucid.visibility import Coordinates


class MoE(nn.Module):
    """Each real token through its ``num_experts_per_tok`` experts (Shazeer et al. 2017 eq. 1).

    Padding is not routed and gives 0.

    Without a ``capacity`` nothing is ever dropped: what a token gets depends on no other token. With one, an expert
    takes at most that many tokens *in one call*, all rows together: earlier slots first, then lower rows, whatever
    the rank at which a token chose the expert. So earlier tokens never lose to later ones, but batch mates matter,
    and a sequence run in pieces may keep what one run drops. A token that is dropped gets exactly 0 from that expert.

    Raises:
        ShapeError: router and experts that do not fit, or a capacity below 0.
    """

    routes = True
    """Blocks pass coordinates and ``router_stats`` on to it."""

    def __init__(self, *, router: Router, experts: Experts, expert_capacity: int | None = None) -> None:
        super().__init__()
        if router.num_experts != len(experts.down_proj):
            raise ShapeError(
                f"the router chooses among {router.num_experts} experts, but there are {len(experts.down_proj)}; "
                "make the numbers agree"
            )
        if expert_capacity is not None and expert_capacity < 0:
            raise ShapeError(
                f"expert_capacity is {expert_capacity}, but must be 0 or more; leave it out to drop nothing"
            )
        self.router = router
        self.experts = experts
        self.expert_capacity = expert_capacity

    def forward(
        self,
        x_BTD: Float[Tensor, "B T D"],
        coords: Coordinates | None = None,
        router_stats: list[LoadBalanceStats] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """``coords`` say which slots hold tokens (None: all).

        The statistics of this call become the only entry of the list ``router_stats``, also where checkpointing runs
        the call again.
        """
        tokens_C = self._tokens(x_BTD, coords)
        flat_XD = x_BTD.flatten(0, 1)
        x_CD = flat_XD if tokens_C is None else flat_XD[tokens_C]
        routing = self.router(x_CD)
        if router_stats is not None:
            router_stats[:] = [self.sums(routing)]
        y_CD = self._mixed(x_CD, routing)
        y_XD = y_CD if tokens_C is None else torch.zeros_like(flat_XD).index_copy(0, tokens_C, y_CD)
        return y_XD.view_as(x_BTD)

    def route(self, x_BTD: Float[Tensor, "B T D"], coords: Coordinates | None = None) -> Routing:
        """Where each real token would go; row by row without a capacity, slot by slot with one."""
        tokens_C = self._tokens(x_BTD, coords)
        flat_XD = x_BTD.flatten(0, 1)
        return self.router(flat_XD if tokens_C is None else flat_XD[tokens_C])

    def sums(self, routing: Routing) -> LoadBalanceStats:
        """How evenly ``routing`` spreads its tokens."""
        tokens_E = tokens_of_each(routing, self.router.num_experts)
        return LoadBalanceStats(
            tokens_E,
            tokens_E.clamp(max=self.expert_capacity) if self.expert_capacity is not None else tokens_E,
            self.router.probabilities(routing.logits).sum(0),
            tokens_E.new_tensor(len(routing.logits)),
        )

    def _mixed(self, x_CD: Tensor, routing: Routing) -> Tensor:
        return self.experts(x_CD, routing, self.expert_capacity)

    def _tokens(self, x_BTD: Tensor, coords: Coordinates | None) -> Int[Tensor, "C"] | None:
        """Flat slots of the real tokens in the order in which they take places; None: all, in their order."""
        if coords is not None and coords.shape != x_BTD.shape[:2]:
            raise ShapeError(
                f"the coordinates are {coords.shape}, but the tensor has {tuple(x_BTD.shape[:2])}; give those of its "
                "own tokens"
            )
        if self.expert_capacity is None and (coords is None or _unpadded(coords)):
            return None
        if coords is None:
            return by_slot(x_BTD.new_ones(x_BTD.shape[:2], dtype=torch.bool))
        find = torch.compiler.disable(by_slot) if torch.compiler.is_compiling() else by_slot
        return coords.cached("tokens by slot", lambda: find(coords.real))

    def extra_repr(self) -> str:
        return "dropless" if self.expert_capacity is None else f"expert_capacity={self.expert_capacity}"


class SharedMoE(MoE):
    """``experts(x) + shared(x)``: some weights are for every real token (Dai et al. 2024 §3.2).

    ``shared`` is any feed-forward part: as it is (DeepSeek), or in a :class:`GatedSharedExpert` (Qwen2-MoE). Dropped
    tokens keep it.
    """

    def __init__(
        self, *, router: Router, experts: Experts, shared: nn.Module, expert_capacity: int | None = None
    ) -> None:
        super().__init__(router=router, experts=experts, expert_capacity=expert_capacity)
        self.shared = shared

    def _mixed(self, x_CD: Tensor, routing: Routing) -> Tensor:
        return super()._mixed(x_CD, routing) + self.shared(x_CD)


class GatedSharedExpert(nn.Module):
    """``σ(w · x) · ffn(x)``: a shared expert that each token opens as far as it needs (Qwen2-MoE)."""

    def __init__(self, hidden_size: int, ffn: nn.Module) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, 1, bias=False)
        self.ffn = ffn

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        return self.gate(x).sigmoid() * self.ffn(x)


def by_slot(real_BT: Tensor) -> Int[Tensor, "C"]:
    """Flat indices of what is real, earlier slots first, then lower rows."""
    slot_C, row_C = real_BT.T.nonzero(as_tuple=True)
    return row_C * real_BT.shape[1] + slot_C


def _unpadded(coords: Coordinates) -> bool:
    if torch.compiler.is_compiling():  # one graph for padded and unpadded batches
        return False
    rows, slots = coords.shape
    return coords.layout is not None and coords.layout.tokens == rows * slots
