"""Files of checkpoints: hostile ones are read safely, and new ones appear whole or not at all.

Reading: a folder may contain links, pipes, or JSON that is endless, deeply nested or repeats a name. Each of these is
one :class:`~pellucid.errors.CheckpointError`, in bounded time and memory.

Writing: a new folder is filled under a temporary name beside its target, synced to the disk and renamed. A reader of
the target sees nothing, or everything; a crash leaves at most a folder whose name marks it as unfinished
(:func:`discard_unfinished` removes those).

``RUN/best``, ``RUN/last`` and a run's folder stand for a checkpoint in ``RUN/checkpoints``: ``best`` and ``last`` are
files with the name of one of them. Only the name of a step is accepted there, and it leads only into that folder.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

from pellucid.errors import CheckpointError
from pellucid.files import LONGEST_NAME, UNFINISHED, checked_path, replace_file, sync, temporary_name

STEP = re.compile(r"step-[0-9]{8,12}\Z")
INSIDE = "checkpoints"
POINTERS = ("best", "last")

MAX_LEVELS = 16
"""How deep values of a JSON file may be nested."""


@contextmanager
def open_regular(path: Path) -> Iterator[BufferedReader]:
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
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise CheckpointError(f"{path} is larger than {most} bytes; it is not what its name says")
    return content


def digest(path: Path) -> str:
    """SHA-256 of the file, in hexadecimal."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path, most: int) -> dict[str, Any]:
    """The mapping in a JSON file: no name given twice, nothing nested deep, no NaN and no infinity."""
    content = read(path, most)
    try:
        data = json.loads(
            content, object_pairs_hook=reject_duplicate_keys, parse_constant=_no_number, parse_float=_finite
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {str(error)[:200]}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} is not a mapping; it is not what its name says")
    if any(level >= MAX_LEVELS for level, _ in enumerate(nesting_levels(data))):
        raise CheckpointError(f"{path} nests values deeper than {MAX_LEVELS} levels; it is not what its name says")
    return data


def canonical_digest(data: Any) -> str:
    """SHA-256 of plain data, whatever the order of its keys and the space between them."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
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


def nesting_levels(data: Any) -> Iterator[list[Any]]:
    """The mappings and lists in ``data``, level by level."""
    parts = [data]
    while parts:
        yield parts
        inside = [value for part in parts for value in (part.values() if isinstance(part, dict) else part)]
        parts = [value for value in inside if isinstance(value, dict | list)]


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Fill the yielded folder; when the block ends well it becomes ``path``, otherwise it is gone.

    An existing target is refused. What the disk refuses (full, read-only) is one clear
    :class:`~pellucid.errors.CheckpointError` that names the path. Parents that are missing are made, and stay only
    when the folder does.
    """
    target = _resolve_target(Path(path))
    unfinished = temporary_name(target)
    made: list[Path] = []
    try:
        made += _make_parents(target.parent)
        unfinished.mkdir()
        yield unfinished
        _sync_tree(unfinished)
        refuse_existing(target)
        unfinished.rename(target)
        made.clear()
        sync(target.parent)
    except OSError as error:
        raise CheckpointError(cannot_write(target, error)) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        with suppress(OSError):  # somebody else may have come in
            for parent in reversed(made):
                parent.rmdir()


def write_text(path: str | Path, text: str) -> None:
    """Replace the file at ``path`` by ``text`` in one step: readers see the old or the new, never a part."""
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise CheckpointError(cannot_write(Path(path), error)) from error


def discard_folder(path: Path) -> None:
    """Remove a folder so that no part of it can be mistaken for the whole, even when interrupted."""
    doomed = temporary_name(path)
    try:
        path.rename(doomed)
    except OSError as error:
        raise CheckpointError(cannot_write(path, error)) from error
    shutil.rmtree(doomed, ignore_errors=True)


def discard_unfinished(parent: Path) -> list[Path]:
    """Remove what a killed writer left in ``parent``, and say what; nobody else may be writing there."""
    left = sorted(path for path in parent.glob(f".*{UNFINISHED}*") if not path.is_symlink())
    for path in left:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return left


def refuse_existing(target: Path) -> None:
    """Nothing is ever written over: an existing ``target`` of any kind is an error."""
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists already; nothing is overwritten: choose another name or remove it")


def cannot_write(path: Path, error: OSError) -> str:
    """One line about what the disk refused."""
    reason, way = error.strerror or str(error), "free space there or choose a folder that can be written"
    there = next((parent for parent in path.parents if os.path.lexists(parent)), path)
    if error.errno in (errno.ENOTDIR, errno.EEXIST) and not there.is_dir():
        reason, way = f"{there} is not a folder", "choose another place"
    elif error.errno == errno.EEXIST:
        reason, way = f"{path} is a file", "choose another name"
    elif error.errno == errno.ENAMETOOLONG:
        longest = max(map(len, map(os.fsencode, path.parts)))
        reason = f"a name in it has {longest} bytes, at most {LONGEST_NAME} are possible"
        reason, way = reason if longest > LONGEST_NAME else "the whole path is too long", "choose a shorter one"
    elif error.errno == errno.ENOENT and there == path.parent:
        reason, way = f"the system lets no one create anything in {there}", "choose another place"
    return f"cannot write {path}: {reason}; {way}"


def _resolve_target(path: Path) -> Path:
    """``path``, which nothing is at; a way back (``a/..``) is gone through without making what it comes from."""
    refuse_existing(path)
    if path.name in ("", ".."):
        raise CheckpointError(f"{path} does not end in a name for the new folder; add one")
    if len(os.fsencode(path.name)) > LONGEST_NAME:
        raise CheckpointError(cannot_write(path, OSError(errno.ENAMETOOLONG, "")))
    return Path(os.path.realpath(path.parent), path.name) if ".." in path.parts else path


def _make_parents(folder: Path) -> list[Path]:
    """Make ``folder`` and what is missing above it; returns what was made, outer ones first."""
    missing = [parent for parent in (folder, *folder.parents) if not os.path.lexists(parent)]
    folder.mkdir(parents=True, exist_ok=True)
    return missing[::-1]


def _sync_tree(folder: Path) -> None:
    """Push all files and folders in ``folder`` to the disk, together: one commit of a journal serves many of them."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(sync, [folder, *folder.rglob("*")]))


# ---- names of folders


def read_pointer(pointer: Path) -> Path | None:
    """The checkpoint named by the file ``RUN/best`` or ``RUN/last``; None where there is no such file.

    Raises:
        CheckpointError: the file does not hold the name of a step.
    """
    if not os.path.lexists(pointer):
        return None
    text = read(pointer, 1000).decode("utf-8", errors="replace").strip()[:100]
    if not STEP.match(text):
        raise CheckpointError(f"{pointer} holds {text!r}, which is not the name of a step such as step-00000200")
    return pointer.parent / INSIDE / text


def resolve_checkpoint_path(path: str | os.PathLike[str]) -> Path:
    """The checkpoint folder that ``path`` stands for: a run's best or, before any validation, its last.

    Any other path is returned as it is.
    """
    path = checked_path(path, "a checkpoint folder")
    try:
        if path.name in POINTERS and not path.is_dir() and (path.parent / INSIDE).is_dir():
            return read_pointer(path) or path
        if (path / INSIDE).is_dir() and not (path / "pellucid.json").exists():
            return read_pointer(path / "best") or read_pointer(path / "last") or path
    except OSError:
        pass  # reading the folder will say why it cannot be read
    return path
