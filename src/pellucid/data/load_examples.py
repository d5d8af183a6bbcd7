"""Labelled examples from JSON lines, Parquet or memory, tokenized and split by name like any corpus."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pellucid.data.corpus import HELDOUT_SHARE, SPLITS, open_corpus, split_of
from pellucid.data.examples import Examples
from pellucid.data.records import Record, holds_records, read_records, require_fields
from pellucid.data.schemas import ClassificationSchema, RecordSchema, TokenClassificationSchema
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import DataError
from pellucid.messages import printable

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str] | Mapping[str, Any]]


def open_examples(
    source: Source,
    form: RecordSchema,
    tokenizer: Tokenizer,
    *,
    split: str = "train",
    heldout_share: float = HELDOUT_SHARE,
) -> Examples:
    """The examples of one side of ``source``, for a :class:`~pellucid.data.Loader`.

    ``source`` is a ``.jsonl`` or ``.parquet`` file, a glob pattern, a sequence of these, or one of mappings.
    ``form`` says which fields records have and what they are for: :class:`ClassificationSchema`,
    :class:`RegressionSchema`, :class:`TokenClassificationSchema`, :class:`Seq2SeqSchema`,
    :class:`PromptCompletionSchema`, :class:`SimilarityPairSchema` or :class:`QuestionAnsweringSchema`. Classes that it
    does not name are those of all records on both sides. Sides are ``train``, ``heldout`` and ``all``, by the hash of
    a record's name (``file:line``, or its number in memory).
    """
    if split not in SPLITS:
        raise DataError(f"split is {split!r}; choose train, heldout or all")
    records = list(_records(source, form.fields, heldout_share))
    chosen = [record for record in records if split in ("all", split_of(record.name, heldout_share))]
    if not chosen:
        raise DataError(
            f"none of the {len(records)} examples falls into the {split} split (by name, heldout_share "
            f"{heldout_share:g}); change heldout_share, or give more examples"
        )
    classes = tuple(getattr(form, "classes", ()))
    return form.build(chosen, tokenizer, classes or _classes(form, records))


def _records(source: Source, fields: Sequence[str], heldout_share: float) -> Iterator[Record]:
    items = [source] if isinstance(source, str | os.PathLike) else list(source)
    paths = [item for item in items if not isinstance(item, Mapping)]
    for file in open_corpus(paths, heldout_share=heldout_share).files if paths or not items else ():
        if not holds_records(file):
            raise DataError(f"{printable(file.path)} is no file of examples; give .jsonl or .parquet, one record each")
        yield from read_records(file, fields, lambda name: True)
    for number, item in enumerate(item for item in items if isinstance(item, Mapping)):
        where = f"record {number}"
        yield Record(str(number), where, {field: item[field] for field in require_fields(where, fields, list(item))})


def _classes(form: RecordSchema, records: Sequence[Record]) -> tuple[str, ...]:
    """Every class in the records: numbers by size, then texts alphabetically."""
    found = {name for record in records for name in form.label_values(record)}
    if twice := sorted(
        name for name in found if isinstance(name, str) and name in {str(n) for n in found if n != name}
    ):
        raise DataError(
            f"the class {printable(twice[0])!r} occurs as a number and as text, which have the same name; "
            "write it in one way"
        )
    if isinstance(form, ClassificationSchema | TokenClassificationSchema) and len(found) < 2:
        only = ", ".join(printable(name) for name in found) or "none"
        raise DataError(f"the examples have a single class or none ({only}), so there is nothing to classify")
    numbers = sorted(name for name in found if isinstance(name, int))
    return (*map(str, numbers), *sorted(name for name in found if isinstance(name, str)))
