"""``environment.json``: what the numbers of a run depend on besides its configuration. Read with distrust."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

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
    """This machine, as far as a run's numbers depend on it."""
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
