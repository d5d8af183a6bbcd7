"""Losses are sums and counts, never means: they are divided once, when everything that belongs together is added up."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from pellucid.errors import ShapeError
from pellucid.shapes import Float, Int, Tensor


class Loss(NamedTuple):
    """A sum in nats over ``count`` predictions."""

    total: Float[Tensor, ""]
    count: Int[Tensor, ""]  # type: ignore[assignment]  # hides tuple.count, which nobody asks of a loss

    def plus(self, other: Loss) -> Loss:
        """Both together."""
        return Loss(self.total + other.total, self.count + other.count)

    def mean(self) -> Float[Tensor, ""]:
        """``total / count``, and 0 where nothing was counted."""
        return self.total / self.count.clamp(min=1)


def linear_cross_entropy(
    hidden_BTD: Float[Tensor, "B T D"],
    weight_VD: Float[Tensor, "V D"],
    labels_BT: Int[Tensor, "B T"],
    *,
    bias_V: Float[Tensor, V] | None = None,
    counted: Int[Tensor, C] | None = None,
    ignored: int = -100,
    multiplier: float = 1.0,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    chunk: int = 512,
) -> Loss:
    """Cross-entropy of ``hidden · weightᵀ + bias`` against labels, at counted positions only.

    Never holds more than ``chunk`` rows of logits: each chunk's gradient is taken while its logits are there, so the
    backward pass recomputes nothing. ``counted`` are the flat indices of labels that are not ``ignored``, where the
    host knows them. Logits are multiplied by ``multiplier`` (bias included), then ``softcap`` c bends them to
    ``c · tanh(logit / c)``. ``label_smoothing`` ε mixes the target with the uniform distribution over the vocabulary
    (Szegedy et al. 2016 §7), at counted positions only.

    Raises:
        ShapeError: labels that do not fit, or name a class outside the vocabulary.
    """
    if labels_BT.shape != hidden_BTD.shape[:2]:
        raise ShapeError(f"labels are {tuple(labels_BT.shape)}, but hidden states are {tuple(hidden_BTD.shape[:2])}")
    if bias_V is not None and bias_V.shape != weight_VD.shape[:1]:
        raise ShapeError(
            f"the bias has shape {tuple(bias_V.shape)}, but the weight {tuple(weight_VD.shape)}; give a number a class"
        )
    flat = labels_BT.flatten()
    if counted is None:
        counted = (flat != ignored).nonzero()[:, 0]
    targets = flat[counted]
    if targets.device.type == "cpu" and targets.numel():
        low, high = (int(x) for x in targets.aminmax())
        if low < 0 or high >= weight_VD.shape[0]:
            raise ShapeError(
                f"label {low if low < 0 else high} is outside the vocabulary of {weight_VD.shape[0]}; "
                f"positions without a label are marked by {ignored}"
            )
    hidden_CD = hidden_BTD.flatten(0, 1).index_select(0, counted)
    if not torch.is_grad_enabled():  # an autograd function is not told, and would compute gradients for nobody
        hidden_CD, weight_VD = hidden_CD.detach(), weight_VD.detach()
        bias_V = None if bias_V is None else bias_V.detach()
    settings = (multiplier, softcap, label_smoothing, chunk)
    total = _LinearCrossEntropy.apply(hidden_CD, weight_VD, bias_V, targets, *settings)  # type: ignore[no-untyped-call]
    return Loss(total, torch.tensor(targets.numel(), device=targets.device))


class _LinearCrossEntropy(torch.autograd.Function):
    """Forward and gradient in one sweep over chunks."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_CD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_C: Tensor,
        multiplier: float,
        softcap: float | None,
        smoothing: float,
        chunk: int,
    ) -> Tensor:
        device = hidden_CD.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_VD.dtype
        if weight_VD.dtype == torch.float64:
            dtype = torch.float64
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        needs_h, needs_w, needs_b = ctx.needs_input_grad[:3]
        weight = weight_VD.to(dtype)
        total = torch.zeros((), dtype=exact, device=hidden_CD.device)
        d_hidden = torch.zeros_like(hidden_CD) if needs_h else None
        d_weight = torch.zeros_like(weight_VD, dtype=exact) if needs_w else None
        d_bias = torch.zeros_like(bias_V, dtype=exact) if needs_b and bias_V is not None else None
        with torch.autocast(device, enabled=False):
            for start in range(0, hidden_CD.shape[0], chunk):
                rows = slice(start, start + chunk)
                h, target = hidden_CD[rows].to(dtype), targets_C[rows]
                logits = (h @ weight.T).to(exact)
                if bias_V is not None:
                    logits += bias_V
                logits *= multiplier
                loss, d_logits = _chunk(logits, target, softcap, smoothing, needs_h or needs_w or needs_b)
                total += loss
                if d_logits is None:
                    continue
                d_logits *= multiplier
                d_low = d_logits.to(dtype)
                if d_hidden is not None:
                    d_hidden[rows] = (d_low @ weight).to(d_hidden.dtype)
                if d_weight is not None:
                    d_weight += d_low.T @ h
                if d_bias is not None:
                    d_bias += d_logits.sum(0)
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.dtypes = (weight_VD.dtype, None if bias_V is None else bias_V.dtype)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            None if d_hidden is None else (d_hidden * grad).to(d_hidden.dtype),
            None if d_weight is None else (d_weight * grad).to(weight_dtype),
            None if d_bias is None else (d_bias * grad).to(bias_dtype),
            None,
            None,
            None,
            None,
            None,
        )


def _chunk(
    logits: Tensor, target: Tensor, softcap: float | None, smoothing: float, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Summed loss of one chunk, and its gradient to the logits (which are used up)."""
    if softcap is not None:
        bent = torch.tanh(logits / softcap)
        logits = bent * softcap
    logits -= logits.amax(-1, keepdim=True)
    at_target = logits.gather(-1, target[:, None])
    mean = logits.mean(-1, keepdim=True) if smoothing else at_target
    exponentials = logits.exp_()
    sums = exponentials.sum(-1, keepdim=True)
    loss = (sums.log() - (1 - smoothing) * at_target - smoothing * mean).sum()
    if not with_gradient:
        return loss, None
    gradient = exponentials.div_(sums)
    if smoothing:
        gradient -= smoothing / logits.shape[-1]
    gradient.scatter_add_(-1, target[:, None], torch.full_like(at_target, smoothing - 1))
    if softcap is not None:
        gradient *= 1 - bent.square()
    return loss, gradient
