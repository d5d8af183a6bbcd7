"""``attend``: the only function that runs attention.

Who sees whom is decided by a rule and two sets of coordinates; which kernel does the work is chosen from facts that
the host knows. Every backend gives what :mod:`~pellucid.nn.backends.reference` gives, or raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, get_args

import torch
from torch._C import DispatchKey

from pellucid.errors import ShapeError, UnsupportedError
from pellucid.nn.backends import reference, sdpa
from pellucid.nn.backends.inputs import AttentionInputs, AttentionOptions, Backend, with_finite_inputs
from pellucid.shapes import Bool, Float, Tensor, broadcasts_to
from pellucid.visibility import Coordinates, Rule, parse

__all__ = ["BACKENDS", "AttentionOptions", "Backend", "attend", "choose", "probabilities"]

BACKENDS: tuple[str, ...] = get_args(Backend)
_BACKENDS = {"reference": reference.attend, "sdpa": sdpa.attend, "varlen": sdpa.attend_varlen}


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
    nonfinite: Bool[Tensor, "B S"] | None = None,
    options: AttentionOptions = AttentionOptions(),  # noqa: B008 - frozen
) -> Float[Tensor, "B T N U"]:
    """Scaled dot-product attention (Vaswani et al. 2017, §3.2.1) of ``q`` over the keys that ``rule`` lets it see.

    Query head n reads key/value head ``n // (N / K)`` (grouped-query attention, Ainslie et al. 2023). ``q_coords`` and
    ``k_coords`` are the positions and documents of queries and keys. ``bias`` is added to scores after the softcap;
    ``sink_logits`` join each softmax as a key without a value. ``nonfinite`` says that keys and values are finite,
    because a cache or :func:`~pellucid.nn.backends.inputs.replace_nonfinite` put 0 in the place of NaN and Inf in
    these slots; without it, this function does so.

    A query that sees nothing returns exactly 0. Hidden content never matters, not even NaN; a NaN that is visible
    makes the output NaN.

    Raises:
        ShapeError: sizes that do not fit.
        UnsupportedError: the backend named in ``options`` does not support the call.
    """
    call = AttentionInputs(q_BTNH, k_BSKH, v_BSKU, rule, q_coords, k_coords, bias, sink_logits, options, nonfinite)
    if not torch.compiler.is_compiling():
        kernel, call = _prepare(call)
        return kernel(call)
    # one operator of the graph, where the rule has a text and nothing random would be computed twice
    return torch.compiler.disable(_run)(call) if rule.is_slot_mask or options.dropout else _compiled(call)


def _prepare(call: AttentionInputs) -> tuple[Callable[[AttentionInputs], Tensor], AttentionInputs]:
    """The backend's function for this call, and the call as backends get it: shapes checked, numbers finite."""
    _check(call)
    backend = choose(call) if call.options.backend == "auto" else call.options.backend
    if backend not in _BACKENDS:
        raise UnsupportedError(f"there is no attention backend {backend!r}; choose one of {', '.join(BACKENDS)}")
    return _BACKENDS[backend], with_finite_inputs(call)


def _run(call: AttentionInputs) -> Tensor:
    kernel, call = _prepare(call)
    return kernel(call)


def choose(call: AttentionInputs) -> str:
    """The fastest backend that supports the call, from layout facts alone."""
    if sdpa.unsupported_reason(call):
        return "reference"
    if sdpa.varlen_unsupported_reason(call) is None and sdpa.varlen_is_profitable(call):
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
    return reference.probabilities(with_finite_inputs(call))


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


# ---- compiled graphs

_recent: deque[Coordinates] = deque(maxlen=2)  # of queries and of keys: the layers of a pass share masks and layouts

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sink_logits, Tensor q_positions, Tensor q_segments, "
    "Tensor? q_groups, Tensor k_positions, Tensor k_segments, Tensor? k_groups, Tensor? nonfinite, str rule, "
    "float? scale, float? softcap, str backend"
)


def _compiled(call: AttentionInputs) -> Tensor:
    """The call as one operator of the graph that is being compiled.

    It takes tensors, the rule's text and numbers, so that one graph serves every batch, whatever its layout; what it
    does inside is what attention does without a compiler. Its backward pass computes the forward pass again: nothing
    but the operator's inputs is stored for it.
    """
    q, k, v = _autocast(call)
    queries, keys, options = call.q_coords, call.k_coords, call.options
    out: Tensor = _forward(
        q, k, v, call.bias, call.sink_logits, queries.positions, queries.segments, queries.groups, keys.positions,
        keys.segments, keys.groups, call.nonfinite, call.rule.describe(), options.scale, options.softcap,
        options.backend,
    )  # fmt: skip
    return out


def _autocast(call: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast, queries, keys and values in the type that torch's own attention would cast them to."""
    kind = call.q.device.type
    if not torch.is_autocast_enabled(kind) or call.options.softcap is not None or call.sink_logits is not None:
        return call.q, call.k, call.v
    dtype = torch.get_autocast_dtype(kind)
    return call.q.to(dtype), call.k.to(dtype), call.v.to(dtype)


@torch.library.custom_op("pellucid::attend", mutates_args=(), schema=f"({_INPUTS}) -> Tensor")
def _forward(*inputs: Any) -> Tensor:
    out = _run(_call(*inputs))
    return out.clone() if out._is_view() else out


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])


@torch.library.custom_op(
    "pellucid::attend_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, bias and sink logits; an empty tensor for what is not there."""
    with torch.enable_grad(), _above_autograd():
        leaves: list[Any] = [None if x is None else x.detach().requires_grad_() for x in inputs[:5]]
        every: list[Any] = [*leaves, *inputs[5:]]
        out = _run(_call(*every))
        given = [x for x in leaves if x is not None]
        found = iter(torch.autograd.grad(out, given, grad, materialize_grads=True))
    return tuple(grad.new_empty(0) if x is None else next(found).clone() for x in leaves)


def _above_autograd() -> Any:
    """Record operations for gradients again: the body of an operator runs below autograd."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    keys = (DispatchKey.AutogradCPU, DispatchKey.AutogradCUDA, DispatchKey.AutogradOther, DispatchKey.ADInplaceOrView)
    for key in keys:
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


@_backward.register_fake
def _(grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(grad.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs[:5])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    ctx.there = [isinstance(x, Tensor) for x in inputs]
    ctx.others = [x for x in inputs if not isinstance(x, Tensor)]
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    tensors, others = iter(ctx.saved_tensors), iter(ctx.others)
    inputs = [next(tensors) if there else next(others) for there in ctx.there]
    found = _backward(grad, *inputs)
    return (*(g if x is not None else None for g, x in zip(found, inputs, strict=False)), *([None] * (len(inputs) - 5)))


_forward.register_autograd(_gradients, setup_context=_keep)


def _call(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink_logits: Tensor | None, q_positions: Tensor,
    q_segments: Tensor, q_groups: Tensor | None, k_positions: Tensor, k_segments: Tensor, k_groups: Tensor | None,
    nonfinite: Tensor | None, rule: str, scale: float | None, softcap: float | None, backend: Any,
) -> AttentionInputs:  # fmt: skip
    queries = _coordinates(q_positions, q_segments, q_groups)
    keys = _coordinates(k_positions, k_segments, k_groups)
    options = AttentionOptions(scale=scale, softcap=softcap, backend=backend)
    return AttentionInputs(q, k, v, parse(rule), queries, keys, bias, sink_logits, options, nonfinite)


def _coordinates(positions: Tensor, segments: Tensor, groups: Tensor | None) -> Coordinates:
    """Coordinates of these tensors; on a CPU those of a layer before, where they are the same numbers."""
    if positions.device.type != "cpu":
        return Coordinates(positions, segments, groups)
    for known in _recent:
        pairs = ((known.positions, positions), (known.segments, segments), (known.groups, groups))
        if all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs):
            return known
    _recent.append(Coordinates(positions.clone(), segments.clone(), None if groups is None else groups.clone()))
    return _recent[-1]
