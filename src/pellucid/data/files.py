"""Which files a name means, and how text, JSON lines and Parquet are read, one record at a time."""

from __future__ import annotations

import glob
import json
import os
import stat
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pellucid.errors import DataError, UnsupportedError

BUILT_IN = "python-source"
"""The corpus that every machine with Python has: the ``.py`` files of its standard library."""

_LARGEST_LINE = 256 << 20
_NOT_OURS = {"site-packages", "dist-packages", "__pycache__"}

Wanted = Callable[[str], bool]
"""Whether the record of this name is asked for; others are passed over unread."""


@dataclass(frozen=True)
class File:
    """One file of a corpus. ``lenient`` files are left out when they are not UTF-8, instead of refused."""

    path: Path
    name: str
    lenient: bool = False


def plain(value: object) -> str:
    """``value`` as text for one line of output: characters that do not print are escaped."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


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
            f"{BUILT_IN}: no .py file lies below {plain(root)}; install Python with its library's source, "
            "or name your own text files"
        )
    return [File(path, plain(path.relative_to(root).as_posix()), lenient=True) for path in found]


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
        raise DataError(f"cannot read {plain(path)}: {error.strerror}{hint}") from error
    except ValueError as error:
        raise DataError(f"{plain(text)!r} cannot be a path: {error}") from error
    if stat.S_ISDIR(mode):
        pattern = plain(path / "**" / "*.txt")
        raise DataError(f"{plain(path)} is a directory; name the files in it with a pattern such as '{pattern}'")
    if not stat.S_ISREG(mode):
        raise DataError(f"{plain(path)} is not a regular file; write what it gives to a file first")
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
        raise DataError(f"no file matches {plain(pattern)!r}; check the pattern ('**' reaches into subfolders)")
    return Path(os.path.abspath(Path(*parts[:fixed]))), [Path(found) for found in distinct.values()]


def read(file: File, text_field: str, wanted: Wanted) -> Iterator[tuple[str, str | None]]:
    """``(name, text)`` of each wanted record; the text is None where a lenient file is left out."""
    suffix = file.path.suffix.lower()
    if suffix == ".jsonl":
        yield from _read_lines(file, text_field, wanted)
    elif suffix == ".parquet":
        yield from _read_parquet(file, text_field, wanted)
    elif wanted(file.name):
        try:
            data = file.path.read_bytes()
        except OSError as error:
            raise _unreadable(file, error) from error
        try:
            yield file.name, data.decode("utf-8")
        except UnicodeDecodeError as error:
            if not file.lenient:
                raise _undecodable(file, error.start, data[error.start]) from error
            yield file.name, None


def _read_lines(file: File, text_field: str, wanted: Wanted) -> Iterator[tuple[str, str]]:
    offset = 0
    try:
        with open(file.path, "rb") as stream:
            lines = iter(lambda: stream.readline(_LARGEST_LINE + 1), b"")
            for number, line in enumerate(lines, 1):
                name = f"{file.name}:{number}"
                if len(line) > _LARGEST_LINE:
                    limit = f"{_LARGEST_LINE >> 20} MiB"
                    raise DataError(f"{plain(file.path)}, line {number} is longer than {limit}; one object a line")
                if line.strip() and wanted(name):
                    try:
                        text = line.decode("utf-8")
                    except UnicodeDecodeError as error:
                        raise _undecodable(file, offset + error.start, line[error.start]) from error
                    yield name, _field(text, f"{plain(file.path)}, line {number}", text_field)
                offset += len(line)
    except OSError as error:
        raise _unreadable(file, error) from error


def _field(line: str, where: str, text_field: str) -> str:
    """The text in one line of JSON."""
    try:
        record = json.loads(line.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON ({plain(error)}); write one JSON object a line") from error
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise DataError(f'{where} holds a {kind}, not an object; write {{"{plain(text_field)}": "…"}} a line')
    if text_field not in record:
        raise _no_field(where, text_field, list(record))
    text = record[text_field]
    if not isinstance(text, str):
        raise DataError(f"{where}: field {plain(text_field)!r} holds {type(text).__name__}, not text")
    return _whole(text, where)


def _read_parquet(file: File, text_field: str, wanted: Wanted) -> Iterator[tuple[str, str]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UnsupportedError(
            f"{plain(file.path)} is a Parquet file, which needs pyarrow; pip install 'pellucid[data]'"
        ) from error
    where, number = plain(file.path), 0
    try:
        with parquet.ParquetFile(file.path) as table:
            schema = table.schema_arrow
            if text_field not in schema.names:
                raise _no_field(where, text_field, schema.names)
            kind = schema.field(text_field).type
            if not _is_text(pyarrow.types, kind):
                raise DataError(f"{where}: field {plain(text_field)!r} holds {kind}, not text")
            for chunk in table.iter_batches(batch_size=256, columns=[text_field]):
                for value in chunk.column(0):
                    number += 1
                    name = f"{file.name}:{number}"
                    if wanted(name):
                        yield name, _cell(value, f"{where}, row {number}", text_field)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{where} is not a whole Parquet file ({plain(error)}); copy it again") from error
    except OSError as error:
        raise _unreadable(file, error) from error


def _is_text(types: Any, kind: Any) -> bool:
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _cell(value: Any, where: str, text_field: str) -> str:
    """The text in one cell of a Parquet column."""
    try:
        text = value.as_py()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte {error.start} is not UTF-8; write the column anew") from error
    if text is None:
        raise DataError(f"{where}: field {plain(text_field)!r} is null, not text; leave such rows out")
    return _whole(text, where)


def _whole(text: str, where: str) -> str:
    """``text`` that UTF-8 can write: JSON can spell half a character."""
    if (at := surrogate_at(text)) is not None:
        raise DataError(f"{where}: {lone_surrogate(text, at)}")
    return text


def surrogate_at(text: str) -> int | None:
    """Where ``text`` first holds half a character; None where UTF-8 can write all of it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return error.start
    return None


def lone_surrogate(text: str, at: int) -> str:
    """What to say of half a character in ``text``."""
    return f"character {at} is the lone surrogate U+{ord(text[at]):04X}, which UTF-8 cannot write; replace it"


def _no_field(where: str, text_field: str, fields: list[str]) -> DataError:
    there = ", ".join(plain(field) for field in fields[:20]) or "none"
    return DataError(f"{where} has no field {plain(text_field)!r}; set text_field to one it has: {there}")


def _unreadable(file: File, error: OSError) -> DataError:
    if isinstance(error, FileNotFoundError):
        return DataError(f"{plain(file.path)} was listed but has vanished since; list the files again")
    reason = error.strerror or plain(error)
    return DataError(f"cannot read {plain(file.path)}: {reason}; make it readable or leave it out")


def _undecodable(file: File, offset: int, byte: int) -> DataError:
    return DataError(
        f"{plain(file.path)} is not UTF-8: byte 0x{byte:02x} at offset {offset}; convert it "
        "(for example: iconv -f latin1 -t utf-8), or leave it out"
    )
