"""The loop: with and without a cache, alone and in a batch, its limits and its stops."""

import pytest
import torch

from helpers.table_model import PrefixTableModel, SourceTableModel, TableModel
from helpers.tiny import tiny_model
from pellucid.errors import InputError, LengthError, UnsupportedError
from pellucid.generation import GenerationConfig, decode, generate_ids

PROMPTS = [[1, 2, 3], [4], [5, 6, 0, 1, 2]]


def sampled(seed: int, **fields: object) -> GenerationConfig:
    return GenerationConfig(temperature=1.0, seed=seed, **{"max_new_tokens": 6, **fields})


@pytest.mark.parametrize("params", [GenerationConfig(max_new_tokens=6), sampled(3, top_p=0.9, top_k=5)])
def test_with_and_without_a_cache_give_the_same(params: GenerationConfig) -> None:
    model = TableModel.random(9)
    assert generate_ids(model, PROMPTS, params) == generate_ids(model, PROMPTS, params, use_cache=False)


def test_a_request_is_the_same_alone_and_with_any_batch_mates() -> None:
    """P-BATCH for generated ids; the mates stop early, late, and draw more or fewer numbers."""
    model = TableModel.random(9)
    params = [sampled(1), sampled(2, max_new_tokens=1), GenerationConfig(max_new_tokens=9)]
    together = generate_ids(model, PROMPTS, params)
    alone = [generate_ids(model, [p], [q])[0] for p, q in zip(PROMPTS, params, strict=True)]
    assert together == alone
    assert generate_ids(model, PROMPTS[::-1], params[::-1]) == alone[::-1]


SOURCES = [[3], [1, 4, 2, 0], [2, 2]]


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_decoder_goes_on_with_its_own_source(use_cache: bool) -> None:
    """The same loop: greedy tokens are those that the table gives for each row's source, whoever else is there."""
    model = SourceTableModel.random(9)
    params = [GenerationConfig(max_new_tokens=new) for new in (6, 1, 9)]  # mates finish early and late
    found = generate_ids(model, PROMPTS, params, sources=SOURCES, use_cache=use_cache)
    for row, prompt, source, own in zip(found, PROMPTS, SOURCES, params, strict=True):
        moved, said = sum(place * token for place, token in enumerate(source, 1)), list(prompt)
        for _ in range(own.max_new_tokens):
            previous = said[-2] if len(said) > 1 else 0
            said.append(int(model.table[(previous + moved) % 9, said[-1]].argmax()))
        assert row.tokens == said[len(prompt) :]
        assert [row] == generate_ids(model, [prompt], [own], sources=[source])


@pytest.mark.parametrize("use_cache", [True, False])
def test_the_prompt_of_a_prefix_lm_is_its_prefix(use_cache: bool) -> None:
    """All of the prompt has a group, no padding and no new token has one, at every pass."""
    model = PrefixTableModel.random(9)
    found = generate_ids(model, PROMPTS, GenerationConfig(max_new_tokens=6), use_cache=use_cache)
    for row, prompt in zip(found, PROMPTS, strict=True):
        said = list(prompt)
        for _ in range(6):
            previous = said[-2] if len(said) > 1 else 0
            said.append(int(model.table[(previous + len(prompt)) % 9, said[-1]].argmax()))
        assert row.tokens == said[len(prompt) :]


def test_penalties_count_new_tokens_and_the_prompt_or_not_and_never_padding() -> None:
    """B124: the model likes 0 best, which is what padding is filled with, then 1, then 2."""
    table = torch.zeros(5, 5, 5, dtype=torch.float64)
    table[..., 0], table[..., 1], table[..., 2] = 3.0, 2.0, 1.0
    model, penalty = TableModel(table), {"max_new_tokens": 3, "repetition_penalty": 10.0}
    prompts = [[1], [4, 4, 4, 4]]  # the first row is padded by three slots
    both = generate_ids(model, prompts, GenerationConfig(**penalty))
    assert [row.tokens for row in both] == [[0, 2, 0], [0, 1, 2]]
    new_only = generate_ids(model, prompts, GenerationConfig(**penalty, penalize_prompt=False))
    assert [row.tokens for row in new_only] == [[0, 1, 2], [0, 1, 2]]
    plain = GenerationConfig(max_new_tokens=3)
    assert [row.tokens for row in generate_ids(model, prompts, plain)] == [[0, 0, 0], [0, 0, 0]]
    source = generate_ids(
        SourceTableModel(table), [[4]], GenerationConfig(**penalty), sources=[[0, 1, 2]]
    )  # what an encoder reads is not said yet
    assert source[0].tokens == [0, 1, 2]


def test_equal_seeds_draw_equally_and_other_seeds_do_not() -> None:
    model = TableModel.random(9)
    same = generate_ids(model, [[1], [1]], sampled(5, max_new_tokens=20))
    assert same[0] == same[1]
    assert generate_ids(model, [[1]], sampled(6, max_new_tokens=20))[0] != same[0]


def test_the_global_random_state_is_not_touched() -> None:
    before = torch.get_rng_state()
    generate_ids(TableModel.random(9), [[1]], [GenerationConfig(temperature=1.0)])
    assert torch.equal(before, torch.get_rng_state())


def test_greedy_follows_the_table() -> None:
    result = generate_ids(TableModel.chain({1: 2, 2: 3, 3: 1}, 4), [[1], [3]], GenerationConfig(max_new_tokens=4))
    assert [row.tokens for row in result] == [[2, 3, 1, 2], [1, 2, 3, 1]]
    assert result[0].finish_reason == "length"


def test_a_cached_step_runs_one_slot_and_nothing_runs_after_the_end() -> None:
    model = TableModel.random(9)
    generate_ids(model, PROMPTS, GenerationConfig(max_new_tokens=3))
    assert model.slots_run == [(3, 5), (3, 1), (3, 1)]
    model.slots_run.clear()
    generate_ids(model, PROMPTS, GenerationConfig(max_new_tokens=3), use_cache=False)
    assert model.slots_run == [(3, 5), (3, 6), (3, 7)]


def test_one_rows_stop_does_not_end_the_batch() -> None:
    """B128: the other rows go on, and a finished row gives nothing more."""
    model = TableModel.chain({1: 2, 2: 3, 3: 1}, 5)
    params = [GenerationConfig(max_new_tokens=4, stop_token_ids=[2]), GenerationConfig(max_new_tokens=4)]
    steps = list(decode(model, [[1], [1]], params))
    assert [step.tokens for step in steps] == [(2, 2), (None, 3), (None, 1), (None, 2)]
    assert [step.finished for step in steps] == [("stop", None), (None, None), (None, None), (None, "length")]
    assert [step.logprobs[0] is None for step in steps] == [False, True, True, True]


@pytest.mark.parametrize("use_cache", [True, False])
def test_every_stop_id_waits_for_the_least_number_of_new_tokens(use_cache: bool) -> None:
    """B127: end ids {2, 3}, at least 2 new, the model prefers 3, then 2: the third token may be 3."""
    table = torch.zeros(5, 5, 5, dtype=torch.float64)
    table[..., 3], table[..., 2], table[..., 4] = 9.0, 8.0, 7.0
    params = GenerationConfig(min_new_tokens=2, stop_token_ids=[2, 3], max_new_tokens=8)
    for prompt in ([1], [1, 1, 1, 1, 1]):  # the prompt does not count
        result = generate_ids(TableModel(table), [prompt], params, use_cache=use_cache)[0]
        assert (result.tokens, result.finish_reason) == ([4, 4, 3], "stop")


def test_rows_of_the_table_beyond_the_vocabulary_never_come() -> None:
    """B131: V = 5 padded to 8 with logits +10 beyond; neither drawn nor part of any probability."""
    table = torch.zeros(8, 8, 8, dtype=torch.float64)
    table[..., 5:] = 10.0
    params = GenerationConfig(temperature=1.0, seed=0, max_new_tokens=50)
    result = generate_ids(TableModel(table), [[1]], params, vocab_size=5)[0]
    assert set(result.tokens) == {0, 1, 2, 3, 4}
    assert result.logprobs == pytest.approx([-torch.tensor(5.0).log().item()] * 50)


def test_a_caller_may_end_a_row() -> None:
    model = TableModel.chain({1: 2, 2: 3, 3: 1}, 4)
    asked: list[tuple[int, int]] = []

    def ends_row(row: int, token: int) -> bool:
        asked.append((row, token))
        return row == 0 and token == 3

    steps = list(decode(model, [[1], [2]], GenerationConfig(max_new_tokens=3, stop_token_ids=[1]), ends_row=ends_row))
    assert [step.tokens for step in steps] == [(2, 3), (3, 1)]
    assert [step.finished for step in steps] == [(None, None), ("stop", "stop")]
    assert asked == [(0, 2), (1, 3), (0, 3)]  # a stop id is not asked about


def refused(error: type[Exception], prompts: object, *args: object, **kwargs: object) -> str:
    model = TableModel.random(9, max_length=8)
    with pytest.raises(error) as caught:
        decode(model, prompts, *args, **kwargs)  # type: ignore[arg-type]
    assert model.slots_run == []
    return str(caught.value)


def test_too_long_is_refused_before_anything_runs() -> None:
    """B100: table 8, prompt 6, generate 5."""
    said = refused(LengthError, [[1], [1] * 6], GenerationConfig(max_new_tokens=5))
    assert "prompt 1 has 6 tokens and max_new_tokens is 5, 11 in all" in said
    assert "positions for 8; ask for at most 2 new tokens" in said
    assert "shorten the prompt" in refused(LengthError, [[1] * 8], GenerationConfig(max_new_tokens=1))
    generate_ids(TableModel.random(9, max_length=8), [[1] * 6], GenerationConfig(max_new_tokens=2))


def test_bad_input_is_refused_before_anything_runs() -> None:
    few = GenerationConfig(max_new_tokens=2)
    assert "prompt 1 is empty" in refused(InputError, [[1], []], few)
    assert "prompt 0 holds 9, but token ids are 0 to 8" in refused(InputError, [[9]], few)
    assert "prompt 0 holds -1" in refused(InputError, [[-1]], few)
    assert "prompt 0 holds True" in refused(InputError, [[True]], few)
    far, text = few.model_copy(update={"stop_token_ids": [9]}), few.model_copy(update={"stop": ["x"]})
    assert "stop id 9 can never come" in refused(InputError, [[1]], far)
    assert "need text" in refused(InputError, [[1]], text)
    assert "2 params for 1 prompts" in refused(InputError, [[1]], [few, few])
    assert "vocab_size is 10, but the model has 9" in refused(InputError, [[1]], few, vocab_size=10)
    assert "prompt 0 holds 5" in refused(InputError, [[5]], few, vocab_size=4)
    assert "entry 0 of prompts is '1', but prompts is a list of lists" in refused(InputError, [1, 2], few)
    assert "entry 1 of prompts is 'ab', but prompts is a list of lists" in refused(InputError, [[1], "ab"], few)
    assert "prompts is 'ab', but must be a list of lists" in refused(InputError, "ab", few)


def test_sources_must_be_what_the_model_reads() -> None:
    model = SourceTableModel.random(9)
    model.max_source_length = 3
    few = GenerationConfig(max_new_tokens=2)

    def said(error: type[Exception], reader: TableModel, **given: object) -> str:
        with pytest.raises(error) as caught:
            decode(reader, [[1]], few, **given)  # type: ignore[arg-type]
        return str(caught.value)

    assert "this SourceTableModel reads a source; give sources, one a prompt" in said(InputError, model)
    assert "2 sources for 1 prompts" in said(InputError, model, sources=[[1], [1]])
    assert "source 0 is empty" in said(InputError, model, sources=[[]])
    assert "source 0 holds 9, but token ids are 0 to 8" in said(InputError, model, sources=[[9]])
    assert "entry 0 of sources is '1', but sources is a list of lists" in said(InputError, model, sources=[1])
    assert "source 0 holds 5" in said(InputError, model, sources=[[5]], vocab_size=4)
    assert "source 0 has 4 tokens, but the model has positions for 3" in said(LengthError, model, sources=[[1] * 4])
    assert "this TableModel reads prompts only" in said(InputError, TableModel.random(9), sources=[[1]])
    assert model.slots_run == []


def test_a_model_that_says_no_tokens_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="this Linear cannot continue a prompt"):
        generate_ids(torch.nn.Linear(2, 2), [[1]])
    model = TableModel.random(9)
    model.head_name = "token_classifier"
    with pytest.raises(UnsupportedError, match="with the head token_classifier predicts no tokens"):
        generate_ids(model, [[1]])


def test_a_model_in_training_mode_is_refused() -> None:
    model = TableModel.random(9).train()
    with pytest.raises(InputError, match=r"call model\.eval"):
        decode(model, [[1]])


def test_no_prompts_give_nothing() -> None:
    assert generate_ids(TableModel.random(9), []) == []


def test_the_caller_is_not_left_in_inference_mode() -> None:
    for _ in decode(TableModel.random(9), [[1]], GenerationConfig(max_new_tokens=2)):
        assert not torch.is_inference_mode_enabled()


def test_the_callers_prompt_is_left_alone() -> None:
    prompt = [1, 2]
    generate_ids(TableModel.random(9), [prompt], GenerationConfig(max_new_tokens=2))
    assert prompt == [1, 2]


def test_a_cache_that_could_not_serve_the_whole_answer_is_refused_before_the_first_token() -> None:
    scaling = {"kind": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8}
    model = tiny_model(position={"kind": "rope", "scaling": scaling})
    assert len(generate_ids(model, [[1] * 6], GenerationConfig(max_new_tokens=3))[0].tokens) == 3
    with pytest.raises(UnsupportedError, match="prompt 0 has 6 tokens and grows to 9, past where its rotary scaling"):
        generate_ids(model, [[1] * 6], GenerationConfig(max_new_tokens=4))
    assert len(generate_ids(model, [[1] * 6], GenerationConfig(max_new_tokens=4), use_cache=False)[0].tokens) == 4


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_stop_the_loop(value: float, temperature: float) -> None:
    """A finished row may say what it likes."""
    table = torch.zeros(4, 4, 4)
    table[:, 3, 0] = value
    params = GenerationConfig(temperature=temperature, max_new_tokens=3)
    with pytest.raises(InputError, match="logits hold NaN or infinity"):
        generate_ids(TableModel(table), [[1, 2, 3]], params)
    stops = GenerationConfig(min_new_tokens=2, stop_token_ids=[0, 1], temperature=temperature)
    with pytest.raises(InputError, match=r"no token may be chosen: 2 stop ids are blocked; lower min_new_tokens"):
        generate_ids(TableModel(torch.zeros(2, 2, 2)), [[1]], stops)
