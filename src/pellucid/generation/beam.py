"""Beam search: several unfinished sequences of each prompt at once, and the best finished ones in the end.

After each step the ``num_beams`` best unfinished sequences of a prompt, by the sum of their log-probabilities, are
continued; an ending counts when its sum is among the ``num_beams`` best of its step, ended or not. A prompt is done
when it has ``num_return_sequences`` finished sequences and no unfinished one can overtake the last of them under the
length penalty, whatever its sign: log-probabilities are never positive, so a sum can only fall while the penalty takes
a known range.

Ties: equal sums rank by the unfinished sequence that they continue, the better one first, then by token id, lower
first; of equal scores the sequence that ended earlier comes first, then that of the better rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from pellucid.errors import ArgumentError
from pellucid.generation.config import BeamSearchConfig, Ids, check_lists, check_requests
from pellucid.generation.decode import FinishReason, Generated, ModelRunner
from pellucid.generation.sampling import NOT_FINITE, nothing_possible
from pellucid.shapes import Float, Tensor


@dataclass(frozen=True)
class Hypothesis(Generated):
    """A finished sequence. ``score`` is its summed log-probability divided by the length penalty."""

    score: float


def beam_search(
    model: nn.Module,
    prompts: Sequence[Ids],
    params: BeamSearchConfig = BeamSearchConfig(),  # noqa: B008 - frozen
    *,
    sources: Sequence[Ids] | None = None,
    use_cache: bool = True,
    vocab_size: int | None = None,
) -> list[list[Hypothesis]]:
    """For each prompt the ``num_return_sequences`` sequences, best first: fewer only where there are not so many.

    Arguments are those of :func:`~pellucid.generation.decode.decode`, as are the checks before anything is computed.
    A prompt's result does not depend on its batch mates: one that is done leaves the batch, and the others keep
    their own caches and sources.
    """
    check_lists("prompts", prompts)
    each = [params] * len(prompts)
    size = check_requests(model, prompts, each, sources, vocab_size=vocab_size, use_cache=use_cache)
    if not prompts:
        return []
    runner = ModelRunner(model, prompts, sources, new=params.max_new_tokens, use_cache=use_cache)
    searches = [_Search(list(prompt), params) for prompt in prompts]
    while rows := [row for search in searches for row in search.rows()]:
        logprobs_RV = _log_probabilities(runner.next_logits(rows)[:, :size].cpu())
        going_on, start = [], 0
        for search in searches:
            count = len(search.beams)
            if count:
                going_on += [start + beam for beam in search.step(logprobs_RV[start : start + count])]
            start += count
        if going_on and going_on != list(range(len(rows))):
            runner.keep(going_on)
    return [search.finished for search in searches]


@dataclass(frozen=True)
class _Beam:
    """An unfinished sequence: its new tokens, their log-probabilities and the sum of these."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    total: float = 0.0

    def then(self, token: int, logprob: float, total: float) -> _Beam:
        return _Beam((*self.tokens, token), (*self.logprobs, logprob), total)


@dataclass
class _Search:
    """What one prompt has found so far."""

    prompt: list[int]
    params: BeamSearchConfig
    beams: list[_Beam] = field(default_factory=lambda: [_Beam()])
    finished: list[Hypothesis] = field(default_factory=list)
    new: int = 0

    def rows(self) -> list[list[int]]:
        return [[*self.prompt, *beam.tokens] for beam in self.beams]

    def step(self, logprobs_KV: Float[Tensor, "K V"]) -> list[int]:
        """Take a token. Returns which of the old beams each new one continues."""
        stop_token_ids = list(self.params.stop_token_ids)
        if self.new < self.params.min_new_tokens:
            logprobs_KV = _without(logprobs_KV, stop_token_ids)
        self.new += 1
        last = self.new == self.params.max_new_tokens
        totals_KV = torch.tensor([beam.total for beam in self.beams], dtype=torch.float64)[:, None] + logprobs_KV
        for origin, token in _best(totals_KV, self.params.num_beams):
            if last or token in stop_token_ids:
                self._finish(self._grown(origin, token, logprobs_KV, totals_KV), token in stop_token_ids)
        ahead = [] if last else _best(_without(totals_KV, stop_token_ids), self.params.num_beams)
        if not ahead and not self.finished:
            raise nothing_possible(len(stop_token_ids))
        beams = [self._grown(origin, token, logprobs_KV, totals_KV) for origin, token in ahead]
        if self._is_settled(beams):
            beams, ahead = [], []
        self.beams = beams
        return [origin for origin, _ in ahead]

    def _grown(self, origin: int, token: int, logprobs_KV: Tensor, totals_KV: Tensor) -> _Beam:
        return self.beams[origin].then(token, float(logprobs_KV[origin, token]), float(totals_KV[origin, token]))

    def _finish(self, beam: _Beam, stopped: bool) -> None:
        reason: FinishReason = "stop" if stopped else "length"
        score = beam.total / self.params.penalty(self.new)
        self.finished.append(Hypothesis(list(beam.tokens), list(beam.logprobs), reason, score))
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)  # stable: of equals the earlier comes first
        del self.finished[self.params.num_return_sequences :]

    def _is_settled(self, beams: list[_Beam]) -> bool:
        """Whether no beam can overtake. A sum only falls, so it ends best with the largest penalty still to come."""
        if not beams or len(self.finished) < self.params.num_return_sequences:
            return False
        most = self.params.max_new_tokens
        soonest = min(max(self.new, self.params.min_new_tokens) + 1, most)
        largest = max(self.params.penalty(soonest), self.params.penalty(most))
        return beams[0].total / largest <= self.finished[-1].score


def _log_probabilities(logits_RV: Tensor) -> Tensor:
    """In float64, never positive. A row that nothing can follow is minus infinity throughout, not NaN."""
    logits_RV = logits_RV.double()
    if bool(logits_RV.isnan().any()) or bool((logits_RV == torch.inf).any()):
        raise ArgumentError(NOT_FINITE)
    return logits_RV.log_softmax(1).masked_fill(logits_RV == -torch.inf, -torch.inf)


def _without(values_KV: Tensor, tokens: list[int]) -> Tensor:
    return values_KV.index_fill(1, torch.tensor(tokens, dtype=torch.long), -torch.inf)


def _best(values_KV: Tensor, count: int) -> list[tuple[int, int]]:
    """(row, token) of the ``count`` largest values above minus infinity; of equals the lower row, then token, first."""
    flat = values_KV.flatten()
    least = flat.topk(min(count, len(flat))).values[-1]
    candidates = ((flat >= least) & (flat > -torch.inf)).nonzero()[:, 0]
    order = flat[candidates].sort(descending=True, stable=True).indices[:count]
    return [divmod(place, values_KV.shape[1]) for place in candidates[order].tolist()]
