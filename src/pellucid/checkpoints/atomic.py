"""Folders and small files that appear whole or not at all.

A new folder is filled under a temporary name beside its target, synced to the disk and renamed. Whoever
looks at the target sees nothing, or everything; a crash leaves at most a folder whose name says that it is
unfinished (:func:`discard_unfinished` removes those).
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pellucid.errors import CheckpointError

_UNFINISHED = ".unfinished-"
_LONGEST_NAME = 255


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Fill the yielded folder; when the block ends well it becomes ``path``, otherwise it is gone.

    An existing target is refused. What the disk refuses (full, read-only) is one clear
    :class:`~pellucid.errors.CheckpointError` that names the path. Parents that are missing are made, and stay only
    when the folder does.
    """
    target = _settled(Path(path))
    unfinished = _beside(target)
    made: list[Path] = []
    try:
        made += _make_parents(target.parent)
        unfinished.mkdir()
        yield unfinished
        _sync_tree(unfinished)
        refuse_existing(target)
        unfinished.rename(target)
        made.clear()
        _sync(target.parent)
    except OSError as error:
        raise CheckpointError(cannot_write(target, error)) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        with suppress(OSError):  # somebody else may have come in
            for parent in reversed(made):
                parent.rmdir()


def write_text(path: str | Path, text: str) -> None:
    """Replace the file at ``path`` by ``text`` in one step: readers see the old or the new, never a part."""
    target = Path(path)
    unfinished = _beside(target)
    try:
        with open(unfinished, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(target)
        _sync(target.parent)
    except OSError as error:
        raise CheckpointError(cannot_write(target, error)) from error
    finally:
        with suppress(OSError):  # what went wrong before is what matters
            unfinished.unlink(missing_ok=True)


def discard_folder(path: Path) -> None:
    """Remove a folder so that no part of it can be mistaken for the whole, even when interrupted."""
    doomed = _beside(path)
    try:
        path.rename(doomed)
    except OSError as error:
        raise CheckpointError(cannot_write(path, error)) from error
    shutil.rmtree(doomed, ignore_errors=True)


def discard_unfinished(parent: Path) -> list[Path]:
    """Remove what a killed writer left in ``parent``, and say what; nobody else may be writing there."""
    left = sorted(path for path in parent.glob(f".*{_UNFINISHED}*") if not path.is_symlink())
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
    elif error.errno == errno.ENAMETOOLONG:
        longest = max(map(len, map(os.fsencode, path.parts)))
        reason = f"a name in it has {longest} bytes, at most {_LONGEST_NAME} are possible"
        reason, way = reason if longest > _LONGEST_NAME else "the whole path is too long", "choose a shorter one"
    elif error.errno == errno.ENOENT and there == path.parent:
        reason, way = f"the system lets nobody make anything in {there}", "choose another place"
    return f"cannot write {path}: {reason}; {way}"


def _settled(path: Path) -> Path:
    """``path``, which nothing is at; a way back (``a/..``) is gone through without making what it comes from."""
    refuse_existing(path)
    if path.name in ("", ".."):
        raise CheckpointError(f"{path} does not end in a name for the new folder; add one")
    if len(os.fsencode(path.name)) > _LONGEST_NAME:
        raise CheckpointError(cannot_write(path, OSError(errno.ENAMETOOLONG, "")))
    return Path(os.path.realpath(path.parent), path.name) if ".." in path.parts else path


def _make_parents(folder: Path) -> list[Path]:
    """Make ``folder`` and what is missing above it; returns what was made, outer ones first."""
    missing = [parent for parent in (folder, *folder.parents) if not os.path.lexists(parent)]
    folder.mkdir(parents=True, exist_ok=True)
    return missing[::-1]


def _beside(target: Path) -> Path:
    """A new hidden name beside ``target`` that says it is unfinished, and is no longer than names can be."""
    mark = f"{_UNFINISHED}{uuid.uuid4().hex[:12]}"
    kept = os.fsencode(target.name)[: _LONGEST_NAME - 1 - len(mark)].decode(errors="ignore")
    return target.with_name(f".{kept}{mark}")


def _sync_tree(folder: Path) -> None:
    """Give every file the mode of any new file, and push files and folders to the disk, inner ones first."""
    probe = folder / ".mode"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            file = Path(root, name)
            file.chmod(mode)
            _sync(file)
        _sync(Path(root))


def _sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open a folder, and has no need to
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
