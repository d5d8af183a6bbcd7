"""From logits to a token. Filters say what to keep, as booleans; nothing is ever added to a logit.

Ties: equal logits rank by token id, lower first. ``keep_top_k`` and ``keep_top_p`` cut inside a tie by that
rank; ``keep_min_p`` keeps or drops all of a tie; greedy takes the first. Everything is computed in float64,
so a narrow dtype of the logits changes what the model said, but not how it is read.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch

from pellucid.errors import InputError
from pellucid.generation.params import GenerationParams
from pellucid.shapes import Bool, Float, Tensor

_ROUNDING = 1e-6  # a sum this close below p has reached it: float32 logits cannot say more


class SampledToken(NamedTuple):
    """A token and its log-probability: the model's own, at temperature 1 and before any filter."""

    token: int
    logprob: float


def top_k_mask(logits_BV: Float[Tensor, "B V"], k: int) -> Bool[Tensor, "B V"]:
    """The ``k`` most likely tokens, exactly ``k`` of them where there are so many."""
    return _first_ranked(logits_BV, torch.arange(logits_BV.shape[1], device=logits_BV.device) < k)


def top_p_mask(logits_BV: Float[Tensor, "B V"], p: float) -> Bool[Tensor, "B V"]:
    """The fewest most likely tokens whose probabilities sum to ``p``: at least one, and for ``p = 1`` all."""
    if p >= 1:
        return torch.ones_like(logits_BV, dtype=torch.bool)
    ranked_BV = probabilities(logits_BV).sort(dim=1, descending=True, stable=True).values
    before_BV = ranked_BV.cumsum(1) - ranked_BV  # what the more likely ones sum to
    keep_BV = before_BV < p - _ROUNDING
    keep_BV[:, 0] = True
    return _first_ranked(logits_BV, keep_BV)


def min_p_mask(logits_BV: Float[Tensor, "B V"], p: float) -> Bool[Tensor, "B V"]:
    """Tokens at least ``p`` times as likely as the most likely one."""
    likelihood_BV = probabilities(logits_BV)
    return likelihood_BV >= p * likelihood_BV.amax(1, keepdim=True)


def probabilities(logits_BV: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
    """Softmax in float64."""
    return logits_BV.double().softmax(1)


def sample(
    logits_V: Float[Tensor, " V"],
    params: GenerationParams,
    generator: torch.Generator,
    *,
    forbidden: tuple[int, ...] = (),
    seen: Collection[int] = (),
) -> SampledToken:
    """The next token of one request. Draws one number from ``generator``, or none when greedy.

    Tokens of ``forbidden`` do not come; those of ``seen`` are penalized as ``params`` says.
    """
    logits_BV = checked(logits_V[None])
    allowed_BV = logits_BV > -torch.inf
    allowed_BV[:, list(forbidden)] = False
    if not bool(allowed_BV.any()):
        raise nothing_possible(len(forbidden))
    penalized_BV = apply_repetition_penalty(logits_BV, seen, params.repetition_penalty)
    token = _pick(penalized_BV.masked_fill(~allowed_BV, -torch.inf), params, generator)
    return SampledToken(token, float(logits_BV.log_softmax(1)[0, token]))


def checked(logits_BV: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
    """The logits in float64. NaN and plus infinity are refused; minus infinity is a token that never comes."""
    logits_BV = logits_BV.double()
    if bool(logits_BV.isnan().any()) or bool((logits_BV == torch.inf).any()):
        raise InputError("the model's logits hold NaN or infinity; audit or reload its weights")
    return logits_BV


def nothing_possible(held_back: int) -> InputError:
    """What to raise where no token is left to choose."""
    return InputError(f"no token may be chosen: {held_back} stop ids are held back; lower min_new_tokens")


def apply_repetition_penalty(
    logits_BV: Float[Tensor, "B V"], seen: Collection[int], penalty: float
) -> Float[Tensor, "B V"]:
    """Logits of the tokens ``seen``: divided by ``penalty`` where positive, multiplied where negative."""
    if penalty == 1 or not seen:
        return logits_BV
    index = torch.tensor(sorted(seen), device=logits_BV.device)
    chosen_BS = logits_BV[:, index]
    result_BV = logits_BV.clone()
    result_BV[:, index] = torch.where(chosen_BS > 0, chosen_BS / penalty, chosen_BS * penalty)
    return result_BV


def _pick(logits_BV: Tensor, params: GenerationParams, generator: torch.Generator) -> int:
    if params.temperature == 0:
        return int(logits_BV.argmax(1))
    # Subtracting the largest first keeps the quotient from overflowing at any temperature.
    logits_BV = (logits_BV - logits_BV.amax(1, keepdim=True)) / params.temperature
    if params.top_k is not None:
        logits_BV = _only(logits_BV, top_k_mask(logits_BV, params.top_k))
    logits_BV = _only(logits_BV, top_p_mask(logits_BV, params.top_p))
    logits_BV = _only(logits_BV, min_p_mask(logits_BV, params.min_p))
    return draw(probabilities(logits_BV)[0], generator)


def draw(weights_V: Float[Tensor, " V"], generator: torch.Generator) -> int:
    """An index with probability proportional to its weight, by one uniform number; never one of weight 0."""
    weights_V = weights_V.cpu()
    uniform = torch.rand((), generator=generator, dtype=torch.float64)
    possible = weights_V.nonzero()[:, 0]
    sums = weights_V[possible].double().cumsum(0)
    place = int(torch.searchsorted(sums, uniform * sums[-1], right=True))
    return int(possible[min(place, len(possible) - 1)])


def _only(logits_BV: Tensor, keep_BV: Tensor) -> Tensor:
    return logits_BV.masked_fill(~keep_BV, -torch.inf)


def _first_ranked(logits_BV: Tensor, keep_ranks: Tensor) -> Tensor:
    """Booleans by rank (``[V]`` or ``[B, V]``) put back in the order of token ids."""
    order_BV = logits_BV.sort(dim=1, descending=True, stable=True).indices
    keep_BV = torch.zeros_like(logits_BV, dtype=torch.bool)
    return keep_BV.scatter(1, order_BV, keep_ranks.expand_as(order_BV))
