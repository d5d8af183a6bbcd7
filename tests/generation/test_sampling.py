"""Filters select and never add; draws are a request's own and follow the distribution."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.errors import ConfigError, InputError
from pellucid.generation import GenerationParams
from pellucid.generation.sampling import (
    apply_repetition_penalty,
    draw,
    min_p_mask,
    probabilities,
    sample,
    top_k_mask,
    top_p_mask,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def logits(*weights: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor([weights], dtype=torch.float64).log().to(dtype)


def kept(keep_BV: torch.Tensor) -> list[int]:
    return keep_BV[0].nonzero()[:, 0].tolist()


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.0, 1e-8, 1e-3])
def test_a_tiny_top_p_keeps_exactly_the_most_likely(dtype: torch.dtype, p: float) -> None:
    """B125."""
    assert kept(top_p_mask(logits(0.2, 0.5, 0.3, dtype=dtype), p)) == [1]
    flat = torch.zeros(1, 5000, dtype=dtype)
    flat[0, 4321] = 1e-2
    assert kept(top_p_mask(flat, 0.0)) == [4321]
    assert kept(top_p_mask(torch.zeros(1, 700, dtype=dtype), p)) == [0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_top_p_one_keeps_all_and_half_keeps_the_half(dtype: torch.dtype) -> None:
    """B125: p = 1 keeps what underflows too; p = .5 on [.5, .3, .2] is reached by the first token alone."""
    assert kept(top_p_mask(torch.tensor([[0.0, -1000.0, -60000.0]], dtype=dtype), 1.0)) == [0, 1, 2]
    assert kept(top_p_mask(torch.tensor([[3.0, 1.0, 1.0, 1.0]], dtype=dtype).log(), 0.5)) == [0]
    assert kept(top_p_mask(torch.tensor([[1.0, 1.0]], dtype=dtype), 0.5)) == [0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_top_p_cuts_where_the_sum_is_reached(dtype: torch.dtype) -> None:
    assert kept(top_p_mask(logits(0.5, 0.3, 0.2, dtype=dtype), 0.5)) == [0]
    assert kept(top_p_mask(logits(0.5, 0.3, 0.2, dtype=dtype), 0.51)) == [0, 1]
    assert kept(top_p_mask(logits(0.3, 0.2, 0.5, dtype=dtype), 0.8)) == [0, 2]
    assert kept(top_p_mask(logits(0.3, 0.2, 0.5, dtype=dtype), 0.81)) == [0, 1, 2]


def test_rounding_of_float32_logits_lets_no_other_token_in() -> None:
    """In float32 .4 comes back as .39999999838, which has reached .4."""
    assert kept(top_p_mask(logits(0.4, 0.3, 0.2, 0.1), 0.4)) == [0]


def test_ties_rank_by_id_for_top_k_and_top_p_and_stand_together_for_min_p() -> None:
    tied = torch.tensor([[1.0, 2.0, 2.0, 2.0]])
    assert kept(top_k_mask(tied, 2)) == [1, 2]
    assert kept(top_p_mask(tied, 0.5)) == [1, 2]
    assert kept(min_p_mask(tied, 1.0)) == [1, 2, 3]
    assert sample(tied[0], GenerationParams(), generator()).token == 1


def test_min_p_is_relative_to_the_most_likely() -> None:
    assert kept(min_p_mask(logits(0.5, 0.3, 0.2), 0.5)) == [0, 1]
    assert kept(min_p_mask(logits(0.5, 0.3, 0.2), 0.0)) == [0, 1, 2]
    assert kept(min_p_mask(logits(0.5, 0.3, 0.2), 1.0)) == [0]


def test_top_k_larger_than_the_vocabulary_keeps_all() -> None:
    assert kept(top_k_mask(logits(0.5, 0.5), 9)) == [0, 1]


@settings(max_examples=60, deadline=None)
@given(
    row=st.lists(st.floats(-30, 30), min_size=1, max_size=12),
    k=st.integers(1, 12),
    p=st.floats(0, 1),
    dtype=st.sampled_from(DTYPES),
)
def test_every_filter_keeps_the_most_likely_and_only_a_top_set(
    row: list[float], k: int, p: float, dtype: torch.dtype
) -> None:
    logits_BV = torch.tensor([row], dtype=dtype)
    best = int(logits_BV[0].argmax())
    for keep_BV in (top_k_mask(logits_BV, k), top_p_mask(logits_BV, p), min_p_mask(logits_BV, p)):
        assert bool(keep_BV[0, best])
        dropped = logits_BV[~keep_BV]
        assert dropped.numel() == 0 or dropped.max() <= logits_BV[keep_BV].min()
    assert int(top_k_mask(logits_BV, k).sum()) == min(k, len(row))
    chosen = probabilities(logits_BV)[top_p_mask(logits_BV, p)]
    assert chosen.sum() >= p - 1e-6  # enough …
    assert len(chosen) == 1 or p == 1 or chosen.sum() - chosen.min() < p  # … and no more than needed


@pytest.mark.parametrize("name", ["top_p", "min_p"])
@pytest.mark.parametrize("value", [float("nan"), -0.1, 1.1, float("inf")])
def test_probabilities_that_are_none_are_refused(name: str, value: float) -> None:
    """B125: NaN must not switch a filter off."""
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        GenerationParams(**{name: value})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temperature": -1.0}, "temperature is -1.0, but must be at least 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0, but must be at least 0.01"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty is nan"),
        ({"penalize_prompt": 1}, "penalize_prompt is 1, but must be true or false"),
        ({"top_k": 0}, "top_k is 0, but must be at least 1"),
        ({"top_k": True}, "top_k is true"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens is 9, but max_new_tokens is 8"),
        ({"stop": [""]}, "stop.0 is '', but must be at least 1 character long"),
        ({"stop": "x"}, "stop is 'x', but must be a list"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0 is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"top_pp": 0.5}, "did you mean 'top_p'"),
    ],
)
def test_bad_params_are_named(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GenerationParams(**fields)
    assert said in str(caught.value)


def test_draws_follow_the_weights_and_never_choose_what_has_none() -> None:
    weights, source = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0]), generator(7)
    counts = torch.bincount(torch.tensor([draw(weights, source) for _ in range(4000)]), minlength=6)
    assert counts[[0, 2, 5]].tolist() == [0, 0, 0]
    assert (counts / 4000 - weights).abs().max() < 0.03


def test_a_draw_at_either_end_of_the_interval_is_a_possible_token(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.tensor([0.0, 0.1, 0.2, 0.0])
    for uniform, expected in (
        (0.0, 1),
        (math.nextafter(1.0, 0.0), 2),
        (0.1 / 0.3 - 1e-9, 1),
        (0.1 / 0.3 + 1e-9, 2),
    ):
        monkeypatch.setattr(torch, "rand", lambda *_, u=uniform, **__: torch.tensor(u, dtype=torch.float64))
        assert draw(weights.double(), generator()) == expected


def test_filters_apply_in_the_documented_order() -> None:
    """top_k 2 of [.4, .3, .3] leaves [4/7, 3/7]; then top_p .5 keeps one (before top_k it would keep two)."""
    params = GenerationParams(temperature=1.0, top_k=2, top_p=0.5)
    source = generator(0)
    assert {sample(logits(0.4, 0.3, 0.3)[0], params, source).token for _ in range(50)} == {0}
    hot = GenerationParams(temperature=2.0, top_p=0.6)  # p ** (1/2): [.36, .33, .31], two are needed for .6
    assert {sample(logits(0.4, 0.33, 0.27)[0], hot, source).token for _ in range(200)} == {0, 1}


def test_a_penalty_divides_what_is_positive_and_multiplies_what_is_negative() -> None:
    """B124: 0 and minus infinity stay, and so does every token that was not seen."""
    given = torch.tensor([[0.0, 3.0, -3.0, -math.inf, 3.0, -3.0]], dtype=torch.float64)
    expected = torch.tensor([[0.0, 1.5, -6.0, -math.inf, 3.0, -3.0]], dtype=torch.float64)
    before = given.clone()
    assert torch.equal(apply_repetition_penalty(given, {3, 2, 1, 0}, 2.0), expected)
    assert torch.equal(apply_repetition_penalty(given, (), 2.0), before)
    assert torch.equal(given, before)
    rewarded = apply_repetition_penalty(given, [1, 2], 0.5)[0, 1:3]
    assert rewarded.tolist() == [6.0, -1.5]


def test_a_penalty_comes_before_temperature_and_filters_and_leaves_the_log_probability() -> None:
    """[3, 2] at half the temperature is [6, 4]; penalized first by 2 it is [3, 4], and top_k takes the second."""
    given = torch.tensor([3.0, 2.0], dtype=torch.float64)
    params = GenerationParams(temperature=0.5, top_k=1, repetition_penalty=2.0)
    choice = sample(given, params, generator(), seen={0})
    assert choice.token == 1
    assert choice.logprob == pytest.approx(float(given.log_softmax(0)[1]))


@pytest.mark.parametrize("temperature", [1e-300, 1e-8, 1e300])
def test_no_temperature_overflows(temperature: float) -> None:
    choice = sample(torch.tensor([100.0, -100.0, 99.0]), GenerationParams(temperature=temperature), generator())
    assert choice.token == 0 or temperature > 1
    assert math.isfinite(choice.logprob)


def test_the_log_probability_is_the_models_own() -> None:
    params = GenerationParams(temperature=0.1, top_k=1)
    choice = sample(logits(0.2, 0.5, 0.3)[0], params, generator())
    assert choice.token == 1
    assert choice.logprob == pytest.approx(math.log(0.5), abs=1e-6)


def test_greedy_draws_nothing_and_sampling_draws_one_number() -> None:
    source, other = generator(3), generator(3)
    sample(torch.zeros(4), GenerationParams(), source)
    assert torch.equal(source.get_state(), other.get_state())
    sample(torch.zeros(4), GenerationParams(temperature=1.0), source)
    torch.rand((), generator=other, dtype=torch.float64)
    assert torch.equal(source.get_state(), other.get_state())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_refused(value: float) -> None:
    with pytest.raises(InputError, match="NaN or infinity"):
        sample(torch.tensor([0.0, value]), GenerationParams(), generator())


def test_minus_infinity_is_a_token_that_may_not_come() -> None:
    params = GenerationParams(temperature=1.0)
    assert {sample(torch.tensor([-math.inf, 0.0]), params, generator(s)).token for s in range(20)} == {1}
    with pytest.raises(InputError, match="no token may be chosen"):
        sample(torch.tensor([0.0, -math.inf]), params, generator(), forbidden=(0,))
