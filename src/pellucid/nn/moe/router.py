"""Which experts a token goes to, and with which weights.

Routers keep their weights in float32 in a narrower model and compute in float32 at least: a rounded score can send a
token elsewhere. Ties go to the expert (or group) with the lower number, on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from pellucid.errors import ShapeError
from pellucid.nn.moe.routing import Routing
from pellucid.nn.norms import at_least_float32
from pellucid.shapes import Float, Int, Tensor


class ExpertGroups(nn.Module):
    """Leaves each token only the experts of its ``keep`` best groups, of ``count`` equal ones.

    A group is worth its best expert (``score="max"``, DeepSeek-V2 §2.2.2) or its best two together (``"top2"``,
    DeepSeek-V3 §2.1.2).
    """

    def __init__(self, count: int, *, keep: int, score: Literal["max", "top2"]) -> None:
        super().__init__()
        if not 1 <= keep <= count:
            raise ShapeError(f"{keep} of {count} expert groups cannot be kept; choose keep from 1 to {count}")
        if score not in ("max", "top2"):
            raise ShapeError(f"a group's score is {score!r}; choose max or top2")
        self.count, self.keep, self.best = count, keep, {"max": 1, "top2": 2}[score]

    def forward(self, scores_CE: Float[Tensor, "C E"]) -> Float[Tensor, "C E"]:
        """The scores, −inf outside the kept groups."""
        grouped = scores_CE.unflatten(-1, (self.count, -1))
        worth = grouped.topk(self.best, -1).values.sum(-1)
        kept = torch.zeros_like(worth, dtype=torch.bool).scatter(-1, best(worth, self.keep), True)
        return grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)

    def extra_repr(self) -> str:
        return f"{self.count}, keep={self.keep}, score={'top2' if self.best == 2 else 'max'}"


def best(scores_CE: Float[Tensor, "C E"], count: int) -> Int[Tensor, "C J"]:
    """The indices of the ``count`` highest scores, best first; of equal ones the lower (topk leaves that open)."""
    return torch.sort(scores_CE, dim=-1, descending=True, stable=True).indices[..., :count]


class Router(nn.Module):
    """The part that all routers share: logits ``W x (+ b)`` in float32, and how many experts a token gets."""

    def __init__(self, size: int, *, experts: int, top_k: int, bias: bool, groups: ExpertGroups | None) -> None:
        super().__init__()
        _check(experts, top_k, groups)
        wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.top_k = top_k
        self.weight = nn.Parameter(torch.empty(experts, size, dtype=wide))
        self.bias = nn.Parameter(torch.empty(experts, dtype=wide)) if bias else None
        self.groups: nn.Module = nn.Identity() if groups is None else groups
        self.reset_parameters()

    @property
    def experts(self) -> int:
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
        return f"{self.weight.shape[-1]}, experts={self.experts}, top_k={self.top_k}"


class ScoreRouter(Router):
    """Routers whose weights are the chosen scores themselves, divided by their sum or not."""

    def __init__(
        self,
        size: int,
        *,
        experts: int,
        top_k: int,
        renormalise: bool,
        scale: float = 1.0,
        bias: bool = False,
        groups: ExpertGroups | None = None,
    ) -> None:
        super().__init__(size, experts=experts, top_k=top_k, bias=bias, groups=groups)
        self.renormalise = renormalise
        self.scale = scale

    def weighed(self, scores_CE: Tensor, chosen_CJ: Tensor) -> Float[Tensor, "C J"]:
        """The weights of the chosen experts."""
        scores_CJ = scores_CE.gather(-1, chosen_CJ)
        if self.renormalise:
            scores_CJ = scores_CJ / (scores_CJ.sum(-1, keepdim=True) + 1e-20)
        return scores_CJ * self.scale


class SoftmaxRouter(ScoreRouter):
    """Softmax over all experts, then the ``top_k`` best (Fedus et al. 2021 eq. 2; Mixtral, Qwen, DeepSeek-V2).

    ``renormalise`` divides their weights by their sum; ``scale`` multiplies them after that.
    """

    def forward(self, x_CD: Float[Tensor, "C D"]) -> Routing:
        logits_CE = self.logits(x_CD)
        scores_CE = logits_CE.softmax(-1)
        chosen_CJ = best(self.groups(scores_CE), self.top_k)
        return Routing(chosen_CJ, self.weighed(scores_CE, chosen_CJ), logits_CE)


class TopKSoftmaxRouter(Router):
    """The ``top_k`` best logits, then softmax over those (Shazeer et al. 2017 eq. 3; gpt-oss); the sum is ``scale``."""

    def __init__(
        self,
        size: int,
        *,
        experts: int,
        top_k: int,
        scale: float = 1.0,
        bias: bool = False,
        groups: ExpertGroups | None = None,
    ) -> None:
        super().__init__(size, experts=experts, top_k=top_k, bias=bias, groups=groups)
        self.scale = scale

    def forward(self, x_CD: Float[Tensor, "C D"]) -> Routing:
        logits_CE = self.logits(x_CD)
        chosen_CJ = best(self.groups(logits_CE), self.top_k)
        return Routing(chosen_CJ, logits_CE.gather(-1, chosen_CJ).softmax(-1) * self.scale, logits_CE)


class SigmoidRouter(ScoreRouter):
    """Each expert scored by itself with a sigmoid (DeepSeek-V3 §2.1.2 eq. 13–16). Takes what SoftmaxRouter takes.

    ``choice_bias`` (a float32 buffer, 0 at first) is added to the scores to choose by, never to the weights;
    :meth:`rebalance` moves it, gradients do not. Groups are chosen by the biased scores too.
    """

    choice_bias: Tensor

    def __init__(self, size: int, *, experts: int, **how: Any) -> None:
        super().__init__(size, experts=experts, **how)
        self.register_buffer("choice_bias", torch.zeros(experts, dtype=self.weight.dtype))

    def reset_parameters(self) -> None:
        """As other routers, and no preference among experts."""
        super().reset_parameters()
        if "choice_bias" in self._buffers:
            nn.init.zeros_(self.choice_bias)

    def forward(self, x_CD: Float[Tensor, "C D"]) -> Routing:
        logits_CE = self.logits(x_CD)
        scores_CE = logits_CE.sigmoid()
        chosen_CJ = best(self.groups(scores_CE + self.choice_bias), self.top_k)
        return Routing(chosen_CJ, self.weighed(scores_CE, chosen_CJ), logits_CE)

    def probabilities(self, logits_CE: Float[Tensor, "C E"]) -> Float[Tensor, "C E"]:
        """Scores divided by their sum (DeepSeek-V3 eq. 19)."""
        scores_CE = logits_CE.sigmoid()
        return scores_CE / (scores_CE.sum(-1, keepdim=True) + 1e-20)

    @torch.no_grad()
    def rebalance(self, tokens_E: Int[Tensor, "E"], rate: float) -> None:
        """Raise the choice bias below the mean load by ``rate``, lower it above (Wang et al. 2024 alg. 1)."""
        load_E = tokens_E.to(self.choice_bias.dtype)
        self.choice_bias += rate * (load_E.mean() - load_E).sign()


def _check(experts: int, top_k: int, groups: ExpertGroups | None) -> None:
    if not 1 <= top_k <= experts:
        raise ShapeError(f"a token cannot go to {top_k} of {experts} experts; choose top_k from 1 to {experts}")
    if groups is None:
        return
    if experts % groups.count:
        raise ShapeError(f"{experts} experts do not make {groups.count} equal groups; make experts a multiple of it")
    size = experts // groups.count
    if size < groups.best:
        raise ShapeError(f"score 'top2' adds up two experts, but a group has {size}; use fewer groups or score='max'")
    if top_k > groups.keep * size:
        raise ShapeError(
            f"top_k is {top_k}, but {groups.keep} groups of {size} experts hold only {groups.keep * size}; keep more"
        )
