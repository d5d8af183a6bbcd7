"""Which checkpoint a run goes on from (the newest one that is whole), and what is put right before it does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pellucid.checkpoints import store
from pellucid.checkpoints.folder import open_folder
from pellucid.checkpoints.verify import verify
from pellucid.errors import CheckpointError, ConfigError, InputError
from pellucid.training import state
from pellucid.training.config import TrainConfig
from pellucid.training.config_diff import differences, plain
from pellucid.training.events import Listener, Warned
from pellucid.training.loggers import MetricsLog
from pellucid.training.results import Validation
from pellucid.training.run_folder import LENGTH, RunFolder, step_name
from pellucid.training.schedule import progress

_MOST_NAMED = 3


@dataclass(frozen=True)
class ResumePoint:
    """``checkpoint`` is None for a run that has saved nothing yet; ``passed`` are newer ones, and what is wrong."""

    checkpoint: Path | None
    counters: state.TrainerState
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
            counters = examine(path)
        except (InputError, OSError) as error:
            passed.append((path, str(error)))
        else:
            return ResumePoint(path, counters, tuple(passed), pointer)
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
    if not (path / store.TOKENIZER).is_file():
        raise CheckpointError(f"{path} has no {store.TOKENIZER}, so it is not a run's checkpoint")
    counters = state.read_counters(path / state.FOLDER)
    if path.name != step_name(counters.step):
        raise CheckpointError(f"{path} holds the state of step {counters.step}; it was put together from two")
    return counters


def _pointer_problem(run: RunFolder) -> str:
    try:
        pointed = run.read_pointer("last")
    except CheckpointError as error:
        return str(error)
    if pointed is None or pointed.is_dir():
        return ""
    return f"{run.path / 'last'} points to {pointed.name}, which is not there"


def refuse_other_model(config: TrainConfig, choice: ResumePoint) -> None:
    """A checkpoint of another model than the run's is refused by the first field that differs."""
    if choice.checkpoint is None:
        return
    stored = open_folder(choice.checkpoint).contract.model
    for path, own, found in differences(config.model, stored, "model"):
        raise CheckpointError(
            f"{choice.checkpoint} is of another model: {path}: the run has {plain(own)}, the checkpoint {plain(found)};"
            " put back the checkpoint that the run saved, or move this one away"
        )


def final(config: TrainConfig, run: RunFolder, choice: ResumePoint) -> Validation | None:
    """What a run came to that is at its end; None where something is left to do, or to do in another way."""
    counters = choice.counters
    if choice.checkpoint is None or run.changed & {"eval_steps", "evaluation"}:
        return None
    length_is_known = config.max_minutes is None or run.changed & LENGTH
    if length_is_known and progress(config, counters.step, counters.minutes) < 1:
        return None
    return MetricsLog(run.metrics).final(counters.step)


def refuse_shorter(config: TrainConfig, run: RunFolder, counters: state.TrainerState) -> None:
    """A length that was changed must reach as far as the run has come."""
    if not run.changed & LENGTH:
        return
    pairs = (("steps", config.max_steps, counters.step), ("minutes", config.max_minutes, counters.minutes))
    for name, limit, reached in pairs:
        if limit is not None and reached > limit:
            raise ConfigError(
                f"max_{name} is {limit:g}, but the run in {run.path} has reached {reached:g} {name}; "
                "give as many or more, or start a new run in another folder"
            )


def repair_folder(run: RunFolder, choice: ResumePoint, tell: Listener) -> None:
    """Put the folder right, and say what was passed over."""
    counters = choice.counters
    moved = run.repair_folder(choice.checkpoint, {path for path, _ in choice.passed}, counters.best_step)
    if choice.checkpoint is None:
        return
    where = f"the run in {run.path} goes on from {choice.checkpoint.name}"
    for path, reason in choice.passed:
        tell(Warned(f"{path.name} cannot be used ({reason}) and is kept as {moved[path].name}; {where}"))
    if choice.pointer:
        tell(Warned(f"{choice.pointer}; {where}, the newest that is whole"))
    if counters.best_step is not None and run.read_pointer("best") is None:
        tell(Warned(f"{step_name(counters.best_step)}, the best so far, is not there any more; {where}"))
