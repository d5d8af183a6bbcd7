"""Losses are sums and counts, never means: they are divided once, when everything that belongs together is added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from pellucid.errors import ShapeError
from pellucid.shapes import Float, Int, Tensor


class Loss(NamedTuple):
    """A sum in nats over ``count`` predictions."""

    total: Float[Tensor, ""]
    count: Int[Tensor, ""]  # type: ignore[assignment]  # hides tuple.count, which a loss does not need

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
    label_indices: Int[Tensor, C] | None = None,
    ignore_index: int = -100,
    multiplier: float = 1.0,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    chunk_size: int = 512,
) -> Loss:
    """Cross-entropy of ``hidden · weightᵀ + bias`` against labels, at positions whose label is not ``ignore_index``.

    At most ``chunk_size`` rows of logits exist at a time: each chunk's gradient is taken while they do, so the
    backward pass recomputes nothing. ``label_indices`` are the flat indices of the labels that count, where the host
    knows them. Logits are multiplied by ``multiplier`` (bias included), then ``softcap`` c bends them to
    ``c · tanh(logit / c)``. ``label_smoothing`` ε mixes the target with the uniform distribution over the vocabulary
    (Szegedy et al. 2016 §7).

    Raises:
        ShapeError: labels that do not fit, or name a class outside the vocabulary.
    """
    if labels_BT.shape != hidden_BTD.shape[:2]:
        raise ShapeError(f"labels are {tuple(labels_BT.shape)}, but hidden states are {tuple(hidden_BTD.shape[:2])}")
    if bias_V is not None and bias_V.shape != weight_VD.shape[:1]:
        raise ShapeError(
            f"the bias has shape {tuple(bias_V.shape)}, but the weight {tuple(weight_VD.shape)}; give a number a class"
        )
    options = (multiplier, softcap, label_smoothing, chunk_size)
    inputs = (hidden_BTD, weight_VD, bias_V)
    needs_grad = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs]
    if torch.compiler.is_compiling():  # how many labels count is no size that a graph knows: one operator
        dtype = _dtype(hidden_BTD, weight_VD)
        total, count, *_ = _operator(*inputs, labels_BT, needs_grad, ignore_index, dtype, *options)
        return Loss(total, count)
    label_indices, targets_C = _targets(labels_BT, label_indices, ignore_index, weight_VD.shape[0])
    hidden_CD = hidden_BTD.flatten(0, 1).index_select(0, label_indices)
    total = _LinearCrossEntropy.apply(hidden_CD, weight_VD, bias_V, targets_C, needs_grad, *options)  # type: ignore[no-untyped-call]
    return Loss(total, torch.tensor(targets_C.numel(), device=targets_C.device))


def _targets(labels_BT: Tensor, label_indices: Tensor | None, ignore_index: int, classes: int) -> tuple[Tensor, Tensor]:
    """The flat indices of the labels that count, and those labels; on a CPU they are checked."""
    flat = labels_BT.flatten()
    if label_indices is None:
        label_indices = (flat != ignore_index).nonzero()[:, 0]
    targets_C = flat[label_indices]
    if targets_C.device.type == "cpu" and targets_C.numel():
        low, high = (int(x) for x in targets_C.aminmax())
        if low < 0 or high >= classes:
            raise ShapeError(
                f"label {low if low < 0 else high} is outside the vocabulary of {classes}; "
                f"positions without a label are marked by {ignore_index}"
            )
    return label_indices, targets_C


def _dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The type in which logits are multiplied out: the weight's, or autocast's where float64 is not wanted."""
    device = hidden.device.type
    if weight.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return weight.dtype
    return torch.get_autocast_dtype(device)


class _LinearCrossEntropy(torch.autograd.Function):
    """Forward and gradient in one sweep over chunks."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        arguments = [*inputs[:5], _dtype(inputs[0], inputs[1]), *inputs[5:]]
        total, *gradients = _loss_and_gradients(*arguments)
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        return (*(None if x is None else x * grad for x in ctx.saved_tensors), *([None] * 6))


def _loss_and_gradients(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_C: Tensor,
    needs_grad: Sequence[bool],
    dtype: torch.dtype,
    multiplier: float,
    softcap: float | None,
    smoothing: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The summed loss, and its gradient to hidden states, weight and bias where it is needed."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    weight = weight_VD.to(dtype)
    total = torch.zeros((), dtype=exact, device=hidden_CD.device)
    d_hidden, d_weight, d_bias = (
        torch.zeros_like(x, dtype=kind) if x is not None and needs else None
        for x, kind, needs in zip((hidden_CD, weight_VD, bias_V), (None, exact, exact), needs_grad, strict=True)
    )
    with torch.autocast(hidden_CD.device.type, enabled=False):
        for start in range(0, hidden_CD.shape[0], chunk_size):
            rows = slice(start, start + chunk_size)
            h, target = hidden_CD[rows].to(dtype), targets_C[rows]
            logits = (h @ weight.T).to(exact)
            if bias_V is not None:
                logits += bias_V
            logits *= multiplier
            loss, d_logits = _chunk(logits, target, softcap, smoothing, any(needs_grad))
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
    return total, d_hidden, d_weight, d_bias


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


# ---- compiled graphs


@torch.library.custom_op(
    "pellucid::linear_cross_entropy",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, bool[] needs_grad, int ignore_index, "
    "ScalarType dtype, float multiplier, float? softcap, float smoothing, int chunk_size)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _operator(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_BT: Tensor,
    needs_grad: Sequence[bool],
    ignore_index: int,
    *options: Any,
) -> tuple[Tensor, ...]:
    """Total, count, and the gradients of hidden states, weight and bias; an empty tensor for one not needed."""
    label_indices, targets_C = _targets(labels_BT, None, ignore_index, weight_VD.shape[0])
    hidden_CD = hidden_BTD.flatten(0, 1)[label_indices]
    total, d_hidden, *others = _loss_and_gradients(hidden_CD, weight_VD, bias_V, targets_C, needs_grad, *options)
    if d_hidden is not None:
        d_hidden = torch.zeros_like(hidden_BTD).flatten(0, 1).index_copy(0, label_indices, d_hidden)
        d_hidden = d_hidden.view(hidden_BTD.shape)
    empty = [hidden_BTD.new_empty(0) if x is None else x for x in (d_hidden, *others)]
    return total, torch.tensor(targets_C.numel(), device=total.device), *empty


@_operator.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    needs_grad: Sequence[bool],
    _ignore_index: int,
    dtype: torch.dtype,
    *_: Any,
) -> tuple[Tensor, ...]:
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    gradients = [
        hidden.new_empty(0) if x is None or not needs else x.new_empty(x.shape, dtype=kind)
        for x, kind, needs in zip((hidden, weight, bias), (hidden.dtype, exact, exact), needs_grad, strict=True)
    ]
    return hidden.new_empty((), dtype=exact), labels.new_empty(()), *gradients


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.needs_grad = inputs[4]
    ctx.save_for_backward(*output[2:])


def _scaled_gradients(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    pairs = zip(ctx.saved_tensors, ctx.needs_grad, strict=True)
    return (*(x * grad if needs else None for x, needs in pairs), *([None] * 8))


_operator.register_autograd(_scaled_gradients, setup_context=_keep_gradients)
