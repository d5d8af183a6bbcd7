"""Optimizers (which rule changes which parameter) and the schedule of their learning rate."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pellucid.nn.moe import Experts, Router
from pellucid.nn.norms import HeadLayerNorm
from pellucid.nn.positions import LearnedPositions
from pellucid.shapes import Float
from pellucid.training import config as cfg
from pellucid.training.step import OptimizerSet

Role = Literal["matrix", "embedding", "head", "vector"]


def roles(model: nn.Module) -> dict[str, Role]:
    """The role of every trainable parameter, under its first name; a tied one is listed once.

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


def make_optimizers(model: nn.Module, config: cfg.AdamWConfig | cfg.MuonConfig) -> OptimizerSet:
    """The optimizers that ``config`` describes, over every trainable parameter of ``model``."""
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


_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024, "Muon": steepest slope at 0


class Muon(torch.optim.Muon):
    """``torch.optim.Muon`` (momentum, orthogonalised update, decoupled decay), computed in ``dtype``.

    A parameter ``[E, M, N]`` is E matrices, each orthogonalised by itself; at least one must be a plain matrix.
    """

    def __init__(self, parameters: Iterable[Tensor], *, dtype: torch.dtype = torch.float32, **settings: Any) -> None:
        given = list(parameters)
        super().__init__([p for p in given if p.dim() != 3], **settings)
        self.param_groups[0]["params"] += [p for p in given if p.dim() == 3]  # torch's class takes no stacks
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Change every matrix that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for parameters in by_shape.values():
                self._change(parameters, group)
        return loss

    def _change(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """One step of parameters of one shape."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        updates = torch._foreach_lerp(gradients, buffers, group["momentum"]) if group["nesterov"] else buffers
        stacked = torch.stack(list(updates)).to(self.dtype)
        update_XMN = stacked.flatten(0, -3)
        directions = orthogonalised(update_XMN, steps=group["ns_steps"], eps=group["eps"]).view_as(stacked)
        rate = group["lr"] * _shape_factor(parameters[0].shape[-2:], group["adjust_lr_fn"])
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, list(directions.to(parameters[0].dtype).unbind()), alpha=-rate)


def orthogonalised(g_XMN: Float[Tensor, "X M N"], *, steps: int = 5, eps: float = 1e-7) -> Float[Tensor, "X M N"]:
    """Each matrix with its singular values brought near 1, by Newton–Schulz steps in its own number format.

    A step turns each singular value s into ``a·s + b·s³ + c·s⁵``, by products alone; a Frobenius norm of 1 at
    the start keeps all of them below 1. Near 1, not at it: these coefficients trade exactness (about 0.7 to
    1.2) for few steps.
    """
    a, b, c = _COEFFICIENTS
    tall = g_XMN.shape[-2] > g_XMN.shape[-1]
    x = g_XMN.mT if tall else g_XMN
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _shape_factor(shape: torch.Size, adjust: str | None) -> float:
    """How a matrix's shape changes its rate, as in ``torch.optim.Muon``."""
    rows, columns = shape
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))
