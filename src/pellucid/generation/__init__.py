"""Using a model: sampling, the decoding loop, text as whole characters.

``GenerationConfig``       what one request asks for, and ``BeamSearchConfig`` what a beam search does
``decode, generate_ids``   the loop on token ids; with ``sources`` for an encoder–decoder
``beam_search``            the best sequences under a length penalty
``generate, stream``       the same on texts, for anything with ``.model`` and ``.tokenizer``; ``generate_n_best``
"""

from pellucid.data.chat import encode_prompt
from pellucid.generation.beam import Hypothesis, beam_search
from pellucid.generation.config import BeamSearchConfig, GenerationConfig
from pellucid.generation.decode import StepResult, decode, generate_ids
from pellucid.generation.text import Completion, ScoredCompletion, TextStream, generate, generate_n_best, stream

__all__ = [
    "BeamSearchConfig",
    "Completion",
    "GenerationConfig",
    "Hypothesis",
    "ScoredCompletion",
    "StepResult",
    "TextStream",
    "beam_search",
    "decode",
    "encode_prompt",
    "generate",
    "generate_ids",
    "generate_n_best",
    "stream",
]
