"""Where a token is, told to the model.

``LearnedPositions`` ``SinusoidalPositions`` ``NoPositions`` ``SegmentEmbedding``   added on entry
``Rotary``                    turns queries and keys inside attention; ``scaling`` stretches it to longer text
``RelativeBias`` ``Alibi``    added to attention scores

All of them read positions from coordinates. Angles are computed in float64 and cast last: 16-bit numbers cannot
hold position 257, and no ``model.half()`` can reach a frequency or a slope here, because none is a parameter or a
buffer.
"""

from pellucid.nn.positions.absolute import LearnedPositions, NoPositions, SinusoidalPositions, TokenTypeEmbedding
from pellucid.nn.positions.biases import Alibi, RelativeBias
from pellucid.nn.positions.frequencies import document_lengths, frequencies
from pellucid.nn.positions.rotary import Rotary
from pellucid.nn.positions.scaling import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    PartialScaling,
    RopeScaling,
    YarnScaling,
)

__all__ = [
    "Alibi",
    "DynamicNTKScaling",
    "LearnedPositions",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "NoPositions",
    "PartialScaling",
    "RelativeBias",
    "RopeScaling",
    "Rotary",
    "SinusoidalPositions",
    "TokenTypeEmbedding",
    "YarnScaling",
    "document_lengths",
    "frequencies",
]
