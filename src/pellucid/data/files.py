"""Which files a name means, and what to say of those that cannot be read."""

from __future__ import annotations

import glob
import os
import stat
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from pellucid.errors import DataError

BUILT_IN = "python-source"
"""The corpus that every machine with Python has: the ``.py`` files of its standard library."""

_NOT_OURS = {"site-packages", "dist-packages", "__pycache__"}


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


def unreadable(file: File, error: OSError) -> DataError:
    """What to say of a file that cannot be read."""
    if isinstance(error, FileNotFoundError):
        return DataError(f"{plain(file.path)} was listed but has vanished since; list the files again")
    reason = error.strerror or plain(error)
    return DataError(f"cannot read {plain(file.path)}: {reason}; make it readable or leave it out")


def undecodable(file: File, offset: int, byte: int) -> DataError:
    """What to say of a byte that is not UTF-8."""
    return DataError(
        f"{plain(file.path)} is not UTF-8: byte 0x{byte:02x} at offset {offset}; convert it "
        "(for example: iconv -f latin1 -t utf-8), or leave it out"
    )
