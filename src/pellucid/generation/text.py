"""Text at the edge: prompts to ids, ids to whole characters, stop texts found across tokens."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from pellucid.errors import ArgumentError
from pellucid.generation.beam import Hypothesis, beam_search
from pellucid.generation.config import (
    BeamSearchConfig,
    GenerationConfig,
    HasModelAndTokenizer,
    Prompt,
    TokenizerLike,
    model_inputs,
)
from pellucid.generation.decode import FinishReason, StepResult, decode

Params = GenerationConfig | BeamSearchConfig | Sequence[GenerationConfig]
P = TypeVar("P", GenerationConfig, BeamSearchConfig)


@dataclass(frozen=True)
class Completion:
    """``tokens`` are all that were drawn, a stop id included; ``text`` is what came before the stop."""

    text: str
    tokens: list[int]
    logprobs: list[float]
    finish_reason: FinishReason

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class ScoredCompletion(Completion):
    """A completion that a beam search found; ``score`` is what it was compared by."""

    score: float


class TextChunk(NamedTuple):
    """A piece of the text of one row, as soon as it is certain."""

    row: int
    text: str


class TextStream:
    """Bytes in, whole characters out, nothing of a stop text and nothing after it.

    Text that may turn out to be the beginning of a stop text is withheld until that is known. Bytes that are
    not UTF-8 become U+FFFD, an unfinished character only at :meth:`close`.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""

    def push(self, data: bytes, *, may_stop: bool = True) -> str:
        """What is now certain. ``may_stop=False`` lets stop texts that end in ``data`` pass."""
        return self._accept(self._decoder.decode(data), may_stop)

    def close(self, *, may_stop: bool = True) -> str:
        """The rest."""
        text = self._accept(self._decoder.decode(b"", final=True), may_stop)
        pending, self._pending = self._pending, ""
        return text + pending

    def _accept(self, new: str, may_stop: bool) -> str:
        if self.stopped:
            return ""
        before, text = len(self._pending), self._pending + new
        if may_stop and (ends := self._matches(text, before)):
            self.stopped, self._pending = True, ""
            return text[: min(ends)[1]]
        sure = len(text) - self._possible(text)
        self._pending = text[sure:]
        return text[:sure]

    def _matches(self, text: str, before: int) -> list[tuple[int, int]]:
        """(end, start) of stop texts in ``text`` that end after ``before``; what ends first is met first."""
        found = ((stop, text.find(stop, max(0, before + 1 - len(stop)))) for stop in self._stop)
        return [(start + len(stop), start) for stop, start in found if start >= 0]

    def _possible(self, text: str) -> int:
        """How many characters at the end of ``text`` may be the beginning of a stop text."""
        lengths = (
            length
            for stop in self._stop
            for length in range(1, min(len(stop), len(text) + 1))
            if text.endswith(stop[:length])
        )
        return max(lengths, default=0)


def generate(
    checkpoint: HasModelAndTokenizer,
    prompts: Sequence[Prompt],
    params: Params | None = None,
    *,
    start_id: int | None = None,
    use_cache: bool = True,
    **fields: Any,
) -> list[Completion]:
    """Complete each prompt. ``fields`` are those of :class:`GenerationConfig`, in place of ``params``.

    With ``num_beams`` among them, or :class:`BeamSearchConfig`, each completion is the best that a beam search finds.
    For an encoder–decoder the texts are sources, and its decoder begins with ``start_id`` (None: the tokenizer's begin
    token). The tokenizer's end-of-text token ends a row. Rows with one seed draw alike: for several different
    completions of one prompt, give each its own ``params``.
    """
    if isinstance(params, BeamSearchConfig) or "num_beams" in fields:
        beams: BeamSearchConfig = _one(BeamSearchConfig, params, fields)
        if beams.num_return_sequences != 1:
            raise ArgumentError(
                f"num_return_sequences is {beams.num_return_sequences}, but generate gives one completion a prompt; "
                "use generate_n_best"
            )
        found = generate_n_best(checkpoint, prompts, beams, start_id=start_id, use_cache=use_cache)
        return [best for best, *_ in found]
    run = TextGeneration(checkpoint, prompts, params, start_id, use_cache, fields)
    for _ in run:
        pass
    return run.completions()


def stream(
    checkpoint: HasModelAndTokenizer,
    prompts: Sequence[Prompt],
    params: Params | None = None,
    *,
    start_id: int | None = None,
    use_cache: bool = True,
    **fields: Any,
) -> Iterator[TextChunk]:
    """:func:`generate`, giving ``(row, text)`` as soon as it is certain; a row's texts join to the same.

    A beam search knows no text before its end, so there is none here.
    """
    return iter(TextGeneration(checkpoint, prompts, params, start_id, use_cache, fields))


def generate_n_best(
    checkpoint: HasModelAndTokenizer,
    prompts: Sequence[Prompt],
    params: BeamSearchConfig | None = None,
    *,
    start_id: int | None = None,
    use_cache: bool = True,
    **fields: Any,
) -> list[list[ScoredCompletion]]:
    """``num_return_sequences`` completions for each prompt, best first; ``fields`` of :class:`BeamSearchConfig`.

    The tokenizer's end-of-text token ends a sequence. For an encoder–decoder the texts are sources, and its decoder
    begins with ``start_id`` (None: the tokenizer's begin token).
    """
    given: BeamSearchConfig = _one(BeamSearchConfig, params, fields)
    ask = model_inputs(checkpoint, prompts, start_id)
    full = _with_end(given, ask.tokenizer.eos_id)
    found = beam_search(
        checkpoint.model, ask.prompts, full, sources=ask.sources, use_cache=use_cache, vocab_size=ask.vocab_size
    )
    return [[_completion(ask.tokenizer, hypothesis) for hypothesis in row] for row in found]


def _completion(tokenizer: TokenizerLike, found: Hypothesis) -> ScoredCompletion:
    tokens = found.tokens[:-1] if found.finish_reason == "stop" else found.tokens
    text = b"".join(map(tokenizer.token_bytes, tokens)).decode("utf-8", "replace")
    return ScoredCompletion(text, found.tokens, found.logprobs, found.finish_reason, found.score)


class TextGeneration:
    """Texts of a batch while they grow."""

    def __init__(
        self,
        checkpoint: HasModelAndTokenizer,
        prompts: Sequence[Prompt],
        params: Params | None,
        start_id: int | None,
        use_cache: bool,
        fields: dict[str, Any],
    ) -> None:
        ask = model_inputs(checkpoint, prompts, start_id)
        self.tokenizer = ask.tokenizer
        self.params = [_with_end(p, self.tokenizer.eos_id) for p in _each(params, fields, len(prompts))]
        self.streams = [TextStream(p.stop) for p in self.params]
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.logprobs: list[list[float]] = [[] for _ in prompts]
        self.texts: list[list[str]] = [[] for _ in prompts]
        self.reasons: list[FinishReason] = ["length" for _ in prompts]
        self._fresh: list[TextChunk] = []
        self._steps = decode(
            checkpoint.model,
            ask.prompts,
            self.params,
            sources=ask.sources,
            use_cache=use_cache,
            vocab_size=ask.vocab_size,
            ends_row=self._ends_row,
        )

    def __iter__(self) -> Iterator[TextChunk]:
        for step in self._steps:
            self._record(step)
            fresh, self._fresh = self._fresh, []
            yield from fresh

    def _ends_row(self, row: int, token: int) -> bool:
        text, may_stop = self.streams[row], len(self.tokens[row]) >= self.params[row].min_new_tokens
        self._add(row, text.push(self.tokenizer.token_bytes(token), may_stop=may_stop))
        return text.stopped

    def _record(self, step: StepResult) -> None:
        for row, (token, logprob) in enumerate(zip(step.tokens, step.logprobs, strict=True)):
            if token is not None and logprob is not None:
                self.tokens[row].append(token)
                self.logprobs[row].append(logprob)
        for row, reason in enumerate(step.finished):
            if reason is not None:
                self.reasons[row] = reason
                self._add(row, self.streams[row].close(may_stop=False))

    def _add(self, row: int, text: str) -> None:
        if text:
            self.texts[row].append(text)
            self._fresh.append(TextChunk(row, text))

    def completions(self) -> list[Completion]:
        texts = ["".join(pieces) for pieces in self.texts]
        return [Completion(*row) for row in zip(texts, self.tokens, self.logprobs, self.reasons, strict=True)]


def _each(params: Params | None, fields: dict[str, Any], count: int) -> list[GenerationConfig]:
    if isinstance(params, BeamSearchConfig) or "num_beams" in fields:
        raise ArgumentError("a beam search has no text before its end; use generate")
    given = _one(GenerationConfig, params, fields)
    return [given] * count if isinstance(given, GenerationConfig) else list(given)


def _one(kind: type[Any], params: Any, fields: dict[str, Any]) -> Any:
    """``params``, or those of this kind that ``fields`` make."""
    if params is not None and fields:
        raise ArgumentError(f"{', '.join(fields)} came beside params; put all of it into params")
    return kind(**fields) if params is None else params


def _with_end(params: P, eos_id: int | None) -> P:
    """``params`` under which the tokenizer's end-of-text token ends a row too."""
    wanted: tuple[int, ...] = params.stop_token_ids
    return params.model_copy(
        update={"stop_token_ids": wanted if eos_id is None or eos_id in wanted else (*wanted, eos_id)}
    )
