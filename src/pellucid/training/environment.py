"""The machine: ``environment.json``, the faster number format, and the C library's allocator."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

from pellucid.checkpoints.files import write_text
from pellucid.data.corpus import Corpus
from pellucid.errors import DataError

NAME = "environment.json"
_MOST_SESSIONS = 1000
_MOST_FILES = 20_000
_MOST_NAMED = 5
_PACKAGES = ("pellucid", "torch", "numpy", "safetensors", "tokenizers", "pydantic")


def read_environment(run: Path) -> dict[str, Any]:
    """What the file says; nothing where it is missing or no mapping."""
    try:
        found = json.loads((run / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def recorded_data(environment: Mapping[str, Any]) -> dict[str, str]:
    """The digests and listings of the data in ``environment``, where they are text."""
    data = environment.get("data")
    return {k: v for k, v in data.items() if isinstance(v, str)} if isinstance(data, dict) else {}


def write_environment(run: Path, step: int, facts: Mapping[str, Any]) -> None:
    """Write the file anew, and note that the run was begun or taken up after ``step``."""
    sessions = read_environment(run).get("sessions")
    before = sessions[:_MOST_SESSIONS] if isinstance(sessions, list) else []
    now = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "step": step}
    environment = {**circumstances(), **facts, "sessions": [*before, now]}
    write_text(run / NAME, json.dumps(environment, indent=2) + "\n")


def circumstances() -> dict[str, Any]:
    """What a run's numbers depend on of this machine."""
    return {
        "versions": {name: version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def other_circumstances(environment: Mapping[str, Any]) -> str:
    """What of threads, torch and processor is not as it was; nothing where all is, or is not known."""
    now, words = circumstances(), []
    versions = environment.get("versions")
    was_torch = versions.get("torch") if isinstance(versions, dict) else None
    pairs = [(name, environment.get(name), now[name]) for name in ("threads", "processor")]
    for name, was, found in [*pairs, ("torch", was_torch, now["versions"]["torch"])]:
        if was is not None and was != found:
            words.append(f"{name} was {str(was)[:40]}, is {found}")
    return ", ".join(words)


# ---- the data, file by file


def listing(corpus: Corpus) -> str:
    """A line for each file of ``corpus``: the beginning of its SHA-256, its name. Nothing where they are too many."""
    if len(corpus.files) > _MOST_FILES:
        return ""
    return "\n".join(f"{_digest(file.path)} {file.name}" for file in corpus.files)


def changes(was: str, now: str) -> str:
    """In words, how two listings differ; nothing where they do not say."""
    before, after = _entries(was), _entries(now)
    if not before or not after:
        return ""
    kinds = {
        "changed": [name for name in after if name in before and after[name] != before[name]],
        "missing": [name for name in before if name not in after],
        "new": [name for name in after if name not in before],
    }
    return "; ".join(f"{kind}: {_named(names)}" for kind, names in kinds.items() if names)


def _entries(text: str) -> dict[str, str]:
    pairs = (line.partition(" ") for line in text.split("\n") if line)
    return {name: digest for digest, _, name in pairs}


def _named(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(name[:80] for name in names[:_MOST_NAMED]) + more


def _digest(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}; put it back") from error


Precision = Literal["float32", "bfloat16"]

_SIZE = 512
_TRIES = 3


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
