"""The folder of a run::

config.yaml        the resolved configuration
environment.json   versions, threads, seed, digests of the data
metrics.jsonl      one line a step and a validation
checkpoints/       step-00000200, step-00000400, …: whole checkpoint folders
last, best         the names of two of them
"""

from __future__ import annotations

import json
import platform
import re
import shutil
from collections.abc import Mapping
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
from pellucid.errors import CheckpointError, ConfigError
from pellucid.training import state
from pellucid.training.config import TrainConfig
from pellucid.training.optim import Optimizers

_STEP = re.compile(r"step-\d{8,12}\Z")
_PACKAGES = ("pellucid", "torch", "numpy", "safetensors", "tokenizers", "pydantic")


def step_name(step: int) -> str:
    """The folder name of a step's checkpoint; names sort like steps."""
    return f"step-{step:08d}"


class RunFolder:
    """One run's files. Whatever is written appears whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"

    @classmethod
    def create(cls, path: str | Path, config: TrainConfig) -> RunFolder:
        """A new run folder; one with anything in it is refused, and so is a disk that cannot be written."""
        run = cls(Path(path))
        try:
            run.checkpoints.parent.mkdir(parents=True, exist_ok=True)
            if any(run.path.iterdir()):
                raise ConfigError(f"{run.path} holds something already; choose another folder, or resume the run in it")
            run.checkpoints.mkdir()
        except OSError as error:
            raise CheckpointError(cannot_write(run.path, error)) from error
        write_text(run.path / "config.yaml", to_yaml(config))
        return run

    @classmethod
    def reopen(cls, path: str | Path, config: TrainConfig) -> tuple[RunFolder, TrainConfig]:
        """The folder of a run that goes on, with the same configuration but for budget and bookkeeping."""
        run = cls(Path(path))
        stored = TrainConfig.from_file(run.path / "config.yaml")
        if stored != stored.settled("float32"):
            raise ConfigError(
                f"{run.path / 'config.yaml'} leaves a precision to be measured, but this run began with one; "
                "put back float32 or bfloat16, whichever it was"
            )
        config = config.settled(stored.settled_precision, getattr(stored.optimizer, "precision", None))
        free = {"budget", "validation", "save_every", "keep", "threads", "device"}
        for name in TrainConfig.model_fields:
            before, now = getattr(stored, name), getattr(config, name)
            if name not in free and before != now:
                raise ConfigError(
                    f"{name} differs from the run in {run.path}: it was {before}, now it is {now}; "
                    "resume with the same configuration, or start a new run"
                )
        discard_unfinished(run.path)
        discard_unfinished(run.checkpoints)
        write_text(run.path / "config.yaml", to_yaml(config))
        return run, config

    def leave_nothing(self) -> None:
        """Take back what :meth:`create` made, if nothing was trained: the folder is free for the next try."""
        if any(self.checkpoints.iterdir()):
            return
        self.checkpoints.rmdir()
        for name in ("config.yaml", "environment.json"):
            (self.path / name).unlink(missing_ok=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def describe_environment(self, **facts: Any) -> None:
        """Write ``environment.json``: what else the numbers of this run depend on."""
        environment: Mapping[str, Any] = {
            "versions": {name: version(name) for name in _PACKAGES},
            "python": platform.python_version(),
            "platform": platform.platform(),
            "processor": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            **facts,
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
        with new_folder(target) as folder:
            store.write(folder, model, tokenizer=tokenizer)
            state.save_state(folder / state.FOLDER, counters, optimizers)
        write_text(self.path / "last", target.name + "\n")
        return target

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

    def prune(self, keep: int) -> None:
        """Remove all checkpoints but the newest ``keep``, the last and the best."""
        found = sorted(path for path in self.checkpoints.glob("step-*") if _STEP.match(path.name))
        kept = {*found[-keep:], self.pointed("last"), self.pointed("best")}
        for path in found:
            if path not in kept:
                discard_folder(path)
