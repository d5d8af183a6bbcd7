"""Whole characters, stop texts across tokens, BOS exactly once."""

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.table_model import PieceTokenizer, TableModel
from pellucid.errors import ConfigError, InputError
from pellucid.generation import GenerationParams, TextStream, encode_prompt, generate, stream


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
    params = [GenerationParams(max_new_tokens=5, stop=["bc"]), GenerationParams(max_new_tokens=5)]
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
        generate(checkpoint, ["a"], GenerationParams(), top_k=1)
    assert generate(checkpoint, []) == []
    assert checkpoint.model.slots_run == []
