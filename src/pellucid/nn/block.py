"""One layer: attention mixes tokens, the feed-forward network mixes features, both on a residual stream.

Where the norms sit changes gradients, initialisation and the final norm; a block of one placement is never the
other with a flag flipped, so each is a class of its own.
"""

from __future__ import annotations

from torch import nn

from pellucid.nn.cache import LayerCache
from pellucid.shapes import Float, Tensor
from pellucid.visibility import Coordinates


class _Block(nn.Module):
    def __init__(
        self, *, attention: nn.Module, ffn: nn.Module, attn_norm: nn.Module, ffn_norm: nn.Module, dropout: float
    ) -> None:
        super().__init__()
        self.attn_norm = attn_norm
        self.attention = attention
        self.ffn_norm = ffn_norm
        self.ffn = ffn
        self.residual_dropout = nn.Dropout(dropout)


class PreNormBlock(_Block):
    """``x + f(norm(x))`` for each half; the stream itself is never normalised, so the model needs a final norm."""

    def forward(
        self, x_BTD: Float[Tensor, "B T D"], queries: Coordinates, keys: Coordinates, cache: LayerCache | None = None
    ) -> Float[Tensor, "B T D"]:
        x_BTD = x_BTD + self.residual_dropout(self.attention(self.attn_norm(x_BTD), queries, keys, cache))
        return x_BTD + self.residual_dropout(self.ffn(self.ffn_norm(x_BTD)))


class PostNormBlock(_Block):
    """``norm(x + f(x))`` for each half, as in Vaswani et al. 2017 §3.1; its last norm is the final norm."""

    def forward(
        self, x_BTD: Float[Tensor, "B T D"], queries: Coordinates, keys: Coordinates, cache: LayerCache | None = None
    ) -> Float[Tensor, "B T D"]:
        x_BTD = self.attn_norm(x_BTD + self.residual_dropout(self.attention(x_BTD, queries, keys, cache)))
        return self.ffn_norm(x_BTD + self.residual_dropout(self.ffn(x_BTD)))
