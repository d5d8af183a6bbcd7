"""Whole characters, stop texts across tokens, BOS exactly once."""

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pellucid as pl
from helpers.table_model import PieceTokenizer, SourceTableModel, TableModel
from pellucid.errors import ArgumentError, ConfigError, InputError
from pellucid.generation import (
    BeamSearchConfig,
    GenerationConfig,
    TextStream,
    beam_search,
    encode_prompt,
    generate,
    generate_ids,
    generate_n_best,
    stream,
)


def pushed(pieces: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    text = TextStream(stop)
    given_out = [text.push(piece) for piece in pieces]
    given_out.append(text.close())
    return given_out, text.stopped


def speaker(pieces: list[bytes], following: dict[int, int], **ids: int) -> SimpleNamespace:
    """A model that says ``following`` and a tokenizer of these pieces."""
    return SimpleNamespace(model=TableModel.chain(following, len(pieces)), tokenizer=PieceTokenizer(pieces, **ids))


def test_characters_split_over_tokens_come_out_whole() -> None:
    data = "aé漢🙂".encode()
    given_out, _ = pushed([data[i : i + 1] for i in range(len(data))])
    assert given_out == ["a", "", "é", "", "", "漢", "", "", "", "🙂", ""]


def test_an_unfinished_character_becomes_a_replacement_only_at_the_end() -> None:
    assert pushed([b"a", b"\xf0\x9f"]) == (["a", "", "\ufffd"], False)


@given(data=st.binary(max_size=40), cuts=st.lists(st.integers(0, 40), max_size=6))
def test_any_bytes_cut_anywhere_decode_as_in_one_piece(data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
    assert "".join(pushed(pieces)[0]) == data.decode("utf-8", "replace")


def test_text_that_may_become_a_stop_is_held_back_until_it_is_known() -> None:
    assert pushed([b"x", b"a", b"b", b"y"], ("abc",)) == (["x", "", "", "aby", ""], False)
    assert pushed([b"xa", b"bc", b"y"], ("abc",)) == (["x", "", "", ""], True)
    assert pushed([b"xa", b"b"], ("abc",)) == (["x", "", "ab"], False)
    assert pushed([b"aab"], ("ab",)) == (["a", ""], True)


def test_one_letter_stops_and_the_stop_that_ends_first() -> None:
    assert pushed([b"hello."], (".",)) == (["hello", ""], True)
    assert pushed([b"abcd"], ("abcd", "bc")) == (["a", ""], True)
    assert pushed([b"abc"], ("c", "abc")) == (["", ""], True)


@given(text=st.text("ab漢", max_size=20), stops=st.lists(st.text("ab漢", min_size=1, max_size=3), max_size=3),
       cuts=st.lists(st.integers(0, 60), max_size=8))  # fmt: skip
def test_stops_do_not_depend_on_where_tokens_end(text: str, stops: list[str], cuts: list[int]) -> None:
    """Against a reference that reads one character at a time."""
    expected = text
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            expected = text[: end - max(map(len, found))]
            break
    data = text.encode()
    edges = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    given_out, stopped = pushed([data[a:b] for a, b in itertools.pairwise(edges)], tuple(stops))
    assert "".join(given_out) == expected
    assert stopped == any(stop in text for stop in stops)


def test_a_stop_across_token_edges_ends_its_row_and_no_other() -> None:
    """B128: vocabulary a, b, ab, ca; stop "bc" fires on "ab", "ca", and nothing after it is given out."""
    checkpoint = speaker([b"a", b"b", b"ab", b"ca"], {0: 2, 2: 3, 3: 0, 1: 1})
    params = [GenerationConfig(max_new_tokens=5, stop=["bc"]), GenerationConfig(max_new_tokens=5)]
    first, second = generate(checkpoint, ["a", "a"], params)
    assert (first.text, first.tokens, first.finish_reason) == ("a", [2, 3], "stop")
    assert (second.text, second.tokens, second.finish_reason) == ("abcaaabca", [2, 3, 0, 2, 3], "length")
    assert len(first.logprobs) == 2


def test_a_stop_of_split_characters() -> None:
    one, two, three = "é".encode()[:1], "é".encode()[1:], "漢".encode()
    checkpoint = speaker([b"a", one, two, three], {0: 1, 1: 2, 2: 3, 3: 0})
    (completion,) = generate(checkpoint, ["a"], max_new_tokens=9, stop=["é漢"])
    assert (completion.text, completion.tokens) == ("", [1, 2, 3])
    (completion,) = generate(checkpoint, ["a"], max_new_tokens=1)
    assert completion.text == "\ufffd"


def test_the_end_of_text_token_ends_a_row_and_is_no_text() -> None:
    checkpoint = speaker([b"a", b"b", b""], {0: 1, 1: 2, 2: 0}, eos_id=2)
    (completion,) = generate(checkpoint, ["a"], max_new_tokens=9)
    assert (completion.text, completion.tokens, completion.finish_reason) == ("b", [1, 2], "stop")


def test_held_back_text_comes_out_when_the_row_ends() -> None:
    checkpoint = speaker([b"a", b"b", b""], {0: 1, 1: 2, 2: 0}, eos_id=2)
    assert generate(checkpoint, ["a"], max_new_tokens=9, stop=["bx"])[0].text == "b"
    assert generate(checkpoint, ["a"], max_new_tokens=1, stop=["bx"])[0].text == "b"


def test_a_stop_text_waits_for_the_least_number_of_new_tokens() -> None:
    checkpoint = speaker([b"a", b"b"], {0: 1, 1: 0})
    (completion,) = generate(checkpoint, ["a"], max_new_tokens=8, min_new_tokens=2, stop=["b"])
    assert (completion.text, completion.tokens) == ("ba", [1, 0, 1])
    (completion,) = generate(checkpoint, ["a"], max_new_tokens=8, min_new_tokens=2, stop=["ab", "bab"])
    assert completion.text == ""  # "bab" ends with the third token, as "ab" does; the longer one is cut off whole


def test_pieces_join_to_the_completions_of_each_row() -> None:
    checkpoint = speaker([b"a", b"\xc3", b"\xa9", b"b"], {0: 1, 1: 2, 2: 3, 3: 0})
    pieces = list(stream(checkpoint, ["a", "b", "ab"], max_new_tokens=7, stop=["bac"]))
    for row, completion in enumerate(generate(checkpoint, ["a", "b", "ab"], max_new_tokens=7, stop=["bac"])):
        assert "".join(text for at, text in pieces if at == row) == completion.text
    assert {row for row, _ in pieces} == {0, 1, 2}
    assert all(text and "\ufffd" not in text for _, text in pieces)


def test_pieces_come_as_soon_as_they_are_certain() -> None:
    checkpoint = speaker([b"a", b"b"], {0: 1, 1: 0})
    pieces = stream(checkpoint, ["a"], max_new_tokens=4)
    assert next(pieces) == (0, "b")
    assert len(checkpoint.model.slots_run) == 1


def test_begin_is_put_before_a_prompt_exactly_once() -> None:
    """B110."""
    assert encode_prompt(PieceTokenizer([b"a", b""], bos_id=1), "aa") == [1, 0, 0]
    assert encode_prompt(PieceTokenizer([b"a", b""], bos_id=1), "") == [1]
    assert encode_prompt(PieceTokenizer([b"a"]), "aa") == [0, 0]


def test_tokens_that_the_tokenizer_lacks_never_come() -> None:
    """B131."""
    checkpoint = SimpleNamespace(model=TableModel.chain({0: 3, 1: 3}, 4), tokenizer=PieceTokenizer([b"a", b"b"]))
    (completion,) = generate(checkpoint, ["a"], max_new_tokens=6, temperature=1.0, seed=1)
    assert set(completion.tokens) <= {0, 1}


def test_bad_calls_are_refused_at_once() -> None:
    checkpoint = speaker([b"a"], {})
    with pytest.raises(InputError, match="give a list of texts"):
        generate(checkpoint, "a")
    with pytest.raises(InputError, match="prompt 0 is empty"):
        stream(checkpoint, [""])
    with pytest.raises(ConfigError, match="did you mean 'temperature'"):
        stream(checkpoint, ["a"], temprature=1.0)
    with pytest.raises(InputError, match="top_k came beside params"):
        generate(checkpoint, ["a"], GenerationConfig(), top_k=1)
    assert generate(checkpoint, []) == []
    assert checkpoint.model.slots_run == []


# ------------------------------------------------------------------------------------------- sources, beams

PIECES = [b"", b"", b"a", b"b", b"\xc3", b"\xa9"]


def translator(**ids: int) -> SimpleNamespace:
    return SimpleNamespace(model=SourceTableModel.random(6, seed=2), tokenizer=PieceTokenizer(PIECES, **ids))


def test_texts_for_an_encoder_decoder_are_sources() -> None:
    """They are written as documents are, with begin and end; the decoder begins with the begin token, or as told."""
    checkpoint = translator(bos_id=0, eos_id=1)
    params = GenerationConfig(max_new_tokens=5, stop_token_ids=[1])
    for start in (None, 3):
        begin = [0 if start is None else start]
        expected = generate_ids(checkpoint.model, [begin, begin], params, sources=[[0, 2, 3, 1], [0, 3, 1]])
        found = generate(checkpoint, ["ab", [0, 3, 1]], max_new_tokens=5, start_id=start)
        assert [row.tokens for row in found] == [row.tokens for row in expected]
        pieces = stream(checkpoint, ["ab", "b"], max_new_tokens=5, start_id=start)
        assert "".join(text for row, text in pieces if row == 0) == found[0].text


def test_a_start_that_nobody_names_is_asked_for() -> None:
    with pytest.raises(InputError, match="no begin token for the decoder; give start_id"):
        generate(translator(eos_id=1), ["a"])
    assert generate(translator(eos_id=1), ["a"], start_id=0, max_new_tokens=1)[0].tokens
    with pytest.raises(InputError, match="start_id is 0, but a TableModel begins with its prompt"):
        generate(speaker([b"a"], {}), ["a"], start_id=0)
    with pytest.raises(InputError, match="prompt 0 holds 6, but token ids are 0 to 5"):
        generate(translator(), ["a"], start_id=6)


@pytest.mark.parametrize("use_cache", [True, False])
def test_the_n_best_completions_are_those_of_the_search(use_cache: bool) -> None:
    checkpoint = translator(bos_id=0, eos_id=1)
    params = BeamSearchConfig(num_beams=5, num_return_sequences=4, max_new_tokens=4, length_penalty=0.5)
    full = params.model_copy(update={"stop_token_ids": [1]})
    expected = beam_search(checkpoint.model, [[0], [0]], full, sources=[[0, 2, 1], [0, 3, 2, 1]])
    found = generate_n_best(checkpoint, ["a", "ba"], params, use_cache=use_cache)
    for texts, hypotheses in zip(found, expected, strict=True):
        for text, hypothesis in zip(texts, hypotheses, strict=True):
            assert (text.tokens, text.score) == (hypothesis.tokens, hypothesis.score)
            assert text.finish_reason == ("stop" if 1 in text.tokens else "length")
            said = [token for token in text.tokens if token != 1]
            assert text.text == b"".join(PIECES[token] for token in said).decode("utf-8", "replace")
            assert set(text.to_dict()) == {"text", "tokens", "logprobs", "finish_reason", "score"}
    reasons = {text.finish_reason for texts in found for text in texts}
    assert reasons == {"stop", "length"}
    best = generate(checkpoint, ["a", "ba"], num_beams=5, max_new_tokens=4, length_penalty=0.5, use_cache=use_cache)
    assert best == [texts[0] for texts in found]
    assert generate(checkpoint, ["a", "ba"], params.model_copy(update={"num_return_sequences": 1})) == best


def test_the_text_of_a_hypothesis_is_without_the_stop_id_that_ended_it() -> None:
    checkpoint = speaker([b"a", b"b", b"!"], {0: 1, 1: 2, 2: 0})
    (stopped,) = generate(checkpoint, ["a"], num_beams=1, length_penalty=0.0, max_new_tokens=5, stop_token_ids=[2])
    assert (stopped.text, stopped.tokens, stopped.finish_reason) == ("b", [1, 2], "stop")
    (whole,) = generate(checkpoint, ["a"], num_beams=1, length_penalty=0.0, max_new_tokens=2)
    assert (whole.text, whole.finish_reason) == ("b!", "length")


def test_what_beams_cannot_do_is_said() -> None:
    checkpoint = speaker([b"a", b"b"], {})
    with pytest.raises(InputError, match="num_return_sequences is 2, but generate gives one completion a prompt"):
        generate(checkpoint, ["a"], num_beams=2, num_return_sequences=2)
    with pytest.raises(InputError, match="num_return_sequences is 2, but generate gives one"):
        generate(checkpoint, ["a"], BeamSearchConfig(num_return_sequences=2))
    with pytest.raises(InputError, match="num_beams came beside params"):
        generate(checkpoint, ["a"], GenerationConfig(), num_beams=2)
    with pytest.raises(InputError, match="num_beams came beside params"):
        generate_n_best(checkpoint, ["a"], BeamSearchConfig(), num_beams=2)
    with pytest.raises(InputError, match="no text before its end; use generate"):
        stream(checkpoint, ["a"], num_beams=2)
    with pytest.raises(InputError, match="no text before its end; use generate"):
        stream(checkpoint, ["a"], BeamSearchConfig())
    with pytest.raises(ConfigError, match="no key 'temperature'"):
        generate(checkpoint, ["a"], num_beams=2, temperature=1.0)
    assert checkpoint.model.slots_run == []


def test_a_path_is_no_checkpoint() -> None:
    with pytest.raises(ArgumentError, match=r"load the checkpoint first: pellucid\.load\(path\)"):
        pl.generate("runs/tiny", ["a"])  # type: ignore[arg-type]
