"""Attention as it is written on paper: every score in float32, the mask selected, nothing fused. The truth."""

import torch

from pellucid.nn.backends.inputs import AttentionInputs, propagate_nan
from pellucid.shapes import Tensor


def attend(call: AttentionInputs) -> Tensor:
    """``softmax(scale · q kᵀ) v`` over visible keys; ``[B, T, N, U]``."""
    weights_BKGTS = _weights(call)
    if call.options.dropout:
        weights_BKGTS = torch.dropout(weights_BKGTS, call.options.dropout, train=True)
    out_BTKGU = torch.einsum("bkgts,bsku->btkgu", weights_BKGTS, call.v.to(weights_BKGTS.dtype))
    out_BTNU = out_BTKGU.flatten(2, 3).to(call.q.dtype)
    return propagate_nan(out_BTNU, call.nonfinite, call.rule.mask(call.q_coords, call.k_coords))


def probabilities(call: AttentionInputs) -> Tensor:
    """The weights, ``[B, N, T, S]``."""
    return _weights(call).flatten(1, 2)


def _weights(call: AttentionInputs) -> Tensor:
    b, t, n, _ = call.q.shape
    heads = call.k.shape[2]
    exact = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    q_BTKGH = (call.q.to(exact) * call.factor).unflatten(2, (heads, n // heads))
    with torch.autocast(call.q.device.type, enabled=False):
        scores = torch.einsum("btkgh,bskh->bkgts", q_BTKGH, call.k.to(exact))
    if call.options.softcap is not None:
        scores = call.options.softcap * torch.tanh(scores / call.options.softcap)
    if call.bias is not None:
        scores = scores + call.bias.to(exact).expand(b, n, t, -1).unflatten(1, (heads, n // heads))
    mask = call.rule.mask(call.q_coords, call.k_coords).unsqueeze(2)  # [B, 1, 1, T, S]
    if call.sink_logits is not None:
        sinks = call.sink_logits.to(exact).view(1, heads, n // heads, 1, 1).expand(b, -1, -1, t, 1)
        scores = torch.cat([scores, sinks], -1)
        mask = torch.cat([mask, mask.any(-1, keepdim=True)], -1)
    # Select, never add. A row that sees nothing gets scores of 0, so that its gradient is finite, and weights of 0.
    fill = torch.where(mask.any(-1, keepdim=True), float("-inf"), 0.0).to(exact)
    weights = torch.softmax(torch.where(mask, scores, fill), -1)
    weights = torch.where(mask, weights, torch.zeros((), dtype=exact, device=weights.device))
    return weights if call.sink_logits is None else weights[..., :-1]
