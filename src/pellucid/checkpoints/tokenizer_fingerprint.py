"""The witness of text: the outputs of the tokenizer and the chat template.

A digest proves that ``tokenizer.json`` is the same file. This proves what it *means*: what every id stands for, the ids
of some lines of many kinds, and the ids of a few small chats. Nothing in it depends on chance.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field

from pellucid.configfile import Config
from pellucid.data.chat import ChatTemplate, encode_chat
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import CheckpointError, DataError, InputError, UnsupportedError

SAMPLE = (
    "The quick brown fox jumps over 13 lazy dogs; IT COSTS $1,234.50, or 7.5e-3 % of that!",
    "def area(r: float) -> float:\n\treturn 3.14159 * r ** 2  # m²\nif x != y and not z[0]['k']: pass\n",
    "  two  spaces, a\ttab,\r\n\n\nempty lines, no\u00a0break, zero\u200bwidth, trailing   ",
    "Straße, naïve, œuvre, ÅNGSTRÖM, Ελλάδα, Привет, мир",
    "你好,世界。日本語のテスト カタカナ 한국어 문장",
    "שלום עולם مرحبا بالعالم नमस्ते สวัสดี",
    "cafe\u0301 café ﬁ Ⅳ ² ½ ﷺ A 👩‍💻 🇪🇺 …—“”",
    '0 00 007 12345678901234567890 0x1F 1_000 <tag a="b"> &amp; {}[]()\\/|~^`@#',
)
"""Lines that tokenizers cut differently: scripts, code, white space, digits, and what a normalizer would change."""

Id = Annotated[int, Field(ge=0, le=1 << 24)]
Ids = Annotated[tuple[Id, ...], Field(max_length=4096)]
Lines = Annotated[tuple[str, ...], Field(min_length=1, max_length=16)]


class Message(Config):
    """One turn."""

    role: Literal["system", "user", "assistant"]
    content: str


class Chat(Config):
    """A small chat, and the template's other variables."""

    messages: tuple[Message, ...]
    add_generation_prompt: bool = True
    date_string: str | None = None
    enable_thinking: bool | None = None

    def ids(self, tokenizer: Tokenizer, template: ChatTemplate) -> list[int]:
        """The chat's ids."""
        given = {"date_string": self.date_string, "enable_thinking": self.enable_thinking}
        variables = {name: value for name, value in given.items() if value is not None}
        messages = [message.model_dump() for message in self.messages]
        return encode_chat(tokenizer, template, messages, self.add_generation_prompt, **variables)


class ChatFingerprint(Config):
    """A chat and the ids it must have; None where the template refuses it."""

    chat: Chat
    ids: Ids | None


class TokenizerFingerprint(Config):
    """The outputs that a tokenizer and a chat template must have."""

    tokens: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 over what every id stands for, and the ids of its text."""
    sample: Lines
    ids: Annotated[tuple[Ids, ...], Field(max_length=16)]
    """The ids of each line of ``sample``."""
    decoded: Lines
    """The decoded text of those ids."""
    chats: dict[str, ChatFingerprint] | None
    """None without a chat template."""


def _chat(*contents: str, system: str | None = None, **more: object) -> Chat:
    turns = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]
    first = [] if system is None else [{"role": "system", "content": system}]
    return Chat.from_mapping({"messages": [*first, *turns], **more})


CHATS = {
    "question": _chat("What is 6 × 7?"),
    "dialogue": _chat(" Hello,\nthere! ", "Hi. ", "And 2 + 2?"),
    "system": _chat("Who are you?", system="Be brief."),
    "answered": _chat("Ping", "Pong", add_generation_prompt=False),
    "variables": _chat("Which day is it?", date_string="1 January 2000", enable_thinking=False),
}
"""The chats of every template: it may refuse some of them, not all."""


def tokenizer_fingerprint(tokenizer: Tokenizer, template: ChatTemplate | None) -> TokenizerFingerprint:
    """The fingerprint of ``tokenizer`` and ``template``. A template that can render none of the chats is refused."""
    ids, decoded = _cut(tokenizer, SAMPLE)
    chats = None if template is None else _chats(tokenizer, template)
    return TokenizerFingerprint(tokens=tokens_digest(tokenizer), sample=SAMPLE, ids=ids, decoded=decoded, chats=chats)


def compare_tokenizer(
    noted: TokenizerFingerprint, tokenizer: Tokenizer, template: ChatTemplate | None
) -> Iterator[tuple[str, str, int]]:
    """(probe, what, in how many places it differs) for everything in ``noted``, computed again."""
    yield "tokens", "digest of what ids stand for", int(tokens_digest(tokenizer) != noted.tokens)
    ids, decoded = _cut(tokenizer, noted.sample)
    yield "sample", "ids", _differ(sum(ids, ()), sum(noted.ids, ())) or int(ids != noted.ids)
    yield "sample", "decoded text", _differ(decoded, noted.decoded)
    for name, answer in (noted.chats or {}).items():
        assert template is not None
        try:
            found: tuple[int, ...] | None = tuple(answer.chat.ids(tokenizer, template))
        except InputError:
            found = None
        yield f"chat {name}", "ids", _differ(found or (), answer.ids or ()) or int(found != answer.ids)
    chats = {name: answer.chat for name, answer in (noted.chats or {}).items()}
    wanted = {} if template is None else CHATS
    yield "text", "inputs", int(noted.sample != SAMPLE) + int(chats != wanted)


@lru_cache(maxsize=2)
def tokens_digest(tokenizer: Tokenizer) -> str:
    """SHA-256 over every id and what it stands for: its bytes, or its spelling where it is no sequence of bytes.

    It also covers the ids of each token's text, so that it depends on every merge.
    """
    special = {id_: spelling for spelling, id_ in tokenizer.special_ids.items()}
    known = hashlib.sha256()
    try:
        pieces = {id_: _bytes(tokenizer, id_) for id_ in range(tokenizer.vocab_size) if id_ not in special}
        for id_ in range(tokenizer.vocab_size):
            text = f"special {special[id_]}" if id_ in special else f"bytes {pieces[id_].hex()}"
            known.update(f"{id_} {text}\n".encode())
        texts = [data.decode("utf-8", "ignore") for data in pieces.values()]
        known.update(repr(tokenizer.encode_many(texts)).encode())
    except UnsupportedError:
        parts = json.loads(tokenizer.to_json())
        spelling = [parts["model"].get("vocab"), parts["added_tokens"]]
        return hashlib.sha256(json.dumps(spelling, sort_keys=True).encode()).hexdigest()
    return known.hexdigest()


def _bytes(tokenizer: Tokenizer, id_: int) -> bytes:
    try:
        return tokenizer.token_bytes(id_)
    except UnsupportedError:
        raise
    except DataError:  # ids may have gaps
        return b""


def _cut(tokenizer: Tokenizer, lines: tuple[str, ...]) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    try:
        ids = tuple(tuple(line) for line in tokenizer.encode_many(lines))
        return ids, tuple(tokenizer.decode(line) for line in ids)
    except InputError:
        raise
    except Exception as error:  # what the library of the tokenizer raises has no type
        raise CheckpointError(
            f"the tokenizer cannot encode some lines of plain text: {str(error)[:200]}; choose one that can"
        ) from error


def _chats(tokenizer: Tokenizer, template: ChatTemplate) -> dict[str, ChatFingerprint]:
    answers, errors = {}, []
    for name, chat in CHATS.items():
        ids = None
        try:
            ids = tuple(chat.ids(tokenizer, template))
        except InputError as error:
            errors.append(error)
        answers[name] = ChatFingerprint(chat=chat, ids=ids)
    if len(errors) == len(CHATS):
        raise CheckpointError(f"no chat can be written with the chat template; {errors[0]}") from errors[0]
    return answers


def _differ(a: tuple[object, ...], b: tuple[object, ...]) -> int:
    return sum(x != y for x, y in zip(a, b, strict=False)) + abs(len(a) - len(b))
