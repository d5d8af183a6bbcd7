"""One training step: the learning rate, forward and backward over micro-batches, and the optimizers' update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pellucid.batch import Batch
from pellucid.errors import CheckpointError, ShapeError, TrainingError
from pellucid.nn.moe import Router
from pellucid.training.config import LoadBalancingConfig, LRSchedulerConfig, TrainConfig
from pellucid.training.environment import Precision
from pellucid.training.routing import RoutingStats, StepRouting


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
    a gradient that is not finite raises before any weight is changed. :class:`~pellucid.training.routing.StepRouting`
    describes what ``load_balancing`` adds.
    """
    count = sum(num_targets(batch) for batch in micro_batches)
    optimizers.zero_grad()
    if not count:
        return TrainStepResult(0.0, 0, 0.0, optimizers.learning_rate)
    found = routers(getattr(model, "encoder", None)), routers(model)
    routing = StepRouting(found, micro_batches, load_balancing) if any(found) else None
    totals = []
    for batch in micro_batches:
        if num_targets(batch) or (routing and load_balancing):  # a token without a label is routed too
            with autocast(precision, batch.tokens.device):
                output = model(batch, want="loss")
            loss = output.loss
            balance_loss = routing.add(output.routing) if routing else 0.0
            (loss.total / count + balance_loss).backward()
            totals.append(torch.stack([loss.total.detach().double(), loss.count.double()]))
    gradients = [p.grad for p in optimizers.parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    total, seen, grad_norm = torch.cat([sum(totals, torch.zeros_like(totals[0])), norm.double()[None]]).tolist()
    assert seen == count, f"the model counted {seen}, the host {count}"
    _refuse_not_finite(total, grad_norm, optimizers, context)
    if max_grad_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(optimizers.parameters, max_grad_norm, norm)
    optimizers.step()
    if routing:
        routing.update_expert_bias()
    stats = routing.stats() if routing else None
    return TrainStepResult(total, count, grad_norm, optimizers.learning_rate, stats)


def routers(stack: nn.Module | None) -> list[Router]:
    """The router of each layer of ``stack`` that routes."""
    return [layer.ffn.router for layer in getattr(stack, "layers", ()) if getattr(layer.ffn, "routes", False)]


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


class OptimizerSet:
    """One or two torch optimizers, stepped together. Rates are peaks times one multiplier."""

    def __init__(self, names: Mapping[str, nn.Parameter], parts: Mapping[str, torch.optim.Optimizer]) -> None:
        self.parts = dict(parts)
        self.parameters = list(names.values())
        self._names = {id(parameter): name for name, parameter in names.items()}
        self._peaks = [(group, float(group["lr"])) for part in parts.values() for group in part.param_groups]
        owned = [id(p) for part in parts.values() for group in part.param_groups for p in group["params"]]
        assert sorted(owned) == sorted(self._names), "every parameter belongs to exactly one optimizer"

    def set_learning_rate(self, multiplier: float) -> float:
        """Set every rate to its peak times ``multiplier``; returns :attr:`learning_rate`."""
        for group, peak in self._peaks:
            group["lr"] = peak * multiplier
        return self.learning_rate

    @property
    def learning_rate(self) -> float:
        """The rate that the next step uses: the matrices' one, where there are several."""
        return float(self._peaks[0][0]["lr"])

    def step(self) -> None:
        """Change the weights by their gradients."""
        for part in self.parts.values():
            part.step()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything the optimizers remember, as ``part/parameter/what``: tensors only, ready for a file."""
        return {
            f"{part}/{self._names[id(parameter)]}/{what}": torch.as_tensor(value)
            for part, optimizer in self.parts.items()
            for parameter, memory in optimizer.state.items()
            for what, value in memory.items()
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Give back what :meth:`state_tensors` gave; anything missing, surplus or misshapen is an error."""
        parameters = {name: p for p in self.parameters for name in [self._names[id(p)]]}
        memories: dict[str, dict[Tensor, dict[str, Any]]] = {part: {} for part in self.parts}
        for key, tensor in tensors.items():
            part, _, rest = key.partition("/")
            name, _, what = rest.rpartition("/")
            if part not in self.parts or name not in parameters:
                raise CheckpointError(
                    f"optimizer state {key!r} belongs to no parameter of this run; was its config changed?"
                )
            parameter = parameters[name]
            if tensor.dim() and tensor.shape != parameter.shape:
                raise CheckpointError(
                    f"optimizer state {key!r} has shape {tuple(tensor.shape)} "
                    f"but the parameter {tuple(parameter.shape)}"
                )
            memories[part].setdefault(parameter, {})[what] = tensor.to(parameter.device, copy=True)
        for part, memory in memories.items():
            _check_complete(part, self.parts[part], memory, self._names)
            self.parts[part].state.clear()
            self.parts[part].state.update(memory)


def _check_complete(
    part: str,
    optimizer: torch.optim.Optimizer,
    memory: Mapping[Tensor, Mapping[str, Any]],
    names: Mapping[int, str],
) -> None:
    """Either nothing was ever stepped, or every parameter remembers the same things."""
    wanted = {what for entries in memory.values() for what in entries}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            missing = wanted - set(memory.get(parameter, {}))
            if missing:
                raise CheckpointError(f"optimizer state lacks {part}/{names[id(parameter)]}/{min(missing)}")


_LOWEST_WARMUP = 0.01


def progress(config: TrainConfig, step: int, minutes: float) -> float:
    """The fraction of the run that is over before ``step`` (the first is 0): the further of steps and minutes."""
    by_steps = step / config.max_steps if config.max_steps else 0.0
    by_time = minutes / config.max_minutes if config.max_minutes else 0.0
    return min(max(by_steps, by_time), 1.0)


def lr_multiplier(config: TrainConfig, step: int, minutes: float) -> float:
    """The multiple of the peak learning rate that ``step`` uses, ``minutes`` into the run.

    A warm-up of 4 steps uses ¼, ½, ¾ and 1; then the decay starts from 1 and would reach ``min_lr_ratio`` at the
    step after the last, so that no step is wasted on a rate of 0. A warm-up by ratio of a run with ``max_minutes``
    follows the clock, and starts above 0.
    """
    scheduler, done = config.lr_scheduler, progress(config, step, minutes)
    by_clock = bool(scheduler.warmup_ratio) and config.max_minutes is not None
    warmup_steps = scheduler.warmup_steps
    if scheduler.warmup_ratio and not by_clock:
        warmup_steps = round(scheduler.warmup_ratio * (config.max_steps or 0))
    warmup_end = warmup_steps / config.max_steps if config.max_steps and warmup_steps else 0.0
    if by_clock:
        warmup_end = scheduler.warmup_ratio
        if done < warmup_end:
            return max(done / warmup_end, _LOWEST_WARMUP)
    elif step < warmup_steps:
        return (step + 1) / warmup_steps
    if scheduler.type == "inverse_sqrt":
        peak = warmup_end / done if by_clock else max(warmup_steps, 1) / (step + 1)
        return max(scheduler.min_lr_ratio, math.sqrt(peak))
    past = 1.0 if warmup_end >= 1 else min(max((done - warmup_end) / (1 - warmup_end), 0.0), 1.0)
    return scheduler.min_lr_ratio + (1 - scheduler.min_lr_ratio) * _decay(scheduler, past)


def _decay(scheduler: LRSchedulerConfig, past: float) -> float:
    """From 1 to 0 while ``past`` goes from 0 to 1."""
    if scheduler.type == "cosine":
        return (1 + math.cos(math.pi * past)) / 2
    if scheduler.type == "linear":
        return 1 - past
    ratio = scheduler.decay_ratio
    return 1.0 if past < 1 - ratio or not ratio else (1 - past) / ratio
