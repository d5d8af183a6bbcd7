"""One step: forward and backward over micro-batches, one look at the numbers, one change of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from pellucid.batch import Batch
from pellucid.errors import ShapeError, TrainingError
from pellucid.training.config import Balance
from pellucid.training.optim import Optimizers
from pellucid.training.precision import Precision, autocast
from pellucid.training.routing import RoutingFigures, StepRouting


@dataclass(frozen=True)
class StepResult:
    """What a step saw; ``loss_total`` is in nats, and the norm is the one before clipping."""

    loss_total: float
    count: int
    grad_norm: float
    rate: float
    routing: RoutingFigures | None = None

    @property
    def loss(self) -> float:
        """Mean loss over what the whole step counted, 0 when that is nothing. A balance loss is not in it."""
        return self.loss_total / self.count if self.count else 0.0


class Where(NamedTuple):
    """What an error must be able to name."""

    step: int
    documents: Callable[[], Sequence[str]]
    last_good: Path | None


class NotFiniteError(TrainingError):
    """A loss or gradient is not finite; the weights are as they were before the step."""


def train_step(
    model: nn.Module,
    micro_batches: Sequence[Batch],
    optimizers: Optimizers,
    *,
    clip_norm: float | None,
    where: Where,
    precision: Precision = "float32",
    balance: Balance | None = None,
) -> StepResult:
    """Change the weights once, by the gradient of (sum of losses) / (what is counted) of all micro-batches.

    What is counted, labels or documents, is known on the host beforehand, so each micro-batch's share of the gradient
    is right when it is added, however unevenly they are filled. With nothing to learn from, nothing changes. A loss or
    a gradient that is not finite raises before any weight is touched. :mod:`~pellucid.training.routing` says what
    ``balance`` adds.
    """
    count = sum(counted(batch) for batch in micro_batches)
    optimizers.zero_grad()
    if not count:
        return StepResult(0.0, 0, 0.0, optimizers.rate)
    routing = StepRouting(model, micro_batches, balance)
    totals = []
    for batch in micro_batches:
        if counted(batch) or routing.all_tokens_matter:
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
    _refuse_not_finite(total, grad_norm, optimizers, where)
    if clip_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(optimizers.parameters, clip_norm, norm)
    optimizers.step()
    routing.update_expert_bias()
    return StepResult(total, count, grad_norm, optimizers.rate, routing.figures())


def counted(batch: Batch) -> int:
    """Positions whose label counts, or else documents whose target does, known without asking a device."""
    found = batch.counted_documents if batch.labels is None and batch.targets is not None else batch.counted
    if found is None:
        raise ShapeError("a training batch needs labels made on the host; use data.objectives before moving it")
    return len(found)


def _refuse_not_finite(total: float, norm: float, optimizers: Optimizers, where: Where) -> None:
    if math.isfinite(total) and math.isfinite(norm):
        return
    what = f"the gradient's norm is {norm}" if math.isfinite(total) else f"the loss is {total}"
    optimizers.zero_grad()
    documents = ", ".join(where.documents()) or "unknown"
    raise NotFiniteError(
        f"step {where.step}: {what}; the weights were not changed. Documents in the batch: {documents}. "
        f"Last good checkpoint: {where.last_good or 'none yet'}. "
        "Lower the rate, lengthen the warm-up, or look at these documents"
    )
