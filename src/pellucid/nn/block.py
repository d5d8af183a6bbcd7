"""One layer: attention mixes tokens, the feed-forward network mixes features, both on a residual stream.

One forward serves all placements of norms; a placement defines what a branch reads (``_branch_input``) and how its
output joins the stream (``_join``). ``needs_final_norm`` is what a stack of such blocks must end with, and
:mod:`pellucid.nn.init` how its weights start. Blocks whose halves run side by side have a forward of their own.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from pellucid.errors import ArgumentError, UnsupportedError
from pellucid.nn.attention import LayerContext
from pellucid.shapes import Float, Tensor

_ORDER = (
    "norm", "attn_norm", "attention", "attn_post_norm", "cross_norm", "cross_attention", "cross_post_norm",
    "ffn_norm", "ffn", "ffn_post_norm",
)  # fmt: skip
"""The order of a block's parts in its state."""


class Scale(nn.Module):
    """``factor · x``."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x

    def extra_repr(self) -> str:
        return f"{self.factor:g}"


class Upcast(nn.Module):
    """``x`` in ``dtype``, or in its own type where that is wider."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.promote_types(x.dtype, self.dtype))

    def extra_repr(self) -> str:
        return str(self.dtype)


class CastLike(nn.Module):
    """``x`` in the type that the first weight of ``part`` has at the time of the call."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self._part = (part,)  # in a tuple, because it is no child: its weights have an owner already

    def forward(self, x: Tensor) -> Tensor:
        return x.to(next(self._part[0].parameters(), x).dtype)


class Block(nn.Module):
    """What every block shares; each placement of norms is a class of its own.

    With ``cross_attention`` and its norms a block reads ``ctx.encoder_output`` between its halves; parallel blocks
    cannot.

    Args:
        attention: called as ``attention(x_BTD, ctx)``.
        ffn: called as ``ffn(x_BTD)``, or with coordinates and router statistics where it has ``routes = True``.
        cross_attention: called as ``attention``.
        dropout: probability with which a feature of a branch's output is dropped in training.
        residual_multiplier: scales each branch before it joins the stream (Granite).
        residual_dtype: has the stream in that type or a wider one, whatever the weights are in; branches run in the
            type of the attention's weights.
        norms: by the names in ``norm_names``, and in ``cross_norm_names`` with cross-attention.

    Raises:
        ArgumentError: norms that are missing or unknown, or cross-attention without its norms.
        UnsupportedError: cross-attention in a parallel block.
    """

    norm_names: ClassVar[tuple[str, ...]] = ("attn_norm", "ffn_norm")
    cross_norm_names: ClassVar[tuple[str, ...]] = ("cross_norm",)
    needs_final_norm: ClassVar[bool]
    attention: nn.Module
    cross_attention: nn.Module
    ffn: nn.Module

    def __init__(
        self,
        *,
        attention: nn.Module,
        ffn: nn.Module,
        cross_attention: nn.Module | None = None,
        dropout: float,
        residual_multiplier: float = 1.0,
        residual_dtype: torch.dtype | None = None,
        **norms: nn.Module | None,
    ) -> None:
        super().__init__()
        parts = {"attention": attention, "ffn": ffn, "cross_attention": cross_attention, **norms}
        parts = {name: part for name, part in parts.items() if part is not None}
        self._check_parts(set(parts))
        for name in sorted(parts, key=_ORDER.index):
            setattr(self, name, parts[name])
        self.has_cross_attention = cross_attention is not None
        self.residual_dropout: nn.Module = nn.Dropout(dropout)
        if residual_multiplier != 1.0:
            self.residual_dropout = nn.Sequential(nn.Dropout(dropout), Scale(residual_multiplier))
        self.to_stream: nn.Module = nn.Identity() if residual_dtype is None else Upcast(residual_dtype)
        self.to_branch: nn.Module = nn.Identity() if residual_dtype is None else CastLike(self.attention)

    def _check_parts(self, names: set[str]) -> None:
        kind, cross = type(self).__name__, {"cross_attention", *self.cross_norm_names}
        given = names & {"cross_attention", "cross_norm", "cross_post_norm"}
        if given and not self.cross_norm_names:
            raise UnsupportedError(
                f"{kind} got cross-attention, but its halves run side by side and leave no place for it; take a "
                "pre-norm, post-norm or sandwich block"
            )
        if given and (missing := cross - given):
            raise ArgumentError(
                f"a block got {', '.join(sorted(given))}, but no {', '.join(sorted(missing))}; give all "
                "of them, or none"
            )
        if missing := set(self.norm_names) - names:
            raise ArgumentError(f"{kind} needs {', '.join(sorted(missing))}; give a norm, or nn.Identity() for none")
        if unknown := names - {"attention", "ffn", *self.norm_names, *(cross if given else ())}:
            raise ArgumentError(
                f"{kind} has no {', '.join(sorted(unknown))}; its norms are {', '.join(self.norm_names)}"
            )

    def forward(self, x_BTD: Float[Tensor, "B T D"], ctx: LayerContext) -> Float[Tensor, "B T D"]:
        """The stream after this layer.

        Raises:
            ArgumentError: an encoder's output without cross-attention, or cross-attention without one.
        """
        x_BTD = self.to_stream(x_BTD)
        x_BTD = self._join(x_BTD, self.attention(self._branch_input(x_BTD, "attn"), ctx), "attn")
        if self._reads_encoder(ctx):
            x_BTD = self._join(x_BTD, self.cross_attention(self._branch_input(x_BTD, "cross"), ctx), "cross")
        return self._join(x_BTD, self._feed(self._branch_input(x_BTD, "ffn"), ctx), "ffn")

    def _branch_input(self, x_BTD: Tensor, branch: str) -> Tensor:
        """What a branch reads of the stream: here the stream, normalized."""
        h_BTD: Tensor = self.to_branch(self._norm(f"{branch}_norm", x_BTD))
        return h_BTD

    def _join(self, x_BTD: Tensor, y_BTD: Tensor, branch: str) -> Tensor:
        """The stream once a branch's output ``y`` has joined it."""
        return x_BTD + self.residual_dropout(y_BTD)

    def _norm(self, name: str, x_BTD: Tensor) -> Tensor:
        normed: Tensor = getattr(self, name)(x_BTD)
        return normed

    def _feed(self, h_BTD: Tensor, ctx: LayerContext) -> Tensor:
        routed = (ctx.q_coords, ctx.router_stats) if getattr(self.ffn, "routes", False) else ()
        out_BTD: Tensor = self.ffn(h_BTD, *routed)
        return out_BTD

    def _reads_encoder(self, ctx: LayerContext) -> bool:
        if ctx.encoder_output is None and self.has_cross_attention:
            raise ArgumentError(
                "this block has cross-attention, but the context no encoder_output; give an EncoderOutput"
            )
        if ctx.encoder_output is not None and not self.has_cross_attention:
            raise ArgumentError(
                "the context has an encoder_output, but this block no cross-attention; give it one, or leave "
                "encoder_output out"
            )
        return self.has_cross_attention


class PreNormBlock(Block):
    """``x + f(norm(x))`` for each half (Xiong et al. 2020).

    The stream itself is never normalized, so the model needs a final norm.
    """

    needs_final_norm = True


class PostNormBlock(Block):
    """``norm(x + f(x))`` for each half, as in Vaswani et al. 2017 §3.1; its last norm is the final norm."""

    needs_final_norm = False

    def _branch_input(self, x_BTD: Tensor, branch: str) -> Tensor:
        h_BTD: Tensor = self.to_branch(x_BTD)
        return h_BTD

    def _join(self, x_BTD: Tensor, y_BTD: Tensor, branch: str) -> Tensor:
        return self._norm(f"{branch}_norm", x_BTD + self.residual_dropout(y_BTD))


class DeepNormBlock(Block):
    """``norm(α x + f(x))`` for each half (Wang et al. 2022 fig. 2); ``init.deep_norm_constants`` gives α and its β."""

    needs_final_norm = False

    def __init__(self, *, alpha: float, **parts: Any) -> None:
        super().__init__(**parts)
        self.alpha = alpha

    def _branch_input(self, x_BTD: Tensor, branch: str) -> Tensor:
        h_BTD: Tensor = self.to_branch(x_BTD)
        return h_BTD

    def _join(self, x_BTD: Tensor, y_BTD: Tensor, branch: str) -> Tensor:
        return self._norm(f"{branch}_norm", self.alpha * x_BTD + self.residual_dropout(y_BTD))

    def extra_repr(self) -> str:
        return f"alpha={self.alpha:g}"


class SandwichBlock(Block):
    """``x + norm(f(norm(x)))`` for each half (Ding et al. 2021; Gemma 2, GLM 4).

    With ``nn.Identity()`` as ``attn_norm`` and ``ffn_norm``, only the outputs of branches are normalized (OLMo 2).
    """

    norm_names = ("attn_norm", "attn_post_norm", "ffn_norm", "ffn_post_norm")
    cross_norm_names = ("cross_norm", "cross_post_norm")
    needs_final_norm = True

    def _join(self, x_BTD: Tensor, y_BTD: Tensor, branch: str) -> Tensor:
        return x_BTD + self.residual_dropout(self._norm(f"{branch}_post_norm", y_BTD))


class ParallelTwoNormBlock(Block):
    """``x + attention(norm₁(x)) + ffn(norm₂(x))`` (Black et al. 2022 §2.1.2, GPT-NeoX; Falcon 40B)."""

    cross_norm_names = ()
    needs_final_norm = True

    def forward(self, x_BTD: Float[Tensor, "B T D"], ctx: LayerContext) -> Float[Tensor, "B T D"]:
        self._reads_encoder(ctx)
        x_BTD = self.to_stream(x_BTD)
        attn_BTD = self.residual_dropout(self.attention(self._branch_input(x_BTD, "attn"), ctx))
        return x_BTD + attn_BTD + self.residual_dropout(self._feed(self._branch_input(x_BTD, "ffn"), ctx))


class ParallelBlock(ParallelTwoNormBlock):
    """``x + attention(norm(x)) + ffn(norm(x))``, both from one norm (Wang & Komatsuzaki 2021, GPT-J; Phi, Cohere)."""

    norm_names = ("norm",)

    def _branch_input(self, x_BTD: Tensor, branch: str) -> Tensor:
        h_BTD: Tensor = self.to_branch(self._norm("norm", x_BTD))
        return h_BTD
