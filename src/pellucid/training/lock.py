"""One process a run: a lock on the run's folder, which the system takes back however the process ends."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from pellucid.errors import RunError

try:
    import fcntl
except ImportError:  # Windows cannot lock a folder: there it is up to the user
    fcntl = None  # type: ignore[assignment]


class Lock:
    """Held from when it is made until :meth:`release`; a folder that another holds is refused."""

    def __init__(self, folder: Path) -> None:
        self._handle = _open(folder)
        if not _lock(self._handle):
            self.release()
            raise RunError(f"{folder} is being trained in by another process; wait for it, or choose another folder")

    def release(self) -> None:
        """Let others have it."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


def locked(folder: Path) -> bool:
    """Whether a process trains in ``folder`` now."""
    try:
        handle = _open(folder)
    except OSError:
        return False
    try:
        return not _lock(handle, shared=True)
    finally:
        if handle is not None:
            os.close(handle)


def _open(folder: Path) -> int | None:
    return None if fcntl is None else os.open(folder, os.O_RDONLY)


def _lock(handle: int | None, *, shared: bool = False) -> bool:
    """Whether nobody else holds it. File systems that know no locks hold nobody up."""
    if handle is None:
        return True
    with contextlib.suppress(OSError):
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
