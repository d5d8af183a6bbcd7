"""From logits to tokens, all rows together and on the device where the logits are.

Filters are prefixes of the tokens in rank order: the most likely first, equal ones by token id, lower first. ``top_k``
and ``top_p`` cut inside a tie by that rank, ``min_p`` keeps or drops all of a tie, and greedy takes the first. Nothing
is ever added to a logit. Everything is computed in float64, row by row, so that a row's tokens depend neither on the
dtype of the logits nor on its batch mates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pellucid.errors import ArgumentError
from pellucid.generation.config import GenerationConfig
from pellucid.shapes import Bool, Float, Int, Tensor

NOT_FINITE = "the model's logits hold NaN or infinity; audit or reload its weights"
_ROUNDING = 1e-6  # a sum this close below p has reached it: float32 logits cannot say more
_FIRST = 1024  # so many tokens are ranked first where only top_p says how many are needed
_BLOCK = 256  # steps whose random numbers are drawn, and moved to the device, at once


class SampledToken(NamedTuple):
    """A token and its log-probability: the model's own, at temperature 1 and before any filter."""

    token: int
    logprob: float


class Candidates(NamedTuple):
    """The most likely tokens of each row in rank order, their weights, and which of them the filters keep."""

    ids: Int[Tensor, "B C"]
    weights: Float[Tensor, "B C"]
    keep: Bool[Tensor, "B C"]


def rank(scores_BV: Float[Tensor, "B V"], count: int) -> tuple[Float[Tensor, "B C"], Int[Tensor, "B C"]]:
    """The ``count`` highest scores of each row and their ids; of equal scores the lower id comes first."""
    if count >= scores_BV.shape[1]:
        scores_BC, ids_BC = scores_BV.sort(dim=1, descending=True, stable=True)
        return scores_BC, ids_BC
    top = scores_BV.topk(count + 1, dim=1)
    least_B1, next_B1 = top.values[:, count - 1 : count], top.values[:, count:]
    if bool(((least_B1 == next_B1) & (least_B1 > -torch.inf)).any()):  # topk leaves open which of a tie it takes
        above_BV, tied_BV = scores_BV > least_B1, scores_BV == least_B1
        room_B1 = count - above_BV.sum(1, keepdim=True)
        ids_BC = (above_BV | (tied_BV & (tied_BV.cumsum(1) <= room_B1))).int().topk(count, dim=1).indices
    else:
        ids_BC = top.indices[:, :count]
    ids_BC = ids_BC.sort(1).values
    scores_BC, order_BC = scores_BV.gather(1, ids_BC).sort(dim=1, descending=True, stable=True)
    return scores_BC, ids_BC.gather(1, order_BC)


def candidates(
    logits_BV: Float[Tensor, "B V"],
    temperature_B: Float[Tensor, "B"],
    top_k_B: Int[Tensor, "B"],
    top_p_B: Float[Tensor, "B"],
    min_p_B: Float[Tensor, "B"],
    count: int,
) -> Candidates:
    """What ``top_k``, then ``top_p``, then ``min_p`` keep of the ``count`` most likely tokens of each row.

    ``top_k`` is V where there is none. The most likely token is always kept, and all of them for ``top_p = 1``.
    """
    vocab_size = logits_BV.shape[1]
    logits_BC, ids_BC = rank(logits_BV, min(count, vocab_size))
    logits_BC = logits_BC.double()
    # subtracting the largest first keeps the quotient from overflowing at any temperature
    best_B1, temperature_B1 = logits_BC[:, :1], temperature_B[:, None]
    keep_BC = torch.arange(logits_BC.shape[1], device=logits_BV.device) < top_k_B[:, None]
    weights_BC = ((logits_BC - best_B1) / temperature_B1).exp() * keep_BC
    sums_BC = weights_BC.cumsum(1)  # one after the other, so that no sum depends on how many tokens are ranked
    total_B = sums_BC[:, -1]
    if bool((top_k_B >= vocab_size).any()):
        whole_B = log_totals((logits_BV.double() - best_B1) / temperature_B1).exp()
        total_B = torch.where(top_k_B >= vocab_size, whole_B, total_B)
    needed_B1 = ((top_p_B - _ROUNDING) * total_B)[:, None]
    keep_BC &= (sums_BC - weights_BC < needed_B1) | (top_p_B >= 1)[:, None]
    keep_BC[:, 0] = True
    keep_BC &= weights_BC >= min_p_B[:, None]
    return Candidates(ids_BC, weights_BC * keep_BC, keep_BC)


def log_totals(logits_BV: Float[Tensor, "B V"]) -> Float[Tensor, "B"]:
    """The logarithm of the sum of each row's exponentials, in float64.

    On a CPU row by row: a row stays in its cache, and is added up in the same order in any company.
    """
    if logits_BV.device.type == "cpu":
        return torch.stack([row_V.double().logsumexp(0) for row_V in logits_BV])
    return logits_BV.double().logsumexp(1)


def draw(weights_BC: Float[Tensor, "B C"], uniform_B: Float[Tensor, "B"]) -> Int[Tensor, "B"]:
    """An index a row, with probability proportional to its weight; never one of weight 0."""
    sums_BC = weights_BC.double().cumsum(1)
    total_B = sums_BC[:, -1]
    below_B = torch.minimum(uniform_B * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    return torch.searchsorted(sums_BC, below_B[:, None], right=True)[:, 0]


def apply_repetition_penalty(
    logits_BV: Float[Tensor, "B V"], seen_BV: Bool[Tensor, "B V"], penalty_B: Float[Tensor, "B"]
) -> Float[Tensor, "B V"]:
    """Logits of the tokens ``seen``: divided by the row's penalty where positive, multiplied where negative."""
    penalty_B1 = penalty_B[:, None]
    penalized_BV = torch.where(logits_BV > 0, logits_BV / penalty_B1, logits_BV * penalty_B1)
    return torch.where(seen_BV, penalized_BV, logits_BV)


def nothing_possible(blocked: int) -> ArgumentError:
    """What to raise where no token is left to choose."""
    return ArgumentError(f"no token may be chosen: {blocked} stop ids are blocked; lower min_new_tokens")


class Sampler:
    """Chooses the next token of each row of a batch, step by step.

    Each row draws one number a step from a generator of its own. What a step needs is on the device from the start:
    no list of the host is moved there for a token.
    """

    def __init__(
        self,
        params: Sequence[GenerationConfig],
        prompts: Sequence[Sequence[int]],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.params = params
        self._device = torch.device("cpu") if device.type == "mps" else device
        self._step = 0
        self._generators = [_generator(each.seed) for each in params]
        self._uniform_BS = torch.empty(len(params), 0, dtype=torch.float64)
        drawing = [each.temperature > 0 for each in params]
        ranked = [each.top_p < 1 or (each.top_k or vocab_size) < vocab_size for each in params]
        self._ranked = self._rows([a and b for a, b in zip(drawing, ranked, strict=True)])
        self._unranked = self._rows([a and not b for a, b in zip(drawing, ranked, strict=True)])
        limits = [min(each.top_k or vocab_size, vocab_size) for each in params]
        self._open = any(drawing[row] and ranked[row] and limits[row] == vocab_size for row in range(len(params)))
        largest = [limit for limit in limits if limit < vocab_size]
        self._count = max([*largest, _FIRST] if self._open else [*largest, 1])
        self._top_k_B = torch.tensor(limits, device=self._device)
        self._temperature_B = self._numbers([each.temperature or 1.0 for each in params])
        self._top_p_B = self._numbers([each.top_p for each in params])
        self._min_p_B = self._numbers([each.min_p for each in params])
        self._penalty_B = self._numbers([each.repetition_penalty for each in params])
        self._least_new_B = torch.tensor([each.min_new_tokens for each in params], device=self._device)
        self._most_blocked = max(each.min_new_tokens for each in params)
        self._any_greedy, self._any_min_p = not all(drawing), any(each.min_p > 0 for each in params)
        self._seen_BV = self._blocked_BV = None
        if any(each.repetition_penalty != 1 for each in params):
            counted = [row if each.penalize_prompt else () for row, each in zip(prompts, params, strict=True)]
            self._seen_BV = self._marked(counted, vocab_size)
        if any(each.min_new_tokens and each.stop_token_ids for each in params):
            self._blocked_BV = self._marked([each.stop_token_ids for each in params], vocab_size)

    def __call__(self, logits_BV: Float[Tensor, "B V"]) -> Float[Tensor, "2 B"]:
        """``[2, B]`` in float64: each row's token (-1 where none is possible) and its log-probability (NaN for logits
        that hold NaN or infinity)."""
        logits_BV = logits_BV.to(self._device)
        scores_BV, uniform_B = self._adjusted(logits_BV), self._uniforms()
        # the dtype of the logits holds all of their order; what is computed from them is float64
        token_B = scores_BV.argmax(1) if self._any_greedy else torch.zeros_like(self._top_k_B)
        for rows, choose in ((self._ranked, self._draw_ranked), (self._unranked, self._draw_any)):
            if rows is not None:
                chosen_RV = scores_BV if len(rows) == len(scores_BV) else scores_BV[rows]
                token_B[rows] = choose(chosen_RV, rows, uniform_B[rows])
        self._step += 1
        token_B1 = token_B[:, None]
        total_B = log_totals(logits_BV)
        logprob_B = (logits_BV.gather(1, token_B1)[:, 0].double() - total_B).masked_fill(~total_B.isfinite(), torch.nan)
        impossible_B = scores_BV.gather(1, token_B1)[:, 0] == -torch.inf
        if self._seen_BV is not None:
            self._seen_BV.scatter_(1, token_B1, True)
        return torch.stack([token_B.masked_fill(impossible_B, -1).double(), logprob_B])

    def _adjusted(self, logits_BV: Tensor) -> Tensor:
        """Logits under the repetition penalty, without the stop ids that may not come yet."""
        if self._seen_BV is not None:
            logits_BV = apply_repetition_penalty(logits_BV.double(), self._seen_BV, self._penalty_B)
        if self._blocked_BV is not None and self._step < self._most_blocked:
            blocked_BV = self._blocked_BV & (self._step < self._least_new_B)[:, None]
            logits_BV = logits_BV.masked_fill(blocked_BV, -torch.inf)
        return logits_BV

    def _draw_ranked(self, scores_RV: Tensor, rows: Tensor, uniform_R: Tensor) -> Tensor:
        count, vocab_size, top_k_R = self._count, scores_RV.shape[1], self._top_k_B[rows]
        settings = (self._temperature_B[rows], top_k_R, self._top_p_B[rows], self._min_p_B[rows])
        found = candidates(scores_RV, *settings, count)
        # a row that keeps the last token that was ranked, and has no top_k, may keep more
        while count < vocab_size and self._open and bool((found.keep[:, -1] & (top_k_R > count)).any()):
            count *= 16
            found = candidates(scores_RV, *settings, count)
        ids_RC, order_RC = found.ids.sort(1)
        place_R = draw(found.weights.gather(1, order_RC), uniform_R).clamp(max=ids_RC.shape[1] - 1)
        return ids_RC.gather(1, place_R[:, None])[:, 0]

    def _draw_any(self, scores_RV: Tensor, rows: Tensor, uniform_R: Tensor) -> Tensor:
        relative_RV = scores_RV.double() - scores_RV.amax(1, keepdim=True)
        weights_RV = (relative_RV / self._temperature_B[rows, None]).exp()
        if self._any_min_p:
            weights_RV = weights_RV * (weights_RV >= self._min_p_B[rows, None])
        return draw(weights_RV, uniform_R).clamp(max=scores_RV.shape[1] - 1)

    def _uniforms(self) -> Tensor:
        step = self._step % _BLOCK
        if step == 0:
            block = [torch.rand(_BLOCK, generator=generator, dtype=torch.float64) for generator in self._generators]
            self._uniform_BS = torch.stack(block).to(self._device)
        return self._uniform_BS[:, step]

    def _rows(self, chosen: list[bool]) -> Tensor | None:
        rows = [row for row, is_chosen in enumerate(chosen) if is_chosen]
        return torch.tensor(rows, device=self._device) if rows else None

    def _numbers(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._device)

    def _marked(self, ids: Sequence[Sequence[int]], vocab_size: int) -> Tensor:
        marked_BV = torch.zeros(len(ids), vocab_size, dtype=torch.bool)
        for row, own in enumerate(ids):
            marked_BV[row, list(own)] = True
        return marked_BV.to(self._device)


def _generator(seed: int | None) -> torch.Generator:
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator
