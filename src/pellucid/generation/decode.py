"""The reference loop: prompts in, one token a row and step out, with a cache or without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from pellucid.data.batch import Batch
from pellucid.errors import InputError, LengthError
from pellucid.generation.params import GenerationParams
from pellucid.generation.sampling import Choice, choose
from pellucid.shapes import Tensor

FinishReason = Literal["stop", "length"]
EndsRow = Callable[[int, int], bool]


@dataclass(frozen=True)
class StepResult:
    """What one step gave each row. A row that had finished before has None everywhere.

    ``finished`` is the reason for rows that finish with this step's token.
    """

    tokens: tuple[int | None, ...]
    logprobs: tuple[float | None, ...]
    finished: tuple[FinishReason | None, ...]


@dataclass(frozen=True)
class Generated:
    """One row's new tokens (a stop id included), their log-probabilities, and why it ended."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: FinishReason


@dataclass
class _Row:
    """One request on its way. Its random numbers are its own: batch mates never change them."""

    tokens: list[int]
    params: GenerationParams
    generator: torch.Generator
    new: int = 0
    live: bool = True

    def choose(self, logits_V: Tensor) -> Choice:
        held_back = self.params.stop_ids if self.new < self.params.min_new_tokens else ()
        return choose(logits_V, self.params, self.generator, forbidden=held_back)

    def take(self, token: int, ends: bool) -> FinishReason | None:
        self.tokens.append(token)
        self.new += 1
        reason: FinishReason | None = None
        if ends:
            reason = "stop"
        elif self.new == self.params.max_new_tokens:
            reason = "length"
        self.live = reason is None
        return reason


def decode(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    params: GenerationParams | Sequence[GenerationParams] = GenerationParams(),  # noqa: B008 - frozen
    *,
    use_cache: bool = True,
    vocab_size: int | None = None,
    ends_row: EndsRow | None = None,
) -> Iterator[StepResult]:
    """Steps of generation until every row has finished. All checks are made before anything is computed.

    ``params`` is one for all rows or one a row. Only ids below ``vocab_size`` are ever chosen (a model's
    table may be padded beyond its tokenizer). ``ends_row(row, token)`` is asked about each token that is no
    stop id; True ends the row. Without a cache each step runs the whole rows again: slower, the same numbers.
    """
    rows = _rows(prompts, params)
    size = _vocab_size(model, vocab_size)
    _check(model, rows, size, ends_row)
    return _steps(model, rows, size, use_cache, ends_row)


def _steps(
    model: nn.Module, rows: list[_Row], size: int, use_cache: bool, ends_row: EndsRow | None
) -> Iterator[StepResult]:
    cache = _new_cache(model, rows) if use_cache and rows else None
    chunk = [row.tokens for row in rows]
    while any(row.live for row in rows):
        logits_BV = _next_logits(model, chunk, cache)[:, :size]
        step = _step(rows, logits_BV, ends_row)
        yield step
        if cache is None:  # everything again; a finished row is padding
            chunk = [row.tokens if row.live else [] for row in rows]
        else:  # the new tokens only
            chunk = [row.tokens[-1:] if row.live else [] for row in rows]


@torch.inference_mode()
def _next_logits(model: nn.Module, chunk: list[list[int]], cache: Any) -> Tensor:
    """``[B, V]``: what each row expects next. Rows end at the last slot because padding is on the left."""
    batch = Batch.from_rows(chunk, side="left").to(_device(model))
    hidden_BTD = model(batch, cache=cache, want="hidden").hidden
    logits_BTV: Tensor = model.head(hidden_BTD[:, -1:])  # type: ignore[operator]
    return logits_BTV[:, 0].cpu()


def _step(rows: list[_Row], logits_BV: Tensor, ends_row: EndsRow | None) -> StepResult:
    results: list[tuple[int | None, float | None, FinishReason | None]] = []
    for index, row in enumerate(rows):
        if not row.live:
            results.append((None, None, None))
            continue
        token, logprob = row.choose(logits_BV[index])
        ends = token in row.params.stop_ids or (ends_row is not None and ends_row(index, token))
        results.append((token, logprob, row.take(token, ends)))
    tokens, logprobs, finished = zip(*results, strict=True)
    return StepResult(tokens, logprobs, finished)


def generate_ids(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    params: GenerationParams | Sequence[GenerationParams] = GenerationParams(),  # noqa: B008 - frozen
    *,
    use_cache: bool = True,
    vocab_size: int | None = None,
) -> list[Generated]:
    """:func:`decode` to the end."""
    tokens: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    reasons: list[FinishReason] = ["length" for _ in prompts]
    for step in decode(model, prompts, params, use_cache=use_cache, vocab_size=vocab_size):
        for row, (token, logprob, reason) in enumerate(zip(step.tokens, step.logprobs, step.finished, strict=True)):
            if token is not None and logprob is not None:
                tokens[row].append(token)
                logprobs[row].append(logprob)
            if reason is not None:
                reasons[row] = reason
    return [Generated(*row) for row in zip(tokens, logprobs, reasons, strict=True)]


# ------------------------------------------------------------------------------ before anything is computed


def _rows(prompts: Sequence[Sequence[int]], params: GenerationParams | Sequence[GenerationParams]) -> list[_Row]:
    each = [params] * len(prompts) if isinstance(params, GenerationParams) else list(params)
    if len(each) != len(prompts):
        raise InputError(f"{len(each)} params for {len(prompts)} prompts; give one for all or one a prompt")
    return [_Row(list(p), own, _generator(own.seed)) for p, own in zip(prompts, each, strict=True)]


def _generator(seed: int | None) -> torch.Generator:
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator


def _vocab_size(model: nn.Module, asked: int | None) -> int:
    held = int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    if asked is not None and not 1 <= asked <= held:
        raise InputError(f"vocab_size is {asked}, but the model has {held} tokens; give 1 to {held}")
    return held if asked is None else asked


def _check(model: nn.Module, rows: list[_Row], size: int, ends_row: EndsRow | None) -> None:
    if model.training:
        raise InputError("the model is in training mode, where dropout would change its answers; call model.eval()")
    for index, row in enumerate(rows):
        if not row.tokens:
            raise InputError(f"prompt {index} is empty; give at least one token, the BOS id for example")
        odd = [t for t in row.tokens if isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < size]
        if odd:
            raise InputError(f"prompt {index} holds {odd[0]!r}, but token ids are 0 to {size - 1}; use its tokenizer")
        far = [t for t in row.params.stop_ids if t >= size]
        if far:
            raise InputError(f"stop id {far[0]} can never come: token ids are 0 to {size - 1}; leave it out")
        if row.params.stop and ends_row is None:
            raise InputError(f"stop texts {list(row.params.stop)} need text; call generate or stream, or use stop_ids")
        _check_length(index, len(row.tokens), row.params.max_new_tokens, model.max_length)  # type: ignore[arg-type]


def _check_length(index: int, prompt: int, new: int, most: int | None) -> None:
    if most is None or prompt + new <= most:
        return
    room = most - prompt
    way = f"ask for at most {room} new tokens" if room > 0 else f"shorten the prompt to less than {most}"
    raise LengthError(
        f"prompt {index} has {prompt} tokens and max_new_tokens is {new}, {prompt + new} in all, "
        f"but the model has positions for {most}; {way}"
    )


def _new_cache(model: nn.Module, rows: list[_Row]) -> Any:
    """Room for the longest prompt and every new token but the last, which is never read."""
    longest = max(len(row.tokens) for row in rows)
    steps = max(row.params.max_new_tokens for row in rows)
    return model.new_cache(len(rows), longest + steps - 1)  # type: ignore[operator]


def _device(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device
