"""What a request must be before anything is computed for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from pellucid.errors import InputError, LengthError, UnsupportedError
from pellucid.generation.params import BeamParams, GenerationParams

Ids = Sequence[int]


def check_lists(what: str, rows: Sequence[Ids]) -> None:
    """Refuse what is not a list of lists: one flat list of ids, a text, a number.

    What is in the lists is looked at later.
    """
    if isinstance(rows, str) or not hasattr(rows, "__len__"):
        raise InputError(f"{what} is {str(rows)[:40]!r}, but must be a list of lists of token ids, one a row")
    for index, row in enumerate(rows):
        if isinstance(row, str) or not hasattr(row, "__len__"):
            raise InputError(
                f"entry {index} of {what} is {str(row)[:40]!r}, but {what} is a list of lists of token ids, one a row; "
                "put a single row in brackets: [[0, 1]]"
            )


def check_requests(
    model: nn.Module,
    prompts: Sequence[Ids],
    params: Sequence[GenerationParams | BeamParams],
    sources: Sequence[Ids] | None,
    *,
    vocab_size: int | None,
    use_cache: bool,
) -> int:
    """Refuse what ``model`` cannot answer; ``params`` has one for each prompt. Gives how many ids may be chosen."""
    _check_model(model)
    size = _vocabulary(model, vocab_size)
    for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        _check_prompt(model, index, prompt, size, own.stop_token_ids, own.max_new_tokens)
        if use_cache:
            _check_angles(model, index, prompt, own.max_new_tokens)
    _check_sources(model, len(prompts), sources, size)
    return size


def _check_model(model: nn.Module) -> None:
    """Refuse a model that cannot go on from a text, or would not answer the same twice."""
    way = "use a decoder or an encoder-decoder with a language-model head"
    if not callable(getattr(model, "new_cache", None)):
        raise UnsupportedError(f"this {type(model).__name__} cannot go on from a prompt; {way}")
    head = getattr(model, "head_name", "lm_head")
    if head != "lm_head":
        raise UnsupportedError(f"this {type(model).__name__} with the head {head} says no tokens; {way}")
    if model.training:
        raise InputError("the model is in training mode, where dropout would change its answers; call model.eval()")


def _vocabulary(model: nn.Module, requested: int | None) -> int:
    """How many ids may be chosen: those of the model's table, or the first ``requested`` of them."""
    held = int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    if requested is not None and not 1 <= requested <= held:
        raise InputError(f"vocab_size is {requested}, but the model has {held} tokens; give 1 to {held}")
    return held if requested is None else requested


def _check_prompt(
    model: nn.Module, index: int, prompt: Ids, size: int, stop_token_ids: Iterable[int], new: int
) -> None:
    """Refuse a prompt that is empty, of other ids, or without room for ``new`` tokens."""
    _check_ids("prompt", index, prompt, size, "the BOS id")
    far = [token for token in stop_token_ids if token >= size]
    if far:
        raise InputError(f"stop id {far[0]} can never come: token ids are 0 to {size - 1}; leave it out")
    _check_length(index, len(prompt), new, model.max_length)  # type: ignore[arg-type]


def _check_angles(model: nn.Module, index: int, prompt: Ids, new: int) -> None:
    """Refuse to go on from a cache where a longer document turns by other angles than the keys that are held."""
    crosses = getattr(model, "crosses", None)
    end = len(prompt) + new - 1  # the last token is never read
    if crosses is not None and end > len(prompt) and crosses(len(prompt), end):
        raise UnsupportedError(
            f"prompt {index} has {len(prompt)} tokens and grows to {end}, past where its rotary scaling changes the "
            "angles, so that no cache can go on; use use_cache=False, or ask for fewer new tokens"
        )


def reads_sources(model: nn.Module) -> bool:
    """Whether the model is an encoder–decoder: its encoder reads a source, and prompts are what its decoder says."""
    return hasattr(model, "max_source_length")


def _check_sources(model: nn.Module, prompts: int, sources: Sequence[Ids] | None, size: int) -> None:
    """Refuse sources that the model does not read, lacks, or cannot place."""
    if not reads_sources(model):
        if sources is not None:
            raise InputError(f"sources are for an encoder-decoder, and this {type(model).__name__} reads prompts only")
        return
    if sources is None:
        raise InputError(f"this {type(model).__name__} reads a source; give sources, one a prompt")
    check_lists("sources", sources)
    if len(sources) != prompts:
        raise InputError(f"{len(sources)} sources for {prompts} prompts; give one a prompt")
    own: int | None = getattr(model.config, "source_vocab_size", None)
    size = size if own is None else own
    most: int | None = model.max_source_length  # type: ignore[assignment]
    for index, source in enumerate(sources):
        _check_ids("source", index, source, size, "the EOS id")
        if most is not None and len(source) > most:
            raise LengthError(
                f"source {index} has {len(source)} tokens, but the model has positions for {most}; shorten the source"
            )


def _check_ids(what: str, index: int, ids: Ids, size: int, example: str) -> None:
    if not len(ids):
        raise InputError(f"{what} {index} is empty; give at least one token, {example} for example")
    odd = [t for t in ids if isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < size]
    if odd:
        raise InputError(f"{what} {index} holds {odd[0]!r}, but token ids are 0 to {size - 1}; use its tokenizer")


def _check_length(index: int, prompt: int, new: int, most: int | None) -> None:
    if most is None or prompt + new <= most:
        return
    room = most - prompt
    way = f"ask for at most {room} new tokens" if room > 0 else f"shorten the prompt to less than {most}"
    raise LengthError(
        f"prompt {index} has {prompt} tokens and max_new_tokens is {new}, {prompt + new} in all, "
        f"but the model has positions for {most}; {way}"
    )
