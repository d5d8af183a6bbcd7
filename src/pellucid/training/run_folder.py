"""The folder of a run::

config.yaml        the resolved configuration
environment.json   versions, threads, seed, digests of the data, when it was begun and taken up again
metrics.jsonl      one line a step and a validation
checkpoints/       step-00000200, step-00000400, …: whole checkpoint folders
last, best         the names of two of them
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from pellucid.checkpoints import store
from pellucid.checkpoints.atomic import (
    cannot_write,
    discard_folder,
    discard_unfinished,
    new_folder,
    write_text,
)
from pellucid.configfile import to_yaml
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import CheckpointError, ConfigError, InputError
from pellucid.training import state
from pellucid.training.config import TrainConfig
from pellucid.training.lock import Lock
from pellucid.training.optim import Optimizers

_STEP = re.compile(r"step-\d{8,12}\Z")
_FREE = frozenset({"budget", "validation", "save_every", "keep", "threads", "device"})
_MOST_SESSIONS = 1000
_PACKAGES = ("pellucid", "torch", "numpy", "safetensors", "tokenizers", "pydantic")


def step_name(step: int) -> str:
    """The folder name of a step's checkpoint; names sort like steps."""
    return f"step-{step:08d}"


class RunFolder:
    """One run's files, held by one process until :meth:`close`. Whatever is written appears whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.config = path / "config.yaml"
        self.changed: set[str] = set()
        """What the configuration of a run that goes on says differently than before."""
        self._lock: Lock | None = None

    @classmethod
    def create(cls, path: str | Path, config: TrainConfig) -> RunFolder:
        """A new run folder; one with anything in it is refused, and so is a disk that cannot be written."""
        run = cls(Path(path))
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            with run._locked_or_closed():
                run._refuse_what_is_there()
                run.checkpoints.mkdir(exist_ok=True)
                write_text(run.config, to_yaml(config))
        except OSError as error:
            raise CheckpointError(cannot_write(run.path, error)) from error
        return run

    @classmethod
    def reopen(cls, path: str | Path, config: TrainConfig, *, exactly: bool = False) -> tuple[RunFolder, TrainConfig]:
        """The folder of a run that goes on with the same configuration; budget and bookkeeping may differ.

        Not if ``exactly``: then any difference is refused. What a killed process left unfinished is put right.
        """
        run = cls(Path(path))
        stored = TrainConfig.from_file(run.config)
        if stored != stored.settled("float32"):
            raise ConfigError(
                f"{run.config} leaves a precision to be measured, but this run began with one; "
                "put back float32 or bfloat16, whichever it was"
            )
        config = config.settled(stored.settled_precision, getattr(stored.optimizer, "precision", None))
        run._refuse_difference(stored, config, set() if exactly else _FREE)
        with run._locked_or_closed():
            discard_unfinished(run.path)
            run.checkpoints.mkdir(exist_ok=True)
            discard_unfinished(run.checkpoints)
            run._adopt_newest()
            if run.changed:
                write_text(run.config, to_yaml(config))
        return run, config

    @contextmanager
    def _locked_or_closed(self) -> Iterator[None]:
        """Hold the folder; let go of it if the block fails."""
        self._lock = Lock(self.path)
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let other processes have the folder."""
        if self._lock is not None:
            self._lock.release()

    def _refuse_what_is_there(self) -> None:
        """A folder may hold what a process that was killed at once had left, and nothing else."""
        discard_unfinished(self.path)
        there = {path.name for path in self.path.iterdir()}
        if there - {self.checkpoints.name} or (there and any(self.checkpoints.iterdir())):
            raise ConfigError(f"{self.path} holds something already; choose another folder, or resume the run in it")

    def _refuse_difference(self, stored: TrainConfig, config: TrainConfig, free: Set[str]) -> None:
        for name in TrainConfig.model_fields:
            before, now = getattr(stored, name), getattr(config, name)
            if name not in free and before != now:
                same = "resume with the same configuration, or start a new run in another folder"
                new = "--resume goes on with the new one (in Python: resume=True), another folder starts a new run"
                raise ConfigError(
                    f"{name} differs from the run in {self.path}: it was {before}, now it is {now}; "
                    + (new if name in _FREE else same)
                )
            if before != now:
                self.changed.add(name)

    def _adopt_newest(self) -> None:
        """Checkpoints that were completed but not pointed to yet: the newest good one is the last, bad ones go."""
        last = self.pointed("last")
        newer = [path for path in self.saved() if last is None or path.name > last.name]
        for path in reversed(newer):
            try:
                store.load(path, check="digests")
                same_step(path, state.read_counters(path / state.FOLDER))
            except InputError:
                discard_folder(path)
            else:
                write_text(self.path / "last", path.name + "\n")
                break

    def leave_nothing(self) -> None:
        """Take back what :meth:`create` made, if nothing was trained: the folder is free for the next try."""
        if any(self.checkpoints.iterdir()):
            return
        self.checkpoints.rmdir()
        for path in (self.config, self.path / "environment.json"):
            path.unlink(missing_ok=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def environment(self) -> dict[str, Any]:
        """What ``environment.json`` says; nothing before it is there."""
        try:
            found = json.loads((self.path / "environment.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def describe_environment(self, step: int, **facts: Any) -> None:
        """Write ``environment.json``: what else the numbers of this run depend on, and when it was taken up."""
        sessions = self.environment().get("sessions", [])
        now = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "step": step}
        environment: Mapping[str, Any] = {
            "versions": {name: version(name) for name in _PACKAGES},
            "python": platform.python_version(),
            "platform": platform.platform(),
            "processor": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            **facts,
            "sessions": [*sessions[:_MOST_SESSIONS], now],
        }
        write_text(self.path / "environment.json", json.dumps(environment, indent=2) + "\n")

    def refuse_without_room(self, size: int) -> None:
        """Stop before training if the disk has no room for one checkpoint of ``size`` bytes."""
        free = shutil.disk_usage(self.path).free
        if free < size:
            raise CheckpointError(
                f"{self.path} has {free / 1e6:.0f} MB free but a checkpoint of this run needs "
                f"{size / 1e6:.0f}; free space there or choose another folder"
            )

    def save(
        self, model: torch.nn.Module, tokenizer: Tokenizer, counters: state.Counters, optimizers: Optimizers
    ) -> Path:
        """Complete ``checkpoints/step-N``, then point ``last`` to it."""
        target = self.checkpoints / step_name(counters.step)
        self._sync_metrics()
        with new_folder(target) as folder:
            state.save_state(folder / state.FOLDER, counters, optimizers)
            store.write(folder, model, tokenizer=tokenizer)  # its contract comes last: without it nothing is a model
        write_text(self.path / "last", target.name + "\n")
        return target

    def _sync_metrics(self) -> None:
        """The log on the disk reaches as far as the checkpoint that is about to be written."""
        try:
            with open(self.metrics, "ab") as file:
                os.fsync(file.fileno())
        except OSError as error:
            raise CheckpointError(cannot_write(self.metrics, error)) from error

    def mark_best(self, checkpoint: Path) -> None:
        """Point ``best`` to a checkpoint."""
        write_text(self.path / "best", checkpoint.name + "\n")

    def pointed(self, name: str) -> Path | None:
        """The checkpoint that ``last`` or ``best`` points to, None where there is none."""
        pointer = self.path / name
        if not pointer.is_file():
            return None
        text = pointer.read_text(encoding="utf-8")[:100].strip()
        if not _STEP.match(text):
            raise CheckpointError(f"{pointer} holds {text!r}, which is not the name of a step such as step-00000200")
        return self.checkpoints / text

    def saved(self) -> list[Path]:
        """The checkpoints that are there, oldest first."""
        return sorted(path for path in self.checkpoints.glob("step-*") if _STEP.match(path.name))

    def prune(self, keep: int) -> None:
        """Remove all checkpoints but the newest ``keep``, the last and the best."""
        found = self.saved()
        kept = {*found[-keep:], self.pointed("last"), self.pointed("best")}
        for path in found:
            if path not in kept:
                discard_folder(path)


def same_step(checkpoint: Path, counters: state.Counters) -> None:
    """Refuse a checkpoint whose state is that of another step."""
    if checkpoint.name != step_name(counters.step):
        raise CheckpointError(f"{checkpoint} holds the state of step {counters.step}; it was put together from two")
