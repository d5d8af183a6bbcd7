"""Using a model: sampling, the decoding loop, text as whole characters.

``GenerationParams``       what one request asks for
``decode, generate_ids``   the loop on token ids
``generate, stream``       the same on texts, for anything with ``.model`` and ``.tokenizer``
"""

from pellucid.data.chat import encode_prompt
from pellucid.generation.decode import StepResult, decode, generate_ids
from pellucid.generation.params import GenerationParams
from pellucid.generation.text import Completion, TextStream, generate, stream

__all__ = [
    "Completion",
    "GenerationParams",
    "StepResult",
    "TextStream",
    "decode",
    "encode_prompt",
    "generate",
    "generate_ids",
    "stream",
]
