"""``torch.nn.functional.scaled_dot_product_attention``, with its gaps filled.

Its ``is_causal`` counts slots from the first row and column, so it is used only where that *is* the rule: one whole
document in each row, attending to itself. Everything else gets the mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from pellucid.errors import UnsupportedError
from pellucid.nn.backends.inputs import AttentionInputs, propagate_nan
from pellucid.shapes import Tensor
from pellucid.visibility import Coordinates, Rule, full
from pellucid.visibility.rules import is_full, is_plain_causal


def unsupported_reason(call: AttentionInputs, name: str = "sdpa") -> str | None:
    """Why this backend, or the one of another ``name`` that is made of it, refuses the call (None: it does not)."""
    if call.options.softcap is not None:
        return f"{name} has no softcap"
    if call.sink_logits is not None:
        return f"{name} has no sink logits"
    return None


def attend(call: AttentionInputs) -> Tensor:
    """As the reference, by torch's fused kernels."""
    prepared = prepare(call)
    return prepared.finish(scaled_dot_product_attention(**prepared.arguments))


@dataclass(frozen=True, eq=False)
class SDPACall:
    """One call of the kernel: its arguments, and what has to be put right in its answer."""

    call: AttentionInputs
    arguments: dict[str, Any]
    folded: bool
    seeing: Tensor | None  # Bool[B, T]

    def finish(self, out: Tensor) -> Tensor:
        """The kernel's answer as ``[B, T, N, U]``: blind queries exactly 0, NaN where a visible key was NaN."""
        out_BTNU = out.flatten(1, 2).unsqueeze(1) if self.folded else out.transpose(1, 2)
        if self.seeing is not None:
            zero = torch.zeros((), dtype=out.dtype, device=out.device)
            out_BTNU = torch.where(self.seeing[:, :, None, None], out_BTNU, zero)
        nonfinite_BS = self.call.nonfinite
        if nonfinite_BS is None:
            return out_BTNU
        if self.arguments["attn_mask"] is not None:
            return propagate_nan(out_BTNU, nonfinite_BS, self.call.rule.mask(self.call.q_coords, self.call.k_coords))
        # what the kernel needed no mask for needs none here: all keys up to the query, or all there are
        sees_BT = nonfinite_BS.cumsum(1) > 0 if self.arguments["is_causal"] else nonfinite_BS.any(1, keepdim=True)
        return out_BTNU.masked_fill(sees_BT[:, :, None, None], float("nan"))


def prepare(call: AttentionInputs) -> SDPACall:
    """The arguments of the kernel, and what its answer needs."""
    why = unsupported_reason(call)
    if why:
        raise UnsupportedError(f"{why}; use backend='reference' or 'auto'")
    shortcut = None if call.bias is not None else infer_is_causal(call.rule, call.q_coords, call.k_coords)
    mask, seeing_BT = mask_with_open_rows(call) if shortcut is None else (None, None)
    heads, kv_heads = call.q.shape[2], call.k.shape[2]
    # One new token: the query heads of a group are rows over the same keys, and no key is copied.
    folded = call.q.shape[1] == 1 and mask is None
    arguments = {
        "query": call.q[:, 0].unflatten(1, (kv_heads, -1)) if folded else call.q.transpose(1, 2),
        "key": call.k.transpose(1, 2),
        "value": call.v.transpose(1, 2),
        "attn_mask": mask,
        "dropout_p": call.options.dropout,
        "is_causal": shortcut == "causal",
        "scale": call.factor,
        "enable_gqa": kv_heads < heads and not folded,
    }
    return SDPACall(call, arguments, folded, seeing_BT)


def infer_is_causal(rule: Rule, q_coords: Coordinates, k_coords: Coordinates) -> str | None:
    """``"causal"`` or ``"none"`` where the kernel needs no mask."""
    query, key = q_coords.layout, k_coords.layout
    if query is None or key is None or query.kind != "full" or key.kind != "full":
        return None
    if q_coords is k_coords and all(run.first == 0 for run in query.runs):
        if is_plain_causal(rule, query.slots):
            return "causal"
        return "none" if is_full(rule, query.slots) else None
    newest = query.slots == 1 and all(
        q.first == k.first + key.slots - 1 for q, k in zip(query.runs, key.runs, strict=True)
    )
    same = all(q.segment == k.segment for q, k in zip(query.runs, key.runs, strict=True))
    if not same:
        return None
    if newest and all(k.first == 0 for k in key.runs):
        # the power of two keeps the number of lengths that are looked at small while a cache grows
        length = 1 << (key.slots - 1).bit_length()
        if is_plain_causal(rule, length) or is_plain_causal(rule, key.slots):
            return "none"
    return "none" if rule == full() else None


def mask_with_open_rows(call: AttentionInputs) -> tuple[Tensor, Tensor | None]:
    """The mask with blind rows opened (a kernel must not divide by nothing), and which rows see at all (None: all)."""
    dtype = call.q.dtype

    def make() -> tuple[Tensor, Tensor | None]:
        mask = call.rule.mask(call.q_coords, call.k_coords)
        seeing = mask.any(-1, keepdim=True)
        if mask.device.type == "cpu" and bool(seeing.all()):
            return mask, None
        return mask | ~seeing, seeing[:, 0, :, 0]

    mask, seeing_BT, _ = call.q_coords.cached(("sdpa", call.rule, id(call.k_coords)), lambda: (*make(), call.k_coords))
    if call.bias is not None:
        mask = torch.where(mask, call.bias.to(dtype), torch.full((), float("-inf"), dtype=dtype, device=mask.device))
    return mask, seeing_BT
