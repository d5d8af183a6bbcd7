"""How a model knows where a token is.

``LearnedPositions`` ``SinusoidalPositions`` ``TokenTypeEmbedding``   added on entry
``Rotary``                    rotates queries and keys inside attention; a scaling adapts it to longer text
``RelativeBias`` ``Alibi``    added to attention scores

All of them read positions from coordinates. Angles are computed in float64 and cast last: 16-bit numbers cannot
hold position 257, and no ``model.half()`` can reach a frequency or a slope here, because none is a parameter or a
buffer.
"""

from pellucid.nn.positions.absolute import LearnedPositions, SinusoidalPositions, TokenTypeEmbedding
from pellucid.nn.positions.biases import Alibi, RelativeBias
from pellucid.nn.positions.rotary import RopeScaling, Rotary, frequencies
from pellucid.nn.positions.scaling import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    PartialScaling,
    YarnScaling,
    document_lengths,
)

__all__ = [
    "Alibi",
    "DynamicNTKScaling",
    "LearnedPositions",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
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
