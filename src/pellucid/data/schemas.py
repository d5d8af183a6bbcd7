"""What the records of a file of examples hold, and how each becomes ids with an answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pellucid.batch import IGNORED
from pellucid.data.examples import Examples
from pellucid.data.records import Record, check_utf8
from pellucid.data.token_store import TokenStore
from pellucid.data.tokenizer import Tokenizer, with_begin
from pellucid.errors import DataError
from pellucid.messages import printable

_LARGEST = float(np.finfo(np.float32).max)


def encode_documents(
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
        raise DataError(f"{record.where}: field {printable(field)!r} holds {type(value).__name__}, not a list")
    return list(value)


def texts_in(record: Record, field: str) -> list[str]:
    """The list of texts in a field."""
    words = list_in(record, field)
    for word in words:
        if not isinstance(word, str):
            raise DataError(f"{record.where}: field {printable(field)!r} holds {printable(word)!r}, not only texts")
        check_utf8(word, record.where)
    return words


def class_named(record: Record, value: Any) -> str | int:
    """A class as the record names it."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise DataError(f"{record.where}: a class is a text or a whole number, not {printable(repr(value))}")
    return check_utf8(value, record.where) if isinstance(value, str) else value


def number_of(record: Record, name: str | int, number: dict[str, int]) -> int:
    """Which of the classes a name is."""
    if str(name) not in number:
        known = ", ".join(map(printable, list(number)[:20]))
        raise DataError(f"{record.where}: class {printable(name)!r} is not one of {known}; name it in classes")
    return number[str(name)]


def numbers_in(record: Record, field: str) -> list[float] | float:
    """The finite number in a field, or the list of them."""
    value = record.values[field]
    given = list(value) if isinstance(value, list | tuple) else [value]
    for number in given:
        if isinstance(number, bool) or not isinstance(number, int | float) or not -_LARGEST <= number <= _LARGEST:
            shown = printable(repr(number))[:40]
            raise DataError(
                f"{record.where}: field {printable(field)!r} holds {shown}, not a number that float32 can hold"
            )
    return [float(number) for number in given] if isinstance(value, list | tuple) else float(given[0])


class RecordSchema(ABC):
    """The fields of a record, the classes that it names, and the examples that records become."""

    columns: ClassVar[tuple[str, ...]]
    """The attributes that name fields, in the order in which they are read."""
    classes: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that every record must have."""
        names = (getattr(self, column) for column in self.columns)
        return tuple(name for name in names if name is not None)

    def label_values(self, record: Record) -> list[str | int]:
        """The classes that a record names."""
        return []

    @abstractmethod
    def build(self, records: Sequence[Record], tokenizer: Tokenizer, classes: tuple[str, ...]) -> Examples:
        """The tokenized examples; ``classes`` are all that occur, in order."""


@dataclass(frozen=True)
class ClassificationSchema(RecordSchema):
    """A text, or two in one document, and its class: for :class:`~pellucid.data.objectives.Classification`.

    ``classes`` names them in order; left out, all labels of the source are, sorted.
    """

    text: str = "text"
    label: str = "label"
    second: str | None = None
    classes: tuple[str, ...] = ()

    columns = ("text", "second", "label")

    def label_values(self, record: Record) -> list[str | int]:
        return [class_named(record, record.values[self.label])]

    def build(self, records: Sequence[Record], tokenizer: Tokenizer, classes: tuple[str, ...]) -> Examples:
        number = {name: index for index, name in enumerate(classes)}
        targets = [number_of(record, self.label_values(record)[0], number) for record in records]
        store, columns = encode_documents(records, tokenizer, self.text, self.second)
        return Examples(store, columns, np.array(targets, dtype=np.int64), classes=classes)


@dataclass(frozen=True)
class RegressionSchema(RecordSchema):
    """A text, or two in one document, and a number or a list of them: for ``Regression``."""

    text: str = "text"
    score: str = "score"
    second: str | None = None

    columns = ("text", "second", "score")

    def build(self, records: Sequence[Record], tokenizer: Tokenizer, classes: tuple[str, ...]) -> Examples:
        scores = [numbers_in(record, self.score) for record in records]
        for record, score in zip(records, scores, strict=True):
            if np.shape(score) != np.shape(scores[0]):
                raise DataError(
                    f"{record.where}: field {printable(self.score)!r} has {np.size(score)} numbers, but the first "
                    f"record has {np.size(scores[0])}; give each as many"
                )
        store, columns = encode_documents(records, tokenizer, self.text, self.second)
        return Examples(store, columns, np.array(scores, dtype=np.float32))


@dataclass(frozen=True)
class TokenClassificationSchema(RecordSchema):
    """Words and a class for each: for ``TokenLabelling``. A word's first token carries its class, the rest none.

    Words are encoded one by one, as they are: give spaces with them where the tokenizer should see any.
    """

    words: str = "words"
    tags: str = "tags"
    classes: tuple[str, ...] = ()

    columns = ("words", "tags")

    def label_values(self, record: Record) -> list[str | int]:
        return [class_named(record, tag) for tag in list_in(record, self.tags)]

    def build(self, records: Sequence[Record], tokenizer: Tokenizer, classes: tuple[str, ...]) -> Examples:
        number = {name: index for index, name in enumerate(classes)}
        documents, labels = [], []
        size = 0
        for record in records:
            words, tags = texts_in(record, self.words), self.label_values(record)
            if len(words) != len(tags):
                raise DataError(f"{record.where} has {len(words)} words but {len(tags)} tags; give one tag a word")
            ids: list[int] = []
            marks: list[int] = []
            for word, tag, pieces in zip(words, tags, tokenizer.encode_many(words), strict=True):
                if not pieces:
                    raise DataError(
                        f"{record.where}: the word {printable(word)!r} gives no token; leave it out with its tag"
                    )
                ids += pieces
                marks += [number_of(record, tag, number), *[IGNORED] * (len(pieces) - 1)]
            document = tokenizer.as_document(ids)
            before = len(with_begin(tokenizer.bos_id, ids)) - len(ids)
            after = len(document) - before - len(ids)
            documents.append(document)
            labels += [*[IGNORED] * before, *marks, *[IGNORED] * after]
            size += sum(len(word.encode()) for word in words)
        store = TokenStore.of(documents, [record.name for record in records], size=size)
        return Examples(store, {"labels": np.array(labels, dtype=np.int64)}, whole=False, classes=classes)


@dataclass(frozen=True)
class Seq2SeqSchema(RecordSchema):
    """What an encoder reads and what its decoder writes: for ``SequenceToSequence``.

    The target begins with ``start_id``; left out, with the tokenizer's begin token.
    """

    source: str = "source"
    target: str = "target"
    start_id: int | None = None

    columns = ("source", "target")

    def build(self, records: Sequence[Record], tokenizer: Tokenizer, classes: tuple[str, ...]) -> Examples:
        start = tokenizer.bos_id if self.start_id is None else self.start_id
        if start is None:
            raise DataError("the tokenizer has no begin token, so targets need a start_id of their own; name one")
        end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
        source, _ = encode_documents(records, tokenizer, self.source, None)
        texts = [record.text(self.target) for record in records]
        targets = [[start, *ids, *end] for ids in tokenizer.encode_many(texts)]
        return Examples(store_of(targets, records, texts), source=source)


@dataclass(frozen=True)
class PromptCompletionSchema(RecordSchema):
    """A prompt and its completion, in one document: for ``PrefixLM``. Begin token and prompt are the prefix."""

    prompt: str = "prompt"
    completion: str = "completion"

    columns = ("prompt", "completion")

    def build(self, records: Sequence[Record], tokenizer: Tokenizer, classes: tuple[str, ...]) -> Examples:
        prompts, rest = ([record.text(field) for record in records] for field in self.fields)
        documents, groups = [], []
        for prompt, completion in zip(tokenizer.encode_many(prompts), tokenizer.encode_many(rest), strict=True):
            prefix = with_begin(tokenizer.bos_id, prompt)
            document = tokenizer.as_document([*prefix, *completion])
            documents.append(document)
            groups += [*[1] * len(prefix), *[0] * (len(document) - len(prefix))]
        return Examples(store_of(documents, records, [*prompts, *rest]), {"groups": np.array(groups, dtype=np.int64)})


@dataclass(frozen=True)
class SimilarityPairSchema(RecordSchema):
    """Two texts that belong together, each a document: for ``Contrastive``."""

    first: str = "first"
    second: str = "second"

    columns = ("first", "second")

    def build(self, records: Sequence[Record], tokenizer: Tokenizer, classes: tuple[str, ...]) -> Examples:
        texts = [record.text(field) for record in records for field in self.fields]
        documents = [tokenizer.as_document(ids) for ids in tokenizer.encode_many(texts)]
        names = [record.name for record in records for _ in self.fields]
        return Examples(TokenStore.of(documents, names, size=bytes_of(texts)), together=2)


@dataclass(frozen=True)
class QuestionAnsweringSchema(RecordSchema):
    """A question, a text, and the characters ``start … end-1`` of the text that answer it: for ``Span``.

    Question and text are one document; ``start`` and ``end`` are null where there is no answer.
    """

    question: str = "question"
    text: str = "text"
    start: str = "start"
    end: str = "end"

    columns = ("question", "text", "start", "end")

    def build(self, records: Sequence[Record], tokenizer: Tokenizer, classes: tuple[str, ...]) -> Examples:
        store, columns = encode_documents(records, tokenizer, self.question, self.text)
        spans = []
        for number, record in enumerate(records):
            _, places = tokenizer.encode_with_offsets(record.text(self.text))
            end = 0 if tokenizer.eos_id is None else 1
            begins = len(store.document(number)) - end - len(places)
            spans.append([place if place == IGNORED else begins + place for place in self._tokens(record, places)])
        return Examples(store, columns, np.array(spans, dtype=np.int64))

    def _tokens(self, record: Record, places: list[tuple[int, int]]) -> tuple[int, int]:
        """The first and last token of the answer."""
        start, end = record.values[self.start], record.values[self.end]
        if start is None and end is None:
            return IGNORED, IGNORED
        length = len(record.text(self.text))
        if type(start) is not int or type(end) is not int or not 0 <= start < end <= length:
            raise DataError(
                f"{record.where}: the answer is {printable(self.start)} {start!r} to {printable(self.end)} {end!r}, "
                f"but the text has characters 0 … {length - 1}; give start < end inside it, or null twice"
            )
        inside = [n for n, (first, stop) in enumerate(places) if first < end and stop > start]
        if not inside:
            raise DataError(f"{record.where}: no token holds the answer {start} to {end}; choose other characters")
        return inside[0], inside[-1]
