"""Beam search on texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pellucid.generation.beam import Hypothesis, beam_search
from pellucid.generation.completion import ScoredCompletion
from pellucid.generation.inputs import HasModelAndTokenizer, Prompt, Tokenizer, model_inputs, refuse_beside, with_end
from pellucid.generation.params import BeamParams


def generate_n_best(
    checkpoint: HasModelAndTokenizer,
    prompts: Sequence[Prompt],
    params: BeamParams | None = None,
    *,
    start_id: int | None = None,
    use_cache: bool = True,
    **fields: Any,
) -> list[list[ScoredCompletion]]:
    """For each prompt ``num_return_sequences`` completions, best first. ``fields`` are those of :class:`BeamParams`.

    The tokenizer's end-of-text token ends a sequence. For an encoder–decoder the texts are sources, and its decoder
    begins with ``start_id`` (None: the tokenizer's begin token).
    """
    refuse_beside(params, fields)
    given = BeamParams(**fields) if params is None else params
    ask = model_inputs(checkpoint, prompts, start_id)
    full = with_end(given, ask.tokenizer.eos_id)
    found = beam_search(
        checkpoint.model, ask.prompts, full, sources=ask.sources, use_cache=use_cache, vocab_size=ask.vocab_size
    )
    return [[_completion(ask.tokenizer, hypothesis) for hypothesis in row] for row in found]


def _completion(tokenizer: Tokenizer, found: Hypothesis) -> ScoredCompletion:
    said = found.tokens[:-1] if found.finish_reason == "stop" else found.tokens
    text = b"".join(map(tokenizer.token_bytes, said)).decode("utf-8", "replace")
    return ScoredCompletion(text, found.tokens, found.logprobs, found.finish_reason, found.score)
