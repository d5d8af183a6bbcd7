"""Optimizers (which rule changes which parameter) and the schedule of their learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pellucid.errors import CheckpointError
from pellucid.nn.moe import Experts, Router
from pellucid.nn.norms import HeadLayerNorm
from pellucid.nn.positions import LearnedPositions
from pellucid.training import config as cfg
from pellucid.training.config import LRSchedulerConfig, TrainConfig
from pellucid.training.muon import Muon

Role = Literal["matrix", "embedding", "head", "vector"]


def roles(model: nn.Module) -> dict[str, Role]:
    """The role of every parameter that is learnt, under its first name; a tied one is listed once.

    ``matrix``: a weight inside the blocks of a stack (``layers``), a stack ``[E, …]`` of experts' among them;
    ``embedding``: a table that is looked up (tokens, types, positions, relative biases), also when it is tied to the
    head; ``head``: another matrix outside the blocks, and a router's, which gives logits too; ``vector``: norms,
    biases, sinks.
    """
    tables = _owned(model, lambda module, name: isinstance(module, nn.Embedding | LearnedPositions))
    vectors = _owned(model, _is_vector)
    logits = _owned(model, lambda module, name: isinstance(module, Router))

    def role(name: str, parameter: nn.Parameter) -> Role:
        if id(parameter) in tables:
            return "embedding"
        if parameter.dim() < 2 or id(parameter) in vectors:
            return "vector"
        inside = name.startswith(("layers.", "encoder.layers.")) and id(parameter) not in logits
        return "matrix" if inside else "head"

    return {name: role(name, p) for name, p in model.named_parameters() if p.requires_grad}


def _owned(model: nn.Module, of: Callable[[nn.Module, str], bool]) -> set[int]:
    """The identities of the parameters that modules of one kind hold themselves."""
    return {
        id(parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if of(module, name)
    }


def _is_vector(module: nn.Module, name: str) -> bool:
    """Norms and biases that have more than one axis: one vector a head, one an expert."""
    return isinstance(module, HeadLayerNorm) or (isinstance(module, Experts) and name.endswith("_bias"))


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


def make_optimizers(model: nn.Module, config: cfg.AdamWConfig | cfg.MuonConfig) -> OptimizerSet:
    """The optimizers that ``config`` describes, over every parameter of ``model`` that is learnt."""
    names = {name: p for name, p in model.named_parameters() if p.requires_grad}
    by_role = roles(model)

    def those(*wanted: Role) -> list[nn.Parameter]:
        return [names[name] for name, role in by_role.items() if role in wanted]

    if isinstance(config, cfg.AdamWConfig):
        return OptimizerSet(names, {"adamw": _adamw(those("matrix", "head"), those("embedding", "vector"), config)})
    assert config.precision != "auto", "a run settles it before it begins"
    muon = Muon(
        those("matrix"),
        dtype=getattr(torch, config.precision),
        lr=config.learning_rate,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        adjust_lr_fn=config.adjust_lr_fn,
    )
    return OptimizerSet(
        names, {"muon": muon, "adamw": _adamw(those("head"), those("embedding", "vector"), config.adamw)}
    )


def _adamw(
    decayed: Iterable[nn.Parameter], others: Iterable[nn.Parameter], config: cfg.AdamWConfig
) -> torch.optim.AdamW:
    groups = [
        {"params": list(decayed), "weight_decay": config.weight_decay},
        {"params": list(others), "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )


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
