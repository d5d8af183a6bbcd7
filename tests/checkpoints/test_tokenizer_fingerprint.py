"""What a tokenizer and a chat template must give: seen when they give something else, whoever signed it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from helpers.folders import resign
from helpers.tiny import tiny_config
from pellucid.checkpoints import WitnessError, load, save, verify
from pellucid.checkpoints.contract import CONTRACT, read_contract
from pellucid.checkpoints.tokenizer_fingerprint import CHATS, SAMPLE, tokenizer_fingerprint
from pellucid.data import PLAIN, ChatTemplate, Tokenizer
from pellucid.errors import CheckpointError
from pellucid.models import build

TEXTS = ["User: the quick brown fox, to be or not to be\nAssistant: that is the question 12 + 30\n", *SAMPLE] * 3
SIZE = 400
TOKENIZER = Tokenizer.train(TEXTS, vocab_size=SIZE)
CONFIG = tiny_config(vocab_size=SIZE, hidden_size=16, num_hidden_layers=1)
TEMPLATE, WORDS = "chat_template.jinja", "tokenizer.json"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "a"
    save(folder, build(CONFIG, seed=1), tokenizer=TOKENIZER, chat_template=PLAIN)
    assert verify(folder).passed
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "a"))


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads((folder / WORDS).read_text())
    change(data)
    (folder / WORDS).write_text(json.dumps(data))


def _swap_ids(data: dict[str, Any]) -> None:
    vocab = data["model"]["vocab"]
    a, b = (token for token, id_ in vocab.items() if id_ in (200, 280))
    vocab[a], vocab[b] = vocab[b], vocab[a]


def _other_tokenizer(data: dict[str, Any]) -> None:
    other = [" ".join(str(number**3) for number in range(2000))]
    data.update(json.loads(Tokenizer.train(other, vocab_size=SIZE).to_json()))


def _spell_otherwise(data: dict[str, Any]) -> None:
    data["added_tokens"][2]["content"] = "<|fill|>"
    data["model"]["vocab"]["<|fill|>"] = data["model"]["vocab"].pop("<|pad|>")


TOKENIZERS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "two ids change places": (_swap_ids, "tokens"),
    "another tokenizer of that size": (_other_tokenizer, "tokens"),
    "a token is spelt otherwise": (_spell_otherwise, "tokens"),
    "small letters": (lambda d: d.update(normalizer={"type": "Lowercase"}), "tokens"),
    "composed letters": (lambda d: d.update(normalizer={"type": "NFC"}), "sample"),
    "compatible letters": (lambda d: d.update(normalizer={"type": "NFKC"}), "tokens"),
    "stripped": (lambda d: d.update(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}), "tokens"),
    "a space in front": (lambda d: d["pre_tokenizer"].update(add_prefix_space=True), "tokens"),
    "no merges": (lambda d: d["model"].update(merges=[]), "tokens"),
    "merges the other way round": (lambda d: d["model"]["merges"].reverse(), "tokens"),
    "another decoder": (lambda d: d.update(decoder={"type": "Fuse"}), "tokens"),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_another_tokenizer_is_found_out(folder: Path, kind: str) -> None:
    """At every level by its digest, and by what it gives when somebody signed it."""
    change, probe = TOKENIZERS[kind]
    rewrite(folder, change)
    assert "tokenizer.json has SHA-256" in verify(folder, "headers").problem
    resign(folder, lambda data: None)
    if kind == "a token is spelt otherwise":  # the pad token, which the contract speaks of as well
        resign(folder, lambda data: data["text"].update(pad_id=None))
    load(folder, check="digests")
    with pytest.raises(WitnessError, match=f"probe '{probe}' differs first, its .*; its text files or its contract"):
        load(folder, check="witness")
    found = verify(folder)
    assert not found.passed
    assert [d.probe for d in found.differences[:2]] == ["plain", "plain"]
    assert found.differences[-1].probe == probe


TEMPLATES = {
    "another text": PLAIN.text + "!",
    "without the end of a reply": PLAIN.text.replace("{{ eos_token if message.role == 'assistant' else '' }}", ""),
    "without names": PLAIN.text.replace("message.role | capitalize", "'x'"),
    "trimmed": PLAIN.text.replace("message.content", "message.content | trim"),
    "the prompt is always there": PLAIN.text.replace("{% if add_generation_prompt %}", "{% if true %}"),
    "a date, if told": "{{ date_string if date_string is defined else '' }}" + PLAIN.text,
    "thinking": "{% if enable_thinking is defined and not enable_thinking %}no{% endif %}" + PLAIN.text,
    "no system": "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + PLAIN.text,
    "one that cannot be read": "{% for %}",
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_another_template_is_found_out(folder: Path, kind: str) -> None:
    (folder / TEMPLATE).write_text(TEMPLATES[kind])
    assert f"{TEMPLATE} has SHA-256" in verify(folder, "headers").problem
    resign(folder, lambda data: None)
    load(folder, check="digests")
    with pytest.raises(WitnessError, match=r"probe 'chat [a-z]+' differs first, its ids by [1-9]"):
        load(folder, check="witness")


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "ids of a chat": lambda t: t["chats"]["system"]["ids"].append(5),
    "no ids of a chat": lambda t: t["chats"]["system"].update(ids=None),
    "another message": lambda t: t["chats"]["variables"]["chat"]["messages"][0].update(content="?"),
    "no date": lambda t: t["chats"]["variables"]["chat"].update(date_string="2 January 2000"),
    "one chat less": lambda t: t["chats"].pop("question"),
    "no chats": lambda t: t.update(chats=None),
    "chats of none": lambda t: t.update(chats={}),
    "nothing asked": lambda t: t.update(sample=[""], ids=[[]], decoded=[""]),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_witness_of_text_that_was_changed_is_not_borne_out(folder: Path, kind: str) -> None:
    resign(folder, lambda data: CHANGES[kind](data["witness"]["text"]))
    load(folder, check="digests")
    assert not verify(folder).passed


@pytest.mark.parametrize("kind", ["spaces in the file", "a rule that nothing asks for", "a turn that nothing asks for"])
def test_what_is_said_not_to_be_seen_is_not_seen(folder: Path, kind: str) -> None:
    """``UNSEEN`` says so: signed anew, these pass; unsigned, none does."""
    if kind == "spaces in the file":
        rewrite(folder, lambda data: None)
    elif kind == "a rule that nothing asks for":
        rewrite(folder, lambda data: data["model"].update(ignore_merges=True))
    else:
        (folder / TEMPLATE).write_text(PLAIN.text + "{% if messages | length > 7 %}!{% endif %}")
    assert not verify(folder, "headers").passed
    resign(folder, lambda data: None)
    assert verify(folder).passed


def test_the_witness_of_text_is_readable(original: Path) -> None:
    kept = read_contract(original / CONTRACT).witness.text
    assert kept is not None
    assert kept == tokenizer_fingerprint(TOKENIZER, PLAIN)
    assert kept.sample == kept.decoded == SAMPLE
    assert kept.ids[0] == tuple(TOKENIZER.encode(SAMPLE[0]))
    assert kept.chats is not None
    assert list(kept.chats) == list(CHATS)
    said = TOKENIZER.decode(kept.chats["dialogue"].ids or (), skip_special=False)
    assert said == "<|begin|>User:  Hello,\nthere! \nAssistant: Hi. <|end|>\nUser: And 2 + 2?\nAssistant:"
    assert max(map(len, (original / CONTRACT).read_text().splitlines())) < 200


def test_without_text_there_is_no_witness_of_it(tmp_path: Path) -> None:
    save(tmp_path / "bare", build(CONFIG))
    save(tmp_path / "words", build(CONFIG), tokenizer=TOKENIZER)
    assert read_contract(tmp_path / "bare" / CONTRACT).witness.text is None
    kept = read_contract(tmp_path / "words" / CONTRACT).witness.text
    assert kept is not None
    assert kept.chats is None


def test_a_tokenizer_of_words_has_a_witness_too(tmp_path: Path) -> None:
    """Its tokens are no bytes; their spellings count, and ids may have gaps."""
    backend = Backend(models.WordLevel({"[UNK]": 0, "fox": 1, "dogs": 5}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    save(tmp_path / "a", build(CONFIG), tokenizer=Tokenizer(backend))
    assert verify(tmp_path / "a").passed
    rewrite(tmp_path / "a", lambda data: data["model"]["vocab"].update(fox=5, dogs=1))
    resign(tmp_path / "a", lambda data: None)
    assert "probe 'tokens' differs first" in verify(tmp_path / "a").problem


def test_a_tokenizer_that_cannot_encode_plain_text_is_not_saved(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"fox": 0}, unk_token="[UNK]"))
    with pytest.raises(CheckpointError, match=r"the tokenizer cannot encode some lines of plain text: .*; choose one"):
        save(tmp_path / "a", build(CONFIG), tokenizer=Tokenizer(backend))
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for %}", "line 1: "),
        ("{{ messages[0].contents }}", "has no attribute 'contents'"),
        ("{{ raise_exception('never') }}", "never"),
        ("{{ bos_token }}{{ bos_token }}", "writes the begin token twice"),
        ("{{ messages }}", "writes a list"),
    ],
)
def test_a_template_that_writes_no_chat_is_not_saved(tmp_path: Path, template: str, words: str) -> None:
    for given in (template, ChatTemplate(template)):
        with pytest.raises(
            CheckpointError, match=f"^no chat can be written with the chat template; .*{words}"
        ) as caught:
            save(tmp_path / "a", build(CONFIG), tokenizer=TOKENIZER, chat_template=given)
        assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("template", "refused"),
    [
        ("{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}x", {"dialogue", "system", "answered"}),
        ("{{ date_string }}", set(CHATS) - {"variables"}),
        ("x", set()),
    ],
)
def test_a_template_may_refuse_some_chats(tmp_path: Path, template: str, refused: set[str]) -> None:
    save(tmp_path / "a", build(CONFIG), tokenizer=TOKENIZER, chat_template=template)
    text = read_contract(tmp_path / "a" / CONTRACT).witness.text
    assert text is not None
    assert text.chats is not None
    assert {name for name, answer in text.chats.items() if answer.ids is None} == refused
    assert verify(tmp_path / "a").passed


def test_text_that_looks_like_a_list_of_numbers_stays_as_it_is() -> None:
    """Rows of numbers go on one line in the file; what stands in a text is no row."""
    import json

    from pellucid.checkpoints.contract import _FLAT, _row

    text = json.dumps({"said": "[ 1, 2 ]", "row": [1, 2]}, indent=2)
    written = _FLAT.sub(lambda match: _row(match[0]), text)
    assert json.loads(written) == {"said": "[ 1, 2 ]", "row": [1, 2]}
    assert '"row": [1, 2]' in written
