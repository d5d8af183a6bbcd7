"""Filters select and never add; draws are a request's own and follow the distribution."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.errors import ConfigError
from pellucid.generation import GenerationConfig
from pellucid.generation.sampling import SampledToken, Sampler, apply_repetition_penalty, candidates, draw, rank

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def logits(*weights: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor([weights], dtype=torch.float64).log().to(dtype)


def kept(
    logits_BV: torch.Tensor, *, top_k: int = 1 << 20, top_p: float = 1.0, min_p: float = 0.0, count: int = 1 << 20
) -> list[int]:
    """What the filters keep of one row, by id."""
    top_k_B = torch.tensor([min(top_k, logits_BV.shape[1])])
    probabilities = (torch.tensor([p], dtype=torch.float64) for p in (top_p, min_p))
    found = candidates(logits_BV, torch.ones(1, dtype=torch.float64), top_k_B, *probabilities, count)
    return sorted(found.ids[0, found.keep[0]].tolist())


def sample(
    logits_V: torch.Tensor, *, blocked: tuple[int, ...] = (), seen: tuple[int, ...] = (), **fields: object
) -> SampledToken:
    """One row, one step."""
    if blocked:
        fields |= {"min_new_tokens": 1, "stop_token_ids": blocked}
    sampler = Sampler([GenerationConfig(**fields)], [seen], len(logits_V), torch.device("cpu"))
    (token,), (logprob,) = sampler(logits_V[None]).tolist()
    return SampledToken(int(token), logprob)


def by_definition(weights: list[float], top_k: int, top_p: float, min_p: float) -> list[int]:
    """The filters one after the other on a list of (weight, id), as they are defined."""
    ranked = sorted(range(len(weights)), key=lambda i: (-weights[i], i))[:top_k]
    total, before, nucleus = sum(weights[i] for i in ranked), 0.0, []
    for i in ranked:
        if top_p < 1 and nucleus and before / total >= top_p - 1e-6:
            break
        nucleus.append(i)
        before += weights[i]
    return sorted(i for i in nucleus if weights[i] >= min_p * weights[ranked[0]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.0, 1e-8, 1e-3])
def test_a_tiny_top_p_keeps_exactly_the_most_likely(dtype: torch.dtype, p: float) -> None:
    """B125."""
    assert kept(logits(0.2, 0.5, 0.3, dtype=dtype), top_p=p) == [1]
    flat = torch.zeros(1, 5000, dtype=dtype)
    flat[0, 4321] = 1e-2
    assert kept(flat, top_p=0.0) == [4321]
    assert kept(torch.zeros(1, 700, dtype=dtype), top_p=p) == [0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_top_p_one_keeps_all_and_half_keeps_the_half(dtype: torch.dtype) -> None:
    """B125: p = 1 keeps what underflows too; p = .5 on [.5, .3, .2] is reached by the first token alone."""
    assert kept(torch.tensor([[0.0, -1000.0, -60000.0]], dtype=dtype), top_p=1.0) == [0, 1, 2]
    assert kept(torch.tensor([[3.0, 1.0, 1.0, 1.0]], dtype=dtype).log(), top_p=0.5) == [0]
    assert kept(torch.tensor([[1.0, 1.0]], dtype=dtype), top_p=0.5) == [0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_top_p_cuts_where_the_sum_is_reached(dtype: torch.dtype) -> None:
    assert kept(logits(0.5, 0.3, 0.2, dtype=dtype), top_p=0.5) == [0]
    assert kept(logits(0.5, 0.3, 0.2, dtype=dtype), top_p=0.51) == [0, 1]
    assert kept(logits(0.3, 0.2, 0.5, dtype=dtype), top_p=0.8) == [0, 2]
    assert kept(logits(0.3, 0.2, 0.5, dtype=dtype), top_p=0.81) == [0, 1, 2]


def test_rounding_of_float32_logits_lets_no_other_token_in() -> None:
    """In float32 .4 comes back as .39999999838, which has reached .4."""
    assert kept(logits(0.4, 0.3, 0.2, 0.1), top_p=0.4) == [0]


def test_ties_rank_by_id_for_top_k_and_top_p_and_stand_together_for_min_p() -> None:
    tied = torch.tensor([[1.0, 2.0, 2.0, 2.0]])
    assert kept(tied, top_k=2) == [1, 2]
    assert kept(tied, top_p=0.5) == [1, 2]
    assert kept(tied, min_p=1.0) == [1, 2, 3]
    assert sample(tied[0]).token == 1


def test_min_p_is_relative_to_the_most_likely() -> None:
    assert kept(logits(0.5, 0.3, 0.2), min_p=0.5) == [0, 1]
    assert kept(logits(0.5, 0.3, 0.2), min_p=0.0) == [0, 1, 2]
    assert kept(logits(0.5, 0.3, 0.2), min_p=1.0) == [0]


def test_top_k_larger_than_the_vocabulary_keeps_all() -> None:
    assert kept(logits(0.5, 0.5), top_k=9) == [0, 1]


@settings(max_examples=100, deadline=None)
@given(
    row=st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 2.5, -1.0, -7.0]) | st.floats(-30, 30), min_size=1, max_size=12),
    k=st.integers(1, 13),
    p=st.floats(0, 1),
    least=st.floats(0, 1),
    dtype=st.sampled_from(DTYPES),
)
def test_filters_keep_what_their_definitions_keep(
    row: list[float], k: int, p: float, least: float, dtype: torch.dtype
) -> None:
    """And the most likely token whatever they are."""
    logits_BV = torch.tensor([row], dtype=dtype)
    weights = (logits_BV.double() - logits_BV.double().max()).exp()[0].tolist()
    assert int(logits_BV[0].argmax()) in kept(logits_BV, top_k=k, top_p=p, min_p=least)
    assert kept(logits_BV, top_k=k) == by_definition(weights, k, 1.0, 0.0)
    assert kept(logits_BV, min_p=least) == by_definition(weights, 99, 1.0, least)
    nucleus = kept(logits_BV, top_p=p)
    chosen = sorted((weights[i] / sum(weights) for i in nucleus), reverse=True)
    assert sum(chosen) >= p - 2e-6  # enough …
    assert len(chosen) == 1 or p == 1 or sum(chosen[:-1]) < p  # … and no more than needed


@pytest.mark.parametrize("count", [1, 2, 3, 7, 11, 12])
def test_ranks_are_the_beginning_of_a_stable_sort(count: int) -> None:
    torch.manual_seed(count)
    scores_BV = torch.randint(-2, 3, (40, 11)).double()
    scores_BV[0] = -torch.inf
    scores_BV[1, 2:] = -torch.inf
    whole = scores_BV.sort(dim=1, descending=True, stable=True)
    values_BC, ids_BC = rank(scores_BV, count)
    assert torch.equal(values_BC, whole.values[:, :count])
    possible = values_BC > -torch.inf
    assert torch.equal(ids_BC[possible], whole.indices[:, :count][possible])


@pytest.mark.parametrize("name", ["top_p", "min_p"])
@pytest.mark.parametrize("value", [float("nan"), -0.1, 1.1, float("inf")])
def test_probabilities_that_are_none_are_refused(name: str, value: float) -> None:
    """B125: NaN must not switch a filter off."""
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        GenerationConfig(**{name: value})


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
        GenerationConfig(**fields)
    assert said in str(caught.value)


def test_draws_follow_the_weights_and_never_choose_what_has_none() -> None:
    weights = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    uniform = torch.rand(4000, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    counts = torch.bincount(draw(weights.expand(4000, 6), uniform), minlength=6)
    assert counts[[0, 2, 5]].tolist() == [0, 0, 0]
    assert (counts / 4000 - weights).abs().max() < 0.03


@pytest.mark.parametrize(
    ("uniform", "expected"),
    [(0.0, 1), (math.nextafter(1.0, 0.0), 2), (0.1 / 0.3 - 1e-9, 1), (0.1 / 0.3 + 1e-9, 2)],
)
def test_a_draw_at_either_end_of_the_interval_is_a_possible_token(uniform: float, expected: int) -> None:
    weights = torch.tensor([[0.0, 0.1, 0.2, 0.0]], dtype=torch.float64)
    assert draw(weights, torch.tensor([uniform], dtype=torch.float64)).tolist() == [expected]


def test_filters_apply_in_the_documented_order() -> None:
    """top_k 2 of [.4, .3, .3] leaves [4/7, 3/7]; then top_p .5 keeps one (before top_k it would keep two)."""
    three = logits(0.4, 0.3, 0.3)[0]
    assert {sample(three, temperature=1.0, top_k=2, top_p=0.5, seed=s).token for s in range(50)} == {0}
    warm = logits(0.4, 0.33, 0.27)[0]  # p ** (1/2): [.36, .33, .31], two are needed for .6
    assert {sample(warm, temperature=2.0, top_p=0.6, seed=s).token for s in range(200)} == {0, 1}


def test_a_wide_nucleus_is_found_beyond_the_tokens_that_are_ranked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat rows need more than are ranked at first; the answers are those of one ranking of all."""
    torch.manual_seed(0)
    flat = torch.randn(300, dtype=torch.float64) / 4
    fields = {"temperature": 1.0, "top_p": 0.9}
    whole = [sample(flat, seed=s, **fields) for s in range(40)]
    monkeypatch.setattr("pellucid.generation.sampling._FIRST", 3)
    assert [sample(flat, seed=s, **fields) for s in range(40)] == whole
    assert len({token for token, _ in whole}) > 30


def test_a_penalty_divides_what_is_positive_and_multiplies_what_is_negative() -> None:
    """B124: 0 and minus infinity stay, and so does every token that was not seen."""
    given = torch.tensor([[0.0, 3.0, -3.0, -math.inf, 3.0, -3.0]], dtype=torch.float64)
    expected = torch.tensor([[0.0, 1.5, -6.0, -math.inf, 3.0, -3.0]], dtype=torch.float64)
    before = given.clone()
    two = torch.tensor([2.0], dtype=torch.float64)
    seen = torch.tensor([[True, True, True, True, False, False]])
    assert torch.equal(apply_repetition_penalty(given, seen, two), expected)
    assert torch.equal(apply_repetition_penalty(given, torch.zeros_like(seen), two), before)
    assert torch.equal(given, before)
    rewarded = apply_repetition_penalty(given, seen, two / 4)[0, 1:3]
    assert rewarded.tolist() == [6.0, -1.5]


def test_a_penalty_comes_before_temperature_and_filters_and_leaves_the_log_probability() -> None:
    """[3, 2] at half the temperature is [6, 4]; penalized first by 2 it is [3, 4], and top_k takes the second."""
    given = torch.tensor([3.0, 2.0], dtype=torch.float64)
    found = sample(given, temperature=0.5, top_k=1, repetition_penalty=2.0, seen=(0,))
    assert found.token == 1
    assert found.logprob == pytest.approx(float(given.log_softmax(0)[1]))


@pytest.mark.parametrize("temperature", [1e-300, 1e-8, 1e300])
def test_no_temperature_overflows(temperature: float) -> None:
    found = sample(torch.tensor([100.0, -100.0, 99.0]), temperature=temperature)
    assert found.token == 0 or temperature > 1
    assert math.isfinite(found.logprob)


def test_the_log_probability_is_the_models_own() -> None:
    found = sample(logits(0.2, 0.5, 0.3)[0], temperature=0.1, top_k=1)
    assert found.token == 1
    assert found.logprob == pytest.approx(math.log(0.5), abs=1e-6)


MIXED = [
    GenerationConfig(),
    GenerationConfig(temperature=1.0, seed=4),
    GenerationConfig(temperature=0.7, top_k=5, top_p=0.8, seed=5),
    GenerationConfig(temperature=1.5, top_p=0.9, seed=6, repetition_penalty=1.3),
    GenerationConfig(temperature=1.0, min_p=0.2, seed=7, min_new_tokens=200, max_new_tokens=900, stop_token_ids=[3]),
    GenerationConfig(temperature=1.0, top_k=40, min_p=0.01, seed=8, repetition_penalty=0.9, penalize_prompt=False),
]


def run(rows: list[int], steps: int = 300) -> list[list[tuple[float, float]]]:
    """``steps`` steps of these rows of ``MIXED`` together; each row has logits of its own."""
    prompts = [[1, 2] for _ in rows]
    sampler = Sampler([MIXED[row] for row in rows], prompts, 60, torch.device("cpu"))
    generators = [torch.Generator().manual_seed(row) for row in rows]
    found = []
    for _ in range(steps):
        logits_BV = torch.stack([torch.randn(60, generator=generator) * 3 for generator in generators])
        tokens, logprobs = sampler(logits_BV).tolist()
        found.append(list(zip(tokens, logprobs, strict=True)))
    return [list(row) for row in zip(*found, strict=True)]


def test_a_row_gets_the_same_tokens_alone_and_in_any_company() -> None:
    """Bit for bit, log-probabilities too, over more steps than one block of random numbers."""
    together = run([0, 1, 2, 3, 4, 5])
    for row in range(len(MIXED)):
        assert run([row]) == [together[row]]
    assert run([5, 3, 1]) == [together[row] for row in (5, 3, 1)]
    assert all(token != 3 for token, _ in together[4][:200])


def test_a_row_draws_one_number_a_step_from_its_own_seed() -> None:
    """Two equal tokens: the first below 1/2, the second above."""
    sampler = Sampler([GenerationConfig(temperature=1.0, seed=3)], [[]], 2, torch.device("cpu"))
    tokens = [sampler(torch.zeros(1, 2))[0].item() for _ in range(600)]
    source = torch.Generator().manual_seed(3)
    assert tokens == [float(torch.rand((), generator=source, dtype=torch.float64) >= 0.5) for _ in range(600)]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 1, "top_p": 0.5}])
def test_logits_that_are_no_numbers_have_no_log_probability(value: float, fields: dict[str, object]) -> None:
    found = sample(torch.tensor([0.0, value]), **fields)
    assert found.token >= 0
    assert math.isnan(found.logprob)


def test_minus_infinity_is_a_token_that_may_not_come() -> None:
    for filters in ({}, {"top_k": 2}, {"top_p": 0.9}):
        found = {sample(torch.tensor([-math.inf, 0.0]), temperature=1.0, seed=s, **filters).token for s in range(20)}
        assert found == {1}
    assert sample(torch.tensor([0.0, -math.inf]), temperature=1.0, blocked=(0,)).token == -1
