"""Paths and files in every room: names that are checked first, and files that appear whole or not at all."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path

from pellucid.errors import ArgumentError
from pellucid.messages import printable, repr_short

__all__ = ["LONGEST_NAME", "UNFINISHED", "checked_path", "replace_file", "sync", "temporary_name"]

UNFINISHED = ".unfinished-"
"""Marks names of files and folders that are being written."""
LONGEST_NAME = 255
"""Bytes that a name may have."""


def checked_path(path: object, what: str) -> Path:
    """``path`` as one that any file system can hold and any message can name; ``what`` it is of, in an error.

    Raises:
        ArgumentError: it is no text, empty, or holds a character that no path can.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str):
        raise ArgumentError(f"{what} is a text or a Path, not {repr_short(path, 60)}; give its name")
    if not text:
        raise ArgumentError(f"the name of {what} is empty; '.' is the current folder")
    odd = next((c for c in text if c == "\0" or "\ud800" <= c <= "\udfff"), None)
    if odd is not None:
        kind = "a NUL character" if odd == "\0" else f"the lone surrogate {printable(odd)}"
        raise ArgumentError(f"{printable(text)[:200]!r} cannot be a path: it holds {kind}; choose another name")
    return Path(text)


def replace_file(path: str | Path, content: bytes) -> None:
    """Replace the file at ``path`` in one step: readers see the old or the new, never a part.

    Raises:
        OSError: what the system refused, with ``path`` as its filename.
    """
    target = Path(path)
    unfinished = temporary_name(target)
    try:
        with open(unfinished, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(target)
        sync(target.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from error
    finally:
        with suppress(OSError):  # the first error is the one to report
            unfinished.unlink(missing_ok=True)


def temporary_name(target: Path) -> Path:
    """A new hidden name beside ``target`` that marks it as unfinished, no longer than names may be."""
    mark = f"{UNFINISHED}{uuid.uuid4().hex[:12]}"
    stem = os.fsencode(target.name)[: LONGEST_NAME - 1 - len(mark)].decode(errors="ignore")
    return target.with_name(f".{stem}{mark}")


def sync(path: Path) -> None:
    """Push a file or folder to the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open a folder, and has no need to
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
