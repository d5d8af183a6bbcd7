"""How text, JSON lines and Parquet are read, one record at a time."""

from __future__ import annotations

import glob
import json
import os
import stat
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pellucid.errors import DataError, UnsupportedError
from pellucid.messages import printable

BUILT_IN = "python-source"
"""The corpus that every machine with Python has: the ``.py`` files of its standard library."""

_NOT_OURS = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class File:
    """One file of a corpus. ``lenient`` files are left out when they are not UTF-8, instead of refused."""

    path: Path
    name: str
    lenient: bool = False


def python_source() -> list[File]:
    """The files of :data:`BUILT_IN`: without installed packages, without following links."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_OURS]
        paths = (Path(folder, name) for name in names if name.endswith(".py"))
        found += [path for path in paths if not path.is_symlink() and path.is_file()]
    if not found:
        raise DataError(
            f"{BUILT_IN}: no .py file lies below {printable(root)}; install Python with its library's source, "
            "or name your own text files"
        )
    return [File(path, printable(path.relative_to(root).as_posix()), lenient=True) for path in found]


def find(source: str | os.PathLike[str]) -> tuple[Path, list[Path]]:
    """The folder that names are relative to, and the files that a path or a glob pattern means."""
    text = os.path.expanduser(os.fspath(source))
    if glob.has_magic(text) and not os.path.lexists(text):
        return _find_pattern(text)
    path = Path(text)
    try:
        mode = path.stat().st_mode
    except OSError as error:
        hint = f"; the built-in corpus is called {BUILT_IN}" if os.sep not in text else ""
        raise DataError(f"cannot read {printable(path)}: {error.strerror}{hint}") from error
    except ValueError as error:
        raise DataError(f"{printable(text)!r} cannot be a path: {error}") from error
    if stat.S_ISDIR(mode):
        pattern = printable(path / "**" / "*.txt")
        raise DataError(f"{printable(path)} is a directory; name the files in it with a pattern such as '{pattern}'")
    if not stat.S_ISREG(mode):
        raise DataError(f"{printable(path)} is not a regular file; write what it gives to a file first")
    return Path(os.path.abspath(path)).parent, [path]


def _find_pattern(pattern: str) -> tuple[Path, list[Path]]:
    parts = Path(pattern).parts
    fixed = next(n for n, part in enumerate(parts) if glob.has_magic(part))
    distinct: dict[str, str] = {}
    for found in glob.iglob(pattern, recursive=True):
        if os.path.isfile(found):
            real = os.path.realpath(found)  # a link back up would list a file again and again
            distinct[real] = min(distinct.get(real, found), found, key=lambda name: (len(name), name))
    if not distinct:
        raise DataError(f"no file matches {printable(pattern)!r}; check the pattern ('**' reaches into subfolders)")
    return Path(os.path.abspath(Path(*parts[:fixed]))), [Path(found) for found in distinct.values()]


def surrogate_at(text: str) -> int | None:
    """The index of the first lone surrogate in ``text``; None if UTF-8 can write all of it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return error.start
    return None


def lone_surrogate(text: str, at: int) -> str:
    """The message for a lone surrogate in ``text``."""
    return f"character {at} is the lone surrogate U+{ord(text[at]):04X}, which UTF-8 cannot write; replace it"


def unreadable(file: File, error: OSError) -> DataError:
    """The error for a file that cannot be read."""
    if isinstance(error, FileNotFoundError):
        return DataError(f"{printable(file.path)} was listed but has vanished since; list the files again")
    reason = error.strerror or printable(error)
    return DataError(f"cannot read {printable(file.path)}: {reason}; make it readable or leave it out")


def undecodable(file: File, offset: int, byte: int) -> DataError:
    """The error for a byte that is not UTF-8."""
    return DataError(
        f"{printable(file.path)} is not UTF-8: byte 0x{byte:02x} at offset {offset}; convert it "
        "(for example: iconv -f latin1 -t utf-8), or leave it out"
    )


Wanted = Callable[[str], bool]
"""Whether the record of this name is wanted; others are skipped unread."""

_LARGEST_LINE = 256 << 20
_LARGEST_NUMBER = 3.4028234663852886e38  # of float32


class Record(NamedTuple):
    """Values by field name; ``where`` is the file and line, for messages."""

    name: str
    where: str
    values: dict[str, Any]

    def text(self, field: str) -> str:
        """The text in ``field``."""
        value = self.values[field]
        if value is None:
            raise DataError(f"{self.where}: field {printable(field)!r} is null, not text; leave such records out")
        if not isinstance(value, str):
            raise DataError(f"{self.where}: field {printable(field)!r} holds {type(value).__name__}, not text")
        return check_utf8(value, self.where)

    def sequence(self, field: str) -> list[Any]:
        """The list in ``field``."""
        value = self.values[field]
        if not isinstance(value, list | tuple):
            raise DataError(f"{self.where}: field {printable(field)!r} holds {type(value).__name__}, not a list")
        return list(value)

    def texts(self, field: str) -> list[str]:
        """The list of texts in ``field``."""
        words = self.sequence(field)
        for word in words:
            if not isinstance(word, str):
                raise DataError(f"{self.where}: field {printable(field)!r} holds {printable(word)!r}, not only texts")
            check_utf8(word, self.where)
        return words

    def numbers(self, field: str) -> list[float] | float:
        """The finite number in ``field``, or the list of them."""
        value = self.values[field]
        given = list(value) if isinstance(value, list | tuple) else [value]
        for number in given:
            if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) <= _LARGEST_NUMBER:
                shown = printable(repr(number))[:40]
                raise DataError(
                    f"{self.where}: field {printable(field)!r} holds {shown}, not a number that float32 can hold"
                )
        return [float(number) for number in given] if isinstance(value, list | tuple) else float(given[0])


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
                name, where = f"{file.name}:{number}", f"{printable(file.path)}, line {number}"
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
        raise DataError(f"{where} is not JSON ({printable(error)}); write one JSON object a line") from error
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise DataError(f'{where} holds a {kind}, not an object; write {{"{printable(fields[0])}": "…"}} a line')
    return {field: record[field] for field in require_fields(where, fields, list(record))}


def _read_parquet(file: File, fields: Sequence[str], wanted: Wanted, texts: bool) -> Iterator[Record]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UnsupportedError(
            f"{printable(file.path)} is a Parquet file, which needs pyarrow; pip install 'pellucid[data]'"
        ) from error
    path, number = printable(file.path), 0
    try:
        with parquet.ParquetFile(file.path) as table:
            schema = table.schema_arrow
            for field in require_fields(path, fields, schema.names) if texts else ():
                if not _is_text(pyarrow.types, kind := schema.field(field).type):
                    raise DataError(f"{path}: field {printable(field)!r} holds {kind}, not text")
            columns = require_fields(path, fields, schema.names)
            for chunk in table.iter_batches(batch_size=256, columns=list(columns)):
                for cells in zip(*(chunk.column(field) for field in columns), strict=True):
                    number += 1
                    name, where = f"{file.name}:{number}", f"{path}, row {number}"
                    if wanted(name):
                        values = {f: _cell(cell, where) for f, cell in zip(columns, cells, strict=True)}
                        yield Record(name, where, values)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path} is not a whole Parquet file ({printable(error)}); copy it again") from error
    except OSError as error:
        raise unreadable(file, error) from error


def _is_text(types: Any, kind: Any) -> bool:
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _cell(value: Any, where: str) -> Any:
    """The Python value of one cell of a Parquet column."""
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte {error.start} is not UTF-8; write the column again") from error


def check_utf8(text: str, where: str) -> str:
    """``text``, which UTF-8 must be able to write: JSON can spell a lone surrogate."""
    if (at := surrogate_at(text)) is not None:
        raise DataError(f"{where}: {lone_surrogate(text, at)}")
    return text


def require_fields(where: str, fields: Sequence[str], found: Sequence[str]) -> Sequence[str]:
    """``fields``, which must all be in ``found``."""
    missing = next((field for field in fields if field not in found), None)
    if missing is None:
        return fields
    has = ", ".join(printable(field) for field in found[:20]) or "none"
    way = "set text_field to one it has" if len(fields) == 1 else "name fields that it has"
    raise DataError(f"{where} has no field {printable(missing)!r}; {way}: {has}")
