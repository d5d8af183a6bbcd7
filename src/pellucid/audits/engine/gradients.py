"""The gradient of every weight: what the checks that compare two ways of computing share."""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.deviation import TargetRun, logit_scale
from pellucid.batch import Batch

Gradients = dict[str, Tensor]


def gradients(context: AuditContext, run: TargetRun, batch: Batch) -> tuple[Tensor, Gradients]:
    """``[B, T, V]`` logits, and what a fixed weighted sum over the real tokens gives each weight."""
    named = weights_of(run)
    logits = run.differentiable(batch)
    total = (logits * context.directions(logits))[batch.token_mask.to(logits.device)].sum()
    if not named or not total.requires_grad:
        return logits.detach().cpu(), {}
    return logits.detach().cpu(), gradients_of(total, named)


def gradients_of(total: Tensor, named: dict[str, Tensor]) -> Gradients:
    """What ``total`` gives each weight: 0 to those that have no part in it."""
    taken = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    pairs = zip(named.items(), taken, strict=True)
    return {name: torch.zeros_like(weight) if grad is None else grad for (name, weight), grad in pairs}


def embedding_gradient(context: AuditContext, run: TargetRun, batch: Batch) -> Tensor | None:
    """``[B, T, D]``: what the same weighted sum over the real tokens gives their embeddings."""
    embeddings_BTD = run.embed(batch).requires_grad_()
    logits = run.differentiable(batch.replace(inputs_embeds=embeddings_BTD))
    (logits * context.directions(logits))[batch.token_mask.to(logits.device)].sum().backward(inputs=[embeddings_BTD])
    return embeddings_BTD.grad


def weights_of(run: TargetRun) -> dict[str, Tensor]:
    """The parameters that take gradients, by name."""
    module = run.probe.module
    return {} if module is None else {name: p for name, p in module.named_parameters() if p.requires_grad}


def tolerance_of(run: TargetRun) -> float:
    """How far, relative to their scale, two right sums of gradients may lie apart."""
    return (1e-10 if run.dtype == torch.float64 else 10 * run.rounding) + 20 * run.noise


def first_difference(run: TargetRun, want: Gradients, got: Gradients) -> tuple[str, float] | None:
    """The first weight whose two gradients differ beyond rounding, and by how much.

    A gradient that is 0 by its definition, such as that of a bias of all keys, is nothing but the rounding of others.
    """
    tolerance = tolerance_of(run)
    noise = (run.rounding + run.noise) * max((logit_scale(expected) for expected in want.values()), default=0.0)
    for name, expected in want.items():
        size = float(torch.dist(got[name], expected, float("inf"))) if expected.numel() else 0.0
        if not size <= max(tolerance * logit_scale(expected), noise):
            return name, size
    return None


def first_not_finite(found: Gradients) -> str | None:
    """The first weight whose gradient is not finite."""
    return next((name for name, grad in found.items() if not bool(grad.isfinite().all())), None)
