"""Files from outside: only regular ones are opened, only so much is read, and JSON is taken at its word.

A folder may hold links, pipes, or a text that is endless, deeply nested or says one thing twice. Each of these
is one :class:`~pellucid.errors.CheckpointError`, in bounded time and memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

from pellucid.errors import CheckpointError

MOST_LEVELS = 16
"""How deep values of a JSON file may be nested."""


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """The regular file at ``path``, for reading. A link, folder, pipe or device is refused unread."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if path.is_symlink():
        raise CheckpointError(f"{path} is a link; a checkpoint folder holds its own files: copy the real one there")
    try:
        handle = os.open(path, flags)
        with open(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CheckpointError(f"{path} is not a regular file; copy the real one there")
            yield file
    except OSError as error:
        way = "; choose one that you may read" if isinstance(error, PermissionError) else ""
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}{way}") from error


def read(path: Path, most: int) -> bytes:
    """The bytes of the file; one of more than ``most`` bytes is refused."""
    with opened(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise CheckpointError(f"{path} is larger than {most} bytes; it is not what its name says")
    return content


def digest(path: Path) -> str:
    """SHA-256 of the file, in hexadecimal."""
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path, most: int) -> dict[str, Any]:
    """The mapping in a JSON file: no name given twice, nothing nested deep, no NaN and no infinity."""
    content = read(path, most)
    try:
        data = json.loads(content, object_pairs_hook=once, parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {str(error)[:200]}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} is not a mapping; it is not what its name says")
    if any(level >= MOST_LEVELS for level, _ in enumerate(levels_of(data))):
        raise CheckpointError(f"{path} nests values deeper than {MOST_LEVELS} levels; it is not what its name says")
    return data


def canonical_digest(data: Any) -> str:
    """SHA-256 of plain data, whatever the order of its keys and the space between them."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; a name that is given twice is a ValueError."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:80]!r} is named twice")
        found[name] = value
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text[:40]} is not a finite number")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)


def levels_of(data: Any) -> Iterator[list[Any]]:
    """The mappings and lists in ``data``, level by level."""
    parts = [data]
    while parts:
        yield parts
        inside = [value for part in parts for value in (part.values() if isinstance(part, dict) else part)]
        parts = [value for value in inside if isinstance(value, dict | list)]
