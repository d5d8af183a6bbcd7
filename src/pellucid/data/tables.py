"""How text, JSON lines and Parquet are read, one record at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from pellucid.data.files import File, lone_surrogate, plain, surrogate_at, undecodable, unreadable
from pellucid.errors import DataError, UnsupportedError

Wanted = Callable[[str], bool]
"""Whether the record of this name is asked for; others are passed over unread."""

_LARGEST_LINE = 256 << 20


class Record(NamedTuple):
    """Values by field name; ``where`` it was read, for messages."""

    name: str
    where: str
    values: dict[str, Any]

    def text(self, field: str) -> str:
        """The text in ``field``."""
        value = self.values[field]
        if value is None:
            raise DataError(f"{self.where}: field {plain(field)!r} is null, not text; leave such records out")
        if not isinstance(value, str):
            raise DataError(f"{self.where}: field {plain(field)!r} holds {type(value).__name__}, not text")
        return whole(value, self.where)


def read(file: File, text_field: str, wanted: Wanted) -> Iterator[tuple[str, str | None]]:
    """``(name, text)`` of each wanted record; the text is None where a lenient file is left out."""
    if holds_records(file):
        for record in read_records(file, (text_field,), wanted, texts=True):
            yield record.name, record.text(text_field)
    elif wanted(file.name):
        try:
            data = file.path.read_bytes()
        except OSError as error:
            raise unreadable(file, error) from error
        try:
            yield file.name, data.decode("utf-8")
        except UnicodeDecodeError as error:
            if not file.lenient:
                raise undecodable(file, error.start, data[error.start]) from error
            yield file.name, None


def holds_records(file: File) -> bool:
    """Whether this is JSON lines or Parquet, by its name."""
    return file.path.suffix.lower() in (".jsonl", ".parquet")


def read_records(file: File, fields: Sequence[str], wanted: Wanted, *, texts: bool = False) -> Iterator[Record]:
    """Each wanted record, which has all ``fields``; ``texts``: Parquet columns must hold text."""
    if file.path.suffix.lower() == ".jsonl":
        return _read_lines(file, fields, wanted)
    return _read_parquet(file, fields, wanted, texts)


def _read_lines(file: File, fields: Sequence[str], wanted: Wanted) -> Iterator[Record]:
    offset = 0
    try:
        with open(file.path, "rb") as stream:
            lines = iter(lambda: stream.readline(_LARGEST_LINE + 1), b"")
            for number, line in enumerate(lines, 1):
                name, where = f"{file.name}:{number}", f"{plain(file.path)}, line {number}"
                if len(line) > _LARGEST_LINE:
                    raise DataError(f"{where} is longer than {_LARGEST_LINE >> 20} MiB; one object a line")
                if line.strip() and wanted(name):
                    try:
                        text = line.decode("utf-8")
                    except UnicodeDecodeError as error:
                        raise undecodable(file, offset + error.start, line[error.start]) from error
                    yield Record(name, where, _object(text, where, fields))
                offset += len(line)
    except OSError as error:
        raise unreadable(file, error) from error


def _object(line: str, where: str, fields: Sequence[str]) -> dict[str, Any]:
    """The fields in one line of JSON."""
    try:
        record = json.loads(line.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON ({plain(error)}); write one JSON object a line") from error
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise DataError(f'{where} holds a {kind}, not an object; write {{"{plain(fields[0])}": "…"}} a line')
    return {field: record[field] for field in there(where, fields, list(record))}


def _read_parquet(file: File, fields: Sequence[str], wanted: Wanted, texts: bool) -> Iterator[Record]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UnsupportedError(
            f"{plain(file.path)} is a Parquet file, which needs pyarrow; pip install 'pellucid[data]'"
        ) from error
    path, number = plain(file.path), 0
    try:
        with parquet.ParquetFile(file.path) as table:
            schema = table.schema_arrow
            for field in there(path, fields, schema.names) if texts else ():
                if not _is_text(pyarrow.types, kind := schema.field(field).type):
                    raise DataError(f"{path}: field {plain(field)!r} holds {kind}, not text")
            columns = there(path, fields, schema.names)
            for chunk in table.iter_batches(batch_size=256, columns=list(columns)):
                for cells in zip(*(chunk.column(field) for field in columns), strict=True):
                    number += 1
                    name, where = f"{file.name}:{number}", f"{path}, row {number}"
                    if wanted(name):
                        values = {f: _cell(cell, where) for f, cell in zip(columns, cells, strict=True)}
                        yield Record(name, where, values)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path} is not a whole Parquet file ({plain(error)}); copy it again") from error
    except OSError as error:
        raise unreadable(file, error) from error


def _is_text(types: Any, kind: Any) -> bool:
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _cell(value: Any, where: str) -> Any:
    """What one cell of a Parquet column holds."""
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte {error.start} is not UTF-8; write the column anew") from error


def whole(text: str, where: str) -> str:
    """``text`` that UTF-8 can write: JSON can spell half a character."""
    if (at := surrogate_at(text)) is not None:
        raise DataError(f"{where}: {lone_surrogate(text, at)}")
    return text


def there(where: str, fields: Sequence[str], found: Sequence[str]) -> Sequence[str]:
    """``fields``, all of which were found."""
    missing = next((field for field in fields if field not in found), None)
    if missing is None:
        return fields
    has = ", ".join(plain(field) for field in found[:20]) or "none"
    way = "set text_field to one it has" if len(fields) == 1 else "name fields that it has"
    raise DataError(f"{where} has no field {plain(missing)!r}; {way}: {has}")
