"""Mathematics only: parts that take plain numbers and can be used in anybody's model.

``attend``          the only function that runs attention
``GroupedQueryAttention`` ``MLA`` ``CrossAttention``                                how tokens read each other
``DenseFFN`` ``GatedFFN`` ``PreNormBlock`` ``PostNormBlock``                        what else a layer is made of
``Rotary`` ``LearnedPositions`` ``SinusoidalPositions``             where a token is
``ContiguousCache``  keys and values of past tokens, and their coordinates
``linear_cross_entropy``  the loss, as a sum and a count
``from_torch``       torch's own layers as parts of ours, with their weights
"""

from pellucid.nn.attend import AttentionOptions, attend, probabilities
from pellucid.nn.attention import CrossAttention, EncoderOutput, GroupedQueryAttention, LayerContext
from pellucid.nn.block import PostNormBlock, PreNormBlock
from pellucid.nn.cache import ContiguousCache
from pellucid.nn.embedding import TokenEmbedding, zero_padding
from pellucid.nn.ffn import DenseFFN, GatedFFN
from pellucid.nn.losses import Loss, linear_cross_entropy
from pellucid.nn.mla import MLA
from pellucid.nn.norms import LayerNorm, RMSNorm
from pellucid.nn.positions import LearnedPositions, Rotary, SinusoidalPositions
from pellucid.nn.torch_layers import from_torch

__all__ = [
    "MLA",
    "AttentionOptions",
    "ContiguousCache",
    "CrossAttention",
    "DenseFFN",
    "EncoderOutput",
    "GatedFFN",
    "GroupedQueryAttention",
    "LayerContext",
    "LayerNorm",
    "LearnedPositions",
    "Loss",
    "PostNormBlock",
    "PreNormBlock",
    "RMSNorm",
    "Rotary",
    "SinusoidalPositions",
    "TokenEmbedding",
    "attend",
    "from_torch",
    "linear_cross_entropy",
    "probabilities",
    "zero_padding",
]
