"""``attend``: the only function that runs attention.

Who sees whom is said by a rule and two sets of coordinates; which kernel does the work is chosen from facts that
the host knows. Every backend gives what :mod:`~pellucid.nn.backends.reference` gives, or raises.
"""

from __future__ import annotations

from typing import get_args

import torch

from pellucid.errors import ShapeError, UnsupportedError
from pellucid.nn.backends import reference, sdpa, varlen
from pellucid.nn.backends.inputs import AttentionInputs, AttentionOptions, Backend
from pellucid.shapes import Float, Tensor, broadcasts_to
from pellucid.visibility import Coordinates, Rule

__all__ = ["BACKENDS", "AttentionOptions", "Backend", "attend", "choose", "probabilities"]

BACKENDS: tuple[str, ...] = get_args(Backend)


def attend(
    q_BTNH: Float[Tensor, "B T N H"],
    k_BSKH: Float[Tensor, "B S K H"],
    v_BSKU: Float[Tensor, "B S K U"],
    *,
    rule: Rule,
    q_coords: Coordinates,
    k_coords: Coordinates,
    bias: Float[Tensor, "#B #N T S"] | None = None,
    sink_logits: Float[Tensor, "N"] | None = None,
    options: AttentionOptions = AttentionOptions(),  # noqa: B008 - frozen
) -> Float[Tensor, "B T N U"]:
    """Scaled dot-product attention (Vaswani et al. 2017, §3.2.1) of ``q`` over the keys that ``rule`` lets it see.

    Query head n reads key/value head ``n // (N / K)`` (grouped-query attention, Ainslie et al. 2023). ``q_coords`` and
    ``k_coords`` are the positions and documents of queries and keys. ``bias`` is added to scores after the softcap;
    ``sink_logits`` join each softmax as a key without a value.

    A query that sees nothing returns exactly 0. Hidden content never matters, not even NaN; a NaN that is visible
    makes the output NaN.

    Raises:
        ShapeError: sizes that do not fit.
        UnsupportedError: the backend named in ``options`` cannot do what was asked.
    """
    if q_coords.eager and torch.compiler.is_compiling():  # a graph break: attention runs eagerly
        return torch.compiler.disable(attend)(
            q_BTNH, k_BSKH, v_BSKU, rule=rule, q_coords=q_coords, k_coords=k_coords, bias=bias,
            sink_logits=sink_logits, options=options,
        )  # fmt: skip
    call = AttentionInputs(q_BTNH, k_BSKH, v_BSKU, rule, q_coords, k_coords, bias, sink_logits, options)
    _check(call)
    chosen = choose(call) if options.backend == "auto" else options.backend
    match chosen:
        case "reference":
            return reference.attend(call)
        case "sdpa":
            return sdpa.attend(call)
        case "varlen":
            return varlen.attend(call)
    raise UnsupportedError(f"there is no attention backend {chosen!r}; choose one of {', '.join(BACKENDS)}")


def choose(call: AttentionInputs) -> str:
    """The fastest backend that can do what is asked, from layout facts alone."""
    if sdpa.unsupported_reason(call):
        return "reference"
    if varlen.unsupported_reason(call) is None and varlen.is_profitable(call):
        return "varlen"
    return "sdpa"


def probabilities(
    q_BTNH: Float[Tensor, "B T N H"],
    k_BSKH: Float[Tensor, "B S K H"],
    *,
    rule: Rule,
    q_coords: Coordinates,
    k_coords: Coordinates,
    bias: Float[Tensor, "#B #N T S"] | None = None,
    sink_logits: Float[Tensor, "N"] | None = None,
    options: AttentionOptions = AttentionOptions(),  # noqa: B008 - frozen
) -> Float[Tensor, "B N T S"]:
    """The attention weights themselves, by the reference path: hidden keys have weight exactly 0."""
    call = AttentionInputs(q_BTNH, k_BSKH, k_BSKH, rule, q_coords, k_coords, bias, sink_logits, options)
    _check(call)
    return reference.probabilities(call)


def _check(call: AttentionInputs) -> None:
    (b, t, n, h), (kb, s, k, kh), v = call.q.shape, call.k.shape, call.v.shape
    if kb != b or kh != h or v[:3] != call.k.shape[:3]:
        raise ShapeError(
            f"queries {tuple(call.q.shape)}, keys {tuple(call.k.shape)} and values {tuple(v)} do not fit: rows and "
            "head size must agree, and keys and values must have the same slots and heads"
        )
    if n % k:
        raise ShapeError(f"{n} query heads cannot share {k} key/value heads evenly; make {n} a multiple of {k}")
    for name, coordinates, want in (("queries", call.q_coords, (b, t)), ("keys", call.k_coords, (b, s))):
        if coordinates.shape != want:
            raise ShapeError(f"the coordinates of the {name} are {coordinates.shape}, but the tensors have {want}")
    if call.bias is not None and not broadcasts_to(call.bias.shape, (b, n, t, s)):
        raise ShapeError(
            f"the bias has shape {tuple(call.bias.shape)}, but rows, heads, queries and keys need {(b, n, t, s)}; only "
            "axes of 1 are spread: cut the bias to what this pass has"
        )
    if call.sink_logits is not None and call.sink_logits.shape != (n,):
        raise ShapeError(
            f"sink_logits have shape {tuple(call.sink_logits.shape)}, but {n} query heads need ({n},); give one a head"
        )
