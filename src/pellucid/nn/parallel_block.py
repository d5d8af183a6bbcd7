"""Layers whose attention and feed-forward network run side by side from one stream. They read no memory."""

from __future__ import annotations

import torch
from torch import nn

from pellucid.nn.attention import EncoderOutput
from pellucid.nn.block import Block, TwoNormBlock
from pellucid.nn.cache import LayerCache
from pellucid.nn.moe.routing import RouterStatsSink
from pellucid.shapes import Float, Tensor
from pellucid.visibility import Coordinates


class ParallelBlock(Block):
    """``x + attention(norm(x)) + ffn(norm(x))``, both from one norm (Wang & Komatsuzaki 2021, GPT-J; Phi, Cohere)."""

    needs_final_norm = True
    takes_memory = False

    def __init__(
        self,
        *,
        attention: nn.Module,
        ffn: nn.Module,
        norm: nn.Module,
        cross_attention: nn.Module | None = None,
        cross_norm: nn.Module | None = None,
        dropout: float,
        residual_multiplier: float = 1.0,
        residual_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.norm = norm
        self.attention = attention
        self._cross(cross_norm=cross_norm, cross_attention=cross_attention)
        self.ffn = ffn
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
        self._reads(memory)
        x_BTD = self.to_stream(x_BTD)
        h_BTD = self.to_branch(self.norm(x_BTD))
        mixed_BTD = self.residual_dropout(self.attention(h_BTD, queries, keys, cache, bias))
        return x_BTD + mixed_BTD + self.residual_dropout(self._feed(self.ffn, h_BTD, queries, router_stats))


class ParallelTwoNormBlock(TwoNormBlock):
    """``x + attention(norm₁(x)) + ffn(norm₂(x))`` (Black et al. 2022 §2.1.2, GPT-NeoX; Falcon 40B)."""

    needs_final_norm = True
    takes_memory = False

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
        self._reads(memory)
        x_BTD = self.to_stream(x_BTD)
        h_BTD = self.to_branch(self.attn_norm(x_BTD))
        mixed_BTD = self.residual_dropout(self.attention(h_BTD, queries, keys, cache, bias))
        h_BTD = self.to_branch(self.ffn_norm(x_BTD))
        return x_BTD + mixed_BTD + self.residual_dropout(self._feed(self.ffn, h_BTD, queries, router_stats))
