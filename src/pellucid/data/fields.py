"""What is in the fields of a record, checked, and the texts in them as ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pellucid.data.files import plain
from pellucid.data.store import TokenStore
from pellucid.data.tables import Record, whole
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import DataError

_LARGEST = float(np.finfo(np.float32).max)


def given(*fields: str | None) -> tuple[str, ...]:
    """The fields that are named."""
    return tuple(field for field in fields if field is not None)


def documents_of(
    records: Sequence[Record], tokenizer: Tokenizer, first: str, second: str | None
) -> tuple[TokenStore, dict[str, np.ndarray]]:
    """Each text between begin and end; with a ``second`` one both in one document, and token types 0 and 1."""
    texts = [record.text(first) for record in records]
    documents = [tokenizer.as_document(ids) for ids in tokenizer.encode_many(texts)]
    if second is None:
        return store_of(documents, records, texts), {}
    more = [record.text(second) for record in records]
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    later = [[*ids, *end] for ids in tokenizer.encode_many(more)]
    sizes = [size for pair in zip(map(len, documents), map(len, later), strict=True) for size in pair]
    types = np.repeat(np.arange(len(sizes)) % 2, sizes)
    both = [[*ids, *rest] for ids, rest in zip(documents, later, strict=True)]
    return store_of(both, records, [*texts, *more]), {"types": types}


def store_of(documents: list[list[int]], records: Sequence[Record], texts: Sequence[str]) -> TokenStore:
    """These documents under the names of their records."""
    return TokenStore.of(documents, [record.name for record in records], size=bytes_of(texts))


def bytes_of(texts: Sequence[str]) -> int:
    """Bytes of the texts in UTF-8."""
    return sum(len(text.encode()) for text in texts)


def list_in(record: Record, field: str) -> list[Any]:
    """The list in a field."""
    value = record.values[field]
    if not isinstance(value, list | tuple):
        raise DataError(f"{record.where}: field {plain(field)!r} holds {type(value).__name__}, not a list")
    return list(value)


def texts_in(record: Record, field: str) -> list[str]:
    """The list of texts in a field."""
    words = list_in(record, field)
    for word in words:
        if not isinstance(word, str):
            raise DataError(f"{record.where}: field {plain(field)!r} holds {plain(word)!r}, not only texts")
        whole(word, record.where)
    return words


def class_named(record: Record, value: Any) -> str | int:
    """A class as the record names it."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise DataError(f"{record.where}: a class is a text or a whole number, not {plain(repr(value))}")
    return whole(value, record.where) if isinstance(value, str) else value


def number_of(record: Record, name: str | int, number: dict[str, int]) -> int:
    """Which of the classes a name is."""
    if str(name) not in number:
        known = ", ".join(map(plain, list(number)[:20]))
        raise DataError(f"{record.where}: class {plain(name)!r} is not one of {known}; name it in classes")
    return number[str(name)]


def numbers_in(record: Record, field: str) -> list[float] | float:
    """The finite number in a field, or the list of them."""
    value = record.values[field]
    given = list(value) if isinstance(value, list | tuple) else [value]
    for number in given:
        if isinstance(number, bool) or not isinstance(number, int | float) or not -_LARGEST <= number <= _LARGEST:
            shown = plain(repr(number))[:40]
            raise DataError(f"{record.where}: field {plain(field)!r} holds {shown}, not a number that float32 can hold")
    return [float(number) for number in given] if isinstance(value, list | tuple) else float(given[0])
