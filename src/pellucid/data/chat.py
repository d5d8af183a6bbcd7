"""Prompts to ids: messages through a chat template, and plain text. Both get the begin token here, exactly once.

A chat template is a jinja2 text in the tokenizer's folder. It is rendered in a process of its own
(``data.sandbox``). A special token comes only from where the template itself spells it, in one piece; one that is
spelled in a message, or comes together out of parts, is ordinary text.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from pellucid.data.records import lone_surrogate, surrogate_at
from pellucid.data.sandbox import DEFAULT, Limits, render
from pellucid.data.tokenizer import with_begin
from pellucid.data.vocabulary import BEGIN, END, PAD
from pellucid.errors import ArgumentError, DataError
from pellucid.messages import printable

ROLES = ("system", "developer", "user", "assistant", "tool")
VARIABLES: Mapping[str, type] = {
    "bos_token": str,
    "eos_token": str,
    "pad_token": str,
    "date_string": str,
    "enable_thinking": bool,
}
"""Variables that a template may use besides the messages; the tokens default to the tokenizer's."""

Messages = Sequence[Mapping[str, str]]
_LARGEST_TEXT = 16 << 20
_PRIVATE = range(0xF0000, 0xFFFFE)


@runtime_checkable
class TextEncoder(Protocol):
    """What plain text needs of a tokenizer."""

    @property
    def bos_id(self) -> int | None: ...

    def encode(self, text: str, /) -> list[int]: ...


@runtime_checkable
class ChatEncoder(TextEncoder, Protocol):
    """What a chat needs in addition."""

    @property
    def eos_id(self) -> int | None: ...

    @property
    def pad_id(self) -> int | None: ...

    @property
    def special_ids(self) -> Mapping[str, int]:
        """The spelling of every special token, and its id."""
        ...


class TemplatePiece(NamedTuple):
    """Text that a template wrote; a special token has its id."""

    text: str
    special: int | None = None


class ChatTemplate:
    """A chat template. Making one runs nothing; a wrong one is refused when it is first rendered."""

    def __init__(self, text: str, *, limits: Limits = DEFAULT) -> None:
        self.text, self.limits = text, limits
        if (at := surrogate_at(text)) is not None:
            raise ArgumentError(f"the chat template cannot be used: {lone_surrogate(text, at)}")

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, limits: Limits = DEFAULT) -> ChatTemplate:
        """Read a ``chat_template.jinja``."""
        try:
            with open(path, "rb") as file:
                data = file.read(4 * limits.template + 1)
            return cls(data.decode("utf-8"), limits=limits)
        except OSError as error:
            raise DataError(f"cannot read the chat template {printable(path)}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise DataError(
                f"the chat template {printable(path)} is not UTF-8: byte {error.start}; convert it"
            ) from error

    def digest(self) -> str:
        """SHA-256 of the text, in hexadecimal."""
        return hashlib.sha256(self.text.encode("utf-8")).hexdigest()

    def render(self, messages: Messages, add_generation_prompt: bool = True, **variables: str | bool) -> str:
        """The text of a chat, special tokens spelled out: for people. Ids come from :func:`encode_chat`.

        ``variables`` are some of :data:`VARIABLES`; tokens that are not given are those of a tokenizer trained here.
        """
        own = {"bos_token": BEGIN, "eos_token": END, "pad_token": PAD}
        return render(self.text, _variables(messages, add_generation_prompt, own | variables), {}, self.limits)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChatTemplate) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"ChatTemplate({self.text[:60]!r}{'…' if len(self.text) > 60 else ''})"


PLAIN = ChatTemplate(
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ message.role | capitalize }}: {{ message.content }}{{ eos_token if message.role == 'assistant' else '' }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""The template of a model that brings none: plain turns, each on a line of its own, a reply closed by the end token."""


def encode_prompt(tokenizer: TextEncoder, text: str) -> list[int]:
    """The ids of a plain prompt, the begin token before them."""
    return with_begin(tokenizer.bos_id, tokenizer.encode(text))


def encode_chat(
    tokenizer: ChatEncoder,
    template: ChatTemplate,
    messages: Messages,
    add_generation_prompt: bool = True,
    **variables: str | bool,
) -> list[int]:
    """The ids of a chat: the one way from messages to ids, in training as in use.

    The begin token stands at the start exactly once, whether the template writes it or not.
    """
    ids: list[int] = []
    for text, special in _pieces(tokenizer, template, messages, add_generation_prompt, variables):
        ids += tokenizer.encode(text) if special is None else [special]
    bos_id = tokenizer.bos_id
    if bos_id is not None and ids[:2] == [bos_id, bos_id]:
        raise ArgumentError("the chat template writes the begin token twice at the start; take one of them out")
    return with_begin(bos_id, ids)


def reply_end(tokenizer: ChatEncoder, template: ChatTemplate) -> int | None:
    """The special token that the template writes after an assistant's reply; None if there is none."""
    reply = f"reply {secrets.randbits(64)}"
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": reply}]
    pieces = list(_pieces(tokenizer, template, messages, False, {}))
    start = next((at for at, piece in enumerate(pieces) if reply in piece.text), len(pieces))
    return next((piece.special for piece in pieces[start:] if piece.special is not None), None)


def _pieces(
    tokenizer: ChatEncoder,
    template: ChatTemplate,
    messages: Messages,
    add_generation_prompt: bool,
    variables: Mapping[str, str | bool],
) -> Iterator[TemplatePiece]:
    """What the template writes, cut at its special tokens; other text never is one."""
    ends = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    if taken := sorted(ends.keys() & variables.keys()):
        raise ArgumentError(f"{taken[0]} is the tokenizer's own in a chat that becomes ids; leave it out")
    given = _variables(messages, add_generation_prompt, variables)
    marks = _Marks(tokenizer.special_ids, template.text + json.dumps(given, ensure_ascii=False))
    given |= {name: "" if id_ is None else marks.of_id[id_] for name, id_ in ends.items()}

    def written(what: Mapping[str, Any]) -> Iterator[TemplatePiece]:
        return marks.cut(render(template.text, what, marks.of_token, template.limits))

    pieces = list(written(given))
    harmless = {name: marks.without_tokens(value) for name, value in given.items()}
    _refuse_composed(marks, pieces if harmless == given else list(written(harmless)))
    return iter(pieces)


class _Marks:
    """Placeholders of special tokens while a template is rendered: three characters that occur nowhere else.

    They are private-use characters, drawn for each chat and absent from all its inputs, so nobody can write one, and
    one that a template splits is detected.
    """

    def __init__(self, special_ids: Mapping[str, int], inputs: str) -> None:
        self.spelling = {id_: token for token, id_ in special_ids.items() if token}
        first, last, *each = _absent(len(self.spelling) + 2, inputs)
        self.of_id = {id_: first + middle + last for id_, middle in zip(self.spelling, each, strict=True)}
        self.of_token = {token: self.of_id[id_] for id_, token in self.spelling.items()}
        self._ids = dict(zip(each, self.spelling, strict=True))
        self._mark = re.compile(f"{first}([{''.join(each) or first}]){last}")
        self._part = re.compile(f"[{first}{last}{''.join(each)}]")
        self.tokens = re.compile("|".join(map(re.escape, self.of_token)) or r"(?!)")

    def cut(self, text: str) -> Iterator[TemplatePiece]:
        """Pieces of ``text`` between its marks, and the special tokens that these stand for."""
        for number, part in enumerate(self._mark.split(text)):  # text, the middle of a mark, text, …
            if number % 2:
                yield TemplatePiece(self.spelling[self._ids[part]], self._ids[part])
            elif self._part.search(part):
                raise ArgumentError("the chat template changes a special token after writing it; leave it as it is")
            elif part:
                yield TemplatePiece(part)

    def without_tokens(self, value: Any) -> Any:
        """``value`` in which no text spells a special token."""
        if isinstance(value, str):
            return self.tokens.sub("\ufffd", value)
        if isinstance(value, list):
            return [{key: self.without_tokens(text) for key, text in message.items()} for message in value]
        return value


def _absent(count: int, inputs: str) -> list[str]:
    """``count`` private-use characters that are not in ``inputs`` and cannot be foreseen."""
    used = {ord(character) for character in set(inputs) if ord(character) >= _PRIVATE.start}
    if count + len(used) > len(_PRIVATE) // 2:
        raise ArgumentError(f"the chat holds {len(used)} different private-use characters; take some out")
    found: dict[int, None] = {}
    while len(found) < count:
        if (drawn := _PRIVATE[secrets.randbelow(len(_PRIVATE))]) not in used:
            found[drawn] = None
    return list(map(chr, found))


def _refuse_composed(marks: _Marks, pieces: Sequence[TemplatePiece]) -> None:
    """Refuse a template that writes special tokens in parts: they would become text, and not be what it means.

    What messages spell is no matter; so where they do, ``pieces`` are those of the same chat without that.
    """
    for text, special in pieces:
        if special is None and (found := marks.tokens.search(text)):
            raise ArgumentError(
                f"the chat template puts the special token {found[0]!r} together from parts, where it is "
                "indistinguishable from text that only spells it; write it in one piece"
            )


def _variables(messages: Messages, add_generation_prompt: bool, variables: Mapping[str, str | bool]) -> dict[str, Any]:
    """All variables of a template, checked."""
    for name, value in variables.items():
        if name not in VARIABLES:
            near = difflib.get_close_matches(name, VARIABLES, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(VARIABLES)}"
            raise ArgumentError(f"a chat template has no variable {name[:40]!r}; {hint}")
        if type(value) is not VARIABLES[name]:
            wanted = "true or false" if VARIABLES[name] is bool else "text"
            raise ArgumentError(f"{name} is {value!r:.40}, but must be {wanted}")
        if isinstance(value, str):
            _check_text(value, name)
    if not isinstance(add_generation_prompt, bool):
        raise ArgumentError(f"add_generation_prompt is {add_generation_prompt!r:.40}, but must be true or false")
    return {"messages": _checked(messages), "add_generation_prompt": add_generation_prompt, **variables}


def _checked(messages: Messages) -> list[dict[str, str]]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ArgumentError('messages must be a list like [{"role": "user", "content": "Hello"}], and not empty')
    size = 0
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            found = sorted(map(str, message)) if isinstance(message, Mapping) else type(message).__name__
            raise ArgumentError(f"message {number} has {found!s:.80}; give it a role and a content, and nothing else")
        if message["role"] not in ROLES:
            raise ArgumentError(
                f"message {number} has the role {message['role']!r:.40}; choose one of {', '.join(ROLES)}"
            )
        _check_text(message["content"], f"the content of message {number}")
        size += len(message["content"])
    if size > _LARGEST_TEXT:
        raise ArgumentError(f"the messages have {size} characters together, at most {_LARGEST_TEXT} are read")
    return [dict(message) for message in messages]


def _check_text(text: object, what: str) -> None:
    if not isinstance(text, str):
        raise ArgumentError(f"{what} is {type(text).__name__}, not text")
    if (at := surrogate_at(text)) is not None:
        raise ArgumentError(f"{what} cannot be encoded: {lone_surrogate(text, at)}")
