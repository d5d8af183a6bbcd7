"""The tokenizer loses nothing, lets no text forge a special token, and reads hostile files calmly."""

import json
import pickle
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from pellucid.data import MASK, Tokenizer, sentinels, tokenizer
from pellucid.errors import DataError, UnsupportedError

TEXTS = ["def add(a, b):\n    return a + b\n", "Zuò 好的 naïve — 🙂\r\n", "the the the end <|end|>"] * 3


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return Tokenizer.train(TEXTS, vocab_size=300)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "\r\n\r\n",
        "\x00\x01\x7f",
        "\u0301\u0301a",
        "🙂👩‍👩‍👧‍👦",
        "\ufeffbom",
        "  two  spaces \t",
        "<|end|><|begin|>",
    ],
)
def test_round_trip_of_awkward_texts(small: Tokenizer, text: str) -> None:
    assert small.decode(small.encode(text)) == text


@settings(deadline=None, max_examples=200)
@given(st.text())
def test_round_trip_of_any_text_and_its_bytes(small: Tokenizer, text: str) -> None:
    ids = small.encode(text)
    assert small.decode(ids) == text
    assert b"".join(small.token_bytes(id_) for id_ in ids) == text.encode()


def test_every_byte_has_a_token_of_its_own(small: Tokenizer) -> None:
    single = {small.token_bytes(id_) for id_ in range(small.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= single


def test_text_cannot_forge_a_special_token(small: Tokenizer) -> None:
    ids = small.encode("x<|end|>y<|begin|><|pad|>")
    assert not {small.bos_id, small.eos_id, small.pad_id} & set(ids)
    assert small.decode(ids) == "x<|end|>y<|begin|><|pad|>"


def test_specials_survive_saving_and_pickling(small: Tokenizer, tmp_path) -> None:
    small.save(tmp_path / "tokenizer.json")
    for copy in (Tokenizer.load(tmp_path / "tokenizer.json"), pickle.loads(pickle.dumps(small))):
        assert copy.digest() == small.digest()
        assert copy.encode("a<|end|>") == small.encode("a<|end|>")
        assert (copy.bos_id, copy.eos_id, copy.pad_id) == (0, 1, 2)
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.json"]


def test_only_documents_get_begin_and_end(small: Tokenizer) -> None:
    ids = small.encode("the end")
    assert small.encode_document("the end") == [small.bos_id, *ids, small.eos_id]
    assert small.encode_document("") == [small.bos_id, small.eos_id]
    assert small.encode_many(["the end", "", "the end"]) == [ids, [], ids]


def test_decode_names_specials_only_when_asked(small: Tokenizer) -> None:
    ids = small.encode_document("a")
    assert small.decode(ids) == "a"
    assert small.decode(ids, skip_special=False) == "<|begin|>a<|end|>"
    assert small.token_bytes(small.eos_id) == b""


def test_a_cut_character_decodes_to_a_replacement(small: Tokenizer) -> None:
    first = next(id_ for id_ in range(small.vocab_size) if small.token_bytes(id_) == b"\xf0")
    assert small.decode([first]) == "\ufffd"


@pytest.mark.parametrize("id_", [-1, 10_000])
def test_unknown_ids_are_refused(small: Tokenizer, id_: int) -> None:
    with pytest.raises(DataError, match=f"token id {id_} is not one of the 300 ids"):
        small.decode([id_])


def test_lone_surrogates_are_named_by_position(small: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"character 2 is the lone surrogate U\+D83D"):
        small.encode("ab\ud83d")
    with pytest.raises(DataError, match=r"character 0 is the lone surrogate U\+DC00"):
        Tokenizer.train(["fine", "\udc00"], vocab_size=300)


@pytest.mark.parametrize("size", [0, 258])
def test_a_vocabulary_below_the_bytes_is_refused(size: int) -> None:
    with pytest.raises(DataError, match=f"vocab_size is {size}, .* need 259"):
        Tokenizer.train(TEXTS, vocab_size=size)


def test_smallest_vocabulary_and_exhausted_pairs() -> None:
    assert Tokenizer.train(["ab"], vocab_size=259).vocab_size == 259
    assert Tokenizer.train(["ab"], vocab_size=5000).vocab_size == 260


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_training_on_nothing_is_refused(texts: list[str]) -> None:
    with pytest.raises(DataError, match="no text to train"):
        Tokenizer.train(texts, vocab_size=300)


def test_training_is_deterministic_and_the_digest_tells_tokenizers_apart(small: Tokenizer) -> None:
    assert Tokenizer.train(iter(TEXTS), vocab_size=300).digest() == small.digest()
    assert Tokenizer.train(TEXTS, vocab_size=299).digest() != small.digest()


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet="ab1. \n\r\t'\u00a0\u2028é", max_size=40), st.integers(1, 6))
def test_slices_of_a_long_text_join_up(small: Tokenizer, text: str, size: int) -> None:
    slices = list(small._slices(text, size))
    assert "".join(slices) == text
    assert [id_ for part in slices for id_ in small._backend.encode(part).ids] == small._backend.encode(text).ids


def test_long_texts_are_sliced(small: Tokenizer) -> None:
    assert len(list(small._slices("word\n" * 20, 10))) > 5


# ---- files


def write(path, change) -> str:
    parts = json.loads(Tokenizer.train(TEXTS, vocab_size=300).to_json())
    change(parts)
    path.write_text(json.dumps(parts))
    return str(path)


def test_missing_and_directory(tmp_path) -> None:
    with pytest.raises(DataError, match=r"cannot read the tokenizer .*none\.json: No such file") as caught:
        Tokenizer.load(tmp_path / "none.json")
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"is a directory; name the tokenizer\.json in it"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"version":"1.0"', b"[" * 50_000])
def test_damaged_files(tmp_path, data: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"is not a whole tokenizer\.json") as caught:
        Tokenizer.load(path)
    assert "\n" not in str(caught.value)


def test_oversized_files_and_ids(tmp_path, monkeypatch) -> None:
    path = write(tmp_path / "huge_id.json", lambda parts: parts["model"]["vocab"].update(a=2**31))
    with pytest.raises(DataError, match="its ids should lie in"):
        Tokenizer.load(path)
    monkeypatch.setattr(tokenizer, "_LARGEST_FILE", 1000)
    with pytest.raises(DataError, match="is larger than"):
        Tokenizer.load(path)


def test_saving_where_nothing_can_be_written(small: Tokenizer, tmp_path) -> None:
    with pytest.raises(DataError, match=r"cannot write the tokenizer to .*No such file"):
        small.save(tmp_path / "none" / "tokenizer.json")


def test_truncation_and_padding_in_a_file_cut_nothing(tmp_path, small: Tokenizer) -> None:
    backend = Backend.from_str(small.to_json())
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.encode("the end of it") == small.encode("the end of it")


def test_another_tokenizer_is_read_by_its_usual_names(tmp_path) -> None:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(sorted(pre_tokenizers.ByteLevel.alphabet()))
    backend.add_special_tokens(["<|endoftext|>"])
    backend.save(str(tmp_path / "gpt2.json"))
    loaded = Tokenizer.load(tmp_path / "gpt2.json")
    assert loaded.bos_id == loaded.eos_id == 256
    assert loaded.pad_id is None
    assert loaded.encode_document("") == [256, 256]


def test_a_tokenizer_that_could_only_forge_refuses(tmp_path) -> None:
    backend = Backend(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("a", -1.0)], unk_id=0))
    backend.add_special_tokens(["<unk>", "</s>"])
    backend.save(str(tmp_path / "unigram.json"))
    loaded = Tokenizer.load(tmp_path / "unigram.json")
    assert (loaded.bos_id, loaded.eos_id) == (None, 1)
    assert loaded.encode_document("a") == [2, 1]
    with pytest.raises(DataError, match="spells the special token '</s>'"):
        loaded.encode("a</s>")
    with pytest.raises(UnsupportedError, match="only for a byte-level tokenizer"):
        loaded.token_bytes(2)


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="needs fork")
def test_a_fork_after_use_neither_warns_nor_hangs() -> None:
    code = (
        "import os\n"
        "from pellucid.data import Tokenizer\n"
        "t = Tokenizer.train(['some text'] * 50, vocab_size=300)\n"
        "t.encode_many(['some text'] * 50)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(t.encode_many(['some text'] * 50) == [t.encode('some text')] * 50)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


# ---- kinds, and special tokens by name

KINDS = ["bpe", "wordpiece", "unigram"]
EXTRA = (MASK, *sentinels(3))


@pytest.fixture(scope="module", params=KINDS)
def any_kind(request) -> Tokenizer:
    return Tokenizer.train(TEXTS, vocab_size=300, kind=request.param, special_tokens=EXTRA)


def test_special_tokens_have_names_and_the_first_ids(any_kind: Tokenizer, tmp_path) -> None:
    any_kind.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    for copy in (any_kind, loaded, pickle.loads(pickle.dumps(any_kind))):
        assert (copy.bos_id, copy.eos_id, copy.pad_id, copy.mask_id) == (0, 1, 2, 3)
        assert copy.sentinel_ids == (4, 5, 6)
        assert copy.special_ids[MASK] == 3
        assert copy.special_ids["<|span_2|>"] == 6
        assert copy.digest() == any_kind.digest()
        assert copy.encode(TEXTS[0]) == any_kind.encode(TEXTS[0])
        assert copy.word_starts == any_kind.word_starts


def test_no_kind_lets_text_forge_a_special_token(any_kind: Tokenizer) -> None:
    for name in any_kind.special_ids:
        for text in (name, f"a{name}b", f" {name} "):
            assert not set(any_kind.encode(text)) & ({*any_kind.special_ids.values()} - {any_kind.unknown_id})


@pytest.mark.parametrize("name", ["end", "[", "mask"])
def test_a_special_token_spelt_like_text_is_refused(name: str) -> None:
    with pytest.raises(DataError, match="is spelled like ordinary text, which could forge it; give it brackets"):
        Tokenizer.train(TEXTS, vocab_size=300, special_tokens=(name,))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", [(MASK, MASK), ("<|end|>",)])
def test_a_special_token_named_twice_is_refused(kind, names) -> None:
    with pytest.raises(DataError, match="is named twice or is already there"):
        Tokenizer.train(TEXTS, vocab_size=300, kind=kind, special_tokens=names)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(DataError, match="kind is 'word'; choose bpe, wordpiece, unigram"):
        Tokenizer.train(TEXTS, vocab_size=300, kind="word")


@pytest.mark.parametrize(("kind", "least"), [("unigram", 259), ("wordpiece", 6)])
def test_vocabularies_too_small_are_refused(kind: str, least: int) -> None:
    with pytest.raises(DataError, match=f"vocab_size is {least - 1}, .* need {least}; set vocab_size to {least}"):
        Tokenizer.train(TEXTS, vocab_size=least - 1, kind=kind)
    assert Tokenizer.train(TEXTS, vocab_size=least, kind=kind).vocab_size == least


def test_scores_of_any_length_survive_saving(tmp_path) -> None:
    """Long numbers may lose their last bit on reading, and the digest would change with every save."""
    draw = random.Random(0)
    pieces = [(chr(97 + n % 26) * (1 + n // 26), -20 * draw.random()) for n in range(300)]
    loaded = Tokenizer(Backend(models.Unigram(pieces, unk_id=None)))
    for _ in range(3):
        loaded.save(tmp_path / "tokenizer.json")
        again = Tokenizer.load(tmp_path / "tokenizer.json")
        assert again.digest() == loaded.digest()
        loaded = again


@settings(max_examples=60)
@given(text=st.text())
def test_unigram_loses_nothing(unigram: Tokenizer, text: str) -> None:
    ids = unigram.encode(text)
    assert unigram.decode(ids) == text
    assert b"".join(unigram.token_bytes(id_) for id_ in ids) == text.encode()


@pytest.fixture(scope="module")
def unigram() -> Tokenizer:
    return Tokenizer.train(TEXTS, vocab_size=300, kind="unigram")


def test_wordpiece_says_what_it_changes() -> None:
    wordpiece = Tokenizer.train(["low lower lowest, slow"] * 5, vocab_size=40, kind="wordpiece")
    ids = wordpiece.encode("lower,\n\n slower\x00  low")
    assert wordpiece.decode(ids) == "lower , slower low"
    unknown = wordpiece.encode("low Zebra low")
    assert wordpiece.decode(unknown) == "low low"
    assert wordpiece.decode(unknown, skip_special=False) == "low <|unknown|> low"
    with pytest.raises(UnsupportedError, match="only for a byte-level tokenizer"):
        wordpiece.token_bytes(ids[0])


def test_wordpieces_are_those_of_the_definition() -> None:
    """Letters at a word's beginning and inside it apart, then the commonest pairs: here by hand."""
    wordpiece = Tokenizer.train(["aba aba ab"], vocab_size=9, kind="wordpiece")
    pieces = [wordpiece.decode([id_]) for id_ in range(4, wordpiece.vocab_size)]
    assert pieces == ["a", "##b", "##a", "ab", "aba"]
    assert wordpiece.encode("aba ab abab") == [8, 7, 8, 5]


def test_equal_texts_give_equal_wordpieces_in_every_process() -> None:
    """As its library trains it, WordPiece orders letters by a hash that each process salts anew."""
    code = (
        "from pellucid.data import Tokenizer\n"
        "words = [chr(97 + a) + chr(97 + b) + chr(97 + c) for a in range(9) for b in range(9) for c in range(9)]\n"
        "digest = Tokenizer.train([' '.join(words)], vocab_size=400, kind='wordpiece').digest()\n"
    )
    here: dict[str, str] = {}
    exec(code, here)
    run = subprocess.run([sys.executable, "-c", code + "print(digest)"], capture_output=True, text=True, timeout=120)
    assert (run.stdout.strip(), run.stderr) == (here["digest"], "")


def test_where_words_begin(small: Tokenizer) -> None:
    for id_ in small.encode("the end_of (it)\n9 é"):
        piece = small.token_bytes(id_)
        assert small.word_starts[id_] == (piece[:1] in b" (\n)")
    assert all(small.word_starts[id_] for id_ in small.special_ids.values())
    wordpiece = Tokenizer.train(["aba aba ab"], vocab_size=9, kind="wordpiece")
    assert wordpiece.word_starts == (True, True, True, True, True, False, False, True, True)
    backend = Backend(models.Unigram([("▁a", -1.0), ("b", -1.0)], unk_id=None))
    assert Tokenizer(backend).word_starts == (True, False)
    with pytest.raises(UnsupportedError, match="does not mark where words begin"):
        _ = Tokenizer(Backend(models.Unigram([("a", -1.0)], unk_id=None))).word_starts


def test_sentinels_of_t5_are_found_in_order() -> None:
    backend = Backend(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), ("▁a", -1.0)], unk_id=0))
    backend.add_special_tokens(["<unk>", "</s>", "<extra_id_10>", "<extra_id_2>", "<extra_id_0>"])
    assert Tokenizer(backend).sentinel_ids == (5, 4, 3)
    assert Tokenizer(backend).unknown_id == 0


@settings(max_examples=40)
@given(text=st.text(alphabet="ab é漢🙂\n", max_size=30))
def test_places_are_characters(small: Tokenizer, text: str) -> None:
    ids, places = small.encode_with_offsets(text)
    assert ids == small.encode(text)
    assert {n for start, stop in places for n in range(start, stop)} == set(range(len(text)))
