"""Resuming: the newest checkpoint that is whole, what is refused, and what is repaired before the run continues."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from pellucid.checkpoints.loading import TOKENIZER, open_folder
from pellucid.checkpoints.verify import verify
from pellucid.configfile import Config
from pellucid.configfile.yaml import yaml_repr
from pellucid.errors import CheckpointError, ConfigError, InputError, RunError
from pellucid.training import state
from pellucid.training.config import TrainConfig
from pellucid.training.events import Listener, Warned
from pellucid.training.loggers import MetricsLog
from pellucid.training.optim import progress
from pellucid.training.results import Validation
from pellucid.training.run_folder import RunFolder, step_name

_MOST_NAMED = 3


LENGTH = frozenset({"max_steps", "max_minutes"})
"""The keys that say how long a run is."""
_FREE = LENGTH | {"eval_steps", "evaluation", "save_steps", "save_total_limit", "num_threads", "device"}


def reopen(run: RunFolder, config: TrainConfig, *, exactly: bool = False) -> TrainConfig:
    """Hold the folder of a run that is resumed; returns ``config`` with ``auto`` resolved as when the run began.

    Length and bookkeeping may differ from the run's own configuration, nothing at all if ``exactly``.
    """
    if not run.holds_run():
        raise RunError(f"there is no run in {run.path}: leave --resume out (in Python: resume)")
    stored = TrainConfig.from_file(run.config)
    if stored != stored.resolve_auto("float32"):
        raise ConfigError(
            f"{run.config} leaves a precision to be measured, but this run began with one; "
            "put back float32 or bfloat16, whichever it was"
        )
    config = config.resolve_auto(stored.resolved_precision, getattr(stored.optimizer, "precision", None))
    found = config_diff(stored, config)
    run.changed = {difference.top for difference in found}
    free = set() if exactly else _FREE
    if refused := [difference for difference in found if difference.top not in free]:
        same = "resume with the same configuration, or start a new run in another folder"
        new = "--resume continues with the new one (in Python: resume=True), another folder starts a new run"
        raise ConfigError(
            f"the configuration is not that of the run in {run.path}: {format_differences(refused)}; "
            + (new if run.changed <= _FREE else same)
        )
    run.hold()
    return config


@dataclass(frozen=True)
class ResumePoint:
    """``checkpoint`` is None for a run that has saved nothing yet; ``passed`` are newer ones, and what is wrong."""

    checkpoint: Path | None
    trainer_state: state.TrainerState
    passed: tuple[tuple[Path, str], ...] = ()
    pointer: str = ""
    """What is wrong with ``last`` itself."""


def find_resume_point(run: RunFolder) -> ResumePoint:
    """The newest whole checkpoint of ``run``. A run that has some, but none that is whole, is refused.

    Looks, and changes nothing.
    """
    pointer = _pointer_problem(run)
    passed: list[tuple[Path, str]] = []
    for path in reversed(run.saved()):
        try:
            trainer_state = examine(path)
        except (InputError, OSError) as error:
            passed.append((path, str(error)))
        else:
            return ResumePoint(path, trainer_state, tuple(passed), pointer)
    if passed:
        reasons = "; ".join(f"{path.name}: {reason[:300]}" for path, reason in passed[:_MOST_NAMED])
        more = f"; and {len(passed) - _MOST_NAMED} more" if len(passed) > _MOST_NAMED else ""
        raise CheckpointError(
            f"no checkpoint of the run in {run.path} can be used ({reasons}{more}); nothing was changed: "
            "put back a good copy of one, or start a new run in another folder"
        )
    if pointer:
        raise CheckpointError(
            f"{pointer}, and {run.checkpoints} holds no step; put the step's folder back, or remove "
            f"{run.path / 'last'} to begin the run again"
        )
    return ResumePoint(None, state.TrainerState())


def examine(path: Path) -> state.TrainerState:
    """Where the checkpoint at ``path`` stands. Every byte of it is looked at; what is not whole is an error."""
    found = verify(path, "digests")
    if found.problem:
        raise CheckpointError(found.problem)
    if not (path / TOKENIZER).is_file():
        raise CheckpointError(f"{path} has no {TOKENIZER}, so it is not a run's checkpoint")
    trainer_state = state.read_trainer_state(path / state.FOLDER)
    if path.name != step_name(trainer_state.step):
        raise CheckpointError(f"{path} holds the state of step {trainer_state.step}; it was put together from two")
    return trainer_state


def _pointer_problem(run: RunFolder) -> str:
    try:
        target = run.read_pointer("last")
    except CheckpointError as error:
        return str(error)
    if target is None or target.is_dir():
        return ""
    return f"{run.path / 'last'} points to {target.name}, which is not there"


def refuse_other_model(config: TrainConfig, point: ResumePoint) -> None:
    """A checkpoint of another model than the run's is refused by the first field that differs."""
    if point.checkpoint is None:
        return
    stored = open_folder(point.checkpoint).contract.model
    for path, own, found in config_diff(config.model, stored, "model"):
        raise CheckpointError(
            f"{point.checkpoint} is of another model: {path}: the run has {format_value(own)}, "
            f"the checkpoint {format_value(found)}; put back the checkpoint that the run saved, or move this one away"
        )


def final(config: TrainConfig, run: RunFolder, point: ResumePoint) -> Validation | None:
    """What a run came to that is at its end; None where something is left to do, or to do in another way."""
    trainer_state = point.trainer_state
    if point.checkpoint is None or run.changed & {"eval_steps", "evaluation"}:
        return None
    length_is_known = config.max_minutes is None or run.changed & LENGTH
    if length_is_known and progress(config, trainer_state.step, trainer_state.minutes) < 1:
        return None
    return MetricsLog(run.metrics).final(trainer_state.step)


def refuse_shorter(config: TrainConfig, run: RunFolder, trainer_state: state.TrainerState) -> None:
    """A length that was changed must reach as far as the run has come."""
    if not run.changed & LENGTH:
        return
    pairs = (("steps", config.max_steps, trainer_state.step), ("minutes", config.max_minutes, trainer_state.minutes))
    for name, limit, reached in pairs:
        if limit is not None and reached > limit:
            raise ConfigError(
                f"max_{name} is {limit:g}, but the run in {run.path} has reached {reached:g} {name}; "
                "give as many or more, or start a new run in another folder"
            )


def repair_folder(run: RunFolder, point: ResumePoint, listener: Listener) -> None:
    """Put the folder right, and say what was passed over."""
    trainer_state = point.trainer_state
    moved = run.repair_folder(point.checkpoint, {path for path, _ in point.passed}, trainer_state.best_step)
    if point.checkpoint is None:
        return
    where = f"the run in {run.path} continues from {point.checkpoint.name}"
    for path, reason in point.passed:
        listener(Warned(f"{path.name} cannot be used ({reason}) and is moved to {moved[path].name}; {where}"))
    if point.pointer:
        listener(Warned(f"{point.pointer}; {where}, the newest that is whole"))
    if trainer_state.best_step is not None and run.read_pointer("best") is None:
        listener(Warned(f"{step_name(trainer_state.best_step)}, the best so far, is not there any more; {where}"))


_MOST = 3


class ConfigDifference(NamedTuple):
    """One value, under a path such as ``model.layers[0]``."""

    path: str
    was: Any
    now: Any

    @property
    def top(self) -> str:
        """The first part of the path."""
        return self.path.partition(".")[0].partition("[")[0]


def config_diff(was: Config, now: Config, name: str = "") -> list[ConfigDifference]:
    """Every value that is not the same in both, in the order of the fields."""
    return list(_walk(was.model_dump(), now.model_dump(), name))


def format_differences(found: Sequence[ConfigDifference]) -> str:
    """The first few in words."""
    words = [f"{path}: was {format_value(was)}, is {format_value(now)}" for path, was, now in found[:_MOST]]
    if len(found) > _MOST:
        words.append(f"and {len(found) - _MOST} more")
    return "; ".join(words)


def format_value(value: Any) -> str:
    """A value as an error shows it: text without quotes."""
    return value[:80] if isinstance(value, str) and value.isprintable() and value else yaml_repr(value)


def _walk(was: Any, now: Any, name: str) -> Iterator[ConfigDifference]:
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys((*was, *now)):
            yield from _walk(was.get(key), now.get(key), f"{name}.{key}" if name else str(key))
    elif isinstance(was, list | tuple) and isinstance(now, list | tuple):
        for index, (a, b) in enumerate(zip_longest(was, now)):
            yield from _walk(a, b, f"{name}[{index}]")
    elif was != now:
        yield ConfigDifference(name, was, now)
