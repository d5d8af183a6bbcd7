"""One step: forward and backward over micro-batches, one look at the numbers, one change of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pellucid.batch import Batch
from pellucid.errors import ShapeError, TrainingError
from pellucid.nn.moe import LoadBalanceStats, Router, SigmoidRouter
from pellucid.training.config import LoadBalancingConfig
from pellucid.training.environment import Precision
from pellucid.training.optim import OptimizerSet


@dataclass(frozen=True)
class TrainStepResult:
    """What a step saw; ``loss_total`` is in nats, and the norm is the one before clipping."""

    loss_total: float
    num_targets: int
    grad_norm: float
    learning_rate: float
    routing: RoutingStats | None = None

    @property
    def loss(self) -> float:
        """Mean loss over what the whole step counted, 0 when that is nothing. A balance loss is not in it."""
        return self.loss_total / self.num_targets if self.num_targets else 0.0


class StepContext(NamedTuple):
    """What an error must be able to name."""

    step: int
    documents: Callable[[], Sequence[str]]
    last_good: Path | None


class NotFiniteError(TrainingError):
    """A loss or gradient is not finite; the weights are as they were before the step."""


def train_step(
    model: nn.Module,
    micro_batches: Sequence[Batch],
    optimizers: OptimizerSet,
    *,
    max_grad_norm: float | None,
    context: StepContext,
    precision: Precision = "float32",
    load_balancing: LoadBalancingConfig | None = None,
) -> TrainStepResult:
    """Change the weights once, by the gradient of (sum of losses) / (what is counted) of all micro-batches.

    What is counted, labels or documents, is known on the host beforehand, so each micro-batch's share of the gradient
    is right when it is added, however unevenly they are filled. With nothing to learn from, nothing changes. A loss or
    a gradient that is not finite raises before any weight is touched. :mod:`~pellucid.training.step` says what
    ``load_balancing`` adds.
    """
    count = sum(num_targets(batch) for batch in micro_batches)
    optimizers.zero_grad()
    if not count:
        return TrainStepResult(0.0, 0, 0.0, optimizers.learning_rate)
    routing = StepRouting(model, micro_batches, load_balancing)
    totals = []
    for batch in micro_batches:
        if num_targets(batch) or routing.all_tokens_matter:
            with autocast(precision, batch.tokens.device):
                output = model(batch, want="loss")
            loss = output.loss
            aside = routing.add(output.routing) if routing else 0.0
            (loss.total / count + aside).backward()
            totals.append(torch.stack([loss.total.detach().double(), loss.count.double()]))
    gradients = [p.grad for p in optimizers.parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    total, seen, grad_norm = torch.cat([sum(totals, torch.zeros_like(totals[0])), norm.double()[None]]).tolist()
    assert seen == count, f"the model counted {seen}, the host {count}"
    _refuse_not_finite(total, grad_norm, optimizers, context)
    if max_grad_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(optimizers.parameters, max_grad_norm, norm)
    optimizers.step()
    routing.update_expert_bias()
    return TrainStepResult(total, count, grad_norm, optimizers.learning_rate, routing.stats())


def autocast(precision: Precision, device: torch.device | str) -> torch.autocast:
    """The context for a forward pass: matrix products in bfloat16, or everything as it is."""
    kind = torch.device(device).type
    return torch.autocast(kind, dtype=torch.bfloat16, enabled=precision == "bfloat16")


def num_targets(batch: Batch) -> int:
    """Positions whose label counts, or else documents whose target does, known without asking a device."""
    found = batch.target_indices if batch.labels is None and batch.targets is not None else batch.label_indices
    if found is None:
        raise ShapeError("a training batch needs labels made on the host; use data.objectives before moving it")
    return len(found)


def _refuse_not_finite(total: float, norm: float, optimizers: OptimizerSet, context: StepContext) -> None:
    if math.isfinite(total) and math.isfinite(norm):
        return
    what = f"the gradient's norm is {norm}" if math.isfinite(total) else f"the loss is {total}"
    optimizers.zero_grad()
    documents = ", ".join(context.documents()) or "unknown"
    raise NotFiniteError(
        f"step {context.step}: {what}; the weights were not changed. Documents in the batch: {documents}. "
        f"Last good checkpoint: {context.last_good or 'none yet'}. "
        "Lower the rate, lengthen the warm-up, or look at these documents"
    )


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
        self, model: nn.Module, micro_batches: Sequence[Batch], load_balancing: LoadBalancingConfig | None
    ) -> None:
        self.routers = routers(model)
        self.load_balancing = load_balancing
        self._sums: list[LoadBalanceStats | None] = [None] * len(self.routers)
        encoder = getattr(model, "encoder", None)
        read = len(routers(encoder)) if isinstance(encoder, nn.Module) else 0
        self._tokens = [
            sum(_tokens(batch.source if layer < read else batch) for batch in micro_batches)
            for layer in range(len(self.routers))
        ]

    def __bool__(self) -> bool:
        return bool(self.routers)

    @property
    def all_tokens_matter(self) -> bool:
        """Whether a micro-batch without a label still has something to say."""
        return bool(self.routers) and self.load_balancing is not None

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


def routers(model: nn.Module) -> list[Router]:
    """The router of each layer that routes, an encoder's first: in the order of ``Output.routing``."""
    encoder = getattr(model, "encoder", None)
    found = routers(encoder) if isinstance(encoder, nn.Module) else []
    layers = getattr(model, "layers", ())
    return found + [layer.ffn.router for layer in layers if getattr(layer.ffn, "routes", False)]


def _tokens(batch: Batch | None) -> int:
    """Real tokens, known on the host."""
    return 0 if batch is None else sum(sum(row.values()) for row in batch.document_lengths)
