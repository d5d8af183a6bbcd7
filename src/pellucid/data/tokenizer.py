"""``Tokenizer``: text to ids and back, without a loss and without a way for text to forge a special token.

A thin class over ``tokenizers``; ``tokenizer.json`` is the file that everyone reads.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as _Backend
from tokenizers import decoders, models, pre_tokenizers

from pellucid.data.records import check_utf8
from pellucid.data.vocabulary import (
    BEGIN,
    END,
    PAD,
    UNKNOWN,
    USUAL_NAMES,
    Kind,
    canonicalize,
    in_order,
    train_tokenizer,
)
from pellucid.errors import DataError, UnsupportedError
from pellucid.files import replace_file
from pellucid.messages import printable

_LARGEST_FILE = 256 << 20
_LARGEST_ID = 1 << 24
_SLICE = 1 << 20

# Byte-level BPE writes each byte as one character: printable Latin-1 as itself, the rest from U+0100 on.
_VISIBLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_HIDDEN = sorted(set(range(256)) - _VISIBLE)
_BYTE_OF = {chr(byte): byte for byte in _VISIBLE} | {chr(256 + n): byte for n, byte in enumerate(_HIDDEN)}

# Before the newline that starts a line's text, the pre-tokenizer always cuts: cutting there changes nothing.
_CUT = re.compile(r"(?=\n\S)")

# Threads are wanted, but a forked child has none of them and would wait for ever: there it works alone.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: os.environ.update(TOKENIZERS_PARALLELISM="false"))


class Tokenizer:
    """Text to ids and back; created by :meth:`train` or :meth:`load`.

    Byte-level kinds (``bpe`` and ``unigram``) give ``decode(encode(text)) == text`` for every text. ``wordpiece``
    returns words and punctuation separated by one space, without control characters; ``<|unknown|>`` stands for a word
    that it cannot write, and is decoded only with ``skip_special=False``.
    """

    def __init__(self, backend: _Backend) -> None:
        if isinstance(backend.model, models.Unigram):
            backend = canonicalize(backend)
        backend.encode_special_tokens = True  # "<|end|>" in somebody's text is seven ordinary bytes
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        self._tokens = {id_: token for token, id_ in backend.get_vocab(with_added_tokens=True).items()}
        specials = {token.content: id_ for id_, token in self._added.items() if token.special}
        self.bos_id, self.eos_id, self.pad_id, self.mask_id, self.unknown_id = (
            next((specials[name] for name in names if name in specials), None) for names in USUAL_NAMES
        )
        self.special_ids: dict[str, int] = specials
        """The spelling of every special token, and its id."""
        self._control = {id_ for id_ in specials.values() if id_ != self.unknown_id}
        self._byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        ours = json.loads(pre_tokenizers.ByteLevel(add_prefix_space=False).__getstate__())
        self._parts = parts = json.loads(backend.to_str())
        self._sliceable = parts["pre_tokenizer"] == ours and parts["normalizer"] is None and self._byte_level

    @classmethod
    def train(
        cls, texts: Iterable[str], *, vocab_size: int, kind: Kind = "bpe", special_tokens: Sequence[str] = ()
    ) -> Tokenizer:
        """Learn up to ``vocab_size`` tokens: specials (ours, then ``special_tokens``), characters, and pieces.

        Equal texts give equal tokenizers, except for ``unigram``: its library sums in no fixed order.
        """
        seen = 0

        def checked() -> Iterator[str]:
            nonlocal seen
            for text in texts:
                seen += bool(_checked(text))
                yield text

        try:
            backend = train_tokenizer(kind, checked(), vocab_size, [BEGIN, END, PAD, *special_tokens], UNKNOWN)
        except DataError:
            raise
        except Exception as error:
            raise DataError(
                f"no {kind} vocabulary of {vocab_size} was found ({printable(error)}); raise vocab_size"
            ) from error
        if not seen:
            raise DataError("there is no text to train a tokenizer on; give one that is not empty")
        return cls(backend)

    @property
    def sentinel_ids(self) -> tuple[int, ...]:
        """The ids of the sentinels of span corruption, in order (``<|span_0|>`` or ``<extra_id_0>``, …)."""
        return in_order(self.special_ids)

    @cached_property
    def word_starts(self) -> tuple[bool, ...]:
        """For each id, whether a word begins with it, as far as a token alone can say.

        A byte-level token continues a word if its first byte is a letter, a digit, ``_`` or not ASCII (spaces belong
        to the word that follows). WordPiece marks what continues by ``##``, others what begins by ``▁``.
        """
        prefix = self._parts["model"].get("continuing_subword_prefix")
        marked = any(token.startswith("▁") for token in self._tokens.values())
        if not (self._byte_level or prefix or marked):
            raise UnsupportedError(
                "this tokenizer does not mark where words begin (neither byte-level, nor ## or ▁); mask single tokens"
            )
        begins = [True] * self.vocab_size
        for id_, token in self._tokens.items():
            if id_ in self._added:
                continue
            if self._byte_level:
                first = self.token_bytes(id_)[:1]
                begins[id_] = not (first.isalnum() or first == b"_" or first >= b"\x80")
            else:
                begins[id_] = not token.startswith(prefix) if prefix else token.startswith("▁")
        return tuple(begins)

    # ---- text to ids

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``, without begin or end; special tokens spelled out in it are ordinary bytes."""
        return self.encode_many([text])[0]

    def encode_document(self, text: str) -> list[int]:
        """``[begin] + ids + [end]``, less what a loaded tokenizer does not have."""
        return self.as_document(self.encode(text))

    def as_document(self, ids: Sequence[int]) -> list[int]:
        """Already encoded ``ids`` between begin and end: the one place that adds the end."""
        end = [] if self.eos_id is None else [self.eos_id]
        return [*with_begin(self.bos_id, ids), *end]

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """:meth:`encode` for many texts, on all cores; long texts are shared out too."""
        pieces = [list(self._slices(_checked(text))) for text in texts]
        flat = [piece for slices in pieces for piece in slices]
        encoded = iter(self._backend.encode_batch_fast(flat, add_special_tokens=False))
        result = [list(chain.from_iterable(next(encoded).ids for _ in slices)) for slices in pieces]
        if not self._byte_level:
            for ids in result:
                self._refuse_forged(ids)
        return result

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """:meth:`encode`, and for each id the characters ``start … stop-1`` of ``text`` that it stands for."""
        encoded = self._backend.encode(_checked(text), add_special_tokens=False)
        if not self._byte_level:
            self._refuse_forged(encoded.ids)
        return encoded.ids, encoded.offsets

    def _slices(self, text: str, size: int = _SLICE) -> Iterator[str]:
        """``text`` in slices of about ``size`` whose ids join up to those of the whole."""
        start = 0
        while self._sliceable and len(text) - start > size:
            cut = _CUT.search(text, start + size)
            if cut is None:
                break
            yield text[start : cut.start()]
            start = cut.start()
        yield text[start:]

    def _refuse_forged(self, ids: Sequence[int]) -> None:
        forged = self._control.intersection(ids)
        if forged:
            token = self._tokens[min(forged)]
            raise DataError(
                f"the text spells the special token {token!r}, and this tokenizer has no other way to write "
                "it; take it out of the text"
            )

    # ---- ids to text

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of ``ids``; bytes that are no whole character (a cut one) become U+FFFD."""
        ids = [int(id_) for id_ in ids]
        for id_ in ids:
            self._known(id_)
        if not self._byte_level:
            return str(self._backend.decode(ids, skip_special_tokens=skip_special))
        spelled = {} if skip_special else {id_: token.content.encode() for id_, token in self._added.items()}
        pieces = (spelled.get(id_) or self.token_bytes(id_) for id_ in ids)
        return b"".join(pieces).decode("utf-8", errors="replace")

    def token_bytes(self, id_: int) -> bytes:
        """Exactly the bytes that token ``id_`` stands for; none for a special token."""
        token = self._known(id_)
        if id_ in self._added:
            return b"" if self._added[id_].special else token.encode()
        if not self._byte_level:
            raise UnsupportedError(
                "the bytes of single tokens are known only for a byte-level tokenizer, and this one is not; "
                "decode whole sequences instead"
            )
        if not all(character in _BYTE_OF for character in token):
            return token.encode()
        return bytes(_BYTE_OF[character] for character in token)

    def _known(self, id_: int) -> str:
        token = self._tokens.get(id_)
        if token is None:
            raise DataError(f"token id {id_} is not one of the {len(self._tokens)} ids of this tokenizer")
        return token

    @property
    def vocab_size(self) -> int:
        """One more than the largest id: how many rows an embedding needs."""
        return max(self._tokens) + 1

    # ---- on disk

    def to_json(self) -> str:
        """The whole tokenizer as canonical JSON (keys sorted, no spaces)."""
        parts = json.loads(self._backend.to_str())
        return json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    def digest(self) -> str:
        """SHA-256 of :meth:`to_json`, in hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``tokenizer.json`` to ``path``; the file is whole or not there."""
        try:
            replace_file(Path(path), self.to_json().encode())
        except OSError as error:
            raise DataError(f"cannot write the tokenizer to {printable(path)}: {error.strerror}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Read a ``tokenizer.json``, ours or another's; special tokens are found by their usual names."""
        try:
            if Path(path).is_dir():
                raise DataError(f"{printable(path)} is a directory; name the tokenizer.json in it")
            with open(path, "rb") as file:
                data = file.read(_LARGEST_FILE + 1)
        except OSError as error:
            raise DataError(f"cannot read the tokenizer {printable(path)}: {error.strerror}") from error
        if len(data) > _LARGEST_FILE:
            size = f"{_LARGEST_FILE >> 20} MiB"
            raise DataError(f"the tokenizer {printable(path)} is larger than {size}; is it a tokenizer.json?")
        try:
            return cls._from_json(data.decode("utf-8"))
        except ValueError as error:
            raise DataError(
                f"{printable(path)} is not a whole tokenizer.json ({printable(error)}); copy it again"
            ) from error

    @classmethod
    def _from_json(cls, text: str) -> Tokenizer:
        try:
            backend = _Backend.from_str(text)
        except Exception as error:
            raise ValueError(str(error)) from error
        ids = backend.get_vocab(with_added_tokens=True).values()
        if not ids or max(ids) > _LARGEST_ID:
            raise ValueError(f"its ids should lie in 0 … {_LARGEST_ID}, but {max(ids, default='none')} was found")
        return cls(backend)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._from_json, (self.to_json(),)

    def __repr__(self) -> str:
        special = f"bos_id={self.bos_id}, eos_id={self.eos_id}, pad_id={self.pad_id}"
        return f"Tokenizer(vocab_size={self.vocab_size}, {special})"


def with_begin(bos_id: int | None, ids: Sequence[int]) -> list[int]:
    """``ids`` that start with the begin token, if there is one: the one place that puts it there, never twice."""
    if bos_id is None or (ids and ids[0] == bos_id):
        return list(ids)
    return [bos_id, *ids]


def _checked(text: str) -> str:
    """``text``, which UTF-8 can write."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        check_utf8(text, "the text cannot be encoded")
    return text
