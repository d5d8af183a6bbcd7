"""The machine and the process: ``environment.json``, the faster dtype, the C library's allocator, signals."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

import torch

from pellucid.checkpoints.files import write_text
from pellucid.data.corpus import Corpus
from pellucid.errors import DataError, RunError
from pellucid.messages import join_some

NAME = "environment.json"
_MOST_SESSIONS, _MOST_FILES = 1000, 20_000
_PACKAGES = ("pellucid", "torch", "numpy", "safetensors", "tokenizers", "pydantic")


def read_environment(run: Path) -> dict[str, Any]:
    """The contents of ``environment.json`` in a run folder; empty where it is missing or not a mapping."""
    try:
        found = json.loads((run / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write_environment(run: Path, step: int, facts: Mapping[str, Any]) -> None:
    """Write the file anew, with a session that began after ``step``."""
    sessions = read_environment(run).get("sessions")
    before = sessions[:_MOST_SESSIONS] if isinstance(sessions, list) else []
    now = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "step": step}
    environment = {**_circumstances(), **facts, "sessions": [*before, now]}
    write_text(run / NAME, json.dumps(environment, indent=2) + "\n")


def compare_environment(run: Path, data: Mapping[str, str], resumed: bool, warn: Callable[[str], None]) -> None:
    """Compare data and machine with those recorded in ``run``: other data than a resumed run's is refused."""
    recorded = read_environment(run)
    found = recorded.get("data")
    before = {k: v for k, v in found.items() if isinstance(v, str)} if isinstance(found, dict) else {}
    other = [name for name in ("train", "heldout", "tokens") if before.get(name, data[name]) != data[name]]
    lists = (changes(before.get(name, ""), data.get(name, "")) for name in ("files", "heldout_files"))
    changed = "; ".join(filter(None, lists)) or "which files is not known"
    if not resumed:
        if other:
            warn(
                f"the data changed since the run in {run} began ({changed}); it had saved nothing yet, so it starts "
                "again with the data as it is"
            )
        return
    if other := [name for name in other if name != "train"]:
        what = "held-out data" if other == ["heldout"] and data["train"] != data["heldout"] else "data"
        raise RunError(
            f"the {what} is not that of the run in {run} ({changed}); put it back as it was, or start a new run in "
            "another folder"
        )
    if not before:
        warn(f"{run / NAME} is lost, so threads, versions and held-out data cannot be compared with those of the run")
    elif differs := _other_circumstances(recorded):
        warn(
            f"{differs}: the numbers are exactly those of an uninterrupted run only where these are the same; "
            "stop and set them back if that matters"
        )


def _circumstances() -> dict[str, Any]:
    """What a run's numbers depend on besides its config and data."""
    return {
        "versions": {name: version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def _other_circumstances(recorded: Mapping[str, Any]) -> str:
    """Which of threads, processor and torch differ from those recorded; empty where none does."""
    now, versions = _circumstances(), recorded.get("versions")
    pairs = [(name, recorded.get(name), now[name]) for name in ("threads", "processor")]
    pairs.append(("torch", versions.get("torch") if isinstance(versions, dict) else None, now["versions"]["torch"]))
    return ", ".join(
        f"{name} was {str(was)[:40]}, is {found}" for name, was, found in pairs if was not in (None, found)
    )


# ---- the data, file by file


def listing(corpus: Corpus) -> str:
    """A line for each file of ``corpus``: the start of its SHA-256, and its name. Empty where there are too many."""
    if len(corpus.files) > _MOST_FILES:
        return ""
    return "\n".join(f"{_digest(file.path)} {file.name}" for file in corpus.files)


def changes(was: str, now: str) -> str:
    """The difference between two listings, in words; empty where one is."""
    before, after = (
        {name: digest for digest, _, name in (line.partition(" ") for line in text.split("\n") if line)}
        for text in (was, now)
    )
    if not before or not after:
        return ""
    kinds = {
        "changed": [name for name in after if name in before and after[name] != before[name]],
        "missing": [name for name in before if name not in after],
        "new": [name for name in after if name not in before],
    }
    return "; ".join(f"{kind}: {join_some([n[:80] for n in names], 5)}" for kind, names in kinds.items() if names)


def _digest(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}; put it back") from error


# ---- how fast it is

Precision = Literal["float32", "bfloat16"]
_SIZE, _TRIES = 512, 3


def fastest_precision(device: torch.device | str = "cpu") -> Precision:
    """bfloat16 where this machine multiplies matrices faster in it; measured, in well under a second.

    Processors without 16-bit units emulate them, tens of times slower than float32.
    """
    faster = operations_per_second("bfloat16", device) > operations_per_second("float32", device)
    return "bfloat16" if faster else "float32"


def operations_per_second(precision: Precision, device: torch.device | str = "cpu") -> float:
    """Floating-point operations of a matrix product on this machine, measured."""
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    matrix = torch.ones(_SIZE, _SIZE, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(_TRIES):
        started = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # reading one number waits for the device
        best = min(best, time.perf_counter() - started)
    return 2 * _SIZE**3 / best


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER_TRIM = -1
_MMAP_FROM = 2**30
_OWN_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Keep freed blocks below 1 GiB in the process; whether that was done.

    It is not done where the C library is another one, or where the environment already sets these.
    """
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc" or any(map(os.environ.get, _OWN_SETTINGS)):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(
        mallopt(_M_MMAP_THRESHOLD, _MMAP_FROM) and mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM)
    )


# ---- Ctrl-C and SIGTERM: before the first step they stop a run at once, then the first only asks

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class InterruptedBySignal(KeyboardInterrupt):
    """A signal that stopped a run at once."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped at once by {number.name}")
        self.signal = number


class SignalHandler:
    """Handles signals while the block runs; outside the main thread nothing is changed.

    Until :meth:`begin` a signal raises :class:`InterruptedBySignal`; after it the first one only sets
    :attr:`requested`, and the second raises. Signals after one that raised are ignored, so that it can be cleaned up.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._begun = False
        self._stopped: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> SignalHandler:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            if handler is not None:  # None: not Python's to put back
                signal.signal(number, handler)

    def begin(self) -> None:
        """From now on the first signal only asks. One that came before, and that foreign code swallowed, is raised."""
        if self._stopped is not None:
            raise InterruptedBySignal(self._stopped)
        self._begun = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._stopped is not None:
            return
        if self._begun and self.requested is None:
            self.requested = signal.Signals(number)
            return
        self._stopped = signal.Signals(number)
        raise InterruptedBySignal(self._stopped)
