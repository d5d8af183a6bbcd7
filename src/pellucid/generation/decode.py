"""The reference loop: prompts in, one token a row and step out, with a cache or without."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from pellucid.errors import ArgumentError
from pellucid.generation.config import GenerationConfig
from pellucid.generation.inputs import Ids, check_lists, check_requests
from pellucid.generation.model_runner import ModelRunner
from pellucid.generation.sampling import NOT_FINITE, SampledToken, Sampler, nothing_possible
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
class SequenceState:
    """The tokens of one row while it grows."""

    tokens: list[int]
    params: GenerationConfig
    new: int = 0
    live: bool = True

    def append(self, token: int, ends: bool) -> FinishReason | None:
        """Add a token; returns why the row ends with it, if it does."""
        self.tokens.append(token)
        self.new += 1
        reason: FinishReason | None = "length" if self.new == self.params.max_new_tokens else None
        if ends:
            reason = "stop"
        self.live = reason is None
        return reason


def decode(
    model: nn.Module,
    prompts: Sequence[Ids],
    params: GenerationConfig | Sequence[GenerationConfig] = GenerationConfig(),  # noqa: B008 - frozen
    *,
    sources: Sequence[Ids] | None = None,
    use_cache: bool = True,
    vocab_size: int | None = None,
    ends_row: EndsRow | None = None,
) -> Iterator[StepResult]:
    """Steps of generation until every row has finished. All checks are made before anything is computed.

    ``params`` is one for all rows or one a row. An encoder–decoder reads ``sources``, one a prompt, and its prompts
    are what its decoder begins with (the start id, at least). A prefix-LM's prompt is its prefix. Only ids below
    ``vocab_size`` are ever chosen (a model's table may be padded beyond its tokenizer). ``ends_row(row, token)`` is
    asked about each token that is no stop id; True ends the row. Without a cache each step runs the whole rows
    again: slower, the same numbers.
    """
    rows = _rows(prompts, params)
    tokens, each = [row.tokens for row in rows], [row.params for row in rows]
    size = check_requests(model, tokens, each, sources, vocab_size=vocab_size, use_cache=use_cache)
    texts = next((own.stop for own in each if own.stop and ends_row is None), ())
    if texts:
        raise ArgumentError(f"stop texts {list(texts)} need text; call generate or stream, or use stop_token_ids")
    return _steps(model, rows, sources, size, use_cache, ends_row)


def _steps(
    model: nn.Module,
    rows: list[SequenceState],
    sources: Sequence[Ids] | None,
    size: int,
    use_cache: bool,
    ends_row: EndsRow | None,
) -> Iterator[StepResult]:
    if not rows:
        return
    most = max(row.params.max_new_tokens for row in rows)
    runner = ModelRunner(model, [row.tokens for row in rows], sources, new=most, use_cache=use_cache)
    sampler = Sampler([row.params for row in rows], [row.tokens for row in rows], size, runner.device)
    last_B: Tensor | None = None
    while any(row.live for row in rows):  # a finished row is padding
        logits_BV = runner.next_logits([row.tokens if row.live else () for row in rows], last_B)[:, :size]
        sampled_2B = sampler(logits_BV)
        last_B = sampled_2B[0].long().clamp(min=0).to(runner.device)
        tokens, logprobs = sampled_2B.tolist()  # the only time that a step waits for the device
        yield _record(rows, [SampledToken(int(t), p) for t, p in zip(tokens, logprobs, strict=True)], ends_row)


def _record(rows: list[SequenceState], sampled: list[SampledToken], ends_row: EndsRow | None) -> StepResult:
    results: list[tuple[int | None, float | None, FinishReason | None]] = []
    for index, (row, (token, logprob)) in enumerate(zip(rows, sampled, strict=True)):
        if not row.live:
            results.append((None, None, None))
            continue
        if math.isnan(logprob) and token >= 0:
            raise ArgumentError(NOT_FINITE)
        if token < 0:
            raise nothing_possible(len(row.params.stop_token_ids) if row.new < row.params.min_new_tokens else 0)
        ends = token in row.params.stop_token_ids or (ends_row is not None and ends_row(index, token))
        results.append((token, logprob, row.append(token, ends)))
    tokens, logprobs, finished = zip(*results, strict=True)
    return StepResult(tokens, logprobs, finished)


def generate_ids(
    model: nn.Module,
    prompts: Sequence[Ids],
    params: GenerationConfig | Sequence[GenerationConfig] = GenerationConfig(),  # noqa: B008 - frozen
    *,
    sources: Sequence[Ids] | None = None,
    use_cache: bool = True,
    vocab_size: int | None = None,
) -> list[Generated]:
    """:func:`decode` to the end."""
    steps = decode(model, prompts, params, sources=sources, use_cache=use_cache, vocab_size=vocab_size)
    tokens: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    reasons: list[FinishReason] = ["length" for _ in prompts]
    for step in steps:
        for row, (token, logprob, reason) in enumerate(zip(step.tokens, step.logprobs, step.finished, strict=True)):
            if token is not None and logprob is not None:
                tokens[row].append(token)
                logprobs[row].append(logprob)
            if reason is not None:
                reasons[row] = reason
    return [Generated(*row) for row in zip(tokens, logprobs, reasons, strict=True)]


# ------------------------------------------------------------------------------ before anything is computed


def _rows(prompts: Sequence[Ids], params: GenerationConfig | Sequence[GenerationConfig]) -> list[SequenceState]:
    check_lists("prompts", prompts)
    each = [params] * len(prompts) if isinstance(params, GenerationConfig) else list(params)
    if len(each) != len(prompts):
        raise ArgumentError(f"{len(each)} params for {len(prompts)} prompts; give one for all or one a prompt")
    return [SequenceState(list(prompt), own) for prompt, own in zip(prompts, each, strict=True)]
