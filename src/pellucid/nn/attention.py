"""Multi-head attention: of a sequence to itself, and of a decoder to its encoder's output."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from pellucid.errors import ArgumentError, ShapeError
from pellucid.nn.attend import AttentionOptions, attend, probabilities
from pellucid.nn.cache import LayerCache
from pellucid.nn.embedding import zero_padding
from pellucid.nn.moe.router import LoadBalanceStats
from pellucid.nn.positions import Rotary
from pellucid.shapes import Float, Tensor
from pellucid.visibility import Coordinates, Rule, full


@dataclass(frozen=True, eq=False)
class EncoderOutput:
    """What cross-attention reads: hidden states ``[B, S, D]`` and their coordinates.

    Without hidden states, the cache of each layer must have the keys and values made of them.

    Raises:
        ShapeError: hidden states and coordinates of different rows or slots.
    """

    hidden_states: Float[Tensor, "B S D"] | None
    coordinates: Coordinates

    def __post_init__(self) -> None:
        if self.hidden_states is not None and tuple(self.hidden_states.shape[:2]) != self.coordinates.shape:
            raise ShapeError(
                f"the encoder's hidden states are {tuple(self.hidden_states.shape[:2])}, but their coordinates are "
                f"{self.coordinates.shape}; give one coordinate a slot"
            )


@dataclass(frozen=True, eq=False)
class LayerContext:
    """What a layer needs beside its input: where tokens are, and what it reads from or writes to in this pass.

    ``q_coords`` are the coordinates of the input; ``k_coords`` the same, or those of all slots of the ``cache`` once
    the input is appended. ``bias`` is added to the scores of self-attention; ``router_stats`` receives the statistics
    of a mixture of experts.
    """

    q_coords: Coordinates
    k_coords: Coordinates
    encoder_output: EncoderOutput | None = None
    cache: LayerCache | None = None
    bias: Float[Tensor, "#B #N T S"] | None = None
    router_stats: list[LoadBalanceStats] | None = None

    @classmethod
    def of(cls, coords: Coordinates, **fields: Any) -> LayerContext:
        """The context of a pass without a cache: queries and keys are the same tokens."""
        return cls(coords, coords, **fields)


class _Attention(nn.Module):
    """What both kinds share: four projections, with their biases, limits and norms."""

    rule: Rule

    def __init__(
        self,
        hidden_size: int,
        encoder_hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_bias: bool = False,
        k_bias: bool = False,
        v_bias: bool = False,
        o_bias: bool = False,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        norm_over: Literal["head", "projection"] = "head",
        clip_qkv: float | None = None,
        options: AttentionOptions = AttentionOptions(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__()
        if norm_over not in ("head", "projection"):
            raise ArgumentError(f"norm_over is {norm_over!r}; choose head or projection")
        if clip_qkv is not None and not clip_qkv > 0:
            raise ArgumentError(f"clip_qkv is {clip_qkv}, but must be above 0; leave it out for none")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.norm_over, self.clip_qkv, self.options = norm_over, clip_qkv, options
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=q_bias)
        self.k_proj = nn.Linear(encoder_hidden_size, num_kv_heads * head_dim, bias=k_bias)
        self.v_proj = nn.Linear(encoder_hidden_size, num_kv_heads * head_dim, bias=v_bias)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=o_bias)
        self.q_norm: nn.Module = nn.Identity() if q_norm is None else q_norm
        self.k_norm: nn.Module = nn.Identity() if k_norm is None else k_norm

    def _project(self, projection: nn.Module, x_BTD: Tensor) -> Tensor:
        y_BTX: Tensor = projection(x_BTD)
        if self.clip_qkv is not None:
            y_BTX = y_BTX.clamp(-self.clip_qkv, self.clip_qkv)
        return y_BTX.unflatten(-1, (-1, self.head_dim))

    def _normalize(self, norm: nn.Module, y_BTNH: Tensor) -> Tensor:
        normed: Tensor = norm(y_BTNH) if self.norm_over == "head" else norm(y_BTNH.flatten(-2)).view_as(y_BTNH)
        return normed


class GroupedQueryAttention(_Attention):
    """Self-attention with N query heads that share K key/value heads (Ainslie et al. 2023).

    K = N is multi-head attention, K = 1 multi-query attention. Queries and keys are projected, clipped, normalized and
    rotated, in this order.

    Args:
        hidden_size: features of the residual stream.
        rule: who may see whom in this layer.
        rotary: rotates queries and keys to their positions.
        norm_after_rotary: rotate first, then normalize (Llama 4, Hunyuan).
        attention_sinks: learn one logit a head that joins each softmax as a key without a value (gpt-oss).
        num_heads, num_kv_heads, head_dim: heads of queries, heads of keys and values, features of each.
        q_bias, k_bias, v_bias, o_bias: which projections have a bias.
        q_norm, k_norm: norms over one head's features (``norm_over="head"``) or over those of all heads together
            (``"projection"``: OLMo 2).
        clip_qkv: clamps queries, keys and values to ±clip_qkv after projection (MPT, DBRX, OLMo).
        options: scale, softcap, dropout and backend; dropout acts in training mode only.

    Raises:
        ArgumentError: a ``norm_over`` or ``clip_qkv`` outside its range.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        rule: Rule,
        rotary: Rotary | None = None,
        norm_after_rotary: bool = False,
        attention_sinks: bool = False,
        **projections: Any,
    ) -> None:
        super().__init__(hidden_size, hidden_size, **projections)
        self.rule = rule
        self.rotary = rotary
        self.norm_after_rotary = norm_after_rotary
        self.sinks = nn.Parameter(torch.zeros(self.num_heads)) if attention_sinks else None

    @property
    def cache_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The shape of one slot of a cache: keys and values."""
        return (self.num_kv_heads, self.head_dim), (self.num_kv_heads, self.head_dim)

    def forward(self, x_BTD: Float[Tensor, "B T D"], ctx: LayerContext) -> Float[Tensor, "B T D"]:
        """What each token gathers from those that it sees."""
        q_BTNH, k_BSKH = self._queries_and_keys(x_BTD, ctx.q_coords)
        v_BSKH, nonfinite_BS = self._project(self.v_proj, x_BTD), None
        if ctx.cache is not None:
            (k_BSKH, v_BSKH), nonfinite_BS = ctx.cache.append(k_BSKH, v_BSKH)
        out_BTNH = attend(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            rule=self.rule,
            q_coords=ctx.q_coords,
            k_coords=ctx.k_coords,
            bias=ctx.bias,
            sink_logits=self.sinks,
            nonfinite=nonfinite_BS,
            options=options_for(self),
        )
        return self.o_proj(out_BTNH.flatten(-2))

    def weights(self, x_BTD: Float[Tensor, "B T D"], ctx: LayerContext) -> Float[Tensor, "B N T T"]:
        """The attention weights of each head, by the reference path; the weight of a hidden key is exactly 0."""
        q_BTNH, k_BTKH = self._queries_and_keys(x_BTD, ctx.q_coords)
        return probabilities(
            q_BTNH,
            k_BTKH,
            rule=self.rule,
            q_coords=ctx.q_coords,
            k_coords=ctx.q_coords,
            bias=ctx.bias,
            sink_logits=self.sinks,
            options=self.options,
        )

    def _queries_and_keys(self, x_BTD: Tensor, coords: Coordinates) -> tuple[Tensor, Tensor]:
        q_BTNH = self._norm_and_rotate(self.q_norm, self._project(self.q_proj, x_BTD), coords)
        k_BTKH = self._norm_and_rotate(self.k_norm, self._project(self.k_proj, x_BTD), coords)
        return q_BTNH, k_BTKH

    def _norm_and_rotate(self, norm: nn.Module, y_BTNH: Tensor, coords: Coordinates) -> Tensor:
        if self.rotary is None:
            return self._normalize(norm, y_BTNH)
        if self.norm_after_rotary:
            return self._normalize(norm, self.rotary(y_BTNH, coords))
        rotated: Tensor = self.rotary(self._normalize(norm, y_BTNH), coords)
        return rotated


class CrossAttention(_Attention):
    """Attention of one sequence to another (Vaswani et al. 2017 §3.2.3): a decoder's to its encoder's states.

    Document d of the queries sees all of document d of the encoder's output: never causal, never windowed, and nothing
    of other documents or padding. ``encoder_hidden_size`` is the width of those states where it differs. With a cache,
    their keys and values are computed in the first pass and cached. Other arguments: :class:`GroupedQueryAttention`.
    """

    def __init__(self, hidden_size: int, *, encoder_hidden_size: int | None = None, **projections: Any) -> None:
        super().__init__(
            hidden_size, hidden_size if encoder_hidden_size is None else encoder_hidden_size, **projections
        )
        self.rule = full()

    def forward(self, x_BTD: Float[Tensor, "B T D"], ctx: LayerContext) -> Float[Tensor, "B T D"]:
        """What each token gathers from ``ctx.encoder_output``.

        Raises:
            ArgumentError: no hidden states, and no cache with their keys and values.
        """
        q_BTNH, (k_BSKH, v_BSKH, nonfinite_BS), k_coords = self._queries_keys_values(x_BTD, ctx)
        out_BTNH = attend(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            rule=self.rule,
            q_coords=ctx.q_coords,
            k_coords=k_coords,
            nonfinite=nonfinite_BS,
            options=options_for(self),
        )
        return self.o_proj(out_BTNH.flatten(-2))

    def weights(self, x_BTD: Float[Tensor, "B T D"], ctx: LayerContext) -> Float[Tensor, "B N T S"]:
        """The attention weights of each head over ``ctx.encoder_output``, by the reference path."""
        q_BTNH, (k_BSKH, *_), k_coords = self._queries_keys_values(x_BTD, ctx)
        return probabilities(
            q_BTNH, k_BSKH, rule=self.rule, q_coords=ctx.q_coords, k_coords=k_coords, options=self.options
        )

    def _queries_keys_values(
        self, x_BTD: Tensor, ctx: LayerContext
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor | None], Coordinates]:
        source, cache = ctx.encoder_output, ctx.cache
        assert source is not None, "a block checks that there is an encoder's output"
        q_BTNH = self._normalize(self.q_norm, self._project(self.q_proj, x_BTD))
        if source.hidden_states is None:
            if cache is None or cache.cross is None:
                raise ArgumentError(
                    "this encoder output has no hidden states, and no cache has their keys and values; give "
                    "EncoderOutput(hidden_states, coordinates) at the first pass"
                )
            return q_BTNH, cache.cross, source.coordinates
        # padding becomes 0, so that not even NaN there reaches a gradient; states may come from a wider stream
        x_BSD = zero_padding(source.hidden_states, source.coordinates).to(self.k_proj.weight.dtype)
        k_BSKH = self._normalize(self.k_norm, self._project(self.k_proj, x_BSD))
        v_BSKH = self._project(self.v_proj, x_BSD)
        stored = (k_BSKH, v_BSKH, None) if cache is None else cache.append_cross(k_BSKH, v_BSKH)
        return q_BTNH, stored, source.coordinates


def options_for(part: nn.Module) -> AttentionOptions:
    """``part.options``, without dropout in eval mode."""
    options: AttentionOptions = part.options  # type: ignore[assignment]
    return options if part.training or not options.dropout else replace(options, dropout=0.0)
