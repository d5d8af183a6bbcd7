"""The folder of a run::

config.yaml        the resolved configuration
environment.json   versions, threads, seed, digests of the data, when it was begun and resumed
metrics.jsonl      one line a step and a validation
checkpoints/       step-00000200, step-00000400, …: whole checkpoint folders
last, best         the names of two of them
report.html        the page about it, where the command line trained
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Set
from pathlib import Path

import torch

from pellucid.checkpoints.files import (
    INSIDE,
    STEP,
    cannot_write,
    discard_folder,
    discard_unfinished,
    read_pointer,
    write_text,
)
from pellucid.checkpoints.saving import Proof, save
from pellucid.configfile import to_yaml
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import CheckpointError, RunError
from pellucid.training import state
from pellucid.training.config import TrainConfig
from pellucid.training.environment import NAME
from pellucid.training.step import OptimizerSet

try:
    import fcntl
except ImportError:  # Windows cannot lock a folder: there it is up to the user
    fcntl = None  # type: ignore[assignment]

_DAMAGED = ".damaged"


def step_name(step: int) -> str:
    """The folder name of a step's checkpoint; names sort like steps."""
    return f"step-{step:08d}"


class RunFolder:
    """One run's files, locked by one process until :meth:`close`. Each is written whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = self.path / INSIDE
        self.metrics = self.path / "metrics.jsonl"
        self.config = self.path / "config.yaml"
        self.changed: set[str] = set()
        """The keys of a resumed run's configuration that have changed."""
        self._lock: Lock | None = None
        self._made: list[Path] = []

    # ---- a new run, and one that is resumed

    def holds_run(self) -> bool:
        """Whether a run was begun here."""
        try:
            return self.config.is_file()
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error.strerror or error}") from error

    def begin(self, config: TrainConfig) -> None:
        """Make a new run's folder; one with anything in it is refused, and so is a disk that cannot be written."""
        try:
            self._make(self.path)
            self.lock()
            self._refuse_what_is_there()
            self._make(self.checkpoints)
            self._made += [self.config, self.path / NAME]
            write_text(self.config, to_yaml(config))
        except OSError as error:
            raise CheckpointError(cannot_write(self.path, error)) from error

    def lock(self) -> None:
        """Lock the folder until :meth:`close`. Nothing is written."""
        try:
            self._lock = Lock(self.path)
        except RunError:
            self._made.clear()  # what is there is another's by now
            raise

    def repair_folder(self, last: Path | None, passed: Set[Path], best_step: int | None) -> dict[Path, Path]:
        """Repair what a killed process left, once nothing can be refused any more; the run continues from ``last``.

        Checkpoints that were ``passed`` over are moved aside, never removed; returns where each is now.
        """
        discard_unfinished(self.path)
        self.checkpoints.mkdir(exist_ok=True)
        discard_unfinished(self.checkpoints)
        if last is None:
            return {}
        self._point("last", last)
        moved = {path: self._move_aside(path) for path in sorted(passed)}
        best = None if best_step is None else self.checkpoints / step_name(best_step)
        if best is not None and best.is_dir():
            self._point("best", best)  # a kill may have come between the two pointers
        elif (self.path / "best").is_file():
            (self.path / "best").unlink()
        return moved

    def close(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            self._lock.release()

    def _make(self, folder: Path) -> None:
        """Make a folder and those above it, and remember which were not there."""
        self._made += [path for path in reversed((folder, *folder.parents)) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)

    def _refuse_what_is_there(self) -> None:
        """A folder may hold what a process that was killed at once had left, and nothing else."""
        discard_unfinished(self.path)
        there = {path.name for path in self.path.iterdir()}
        if there - {self.checkpoints.name} or (there and any(self.checkpoints.iterdir())):
            raise RunError(f"{self.path} holds something already; choose another folder, or resume the run in it")

    def rollback(self) -> None:
        """Take back what :meth:`begin` made, if nothing was trained: the place is as it was before."""
        for path in reversed(self._made):
            with contextlib.suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        self._made.clear()

    # ---- what is written

    def write_config(self, config: TrainConfig) -> None:
        """Write the configuration of a resumed run, where it has changed."""
        if self.changed:
            write_text(self.config, to_yaml(config))

    def refuse_without_room(self, size: int) -> None:
        """Raises if the disk has no room for one checkpoint of ``size`` bytes."""
        free = shutil.disk_usage(self.path).free
        if free < size:
            raise RunError(
                f"{self.path} has {free / 1e6:.0f} MB free but a checkpoint of this run needs "
                f"{size / 1e6:.0f}; free space there or choose another folder"
            )

    def save(
        self,
        model: torch.nn.Module,
        tokenizer: Tokenizer,
        trainer_state: state.TrainerState,
        optimizers: OptimizerSet,
        label_names: tuple[str, ...] = (),
        *,
        prove: Proof = "witness",
    ) -> Path:
        """Complete ``checkpoints/step-N``, then point ``last`` to it; ``prove`` as for ``checkpoints.save``."""
        target = self.checkpoints / step_name(trainer_state.step)
        try:  # the log on the disk reaches as far as the checkpoint
            with open(self.metrics, "ab") as file:
                os.fsync(file.fileno())
        except OSError as error:
            raise CheckpointError(cannot_write(self.metrics, error)) from error
        save(
            target,
            model,
            tokenizer=tokenizer,
            label_names=label_names,
            prove=prove,
            write_more=lambda folder: state.save_state(folder / state.FOLDER, trainer_state, optimizers),
        )
        self._point("last", target)
        return target

    def mark_best(self, checkpoint: Path) -> None:
        """Point ``best`` to a checkpoint."""
        self._point("best", checkpoint)

    def prune(self, keep: int) -> None:
        """Remove all checkpoints but the newest ``keep``, the last and the best."""
        found = self.saved()
        kept = {*found[-keep:], self.read_pointer("last"), self.read_pointer("best")}
        for path in found:
            if path not in kept:
                discard_folder(path)

    def _move_aside(self, path: Path) -> Path:
        """Rename a step that cannot be used so that it is no step any more."""
        number, target = 1, path.with_name(path.name + _DAMAGED)
        while os.path.lexists(target):
            number += 1
            target = path.with_name(f"{path.name}{_DAMAGED}-{number}")
        try:
            path.rename(target)
        except OSError as error:
            raise CheckpointError(cannot_write(target, error)) from error
        return target

    # ---- what is there

    def read_pointer(self, name: str) -> Path | None:
        """The checkpoint that ``last`` or ``best`` points to, None where there is none."""
        return read_pointer(self.path / name)

    def _point(self, name: str, checkpoint: Path) -> None:
        """Write a pointer, unless it is right already."""
        with contextlib.suppress(CheckpointError):
            if self.read_pointer(name) == checkpoint:
                return
        write_text(self.path / name, checkpoint.name + "\n")

    def saved(self) -> list[Path]:
        """The checkpoints that are there, oldest first."""
        return sorted(path for path in self.checkpoints.glob("step-*") if STEP.match(path.name))


class Lock:
    """An exclusive lock on a run's folder until :meth:`release`; the system releases it however the process ends."""

    def __init__(self, folder: Path) -> None:
        self._handle: int | None = None if fcntl is None else os.open(folder, os.O_RDONLY)
        if self._handle is not None and not _acquire(self._handle, fcntl.LOCK_EX):
            self.release()
            raise RunError(f"{folder} is being trained in by another process; wait for it, or choose another folder")

    def release(self) -> None:
        """Unlock the folder."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


def locked(folder: Path) -> bool:
    """Whether a process trains in ``folder`` now."""
    if fcntl is None:
        return False
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _acquire(handle, fcntl.LOCK_SH)
    finally:
        os.close(handle)


def _acquire(handle: int, kind: int) -> bool:
    """Whether no other process has the lock. File systems without locks refuse nobody."""
    with contextlib.suppress(OSError):
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
