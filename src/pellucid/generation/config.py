"""What one request is: its parameters, its texts as ids, and the checks that come before anything is computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, NamedTuple, Protocol, runtime_checkable

from pydantic import Field, model_validator
from torch import nn

from pellucid.configfile import Config
from pellucid.data.chat import TextEncoder
from pellucid.data.tokenizer import with_begin
from pellucid.errors import ArgumentError, ConfigError, LengthError, UnsupportedError
from pellucid.messages import repr_short

Ids = Sequence[int]

MOST = 1 << 40
"""The largest number of new tokens."""
TokenId = Annotated[int, Field(ge=0, le=1 << 24)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]


class GenerationConfig(Config):
    """How tokens are chosen and when to stop. The default is greedy: the same request, the same tokens.

    ``repetition_penalty`` comes first. Filters apply in this order, each to what the one before it left:
    temperature, ``top_k``, ``top_p``, ``min_p``. None of them ever removes the most likely token.
    """

    max_new_tokens: int = Field(default=64, ge=1, le=MOST)
    min_new_tokens: int = Field(default=0, ge=0, le=MOST)
    """So many new tokens must come before one that is of ``stop_token_ids`` or completes a text of ``stop``."""
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100)
    """Each token that the row holds already: its logit is divided by this where positive, multiplied where negative.

    1 changes nothing. Keskar et al. 2019 (CTRL, section 4.1), made to agree for both signs. Padding is never counted.
    """
    penalize_prompt: bool = True
    """Whether tokens of the prompt are penalized like new ones. What an encoder reads is never counted."""
    temperature: float = Field(default=0.0, ge=0)
    """What logits are divided by; 0 takes the most likely token."""
    top_k: int | None = Field(default=None, ge=1, le=MOST)
    """Keep this many most likely tokens (None: all)."""
    top_p: float = Field(default=1.0, ge=0, le=1)
    """Keep the fewest most likely tokens whose probabilities sum to this much."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Keep tokens at least this likely, relative to the most likely one."""
    stop_token_ids: tuple[TokenId, ...] = Field(default=(), max_length=256)
    """Tokens that end the row; the one that did is the last of the row's tokens and no part of its text."""
    stop: tuple[StopText, ...] = Field(default=(), max_length=64)
    """Texts that end the row; the completion's text is what came before."""
    seed: int | None = Field(default=None, ge=0, lt=1 << 63)
    """Where the request's own random numbers start (None: anywhere). Rows with equal seeds draw equally."""

    @model_validator(mode="after")
    def _agree(self) -> GenerationConfig:
        _refuse_crossed(self.min_new_tokens, self.max_new_tokens)
        return self


class BeamSearchConfig(Config):
    """What a beam search looks for: the ``num_return_sequences`` sequences of the highest score that it meets.

    A sequence ends with a token of ``stop_token_ids`` or after ``max_new_tokens``. Its score is the sum of its new
    tokens' log-probabilities (the stop id's included) divided by a penalty of their number n; the prompt counts in
    neither.
    """

    num_beams: int = Field(default=4, ge=1, le=10_000)
    """How many unfinished sequences of one prompt are kept after each step."""
    num_return_sequences: int = Field(default=1, ge=1, le=10_000)
    """How many finished ones are wanted, at most ``num_beams``."""
    length_penalty: float = Field(default=1.0, ge=-16, le=16)
    """The exponent alpha. Above 0 longer sequences gain, below 0 they lose; 0 compares plain sums."""
    penalty_form: Literal["power", "gnmt"] = "power"
    """``power``: n**alpha (1: the mean). ``gnmt``: ((5 + n) / 6)**alpha (Wu et al. 2016, section 7, equation 14)."""
    max_new_tokens: int = Field(default=64, ge=1, le=MOST)
    min_new_tokens: int = Field(default=0, ge=0, le=MOST)
    """So many new tokens must come before one of ``stop_token_ids``."""
    stop_token_ids: tuple[TokenId, ...] = Field(default=(), max_length=256)
    """Tokens that end a sequence; the one that did is the last of its tokens."""

    @model_validator(mode="after")
    def _agree(self) -> BeamSearchConfig:
        _refuse_crossed(self.min_new_tokens, self.max_new_tokens)
        if self.num_return_sequences > self.num_beams:
            raise ConfigError(
                f"num_return_sequences is {self.num_return_sequences}, but num_beams is {self.num_beams}, "
                "raise num_beams"
            )
        return self

    def penalty(self, new: int) -> float:
        """What the sum of ``new`` log-probabilities is divided by."""
        base = float(new) if self.penalty_form == "power" else (5 + new) / 6
        return float(base**self.length_penalty)


def _refuse_crossed(least: int, most: int) -> None:
    if least > most:
        raise ConfigError(f"min_new_tokens is {least}, but max_new_tokens is {most}, raise max_new_tokens")


@runtime_checkable
class TokenizerLike(TextEncoder, Protocol):
    """What is needed of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_id(self) -> int | None: ...

    def token_bytes(self, token: int, /) -> bytes:
        """The bytes that a token stands for; none for a special token."""
        ...


@runtime_checkable
class HasModelAndTokenizer(Protocol):
    """A model and its tokenizer, as a checkpoint holds them."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def tokenizer(self) -> TokenizerLike | None: ...


Prompt = str | Sequence[int]
"""A text, or the ids of one (from ``data.encode_chat``, say), which are taken as they are."""


class ModelInputs(NamedTuple):
    """Texts as ids: what the decoder begins with and, for an encoder–decoder, what its encoder reads."""

    tokenizer: TokenizerLike
    prompts: list[list[int]]
    sources: list[list[int]] | None
    vocab_size: int


def model_inputs(checkpoint: HasModelAndTokenizer, texts: Sequence[Prompt], start_id: int | None) -> ModelInputs:
    """A decoder continues each text behind the begin token. For an encoder–decoder the texts are sources, written
    as documents are (begin and end tokens around them, as far as there are any), and its decoder begins with
    ``start_id`` (None: the tokenizer's begin token)."""
    if isinstance(texts, str):
        raise ArgumentError(f"prompts is one text, {texts[:40]!r}; give a list of texts")
    for index, text in enumerate(texts):
        if not isinstance(text, str) and not hasattr(text, "__len__"):
            raise ArgumentError(
                f"entry {index} of prompts is {str(text)[:40]!r}, but must be a text or a list of token ids; put a "
                "single list in brackets: [[0, 1]]"
            )
    if not hasattr(checkpoint, "model") or not hasattr(checkpoint, "tokenizer"):
        raise ArgumentError(
            f"{repr_short(checkpoint)} has no model and tokenizer; load the checkpoint first: pellucid.load(path)"
        )
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    if tokenizer is None:
        raise ArgumentError("there is no tokenizer beside this model; decode ids with generate_ids")
    size = min(tokenizer.vocab_size, int(model.config.vocab_size))  # type: ignore[union-attr, arg-type]
    if not reads_sources(model):
        if start_id is not None:
            raise ArgumentError(
                f"start_id is {start_id}, but a {type(model).__name__} begins with its prompt; leave it out"
            )
        return ModelInputs(tokenizer, [_ids(tokenizer, text) for text in texts], None, size)
    start = tokenizer.bos_id if start_id is None else start_id
    if start is None:
        raise ArgumentError("the tokenizer has no begin token for the decoder; give start_id (T5 uses its padding id)")
    return ModelInputs(tokenizer, [[start] for _ in texts], [_source(tokenizer, text) for text in texts], size)


def _ids(tokenizer: TokenizerLike, text: Prompt) -> list[int]:
    return with_begin(tokenizer.bos_id, tokenizer.encode(text)) if isinstance(text, str) else list(text)


def _source(tokenizer: TokenizerLike, text: Prompt) -> list[int]:
    end = [tokenizer.eos_id] if isinstance(text, str) and tokenizer.eos_id is not None else []
    return [*_ids(tokenizer, text), *end]


def check_lists(what: str, rows: Sequence[Ids]) -> None:
    """Refuse what is not a list of lists: one flat list of ids, a text, a number.

    What is in the lists is checked later.
    """
    if isinstance(rows, str) or not hasattr(rows, "__len__"):
        raise ArgumentError(f"{what} is {str(rows)[:40]!r}, but must be a list of lists of token ids, one a row")
    for index, row in enumerate(rows):
        if isinstance(row, str) or not hasattr(row, "__len__"):
            raise ArgumentError(
                f"entry {index} of {what} is {str(row)[:40]!r}, but {what} is a list of lists of token ids, one a row; "
                "put a single row in brackets: [[0, 1]]"
            )


def check_requests(
    model: nn.Module,
    prompts: Sequence[Ids],
    params: Sequence[GenerationConfig | BeamSearchConfig],
    sources: Sequence[Ids] | None,
    *,
    vocab_size: int | None,
    use_cache: bool,
) -> int:
    """Refuse what ``model`` cannot answer; ``params`` has one for each prompt. Returns how many ids may be chosen."""
    _check_model(model)
    size = _vocabulary(model, vocab_size)
    for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        _check_prompt(model, index, prompt, size, own.stop_token_ids, own.max_new_tokens)
        if use_cache:
            _check_angles(model, index, prompt, own.max_new_tokens)
    _check_sources(model, len(prompts), sources, size)
    return size


def _check_model(model: nn.Module) -> None:
    """Refuse a model that cannot continue a text, or would not answer the same twice."""
    way = "use a decoder or an encoder-decoder with a language-model head"
    if not callable(getattr(model, "new_cache", None)):
        raise UnsupportedError(f"this {type(model).__name__} cannot continue a prompt; {way}")
    head = getattr(model, "head_name", "lm_head")
    if head != "lm_head":
        raise UnsupportedError(f"this {type(model).__name__} with the head {head} predicts no tokens; {way}")
    if model.training:
        raise ArgumentError("the model is in training mode, where dropout would change its answers; call model.eval()")


def _vocabulary(model: nn.Module, requested: int | None) -> int:
    """How many ids may be chosen: those of the model's table, or the first ``requested`` of them."""
    vocab_size = int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    if requested is not None and not 1 <= requested <= vocab_size:
        raise ArgumentError(f"vocab_size is {requested}, but the model has {vocab_size} tokens; give 1 to {vocab_size}")
    return vocab_size if requested is None else requested


def _check_prompt(
    model: nn.Module, index: int, prompt: Ids, size: int, stop_token_ids: Iterable[int], new: int
) -> None:
    """Refuse a prompt that is empty, of other ids, or without room for ``new`` tokens."""
    _check_ids("prompt", index, prompt, size, "the BOS id")
    far = [token for token in stop_token_ids if token >= size]
    if far:
        raise ArgumentError(f"stop id {far[0]} can never come: token ids are 0 to {size - 1}; leave it out")
    _check_length(index, len(prompt), new, model.max_length)  # type: ignore[arg-type]


def _check_angles(model: nn.Module, index: int, prompt: Ids, new: int) -> None:
    """Refuse to continue from a cache where a longer document is rotated by other angles than the cached keys."""
    changes_angles = getattr(model, "changes_angles", None)
    end = len(prompt) + new - 1  # the last token is never read
    if changes_angles is not None and end > len(prompt) and changes_angles(len(prompt), end):
        raise UnsupportedError(
            f"prompt {index} has {len(prompt)} tokens and grows to {end}, past where its rotary scaling changes the "
            "angles, so that no cache can be continued; use use_cache=False, or ask for fewer new tokens"
        )


def reads_sources(model: nn.Module) -> bool:
    """Whether the model is an encoder–decoder: its decoder begins with the prompt, its encoder reads a source."""
    return hasattr(model, "max_source_length")


def _check_sources(model: nn.Module, prompts: int, sources: Sequence[Ids] | None, size: int) -> None:
    """Refuse sources that the model does not read, lacks, or cannot place."""
    if not reads_sources(model):
        if sources is not None:
            raise ArgumentError(
                f"sources are for an encoder-decoder, and this {type(model).__name__} reads prompts only"
            )
        return
    if sources is None:
        raise ArgumentError(f"this {type(model).__name__} reads a source; give sources, one a prompt")
    check_lists("sources", sources)
    if len(sources) != prompts:
        raise ArgumentError(f"{len(sources)} sources for {prompts} prompts; give one a prompt")
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
        raise ArgumentError(f"{what} {index} is empty; give at least one token, {example} for example")
    odd = [t for t in ids if isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < size]
    if odd:
        raise ArgumentError(f"{what} {index} holds {odd[0]!r}, but token ids are 0 to {size - 1}; use its tokenizer")


def _check_length(index: int, prompt: int, new: int, most: int | None) -> None:
    if most is None or prompt + new <= most:
        return
    room = most - prompt
    way = f"ask for at most {room} new tokens" if room > 0 else f"shorten the prompt to less than {most}"
    raise LengthError(
        f"prompt {index} has {prompt} tokens and max_new_tokens is {new}, {prompt + new} in all, "
        f"but the model has positions for {most}; {way}"
    )
