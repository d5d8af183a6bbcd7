"""The reference loop: prompts in, one token a row and step out, with a cache or without.

Decoder-only, prefix-LM and encoder–decoder models differ in three places, all of them in :class:`ModelRunner`: an
encoder's source goes with the first pass (every pass, where there is no cache), the tokens of a prefix-LM's prompt
carry group 1, and a cache keeps what it must know about both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from pellucid.batch import Batch
from pellucid.errors import ArgumentError
from pellucid.generation.config import GenerationConfig, Ids, check_lists, check_requests
from pellucid.generation.sampling import NOT_FINITE, SampledToken, Sampler, nothing_possible
from pellucid.shapes import Int, Tensor
from pellucid.visibility import Layout, Rule, Run

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
    called for each token that is no stop id; True ends the row. Without a cache each step runs the whole rows
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


def _rows(prompts: Sequence[Ids], params: GenerationConfig | Sequence[GenerationConfig]) -> list[SequenceState]:
    check_lists("prompts", prompts)
    each = [params] * len(prompts) if isinstance(params, GenerationConfig) else list(params)
    if len(each) != len(prompts):
        raise ArgumentError(f"{len(each)} params for {len(prompts)} prompts; give one for all or one a prompt")
    return [SequenceState(list(prompt), own) for prompt, own in zip(prompts, each, strict=True)]


class ModelRunner:
    """Runs the rows of a batch through a model, pass by pass.

    ``new`` is the most tokens that a row gains. Padding goes to the left, so that all rows end at the last slot.
    """

    def __init__(
        self, model: nn.Module, prompts: Sequence[Ids], sources: Sequence[Ids] | None, *, new: int, use_cache: bool
    ) -> None:
        self.model = model
        parameter = next(model.parameters(), None)
        self.device = torch.device("cpu") if parameter is None else parameter.device
        self.sources = None if sources is None else list(sources)
        self.prefixes = [len(prompt) for prompt in prompts] if reads_prefix(model) else None
        # Room for the longest prompt and every new token but the last, which is never read.
        capacity = max(map(len, prompts)) + new - 1
        self.cache: Any = model.new_cache(len(prompts), capacity) if use_cache else None  # type: ignore[operator]
        self._first = True
        self._live = [True] * len(prompts)
        self._zeros_B1 = torch.zeros(len(prompts), 1, dtype=torch.long, device=self.device)
        self._segments_B1 = torch.ones_like(self._zeros_B1)

    @torch.inference_mode()
    def next_logits(self, rows: Sequence[Ids], last_B: Int[Tensor, "B"] | None = None) -> Tensor:
        """``[B, V]`` on the model's device: what each row, given whole, expects next. An empty row is padding.

        With a cache only what it does not hold is run: all at first, then each row's last token, which may be given as
        ``last_B``, on the device already.
        """
        whole = self._first or self.cache is None
        batch = self._whole(rows) if whole else self._one_token(rows, last_B)
        hidden_BTD = self.model(batch, cache=self.cache, want="hidden").hidden
        self._first = False
        logits_BTV: Tensor = self.model.head(hidden_BTD[:, -1:])  # type: ignore[operator]
        return logits_BTV[:, 0]

    def _whole(self, rows: Sequence[Ids]) -> Batch:
        batch = Batch.from_rows([list(row) for row in rows], side="left")
        if self.prefixes is not None:  # group 1 on the prompt of each row
            inside = batch.positions < torch.tensor(self.prefixes)[:, None]
            batch = replace(batch, groups=(inside & (batch.segments != 0)).long())
        if self.sources is not None:
            batch = replace(batch, source=Batch.from_rows(self.sources))
        return batch.to(self.device)

    def _one_token(self, rows: Sequence[Ids], last_B: Tensor | None) -> Batch:
        live = [len(row) > 0 for row in rows]
        for row, (before, now) in enumerate(zip(self._live, live, strict=True)):
            if before != now:
                self._segments_B1[row] = int(now)
        self._live = live
        if last_B is None:
            last_B = torch.tensor([row[-1] if len(row) else 0 for row in rows], device=self.device)
        zeros_B1 = self._zeros_B1
        runs = tuple(Run(row, 0, 1, 1, 0) for row, alive in enumerate(live) if alive)
        tokens_B1 = torch.where(self._segments_B1 != 0, last_B[:, None], zeros_B1)
        groups_B1 = None if self.prefixes is None else zeros_B1
        return Batch(
            tokens_B1, zeros_B1, self._segments_B1.clone(), groups=groups_B1, layout=Layout(len(rows), 1, runs)
        )

    @torch.inference_mode()
    def keep(self, index: Sequence[int]) -> None:
        """Make row b what row ``index[b]`` was: rows may be repeated, swapped and dropped.

        Everything that belongs to a row moves with it, its encoder output too.
        """
        if self.cache is not None:
            self.cache.reorder(torch.tensor(index, device=self.device))
        if self.sources is not None:
            self.sources = [self.sources[row] for row in index]
        if self.prefixes is not None:
            self.prefixes = [self.prefixes[row] for row in index]
        self._live = [True] * len(index)
        self._zeros_B1 = torch.zeros(len(index), 1, dtype=torch.long, device=self.device)
        self._segments_B1 = torch.ones_like(self._zeros_B1)


def reads_prefix(model: nn.Module) -> bool:
    """Whether a rule of the model lets all tokens see those with a group: a prefix-LM, whose prompt is the prefix."""
    rules: Sequence[Rule] = getattr(model, "rules", ())
    return any(rule.uses_prefix_groups for rule in rules)
