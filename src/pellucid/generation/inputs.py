"""Texts to ids, as each family of models takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

from torch import nn

from pellucid.data.chat import encode_prompt
from pellucid.errors import InputError
from pellucid.generation.params import BeamParams, GenerationParams
from pellucid.generation.validate import reads_sources


@runtime_checkable
class Tokenizer(Protocol):
    """What is needed of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_id(self) -> int | None: ...

    def encode(self, text: str, /) -> list[int]:
        """Ids of a text, without any special token."""
        ...

    def token_bytes(self, token: int, /) -> bytes:
        """The bytes that a token stands for; none for a special token."""
        ...


@runtime_checkable
class HasModelAndTokenizer(Protocol):
    """A model and its tokenizer, as a checkpoint holds them."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...


Prompt = str | Sequence[int]
"""A text, or the ids of one (from ``data.encode_chat``, say), which are taken as they are."""


class ModelInputs(NamedTuple):
    """Texts as ids: what the decoder begins with and, for an encoder–decoder, what its encoder reads."""

    tokenizer: Tokenizer
    prompts: list[list[int]]
    sources: list[list[int]] | None
    vocab_size: int


def model_inputs(checkpoint: HasModelAndTokenizer, texts: Sequence[Prompt], start_id: int | None) -> ModelInputs:
    """A decoder goes on from each text behind the begin token. For an encoder–decoder the texts are sources, written
    as documents are (begin and end tokens around them, as far as there are any), and its decoder begins with
    ``start_id`` (None: the tokenizer's begin token)."""
    if isinstance(texts, str):
        raise InputError(f"prompts is one text, {texts[:40]!r}; give a list of texts")
    for index, text in enumerate(texts):
        if not isinstance(text, str) and not hasattr(text, "__len__"):
            raise InputError(
                f"entry {index} of prompts is {str(text)[:40]!r}, but must be a text or a list of token ids; put a "
                "single list in brackets: [[0, 1]]"
            )
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    if tokenizer is None:
        raise InputError("there is no tokenizer beside this model; decode ids with generate_ids")
    size = min(tokenizer.vocab_size, int(model.config.vocab_size))  # type: ignore[union-attr, arg-type]
    if not reads_sources(model):
        if start_id is not None:
            raise InputError(
                f"start_id is {start_id}, but a {type(model).__name__} begins with its prompt; leave it out"
            )
        return ModelInputs(tokenizer, [_ids(tokenizer, text) for text in texts], None, size)
    start = tokenizer.bos_id if start_id is None else start_id
    if start is None:
        raise InputError("the tokenizer has no begin token for the decoder; give start_id (T5 uses its padding id)")
    return ModelInputs(tokenizer, [[start] for _ in texts], [_source(tokenizer, text) for text in texts], size)


def _ids(tokenizer: Tokenizer, text: Prompt) -> list[int]:
    return encode_prompt(tokenizer, text) if isinstance(text, str) else list(text)


def _source(tokenizer: Tokenizer, text: Prompt) -> list[int]:
    end = [tokenizer.eos_id] if isinstance(text, str) and tokenizer.eos_id is not None else []
    return [*_ids(tokenizer, text), *end]


P = TypeVar("P", GenerationParams, BeamParams)


def with_end(params: P, eos_id: int | None) -> P:
    """``params`` under which the tokenizer's end-of-text token ends a row too."""
    held: tuple[int, ...] = params.stop_token_ids
    return params.model_copy(update={"stop_token_ids": held if eos_id is None or eos_id in held else (*held, eos_id)})


def refuse_beside(params: object, fields: Mapping[str, object]) -> None:
    """Refuse fields that came beside whole params."""
    if params is not None and fields:
        raise InputError(f"{', '.join(fields)} came beside params; put all of it into params")
