"""The folder of a run::

config.yaml        the resolved configuration
environment.json   versions, threads, seed, digests of the data, when it was begun and taken up again
metrics.jsonl      one line a step and a validation
checkpoints/       step-00000200, step-00000400, …: whole checkpoint folders
last, best         the names of two of them
report.html        the page about it, where the command line trained
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
from pellucid.errors import CheckpointError, ConfigError, RunError
from pellucid.training import environment, state
from pellucid.training.config import TrainConfig
from pellucid.training.lock import Lock
from pellucid.training.optim import OptimizerSet

_DAMAGED = ".damaged"


def step_name(step: int) -> str:
    """The folder name of a step's checkpoint; names sort like steps."""
    return f"step-{step:08d}"


def checked_path(value: object) -> Path:
    """``value`` as a path that any file system can hold and any line can name, or an error."""
    try:
        text = os.fspath(value)  # type: ignore[call-overload]
    except TypeError:
        raise ConfigError(f"the run folder is {str(value)[:80]!r}, which is no path; give text or a Path") from None
    if not isinstance(text, str):
        raise ConfigError(f"the run folder is {text[:80]!r}, which is bytes; give text or a Path")
    odd = next((c for c in text if c == "\0" or "\ud800" <= c <= "\udfff"), None)
    if odd is not None:
        raise ConfigError(f"{text[:200]!a} cannot be a path: it holds {odd!a}; choose another name")
    return Path(text)


class RunFolder:
    """One run's files, held by one process until :meth:`close`. Whatever is written appears whole or not at all."""

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
            with self._locked_or_closed():
                self._refuse_what_is_there()
                self._make(self.checkpoints)
                self._made += [self.config, self.path / environment.NAME]
                write_text(self.config, to_yaml(config))
        except OSError as error:
            raise CheckpointError(cannot_write(self.path, error)) from error

    def hold(self) -> None:
        """Hold the folder of a run that is resumed, until :meth:`close`. Nothing is written."""
        with self._locked_or_closed():
            pass

    def repair_folder(self, last: Path | None, passed: Set[Path], best_step: int | None) -> dict[Path, Path]:
        """Repair what a killed process left, once nothing can be refused any more; the run continues from ``last``.

        What was ``passed`` over is moved aside, never removed; returned is where to.
        """
        discard_unfinished(self.path)
        self.checkpoints.mkdir(exist_ok=True)
        discard_unfinished(self.checkpoints)
        if last is None:
            return {}
        if self._read_pointer_or_none("last") != last:
            write_text(self.path / "last", last.name + "\n")
        moved = {path: self._move_aside(path) for path in sorted(passed)}
        best = None if best_step is None else self.checkpoints / step_name(best_step)
        if best is not None and best.is_dir():
            if self._read_pointer_or_none("best") != best:
                self.mark_best(best)  # a kill may have come between the two pointers
        elif (self.path / "best").is_file():
            (self.path / "best").unlink()
        return moved

    @contextmanager
    def _locked_or_closed(self) -> Iterator[None]:
        """Hold the folder; let go of it if the block fails."""
        try:
            self._lock = Lock(self.path)
        except RunError:
            self._made.clear()  # what is there is another's by now
            raise
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let other processes have the folder."""
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

    def environment(self) -> dict[str, Any]:
        """What ``environment.json`` says; nothing before it is there."""
        return environment.read_environment(self.path)

    def write_config(self, config: TrainConfig) -> None:
        """Write the configuration of a resumed run, where it has changed."""
        if self.changed:
            write_text(self.config, to_yaml(config))

    def refuse_without_room(self, size: int) -> None:
        """Stop before training if the disk has no room for one checkpoint of ``size`` bytes."""
        free = shutil.disk_usage(self.path).free
        if free < size:
            raise CheckpointError(
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
        self._sync_metrics()
        save(
            target,
            model,
            tokenizer=tokenizer,
            label_names=label_names,
            prove=prove,
            write_more=lambda folder: state.save_state(folder / state.FOLDER, trainer_state, optimizers),
        )
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

    def _read_pointer_or_none(self, name: str) -> Path | None:
        with contextlib.suppress(CheckpointError):
            return self.read_pointer(name)
        return None

    def saved(self) -> list[Path]:
        """The checkpoints that are there, oldest first."""
        return sorted(path for path in self.checkpoints.glob("step-*") if STEP.match(path.name))
