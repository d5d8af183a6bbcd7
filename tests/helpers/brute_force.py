"""Sequences read off a table, without a model: all there are, or those of a beam search that never stops early."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch

from helpers.table_model import TableModel
from pellucid.generation import BeamSearchConfig, Hypothesis

Next = Callable[[list[int]], torch.Tensor]
RegressionSchema = list[tuple[float, tuple[int, ...]]]


def table(size: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    dice = torch.Generator().manual_seed(seed)
    return scale * torch.randn(size, size, size, generator=dice, dtype=torch.float64)


def says(table_VVV: torch.Tensor, *, moved: int = 0) -> Next:
    """Log-probabilities after a row, read off the table without the model; ``moved`` as its source or prefix says."""

    def after(row: list[int]) -> torch.Tensor:
        previous = row[-2] if len(row) > 1 else 0
        return table_VVV[(previous + moved) % len(table_VVV), row[-1]].log_softmax(0)

    return after


def penalty(params: BeamSearchConfig, new: int) -> float:
    base = new if params.penalty_form == "power" else (5 + new) / 6
    return math.exp(params.length_penalty * math.log(base))


def every_sequence(after: Next, prompt: list[int], params: BeamSearchConfig) -> RegressionSchema:
    """All sequences that end with a stop id or at the greatest length, best score first."""
    found: RegressionSchema = []

    def grow(tokens: tuple[int, ...], total: float) -> None:
        for token, logprob in enumerate(after([*prompt, *tokens]).tolist()):
            if token in params.stop_token_ids and len(tokens) < params.min_new_tokens:
                continue
            longer, new = (*tokens, token), len(tokens) + 1
            if token in params.stop_token_ids or new == params.max_new_tokens:
                found.append(((total + logprob) / penalty(params, new), longer))
            else:
                grow(longer, total + logprob)

    grow((), 0.0)
    return sorted(found, reverse=True)


def patient_search(after: Next, prompt: list[int], params: BeamSearchConfig) -> RegressionSchema:
    """The definition of a beam search, step by step in plain lists, which never stops before the greatest length."""
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: RegressionSchema = []
    for new in range(1, params.max_new_tokens + 1):
        grown = [
            (total + logprob, (*tokens, token))
            for total, tokens in beams
            for token, logprob in enumerate(after([*prompt, *tokens]).tolist())
            if token not in params.stop_token_ids or new > params.min_new_tokens
        ]
        grown.sort(key=lambda pair: -pair[0])
        last = new == params.max_new_tokens
        for total, tokens in grown[: params.num_beams]:
            if last or tokens[-1] in params.stop_token_ids:
                finished.append((total / penalty(params, new), tokens))
        beams = [pair for pair in grown if pair[1][-1] not in params.stop_token_ids][: params.num_beams]
    return sorted(finished, reverse=True)[: params.num_return_sequences]


def assert_same(found: Sequence[Hypothesis], expected: RegressionSchema) -> None:
    assert [tuple(hypothesis.tokens) for hypothesis in found] == [tokens for _, tokens in expected]
    assert [hypothesis.score for hypothesis in found] == pytest.approx([score for score, _ in expected], abs=1e-10)


def scripted(steps: dict[tuple[int, int], dict[int, float]], size: int, junk: Sequence[int]) -> TableModel:
    """After ``(previous, current)`` tokens have these log-probabilities; what is left is spread over ``junk``."""
    weights = torch.full((size, size, size), -math.inf, dtype=torch.float64)
    weights[..., list(junk)] = -math.log(len(junk))
    for (previous, current), logprobs in steps.items():
        rest = 1 - sum(map(math.exp, logprobs.values()))
        weights[previous, current, list(junk)] = math.log(rest / len(junk))
        for token, logprob in logprobs.items():
            weights[previous, current, token] = logprob
    return TableModel(weights)
