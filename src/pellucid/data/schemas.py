"""Labeled examples from JSON lines, Parquet or memory: what records hold, and how each becomes ids with an answer."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from pellucid.batch import IGNORED
from pellucid.data.corpus import HELDOUT_FRACTION, check_split, open_corpus, split_of
from pellucid.data.examples import Examples, TokenStore
from pellucid.data.records import Record, check_utf8, holds_records, read_records, require_fields
from pellucid.data.tokenizer import Tokenizer, with_begin
from pellucid.errors import DataError
from pellucid.messages import printable

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str] | Mapping[str, Any]]


def open_examples(
    source: Source,
    schema: RecordSchema,
    tokenizer: Tokenizer,
    *,
    split: str = "train",
    heldout_fraction: float = HELDOUT_FRACTION,
) -> Examples:
    """The examples of one side of ``source``, for a :class:`~pellucid.data.Loader`.

    ``source`` is a ``.jsonl`` or ``.parquet`` file, a glob pattern, a sequence of these, or one of mappings.
    ``schema`` says which fields records have and what they are for: :class:`ClassificationSchema`,
    :class:`RegressionSchema`, :class:`TokenClassificationSchema`, :class:`Seq2SeqSchema`,
    :class:`PromptCompletionSchema`, :class:`SimilarityPairSchema` or :class:`QuestionAnsweringSchema`. Classes that it
    does not name are those of all records on both sides. Sides are ``train``, ``heldout`` and ``all``, by the hash of
    a record's name (``file:line``, or its number in memory).
    """
    check_split(split)
    records = list(_records(source, schema.fields, heldout_fraction))
    chosen = [record for record in records if split in ("all", split_of(record.name, heldout_fraction))]
    if not chosen:
        raise DataError(
            f"none of the {len(records)} examples falls into the {split} split (by name, heldout_fraction "
            f"{heldout_fraction:g}); change heldout_fraction, or give more examples"
        )
    if isinstance(schema, ClassificationSchema | TokenClassificationSchema) and not schema.label_names:
        schema = replace(schema, label_names=_label_names(schema, records))
    return schema.build(chosen, tokenizer)


class RecordSchema(ABC):
    """The fields of a record, and the examples that records become."""

    columns: ClassVar[tuple[str, ...]]
    """The attributes that name fields, in the order in which they are read."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that every record must have."""
        names = (getattr(self, column) for column in self.columns)
        return tuple(name for name in names if name is not None)

    @abstractmethod
    def build(self, records: Sequence[Record], tokenizer: Tokenizer) -> Examples:
        """The tokenized examples of these records."""


@dataclass(frozen=True)
class ClassificationSchema(RecordSchema):
    """A text, or two in one document, and its class: for :class:`~pellucid.data.objectives.Classification`.

    ``label_names`` names the classes in order; left out, all labels of the source are, sorted.
    """

    text: str = "text"
    label: str = "label"
    text_pair: str | None = None
    label_names: tuple[str, ...] = ()

    columns = ("text", "text_pair", "label")

    def label_values(self, record: Record) -> list[str | int]:
        return [_label(record, record.values[self.label])]

    def build(self, records: Sequence[Record], tokenizer: Tokenizer) -> Examples:
        ids_of = {name: index for index, name in enumerate(self.label_names)}
        targets = [_label_id(record, self.label_values(record)[0], ids_of) for record in records]
        store, columns = _encode_documents(records, tokenizer, self.text, self.text_pair)
        return Examples(store, columns, np.array(targets, dtype=np.int64), label_names=self.label_names)


@dataclass(frozen=True)
class RegressionSchema(RecordSchema):
    """A text, or two in one document, and a number or a list of them: for ``Regression``."""

    text: str = "text"
    score: str = "score"
    text_pair: str | None = None

    columns = ("text", "text_pair", "score")

    def build(self, records: Sequence[Record], tokenizer: Tokenizer) -> Examples:
        scores = [record.numbers(self.score) for record in records]
        for record, score in zip(records, scores, strict=True):
            if np.shape(score) != np.shape(scores[0]):
                raise DataError(
                    f"{record.where}: field {printable(self.score)!r} has {np.size(score)} numbers, but the first "
                    f"record has {np.size(scores[0])}; give each as many"
                )
        store, columns = _encode_documents(records, tokenizer, self.text, self.text_pair)
        return Examples(store, columns, np.array(scores, dtype=np.float32))


@dataclass(frozen=True)
class TokenClassificationSchema(RecordSchema):
    """Words and a class for each: for ``TokenClassification``. A word's first token carries its class, the rest none.

    Words are encoded one by one, as they are: give spaces with them where the tokenizer should see any.
    """

    words: str = "words"
    tags: str = "tags"
    label_names: tuple[str, ...] = ()

    columns = ("words", "tags")

    def label_values(self, record: Record) -> list[str | int]:
        return [_label(record, tag) for tag in record.sequence(self.tags)]

    def build(self, records: Sequence[Record], tokenizer: Tokenizer) -> Examples:
        ids_of = {name: index for index, name in enumerate(self.label_names)}
        documents: list[list[int]] = []
        labels: list[int] = []
        texts: list[str] = []
        for record in records:
            words, tags = record.texts(self.words), self.label_values(record)
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
                marks += [_label_id(record, tag, ids_of), *[IGNORED] * (len(pieces) - 1)]
            document = tokenizer.as_document(ids)
            before = len(with_begin(tokenizer.bos_id, ids)) - len(ids)
            after = len(document) - before - len(ids)
            documents.append(document)
            labels += [*[IGNORED] * before, *marks, *[IGNORED] * after]
            texts += words
        store = _store(documents, records, texts)
        return Examples(store, {"labels": np.array(labels, dtype=np.int64)}, whole=False, label_names=self.label_names)


@dataclass(frozen=True)
class Seq2SeqSchema(RecordSchema):
    """What an encoder reads and what its decoder writes: for ``SequenceToSequence``.

    The target begins with ``start_id``; left out, with the tokenizer's begin token.
    """

    source: str = "source"
    target: str = "target"
    start_id: int | None = None

    columns = ("source", "target")

    def build(self, records: Sequence[Record], tokenizer: Tokenizer) -> Examples:
        start = tokenizer.bos_id if self.start_id is None else self.start_id
        if start is None:
            raise DataError("the tokenizer has no begin token, so targets need a start_id of their own; name one")
        source, _ = _encode_documents(records, tokenizer, self.source)
        texts = [record.text(self.target) for record in records]
        targets = [[start, *ids, *_end(tokenizer)] for ids in tokenizer.encode_many(texts)]
        return Examples(_store(targets, records, texts), source=source)


@dataclass(frozen=True)
class PromptCompletionSchema(RecordSchema):
    """A prompt and its completion, in one document: for ``PrefixLM``. Begin token and prompt are the prefix."""

    prompt: str = "prompt"
    completion: str = "completion"

    columns = ("prompt", "completion")

    def build(self, records: Sequence[Record], tokenizer: Tokenizer) -> Examples:
        prompts, rest = ([record.text(field) for record in records] for field in self.fields)
        documents, groups = [], []
        for prompt, completion in zip(tokenizer.encode_many(prompts), tokenizer.encode_many(rest), strict=True):
            prefix = with_begin(tokenizer.bos_id, prompt)
            document = tokenizer.as_document([*prefix, *completion])
            documents.append(document)
            groups += [*[1] * len(prefix), *[0] * (len(document) - len(prefix))]
        return Examples(_store(documents, records, [*prompts, *rest]), {"groups": np.array(groups, dtype=np.int64)})


@dataclass(frozen=True)
class SimilarityPairSchema(RecordSchema):
    """Two texts that belong together, each a document: for ``Contrastive``."""

    first: str = "first"
    second: str = "second"

    columns = ("first", "second")

    def build(self, records: Sequence[Record], tokenizer: Tokenizer) -> Examples:
        texts = [record.text(field) for record in records for field in self.fields]
        documents = [tokenizer.as_document(ids) for ids in tokenizer.encode_many(texts)]
        names = [record.name for record in records for _ in self.fields]
        return Examples(TokenStore.of(documents, names, size=_size(texts)), together=2)


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

    def build(self, records: Sequence[Record], tokenizer: Tokenizer) -> Examples:
        store, columns = _encode_documents(records, tokenizer, self.question, self.text)
        spans = []
        for number, record in enumerate(records):
            _, places = tokenizer.encode_with_offsets(record.text(self.text))
            begins = len(store.document(number)) - len(_end(tokenizer)) - len(places)
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


def _encode_documents(
    records: Sequence[Record], tokenizer: Tokenizer, first: str, second: str | None = None
) -> tuple[TokenStore, dict[str, np.ndarray]]:
    """Each text between begin and end; with a ``second`` one both in one document, and token types 0 and 1."""
    texts = [record.text(first) for record in records]
    documents = [tokenizer.as_document(ids) for ids in tokenizer.encode_many(texts)]
    if second is None:
        return _store(documents, records, texts), {}
    more = [record.text(second) for record in records]
    later = [[*ids, *_end(tokenizer)] for ids in tokenizer.encode_many(more)]
    sizes = [size for pair in zip(map(len, documents), map(len, later), strict=True) for size in pair]
    types = np.repeat(np.arange(len(sizes)) % 2, sizes)
    both = [[*ids, *rest] for ids, rest in zip(documents, later, strict=True)]
    return _store(both, records, [*texts, *more]), {"types": types}


def _store(documents: list[list[int]], records: Sequence[Record], texts: Sequence[str]) -> TokenStore:
    """These documents under the names of their records."""
    return TokenStore.of(documents, [record.name for record in records], size=_size(texts))


def _size(texts: Sequence[str]) -> int:
    """Bytes of the texts in UTF-8."""
    return sum(len(text.encode()) for text in texts)


def _end(tokenizer: Tokenizer) -> list[int]:
    return [] if tokenizer.eos_id is None else [tokenizer.eos_id]


def _label(record: Record, value: Any) -> str | int:
    """A class as the record names it."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise DataError(f"{record.where}: a class is a text or a whole number, not {printable(repr(value))}")
    return check_utf8(value, record.where) if isinstance(value, str) else value


def _label_id(record: Record, name: str | int, ids: Mapping[str, int]) -> int:
    if str(name) not in ids:
        known = ", ".join(map(printable, list(ids)[:20]))
        raise DataError(f"{record.where}: class {printable(name)!r} is not one of {known}; name it in label_names")
    return ids[str(name)]


def _records(source: Source, fields: Sequence[str], heldout_fraction: float) -> Iterator[Record]:
    items = [source] if isinstance(source, str | os.PathLike) else list(source)
    paths = [item for item in items if not isinstance(item, Mapping)]
    for file in open_corpus(paths, heldout_fraction=heldout_fraction).files if paths or not items else ():
        if not holds_records(file):
            raise DataError(f"{printable(file.path)} is no file of examples; give .jsonl or .parquet, one record each")
        yield from read_records(file, fields, lambda name: True)
    for number, item in enumerate(item for item in items if isinstance(item, Mapping)):
        where = f"record {number}"
        yield Record(str(number), where, {field: item[field] for field in require_fields(where, fields, list(item))})


def _label_names(
    schema: ClassificationSchema | TokenClassificationSchema, records: Sequence[Record]
) -> tuple[str, ...]:
    """Every class in the records: numbers by size, then texts alphabetically."""
    found = {name for record in records for name in schema.label_values(record)}
    if twice := sorted(
        name for name in found if isinstance(name, str) and name in {str(n) for n in found if n != name}
    ):
        raise DataError(
            f"the class {printable(twice[0])!r} occurs as a number and as text, which have the same name; "
            "write it in one way"
        )
    if len(found) < 2:
        only = ", ".join(printable(name) for name in found) or "none"
        raise DataError(f"the examples have a single class or none ({only}), so there is nothing to classify")
    numbers = sorted(name for name in found if isinstance(name, int))
    return (*map(str, numbers), *sorted(name for name in found if isinstance(name, str)))
