"""Attention over keys and values with heads of their own: self-attention, and cross-attention to a memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from pellucid.errors import InputError, ShapeError
from pellucid.nn.attend import AttentionOptions, Backend, attend, probabilities
from pellucid.nn.cache import LayerCache
from pellucid.nn.embedding import zero_padding
from pellucid.nn.positions import Rotary
from pellucid.shapes import Float, Tensor
from pellucid.visibility import Coordinates, Rule, full

Projection = Literal["q", "k", "v", "o"]
NormOver = Literal["head", "projection"]


class _Attention(nn.Module):
    """What both kinds share: four projections, with their biases, limits and norms.

    ``biases`` names the projections that have one. ``clip`` clamps queries, keys and values to ±clip after projection
    (MPT, DBRX, OLMo). ``q_norm`` and ``k_norm`` see one head's features at a time (``norm_over="head"``) or those of
    all heads together (``"projection"``: OLMo 2).
    """

    def __init__(
        self,
        hidden_size: int,
        encoder_hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        biases: Collection[Projection],
        q_norm: nn.Module | None,
        k_norm: nn.Module | None,
        norm_over: NormOver,
        clip_qkv: float | None,
        softcap: float | None,
        scale: float | None,
        dropout: float,
        backend: Backend,
    ) -> None:
        super().__init__()
        if unknown := set(biases) - {"q", "k", "v", "o"}:
            raise InputError(f"biases names {sorted(unknown)}, but projections with a bias are q, k, v and o")
        if norm_over not in ("head", "projection"):
            raise InputError(f"norm_over is {norm_over!r}; choose head or projection")
        if clip_qkv is not None and not clip_qkv > 0:
            raise InputError(f"clip_qkv is {clip_qkv}, but must be above 0; leave it out for none")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.norm_over, self.clip_qkv, self.softcap, self.scale = norm_over, clip_qkv, softcap, scale
        self.dropout = dropout
        self.backend: Backend = backend
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias="q" in biases)
        self.k_proj = nn.Linear(encoder_hidden_size, num_kv_heads * head_dim, bias="k" in biases)
        self.v_proj = nn.Linear(encoder_hidden_size, num_kv_heads * head_dim, bias="v" in biases)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias="o" in biases)
        self.q_norm: nn.Module = nn.Identity() if q_norm is None else q_norm
        self.k_norm: nn.Module = nn.Identity() if k_norm is None else k_norm

    def _projected(self, projection: nn.Module, x_BTD: Tensor) -> Tensor:
        y_BTX: Tensor = projection(x_BTD)
        if self.clip_qkv is not None:
            y_BTX = y_BTX.clamp(-self.clip_qkv, self.clip_qkv)
        return y_BTX.unflatten(-1, (-1, self.head_dim))

    def _normed(self, norm: nn.Module, y_BTNH: Tensor) -> Tensor:
        normed: Tensor = norm(y_BTNH) if self.norm_over == "head" else norm(y_BTNH.flatten(-2)).view_as(y_BTNH)
        return normed


class GroupedQueryAttention(_Attention):
    """Self-attention with N query heads that share K key/value heads (Ainslie et al. 2023).

    K = N is multi-head attention, K = 1 multi-query attention. ``rule`` says who may see whom in this layer. Queries
    and keys are projected, clipped, normalised and turned, in this order; ``norm_after_rotary`` turns first (Llama 4,
    Hunyuan). ``softcap`` c bends scores to ``c · tanh(score / c)`` (Gemma 2). ``sinks`` learns one logit a head that
    joins each softmax as a key without a value (gpt-oss). ``scale`` defaults to ``H ** -0.5``.

    Raises:
        InputError: a bias, norm or limit that there is not.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rule: Rule,
        rotary: Rotary | None = None,
        biases: Collection[Projection] = (),
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        norm_over: NormOver = "head",
        norm_after_rotary: bool = False,
        clip_qkv: float | None = None,
        softcap: float | None = None,
        attention_sinks: bool = False,
        scale: float | None = None,
        dropout: float = 0.0,
        backend: Backend = "auto",
    ) -> None:
        super().__init__(
            hidden_size, hidden_size, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, biases=biases, q_norm=q_norm,
            k_norm=k_norm, norm_over=norm_over, clip_qkv=clip_qkv, softcap=softcap, scale=scale, dropout=dropout,
            backend=backend,
        )  # fmt: skip
        self.rule = rule
        self.rotary = rotary
        self.norm_after_rotary = norm_after_rotary
        self.sinks = nn.Parameter(torch.zeros(num_heads)) if attention_sinks else None

    @property
    def cache_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """What one slot takes in a cache: keys and values."""
        return (self.num_kv_heads, self.head_dim), (self.num_kv_heads, self.head_dim)

    def forward(
        self,
        x_BTD: Float[Tensor, "B T D"],
        queries: Coordinates,
        keys: Coordinates,
        cache: LayerCache | None = None,
        bias: Float[Tensor, "#B #N T S"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """``queries`` say where ``x`` is; ``keys`` the same, or all that the ``cache`` holds once ``x`` is in it.

        ``bias`` is added to scores.
        """
        q_BTNH, k_BTKH = self._queries_and_keys(x_BTD, queries)
        v_BTKH = self._projected(self.v_proj, x_BTD)
        k_BSKH, v_BSKH = (k_BTKH, v_BTKH) if cache is None else cache.append(k_BTKH, v_BTKH)
        out_BTNH = attend(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            rule=self.rule,
            q_coords=queries,
            k_coords=keys,
            bias=bias,
            sink_logits=self.sinks,
            options=AttentionOptions(
                scale=self.scale,
                softcap=self.softcap,
                dropout=self.dropout if self.training else 0.0,
                backend=self.backend,
            ),
        )
        return self.o_proj(out_BTNH.flatten(-2))

    def weights(
        self, x_BTD: Float[Tensor, "B T D"], coords: Coordinates, bias: Float[Tensor, "#B #N T T"] | None = None
    ) -> Float[Tensor, "B N T T"]:
        """What each head attends to in ``x``, by the reference path; the weight of what is hidden is exactly 0."""
        q_BTNH, k_BTKH = self._queries_and_keys(x_BTD, coords)
        return probabilities(
            q_BTNH,
            k_BTKH,
            rule=self.rule,
            q_coords=coords,
            k_coords=coords,
            bias=bias,
            sink_logits=self.sinks,
            options=AttentionOptions(scale=self.scale, softcap=self.softcap),
        )

    def _queries_and_keys(self, x_BTD: Tensor, coords: Coordinates) -> tuple[Tensor, Tensor]:
        q_BTNH = self._norm_and_rotate(self.q_norm, self._projected(self.q_proj, x_BTD), coords)
        k_BTKH = self._norm_and_rotate(self.k_norm, self._projected(self.k_proj, x_BTD), coords)
        return q_BTNH, k_BTKH

    def _norm_and_rotate(self, norm: nn.Module, y_BTNH: Tensor, coords: Coordinates) -> Tensor:
        if self.rotary is None:
            return self._normed(norm, y_BTNH)
        if self.norm_after_rotary:
            return self._normed(norm, self.rotary(y_BTNH, coords))
        return self.rotary(self._normed(norm, y_BTNH), coords)


@dataclass(frozen=True, eq=False)
class EncoderOutput:
    """What cross-attention reads: states, and where they are. Without states, a cache holds their keys and values.

    Raises:
        ShapeError: states that are not where ``coordinates`` says.
    """

    hidden_states: Float[Tensor, "B S D"] | None
    coordinates: Coordinates

    def __post_init__(self) -> None:
        if self.hidden_states is not None and tuple(self.hidden_states.shape[:2]) != self.coordinates.shape:
            raise ShapeError(
                f"the memory's states are {tuple(self.hidden_states.shape[:2])}, but its coordinates are {self.coordinates.shape}; give one "
                "coordinate a slot"
            )


class CrossAttention(_Attention):
    """Attention of one sequence to another (Vaswani et al. 2017 §3.2.3): a decoder's to its encoder's states.

    Document d of the queries sees all of document d of the memory: never causal, never windowed, and nothing of
    other documents or padding. ``encoder_hidden_size`` is the width of the memory where it differs. With a cache, the memory's
    keys and values are computed at the first pass and kept.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        encoder_hidden_size: int | None = None,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        biases: Collection[Projection] = (),
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        norm_over: NormOver = "head",
        clip_qkv: float | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        backend: Backend = "auto",
    ) -> None:
        super().__init__(
            hidden_size, hidden_size if encoder_hidden_size is None else encoder_hidden_size, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
            biases=biases, q_norm=q_norm, k_norm=k_norm, norm_over=norm_over, clip_qkv=clip_qkv, softcap=softcap, scale=scale,
            dropout=dropout, backend=backend,
        )  # fmt: skip
        self.rule = full()

    def forward(
        self,
        x_BTD: Float[Tensor, "B T D"],
        queries: Coordinates,
        memory: EncoderOutput,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "B T D"]:
        """``x``, which is where ``queries`` say, attends to ``memory``.

        Raises:
            InputError: a memory without states, and no cache that holds what became of them.
        """
        q_BTNH = self._normed(self.q_norm, self._projected(self.q_proj, x_BTD))
        k_BSKH, v_BSKH = self._keys_and_values(memory, cache)
        out_BTNH = attend(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            rule=self.rule,
            q_coords=queries,
            k_coords=memory.coordinates,
            options=AttentionOptions(
                scale=self.scale,
                softcap=self.softcap,
                dropout=self.dropout if self.training else 0.0,
                backend=self.backend,
            ),
        )
        return self.o_proj(out_BTNH.flatten(-2))

    def weights(
        self, x_BTD: Float[Tensor, "B T D"], queries: Coordinates, memory: EncoderOutput
    ) -> Float[Tensor, "B N T S"]:
        """What each head attends to in ``memory``, by the reference path."""
        q_BTNH = self._normed(self.q_norm, self._projected(self.q_proj, x_BTD))
        k_BSKH, _ = self._keys_and_values(memory, None)
        return probabilities(
            q_BTNH,
            k_BSKH,
            rule=self.rule,
            q_coords=queries,
            k_coords=memory.coordinates,
            options=AttentionOptions(scale=self.scale, softcap=self.softcap),
        )

    def _keys_and_values(self, memory: EncoderOutput, cache: LayerCache | None) -> tuple[Tensor, Tensor]:
        if memory.hidden_states is None:
            if cache is None or cache.cross is None:
                raise InputError(
                    "this memory has no states, and no cache holds their keys and values; give EncoderOutput(hidden_states, coordinates) at "
                    "the first pass"
                )
            return cache.cross
        # padding is silenced, so that not even NaN there reaches a gradient; states may come from a wider stream
        x_BSD = zero_padding(memory.hidden_states, memory.coordinates).to(self.k_proj.weight.dtype)
        k_BSKH = self._normed(self.k_norm, self._projected(self.k_proj, x_BSD))
        v_BSKH = self._projected(self.v_proj, x_BSD)
        if cache is not None:
            cache.cross = k_BSKH.detach(), v_BSKH.detach()
        return k_BSKH, v_BSKH
