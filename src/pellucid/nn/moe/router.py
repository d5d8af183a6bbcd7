"""Which experts a token goes to, with which weights, and how evenly tokens are spread over experts.

Letters here: C real tokens, J experts that each token goes to, E experts.

Routers keep their weights in float32 in a narrower model and compute in float32 at least: a rounded score can send a
token elsewhere. Ties go to the expert (or group) with the lower number, on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from pellucid.errors import ShapeError
from pellucid.nn.losses import Loss
from pellucid.nn.norms import at_least_float32
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
    """How many of them the expert took (all, without a capacity)."""
    probability: Float[Tensor, "E"]
    """The router's probability of each expert, summed over tokens; the only one with a gradient."""
    count: Int[Tensor, ""]  # type: ignore[assignment]  # hides tuple.count, which sums do not need
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


class ExpertGroups(nn.Module):
    """Leaves each token only the experts of its ``topk_group`` best groups, of ``n_group`` equal ones.

    A group is worth its best expert (``score="max"``, DeepSeek-V2 §2.2.2) or its best two together (``"top2"``,
    DeepSeek-V3 §2.1.2).
    """

    def __init__(self, n_group: int, *, topk_group: int, score: Literal["max", "top2"]) -> None:
        super().__init__()
        if not 1 <= topk_group <= n_group:
            raise ShapeError(
                f"{topk_group} of {n_group} expert groups cannot be kept; choose topk_group from 1 to {n_group}"
            )
        if score not in ("max", "top2"):
            raise ShapeError(f"a group's score is {score!r}; choose max or top2")
        self.n_group, self.topk_group, self.scores_per_group = n_group, topk_group, {"max": 1, "top2": 2}[score]

    def forward(self, scores_CE: Float[Tensor, "C E"]) -> Float[Tensor, "C E"]:
        """The scores, −inf outside the chosen groups."""
        grouped = scores_CE.unflatten(-1, (self.n_group, -1))
        worth = grouped.topk(self.scores_per_group, -1).values.sum(-1)
        kept = torch.zeros_like(worth, dtype=torch.bool).scatter(-1, stable_topk(worth, self.topk_group), True)
        return grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)

    def extra_repr(self) -> str:
        return f"{self.n_group}, topk_group={self.topk_group}, score={'top2' if self.scores_per_group == 2 else 'max'}"


def stable_topk(scores_CE: Float[Tensor, "C E"], count: int) -> Int[Tensor, "C J"]:
    """The indices of the ``count`` highest scores, best first; of equal ones the lower (topk leaves that open)."""
    return torch.sort(scores_CE, dim=-1, descending=True, stable=True).indices[..., :count]


class Router(nn.Module):
    """The part that all routers share: logits ``W x (+ b)`` in float32, and how many experts a token gets.

    Args:
        hidden_size: features of tokens.
        num_experts, num_experts_per_tok: how many experts there are, and how many each token goes to.
        routed_scaling_factor: multiplies the weights in the end.
        bias: whether logits have a bias.
        groups: narrows the choice to the best groups of experts first.

    Raises:
        ShapeError: experts and groups that do not fit.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_experts: int,
        num_experts_per_tok: int,
        routed_scaling_factor: float = 1.0,
        bias: bool = False,
        groups: ExpertGroups | None = None,
    ) -> None:
        super().__init__()
        _check(num_experts, num_experts_per_tok, groups)
        wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.num_experts_per_tok = num_experts_per_tok
        self.routed_scaling_factor = routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, dtype=wide))
        self.bias = nn.Parameter(torch.empty(num_experts, dtype=wide)) if bias else None
        self.groups: nn.Module = nn.Identity() if groups is None else groups
        self.reset_parameters()

    @property
    def num_experts(self) -> int:
        """How many there are to choose from."""
        return len(self.weight)

    def reset_parameters(self) -> None:
        """Weights of ``1/sqrt(fan_in)``, no bias: every expert is as likely as another."""
        nn.init.normal_(self.weight, std=self.weight.shape[-1] ** -0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x_CD: Float[Tensor, "C D"]) -> Routing:
        """Where each token goes."""
        raise NotImplementedError

    def probabilities(self, logits_CE: Float[Tensor, "C E"]) -> Float[Tensor, "C E"]:
        """What the balance loss takes as the probability of each expert; a token's add up to 1."""
        return logits_CE.softmax(-1)

    def logits(self, x_CD: Float[Tensor, "C D"]) -> Float[Tensor, "C E"]:
        """A logit for each expert, never in fewer than 32 bits, under autocast neither."""
        with torch.autocast(x_CD.device.type, enabled=False):
            return F.linear(at_least_float32(x_CD), at_least_float32(self.weight), self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """As ``nn.Module`` does for ``.to()`` and its kin, but no weight here becomes narrower than 32 bits."""

        def wide(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            narrow = moved.is_floating_point() and moved.dtype.itemsize < 4
            return tensor.to(moved.device, torch.float32) if narrow else moved

        return super()._apply(wide, recurse)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        return (
            f"{self.weight.shape[-1]}, num_experts={self.num_experts}, num_experts_per_tok={self.num_experts_per_tok}"
        )


class ScoreRouter(Router):
    """Routers whose weights are the chosen scores themselves, divided by their sum or not."""

    def __init__(self, hidden_size: int, *, norm_topk_prob: bool, **options: Any) -> None:
        super().__init__(hidden_size, **options)
        self.norm_topk_prob = norm_topk_prob

    def weighed(self, scores_CE: Tensor, chosen_CJ: Tensor) -> Float[Tensor, "C J"]:
        """The weights of the chosen experts."""
        scores_CJ = scores_CE.gather(-1, chosen_CJ)
        if self.norm_topk_prob:
            scores_CJ = scores_CJ / (scores_CJ.sum(-1, keepdim=True) + 1e-20)
        return scores_CJ * self.routed_scaling_factor


class SoftmaxRouter(ScoreRouter):
    """Softmax over all experts, then the ``num_experts_per_tok`` best (Fedus et al. 2021 eq. 2).

    So do Mixtral, Qwen and DeepSeek-V2. ``norm_topk_prob`` divides their weights by their sum. Other arguments:
    :class:`Router`.
    """

    def forward(self, x_CD: Float[Tensor, "C D"]) -> Routing:
        logits_CE = self.logits(x_CD)
        scores_CE = logits_CE.softmax(-1)
        chosen_CJ = stable_topk(self.groups(scores_CE), self.num_experts_per_tok)
        return Routing(chosen_CJ, self.weighed(scores_CE, chosen_CJ), logits_CE)


class TopKSoftmaxRouter(Router):
    """The ``num_experts_per_tok`` best logits, then softmax over those (Shazeer et al. 2017 eq. 3; gpt-oss).

    The weights add up to ``routed_scaling_factor``. Arguments: :class:`Router`.
    """

    def forward(self, x_CD: Float[Tensor, "C D"]) -> Routing:
        logits_CE = self.logits(x_CD)
        chosen_CJ = stable_topk(self.groups(logits_CE), self.num_experts_per_tok)
        return Routing(chosen_CJ, logits_CE.gather(-1, chosen_CJ).softmax(-1) * self.routed_scaling_factor, logits_CE)


class SigmoidRouter(ScoreRouter):
    """Each expert scored by itself with a sigmoid (DeepSeek-V3 §2.1.2 eq. 13–16). Arguments: :class:`SoftmaxRouter`.

    ``expert_bias`` (a float32 buffer, 0 at first) is added to the scores to choose by, never to the weights;
    :meth:`update_expert_bias` moves it, gradients do not. Groups are chosen by the biased scores too.
    """

    expert_bias: Tensor

    def __init__(self, hidden_size: int, *, num_experts: int, **options: Any) -> None:
        super().__init__(hidden_size, num_experts=num_experts, **options)
        self.register_buffer("expert_bias", torch.zeros(num_experts, dtype=self.weight.dtype))

    def reset_parameters(self) -> None:
        """As other routers, and no preference among experts."""
        super().reset_parameters()
        if "expert_bias" in self._buffers:
            nn.init.zeros_(self.expert_bias)

    def forward(self, x_CD: Float[Tensor, "C D"]) -> Routing:
        logits_CE = self.logits(x_CD)
        scores_CE = logits_CE.sigmoid()
        chosen_CJ = stable_topk(self.groups(scores_CE + self.expert_bias), self.num_experts_per_tok)
        return Routing(chosen_CJ, self.weighed(scores_CE, chosen_CJ), logits_CE)

    def probabilities(self, logits_CE: Float[Tensor, "C E"]) -> Float[Tensor, "C E"]:
        """Scores divided by their sum (DeepSeek-V3 eq. 19)."""
        scores_CE = logits_CE.sigmoid()
        return scores_CE / (scores_CE.sum(-1, keepdim=True) + 1e-20)

    @torch.no_grad()
    def update_expert_bias(self, tokens_E: Int[Tensor, "E"], rate: float) -> None:
        """Raise the choice bias below the mean load by ``rate``, lower it above (Wang et al. 2024 alg. 1)."""
        load_E = tokens_E.to(self.expert_bias.dtype)
        self.expert_bias += rate * (load_E.mean() - load_E).sign()


def _check(num_experts: int, num_experts_per_tok: int, groups: ExpertGroups | None) -> None:
    if not 1 <= num_experts_per_tok <= num_experts:
        raise ShapeError(
            f"a token cannot go to {num_experts_per_tok} of {num_experts} experts; choose num_experts_per_tok "
            f"from 1 to {num_experts}"
        )
    if groups is None:
        return
    if num_experts % groups.n_group:
        raise ShapeError(
            f"{num_experts} experts do not make {groups.n_group} equal groups; make num_experts a multiple of it"
        )
    size = num_experts // groups.n_group
    if size < groups.scores_per_group:
        raise ShapeError(f"score 'top2' adds up two experts, but a group has {size}; use fewer groups or score='max'")
    if num_experts_per_tok > groups.topk_group * size:
        raise ShapeError(
            f"num_experts_per_tok is {num_experts_per_tok}, but {groups.topk_group} groups of {size} "
            f"experts hold only {groups.topk_group * size}; keep more"
        )
