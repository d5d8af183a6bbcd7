"""Beam search against every sequence there is, against a search that never stops early, and alone against together."""

import itertools
import math

import pytest
import torch

from helpers.brute_force import assert_same, every_sequence, patient_search, says, scripted, table
from helpers.table_model import PrefixTableModel, SourceTableModel, TableModel
from pellucid.errors import ConfigError, InputError, LengthError
from pellucid.generation import BeamSearchConfig, GenerationConfig, beam_search, generate_ids

ALPHAS = [-1.0, 0.0, 0.7, 1.0, 2.0]
FORMS = ["power", "gnmt"]
PROMPTS = [[1, 2, 3], [4], [0, 1, 2, 2, 3]]
SOURCES = [[3], [1, 4, 2, 0], [2, 2]]

# ----------------------------------------------------------------------------------------------------- exact


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("min_new", [0, 2])
def test_enough_beams_find_the_best_of_all_sequences(alpha: float, form: str, min_new: int) -> None:
    """B122: three tokens, four steps, 3 ** 4 beams; the n best of all sequences, in their order."""
    for seed in range(2):
        weights = table(3, seed, scale=2.0)
        params = BeamSearchConfig(
            num_beams=81, num_return_sequences=5, length_penalty=alpha, penalty_form=form,
            max_new_tokens=4, min_new_tokens=min_new, stop_token_ids=[2],
        )  # fmt: skip
        for prompt in ([0], [1, 0, 2, 1]):
            (found,) = beam_search(TableModel(weights), [prompt], params)
            assert_same(found, every_sequence(says(weights), prompt, params)[:5])


def test_the_best_length_depends_on_the_penalty() -> None:
    """The brute-force cases would not tell a penalty from none if one sequence were the best under all of them."""
    lengths = set()
    for alpha in (-1.0, 2.0):
        params = BeamSearchConfig(num_beams=81, length_penalty=alpha, max_new_tokens=4, stop_token_ids=[2])
        lengths.add(len(beam_search(TableModel(table(3, 0, scale=2.0)), [[0]], params)[0][0].tokens))
    assert len(lengths) == 2


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_few_beams_find_what_a_search_without_early_stopping_finds(alpha: float, use_cache: bool) -> None:
    """B122: stopping early saves steps and changes nothing."""
    for seed, beams in itertools.product(range(2), (1, 2, 4)):
        form = FORMS[seed]
        weights = table(6, seed, scale=1.5)
        params = BeamSearchConfig(
            num_beams=beams, num_return_sequences=(beams + 1) // 2, length_penalty=alpha, penalty_form=form,
            max_new_tokens=7, min_new_tokens=seed, stop_token_ids=[5, 3],
        )  # fmt: skip
        found = beam_search(TableModel(weights), PROMPTS, params, use_cache=use_cache)
        for row, prompt in zip(found, PROMPTS, strict=True):
            assert_same(row, patient_search(says(weights), prompt, params))


@pytest.mark.parametrize(
    ("alpha", "tokens", "steps"), [(-1.0, [0], 2), (0.0, [0], 3), (1.0, [2, 3, 3, 3], 4), (2.0, [2, 3, 3, 3], 4)]
)
def test_a_search_stops_when_the_penalty_lets_nothing_overtake_and_not_before(
    alpha: float, tokens: list[int], steps: int
) -> None:
    """B122: [0] ends at once with -1; the other way has -.46, -.82, -1.17 and -1.53 after its steps."""
    go_on = {3: math.log(0.7)}
    ways = {(0, 1): {0: -1.0, 2: math.log(1 - math.exp(-1) - 1e-12)}, (1, 2): go_on, (2, 3): go_on, (3, 3): go_on}
    model = scripted(ways, 6, junk=[4, 5])
    params = BeamSearchConfig(num_beams=2, length_penalty=alpha, max_new_tokens=4, stop_token_ids=[0])
    ((best,),) = beam_search(model, [[1]], params)
    assert (best.tokens, len(model.slots_run)) == (tokens, steps)


@pytest.mark.parametrize("prompt", [1, 100])
def test_the_prompt_is_no_part_of_the_length(prompt: int) -> None:
    """B121: -3 over three new tokens is -1.0, -4 over five is -0.8, and the second wins behind any prompt."""
    first = {2: -1.0, 3: -0.8}
    ways = {(0, 1): first, (1, 1): first, (1, 2): {2: -1.0}, (2, 2): {0: -1.0}}
    ways |= {(1, 3): {3: -0.8}, (3, 3): {4: -0.8}, (3, 4): {4: -0.8}, (4, 4): {0: -0.8}}
    model = scripted(ways, 26, junk=range(6, 26))
    params = BeamSearchConfig(
        num_beams=8, num_return_sequences=2, length_penalty=1.0, max_new_tokens=5, stop_token_ids=[0]
    )
    (found,) = beam_search(model, [[1] * prompt], params)
    assert [hypothesis.tokens for hypothesis in found] == [[3, 3, 4, 4, 0], [2, 2, 0]]
    assert [hypothesis.score for hypothesis in found] == pytest.approx([-0.8, -1.0])
    assert found[1].logprobs == pytest.approx([-1.0] * 3)


def test_one_beam_without_a_penalty_is_greedy() -> None:
    weights = table(7, 3)
    for prompt in PROMPTS:
        greedy = generate_ids(TableModel(weights), [prompt], GenerationConfig(max_new_tokens=9, stop_token_ids=[6]))[0]
        params = BeamSearchConfig(num_beams=1, length_penalty=0.0, max_new_tokens=9, stop_token_ids=[6])
        ((found,),) = beam_search(TableModel(weights), [prompt], params)
        assert (found.tokens, found.finish_reason) == (greedy.tokens, greedy.finish_reason)
        assert found.logprobs == pytest.approx(greedy.logprobs, abs=1e-12)


# --------------------------------------------------------------------------------- several prompts and sources


def families() -> list[tuple[TableModel, list[list[int]] | None, list[int]]]:
    """Each kind of model, its sources, and by how much these (or the prefixes) move each row of the table."""
    moved = [sum(place * token for place, token in enumerate(source, 1)) for source in SOURCES]
    return [
        (TableModel(table(5, 1, 1.5)), None, [0, 0, 0]),
        (SourceTableModel(table(5, 1, 1.5)), SOURCES, moved),
        (PrefixTableModel(table(5, 1, 1.5)), None, list(map(len, PROMPTS))),
    ]


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("family", range(3), ids=["decoder", "encoder-decoder", "prefix"])
def test_every_family_alone_and_together_at_every_pass(family: int, use_cache: bool) -> None:
    """P-BATCH and P-CACHE for beams, against a search that reads the table itself; prompts of different lengths."""
    model, sources, moved = families()[family]
    params = BeamSearchConfig(
        num_beams=3, num_return_sequences=3, length_penalty=0.7, max_new_tokens=6, stop_token_ids=[4]
    )
    together = beam_search(model, PROMPTS, params, sources=sources, use_cache=use_cache)
    for row, prompt in enumerate(PROMPTS):
        own = None if sources is None else [sources[row]]
        assert beam_search(model, [prompt], params, sources=own, use_cache=use_cache) == [together[row]]
        assert_same(together[row], patient_search(says(model.table, moved=moved[row]), prompt, params))


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_sentence_that_is_done_leaves_the_others_their_own_memory(use_cache: bool) -> None:
    """B56: two sentences of two beams; whichever is done first, the other goes on with its own source."""
    weights = table(5, 2)
    weights[..., 4] += 3.0  # sentences end early
    weights[:, 1] = table(5, 9)[:, 1]  # … but not one that says 1
    weights[1, 1, 1] = 3.0
    params = BeamSearchConfig(
        num_beams=2, num_return_sequences=2, length_penalty=0.7, max_new_tokens=9, stop_token_ids=[4]
    )
    sources = [[0], [1], [3], [2, 1]]
    alone = [beam_search(SourceTableModel(weights), [[1]], params, sources=[source])[0] for source in sources]
    uneven = 0
    for pair in itertools.permutations(range(4), 2):
        model = SourceTableModel(weights)
        own = [sources[row] for row in pair]
        assert beam_search(model, [[1], [1]], params, sources=own, use_cache=use_cache) == [alone[row] for row in pair]
        rows = [rows for rows, _ in model.slots_run]
        uneven += rows[-1] < max(rows)
    assert uneven > 2  # a sentence did leave before the other


def test_beams_move_with_everything_they_hold() -> None:
    """B55: both beams go on from the second of the step before."""
    ways = {(0, 1): {2: math.log(0.6), 3: math.log(0.3)}, (1, 3): {2: -0.8, 3: -0.8}}
    model = scripted(ways | {(1, 2): {2: -9.0}, (3, 2): {4: -0.1}, (3, 3): {4: -0.2}}, 26, junk=range(6, 26))
    params = BeamSearchConfig(num_beams=2, num_return_sequences=2, length_penalty=0.0, max_new_tokens=3)
    (found,) = beam_search(model, [[1]], params)
    assert [hypothesis.tokens for hypothesis in found] == [[3, 2, 4], [3, 3, 4]]
    assert found == beam_search(model, [[1]], params, use_cache=False)[0]


def test_a_cached_step_runs_one_slot_of_the_beams_that_are_left() -> None:
    model = TableModel(table(9, 0))
    beam_search(model, PROMPTS, BeamSearchConfig(num_beams=2, max_new_tokens=3))
    assert model.slots_run == [(3, 5), (6, 1), (6, 1)]


# ------------------------------------------------------------------------------------------------- edges


def test_ties_go_to_the_better_beam_and_then_to_the_lower_token() -> None:
    params = BeamSearchConfig(num_beams=3, num_return_sequences=3, length_penalty=0.0, max_new_tokens=2)
    (found,) = beam_search(TableModel(torch.zeros(4, 4, 4, dtype=torch.float64)), [[1]], params)
    assert [hypothesis.tokens for hypothesis in found] == [[0, 0], [0, 1], [0, 2]]
    params = BeamSearchConfig(
        num_beams=4, num_return_sequences=2, length_penalty=0.0, max_new_tokens=2, stop_token_ids=[0]
    )
    even = scripted({(0, 1): {0: -1.0, 2: -0.5}, (1, 2): {0: -0.5}}, 12, junk=range(3, 12))
    (found,) = beam_search(even, [[1]], params)
    assert [(hypothesis.tokens, hypothesis.score) for hypothesis in found] == [([0], -1.0), ([2, 0], -1.0)]


def test_every_stop_id_waits_for_the_least_number_of_new_tokens() -> None:
    """B127 for beams: the prompt does not count, and the second stop id waits as the first does."""
    weights = torch.zeros(5, 5, 5, dtype=torch.float64)
    weights[..., 3], weights[..., 2] = 9.0, 8.0
    params = BeamSearchConfig(
        num_beams=2, num_return_sequences=2, min_new_tokens=2, stop_token_ids=[2, 3], max_new_tokens=8
    )
    for prompt in ([1], [1, 1, 1, 1]):
        (found,) = beam_search(TableModel(weights), [prompt], params)
        assert {(len(hypothesis.tokens), hypothesis.tokens[-1]) for hypothesis in found} == {(3, 3)}


def test_rows_of_the_table_beyond_the_vocabulary_never_come() -> None:
    """B131 for beams: neither chosen nor part of any probability."""
    weights = torch.zeros(8, 8, 8, dtype=torch.float64)
    weights[..., 5:] = 10.0
    (found,) = beam_search(
        TableModel(weights),
        [[1]],
        BeamSearchConfig(num_beams=5, num_return_sequences=5, max_new_tokens=2),
        vocab_size=5,
    )
    assert {token for hypothesis in found for token in hypothesis.tokens} <= set(range(5))
    assert found[0].logprobs == pytest.approx([-math.log(5)] * 2)


def test_fewer_sequences_than_asked_for_where_there_are_no_more() -> None:
    weights = torch.full((3, 3, 3), -math.inf, dtype=torch.float64)
    weights[..., 2] = 0.0
    weights[0, 1, 0] = 0.0
    (found,) = beam_search(
        TableModel(weights),
        [[1]],
        BeamSearchConfig(num_beams=4, num_return_sequences=4, max_new_tokens=2, stop_token_ids=[2]),
    )
    assert [(hypothesis.tokens, hypothesis.finish_reason) for hypothesis in found] == [([0, 2], "stop"), ([2], "stop")]


def test_a_beam_that_nothing_can_follow_is_left_and_the_others_go_on() -> None:
    weights = torch.full((4, 4, 4), -math.inf, dtype=torch.float64)
    weights[0, 1, [0, 2]] = torch.tensor([0.0, -1.0], dtype=torch.float64)  # 0 is the better one, and the end
    weights[1, 2, 3] = 0.0
    (found,) = beam_search(
        TableModel(weights), [[1]], BeamSearchConfig(num_beams=2, num_return_sequences=2, max_new_tokens=2)
    )
    assert [hypothesis.tokens for hypothesis in found] == [[2, 3]]


def test_nothing_is_run_for_what_could_only_be_equal() -> None:
    """The sequence that ended first would stay before it anyway."""
    weights = torch.full((4, 4, 4), -math.inf, dtype=torch.float64)
    weights[0, 1, [0, 2]], weights[1, 2, 3], weights[2:, 3, 3] = 0.0, 0.0, 0.0
    model = TableModel(weights)
    params = BeamSearchConfig(num_beams=2, length_penalty=0.0, max_new_tokens=5, stop_token_ids=[0])
    assert beam_search(model, [[1]], params)[0][0].tokens == [0]
    assert len(model.slots_run) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_refused(value: float) -> None:
    weights = torch.zeros(4, 4, 4, dtype=torch.float64)
    weights[..., 2] = value
    with pytest.raises(InputError, match="NaN or infinity"):
        beam_search(TableModel(weights), [[1]])


def test_no_possible_token_is_said() -> None:
    weights = torch.full((4, 4, 4), -math.inf, dtype=torch.float64)
    weights[..., 2] = 0.0
    with pytest.raises(InputError, match="no token may be chosen: 1 stop ids are blocked; lower min_new_tokens"):
        beam_search(TableModel(weights), [[1]], BeamSearchConfig(stop_token_ids=[2], min_new_tokens=1))


def test_float16_logits_are_read_in_float64() -> None:
    weights = table(5, 4).half()
    params = BeamSearchConfig(num_beams=3, num_return_sequences=2, max_new_tokens=5, stop_token_ids=[4])
    found = beam_search(TableModel(weights), PROMPTS, params)
    assert found == beam_search(TableModel(weights.double()), PROMPTS, params)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_beams": 0}, "num_beams is 0, but must be at least 1"),
        ({"num_return_sequences": 5}, "num_return_sequences is 5, but num_beams is 4, raise num_beams"),
        ({"length_penalty": float("nan")}, "length_penalty is nan"),
        ({"length_penalty": 17}, "length_penalty is 17, but must be at most 16"),
        ({"penalty_form": "mean"}, "penalty_form is 'mean'"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens is 9, but max_new_tokens is 8"),
        ({"temperature": 1.0}, "no key 'temperature'"),
    ],
)
def test_bad_params_are_named(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        BeamSearchConfig(**fields)
    assert said in str(caught.value)


def test_bad_requests_are_refused_before_anything_runs() -> None:
    model = TableModel(table(5, 0), max_length=8)
    with pytest.raises(LengthError, match="prompt 1 has 6 tokens and max_new_tokens is 5, 11 in all"):
        beam_search(model, [[1], [1] * 6], BeamSearchConfig(max_new_tokens=5))
    few = BeamSearchConfig(max_new_tokens=2)
    with pytest.raises(InputError, match="prompt 0 is empty"):
        beam_search(model, [[]], few)
    with pytest.raises(InputError, match="stop id 5 can never come"):
        beam_search(model, [[1]], few.model_copy(update={"stop_token_ids": [5]}))
    with pytest.raises(InputError, match=r"call model\.eval"):
        beam_search(TableModel(table(5, 0)).train(), [[1]], few)
    with pytest.raises(InputError, match="entry 0 of prompts is '0', but prompts is a list of lists of token ids"):
        beam_search(model, [0, 1], few)
    assert beam_search(model, [], few) == []
    assert model.slots_run == []
