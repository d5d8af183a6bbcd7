"""Folders and small files that appear whole or not at all.

A new folder is filled under a temporary name beside its target, synced to the disk and renamed. Whoever
looks at the target sees nothing, or everything; a crash leaves at most a folder whose name says that it is
unfinished (:func:`discard_unfinished` removes those).
"""

from __future__ import annotations

import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pellucid.errors import CheckpointError

_UNFINISHED = ".unfinished-"


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Fill the yielded folder; when the block ends well it becomes ``path``, otherwise it is gone.

    An existing target is refused. What the disk refuses (full, read-only) is one clear
    :class:`~pellucid.errors.CheckpointError` that names the path.
    """
    target = Path(path)
    refuse_existing(target)
    unfinished = target.with_name(f".{target.name}{_UNFINISHED}{uuid.uuid4().hex[:12]}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished.mkdir()
        yield unfinished
        _sync_tree(unfinished)
        refuse_existing(target)
        unfinished.rename(target)
        _sync(target.parent)
    except OSError as error:
        raise CheckpointError(cannot_write(target, error)) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_text(path: str | Path, text: str) -> None:
    """Replace the file at ``path`` by ``text`` in one step: readers see the old or the new, never a part."""
    target = Path(path)
    unfinished = target.with_name(f".{target.name}{_UNFINISHED}{uuid.uuid4().hex[:12]}")
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
        unfinished.unlink(missing_ok=True)


def discard_folder(path: Path) -> None:
    """Remove a folder so that no part of it can be mistaken for the whole, even when interrupted."""
    doomed = path.with_name(f".{path.name}{_UNFINISHED}{uuid.uuid4().hex[:12]}")
    path.rename(doomed)
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
    reason = error.strerror or str(error)
    return f"cannot write {path}: {reason}; free space there or choose a folder that can be written"


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
