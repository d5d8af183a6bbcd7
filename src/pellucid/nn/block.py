"""One layer: attention mixes tokens, the feed-forward network mixes features, both on a residual stream.

Where the norms sit changes gradients, initialisation and the final norm; a block of one placement is never the
other with a flag flipped, so each is a class of its own. ``needs_final_norm`` says what its stack must end with, and
:mod:`pellucid.nn.init` how its weights start. Blocks whose halves run side by side: :mod:`pellucid.nn.parallel_block`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from pellucid.errors import InputError, UnsupportedError
from pellucid.nn.attention import EncoderOutput
from pellucid.nn.cache import LayerCache
from pellucid.nn.moe.routing import RouterStatsSink
from pellucid.nn.residual import CastLike, Scale, Upcast
from pellucid.shapes import Float, Tensor
from pellucid.visibility import Coordinates


class Block(nn.Module):
    """What every block shares.

    ``residual_multiplier`` scales each branch before it joins the stream (Granite). ``residual_dtype`` keeps the stream in
    that type or a wider one, float32 for example, whatever the weights are in; branches run in the type of the
    attention's weights. A feed-forward part with ``routes = True`` is also told where the tokens are, and given the
    caller's ``router_stats``.

    A block with ``cross_attention`` and ``cross_norm`` reads a ``memory`` between its halves, in the way of its halves;
    parallel blocks have no place for it. ``bias`` is added to the scores of self-attention.
    """

    needs_final_norm: ClassVar[bool]
    takes_memory: ClassVar[bool] = True
    attention: nn.Module
    cross_attention: nn.Module
    cross_norm: nn.Module
    ffn: nn.Module

    def _cross(self, **parts: nn.Module | None) -> None:
        """Cross-attention and its norms: all or none."""
        missing = sorted(name for name, part in parts.items() if part is None)
        self.has_memory = not missing
        if self.has_memory and not self.takes_memory:
            raise UnsupportedError(
                f"{type(self).__name__} got cross-attention, but its halves run side by side and leave no place for "
                "it; take a pre-norm, post-norm or sandwich block"
            )
        if missing and len(missing) < len(parts):
            given = ", ".join(sorted(parts.keys() - set(missing)))
            raise InputError(f"a block got {given}, but no {', '.join(missing)}; give all of them, or none")
        for name, part in parts.items():
            if part is not None:
                setattr(self, name, part)

    def _reads(self, memory: EncoderOutput | None) -> bool:
        if memory is None and self.has_memory:
            raise InputError(
                "this block has cross-attention, but got no memory; give memory=EncoderOutput(hidden_states, coordinates)"
            )
        if memory is not None and not self.has_memory:
            raise InputError("this block got a memory, but has no cross-attention; give it one, or leave memory out")
        return self.has_memory

    def _finish(self, dropout: float, residual_multiplier: float, residual_dtype: torch.dtype | None) -> None:
        """What comes after norms and branches, whose order in a block is that of its state."""
        self._feed = _routed if getattr(self.ffn, "routes", False) else _plain
        self.residual_dropout: nn.Module = nn.Dropout(dropout)
        if residual_multiplier != 1.0:
            self.residual_dropout = nn.Sequential(nn.Dropout(dropout), Scale(residual_multiplier))
        self.to_stream: nn.Module = nn.Identity() if residual_dtype is None else Upcast(residual_dtype)
        self.to_branch: nn.Module = nn.Identity() if residual_dtype is None else CastLike(self.attention)


class TwoNormBlock(Block):
    """What blocks with one norm for each half share."""

    def __init__(
        self,
        *,
        attention: nn.Module,
        ffn: nn.Module,
        attn_norm: nn.Module,
        ffn_norm: nn.Module,
        cross_attention: nn.Module | None = None,
        cross_norm: nn.Module | None = None,
        dropout: float,
        residual_multiplier: float = 1.0,
        residual_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.attn_norm = attn_norm
        self.attention = attention
        self._cross(cross_norm=cross_norm, cross_attention=cross_attention)
        self.ffn_norm = ffn_norm
        self.ffn = ffn
        self._finish(dropout, residual_multiplier, residual_dtype)


class PreNormBlock(TwoNormBlock):
    """``x + f(norm(x))`` for each half (Xiong et al. 2020).

    The stream itself is never normalised, so the model needs a final norm.
    """

    needs_final_norm = True

    def forward(
        self,
        x_BTD: Float[Tensor, "B T D"],
        queries: Coordinates,
        keys: Coordinates,
        cache: LayerCache | None = None,
        *,
        bias: Tensor | None = None,
        memory: EncoderOutput | None = None,
        router_stats: RouterStatsSink | None = None,
    ) -> Float[Tensor, "B T D"]:
        x_BTD = self.to_stream(x_BTD)
        h_BTD = self.to_branch(self.attn_norm(x_BTD))
        x_BTD = x_BTD + self.residual_dropout(self.attention(h_BTD, queries, keys, cache, bias))
        if self._reads(memory):
            h_BTD = self.to_branch(self.cross_norm(x_BTD))
            x_BTD = x_BTD + self.residual_dropout(self.cross_attention(h_BTD, queries, memory, cache))
        h_BTD = self.to_branch(self.ffn_norm(x_BTD))
        return x_BTD + self.residual_dropout(self._feed(self.ffn, h_BTD, queries, router_stats))


class PostNormBlock(TwoNormBlock):
    """``norm(x + f(x))`` for each half, as in Vaswani et al. 2017 §3.1; its last norm is the final norm."""

    needs_final_norm = False

    def forward(
        self,
        x_BTD: Float[Tensor, "B T D"],
        queries: Coordinates,
        keys: Coordinates,
        cache: LayerCache | None = None,
        *,
        bias: Tensor | None = None,
        memory: EncoderOutput | None = None,
        router_stats: RouterStatsSink | None = None,
    ) -> Float[Tensor, "B T D"]:
        x_BTD = self.to_stream(x_BTD)
        h_BTD = self.attention(self.to_branch(x_BTD), queries, keys, cache, bias)
        x_BTD = self.attn_norm(x_BTD + self.residual_dropout(h_BTD))
        if self._reads(memory):
            h_BTD = self.cross_attention(self.to_branch(x_BTD), queries, memory, cache)
            x_BTD = self.cross_norm(x_BTD + self.residual_dropout(h_BTD))
        h_BTD = self._feed(self.ffn, self.to_branch(x_BTD), queries, router_stats)
        return self.ffn_norm(x_BTD + self.residual_dropout(h_BTD))


class DeepNormBlock(TwoNormBlock):
    """``norm(α x + f(x))`` for each half (Wang et al. 2022 fig. 2); ``init.deep_norm_constants`` gives α and its β."""

    needs_final_norm = False

    def __init__(self, *, alpha: float, **parts: Any) -> None:
        super().__init__(**parts)
        self.alpha = alpha

    def forward(
        self,
        x_BTD: Float[Tensor, "B T D"],
        queries: Coordinates,
        keys: Coordinates,
        cache: LayerCache | None = None,
        *,
        bias: Tensor | None = None,
        memory: EncoderOutput | None = None,
        router_stats: RouterStatsSink | None = None,
    ) -> Float[Tensor, "B T D"]:
        x_BTD = self.to_stream(x_BTD)
        h_BTD = self.attention(self.to_branch(x_BTD), queries, keys, cache, bias)
        x_BTD = self.attn_norm(self.alpha * x_BTD + self.residual_dropout(h_BTD))
        if self._reads(memory):
            h_BTD = self.cross_attention(self.to_branch(x_BTD), queries, memory, cache)
            x_BTD = self.cross_norm(self.alpha * x_BTD + self.residual_dropout(h_BTD))
        h_BTD = self._feed(self.ffn, self.to_branch(x_BTD), queries, router_stats)
        return self.ffn_norm(self.alpha * x_BTD + self.residual_dropout(h_BTD))

    def extra_repr(self) -> str:
        return f"alpha={self.alpha:g}"


class SandwichBlock(Block):
    """``x + norm(f(norm(x)))`` for each half (Ding et al. 2021; Gemma 2, GLM 4).

    With ``nn.Identity()`` as ``attn_norm`` and ``ffn_norm``, branches are normalised on leaving alone (OLMo 2).
    """

    needs_final_norm = True
    cross_post_norm: nn.Module

    def __init__(
        self,
        *,
        attention: nn.Module,
        ffn: nn.Module,
        attn_norm: nn.Module,
        attn_post_norm: nn.Module,
        ffn_norm: nn.Module,
        ffn_post_norm: nn.Module,
        cross_attention: nn.Module | None = None,
        cross_norm: nn.Module | None = None,
        cross_post_norm: nn.Module | None = None,
        dropout: float,
        residual_multiplier: float = 1.0,
        residual_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.attn_norm = attn_norm
        self.attention = attention
        self.attn_post_norm = attn_post_norm
        self._cross(cross_norm=cross_norm, cross_attention=cross_attention, cross_post_norm=cross_post_norm)
        self.ffn_norm = ffn_norm
        self.ffn = ffn
        self.ffn_post_norm = ffn_post_norm
        self._finish(dropout, residual_multiplier, residual_dtype)

    def forward(
        self,
        x_BTD: Float[Tensor, "B T D"],
        queries: Coordinates,
        keys: Coordinates,
        cache: LayerCache | None = None,
        *,
        bias: Tensor | None = None,
        memory: EncoderOutput | None = None,
        router_stats: RouterStatsSink | None = None,
    ) -> Float[Tensor, "B T D"]:
        x_BTD = self.to_stream(x_BTD)
        h_BTD = self.attention(self.to_branch(self.attn_norm(x_BTD)), queries, keys, cache, bias)
        x_BTD = x_BTD + self.residual_dropout(self.attn_post_norm(h_BTD))
        if self._reads(memory):
            h_BTD = self.cross_attention(self.to_branch(self.cross_norm(x_BTD)), queries, memory, cache)
            x_BTD = x_BTD + self.residual_dropout(self.cross_post_norm(h_BTD))
        h_BTD = self._feed(self.ffn, self.to_branch(self.ffn_norm(x_BTD)), queries, router_stats)
        return x_BTD + self.residual_dropout(self.ffn_post_norm(h_BTD))


def _plain(ffn: nn.Module, x_BTD: Tensor, _coords: Coordinates, _router_stats: RouterStatsSink | None) -> Tensor:
    return ffn(x_BTD)


def _routed(ffn: nn.Module, x_BTD: Tensor, coords: Coordinates, router_stats: RouterStatsSink | None) -> Tensor:
    return ffn(x_BTD, coords, router_stats)
