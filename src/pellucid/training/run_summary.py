"""Runs side by side: summaries of run folders, read without changing anything in them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pellucid.configfile import read_mapping
from pellucid.configfile.base_config import flatten
from pellucid.errors import ArgumentError, InputError, RunError
from pellucid.files import checked_path
from pellucid.messages import printable
from pellucid.records import Cell, Table, number
from pellucid.training import state
from pellucid.training.environment import read_environment
from pellucid.training.loggers import MetricsLog
from pellucid.training.run_folder import RunFolder, locked

T = TypeVar("T")
State = Literal["running", "finished", "stopped", "begun", "damaged"]
_DEEPEST = 3


@dataclass(frozen=True)
class RunSummary:
    """The summary of one run folder. What is not known is None.

    ``running``: a process trains in it now; ``finished``: it ended; ``stopped``: it can be resumed from its last
    checkpoint; ``begun``: it has none yet; ``damaged``: part of it cannot be read, see ``problem``.
    """

    run: Path
    state: State
    steps: int
    """Logged; ``saved`` is the step of the last checkpoint."""
    saved: int | None
    tokens: int
    loss: float | None
    """Of the last step."""
    best: float | None
    """Lowest of the evaluations during the run: held-out bits per byte, or the loss where ``measure`` is that."""
    final: float | None
    """Over all held-out documents."""
    tokens_per_second: float | None
    began: str | None
    precision: str | None
    parameters: int | None
    problem: str | None
    config: Mapping[str, Any]
    measure: Literal["bits per byte", "loss"] = "bits per byte"
    """The quantity of ``best`` and ``final``."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Those of the last evaluation, of objectives without bits per byte: ``{name: {"value": …, "baseline": …}}``."""

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        plain = {key: number(value) if isinstance(value, float) else value for key, value in asdict(self).items()}
        return {**plain, "run": self.name}

    @property
    def name(self) -> str:
        """The folder, as text that can be printed."""
        return printable(self.run)


def is_run(path: Path) -> bool:
    """Whether ``path`` is the folder of a run."""
    try:
        return (path / "config.yaml").is_file() and (path / "checkpoints").is_dir()
    except OSError:  # nothing in it may be looked at
        return False


def find_runs(folder: str | Path) -> list[Path]:
    """The run folders in ``folder`` and three levels below it, by name; ``folder`` itself, if it is one.

    Folders below it that cannot be read are skipped.
    """
    top = checked_path(folder, "the folder of runs")
    if not top.is_dir():
        raise ArgumentError(f"{top} is not a folder; name a run folder, or one that holds some")
    found: list[Path] = []
    level = [top]
    for _ in range(_DEEPEST + 1):
        found += [path for path in level if is_run(path)]
        level = [sub for path in level if not is_run(path) for sub in _folders(path, required=path == top)]
    if not found:
        raise RunError(f"{top} holds no run; pellucid train makes one")
    return sorted(found)


def _folders(path: Path, *, required: bool) -> list[Path]:
    try:
        return [sub for sub in path.iterdir() if sub.is_dir() and not sub.name.startswith(".")]
    except OSError as error:
        if required:
            raise ArgumentError(f"cannot read {path}: {error.strerror}; choose a folder that you may read") from error
        return []


def read_run(path: str | Path) -> RunSummary:
    """The summary of the run in ``path``. A damaged one has a summary too."""
    run = RunFolder(Path(path))
    if not is_run(run.path):
        raise RunError(f"{run.path} is not a run folder: it has no config.yaml and checkpoints")
    problems: list[str] = []
    config = _tried(problems, lambda: read_mapping(run.config)) or {}
    at = _tried(problems, lambda: _last_state(run))
    logged = _tried(problems, lambda: _Log(MetricsLog(run.metrics))) or _Log()
    environment = read_environment(run.path)
    sessions, precision = environment.get("sessions"), config.get("precision")
    first = sessions[0] if isinstance(sessions, list) and sessions else None
    began = first.get("at") if isinstance(first, dict) else None
    saved = None if at is None else at.step
    ended = logged.final is not None and logged.final_step == saved and saved >= logged.steps
    states: tuple[tuple[State, bool], ...] = (
        ("running", locked(run.path)),
        ("damaged", bool(problems)),
        ("begun", saved is None),
        ("finished", ended),
        ("stopped", True),
    )
    return RunSummary(
        run=run.path,
        state=next(name for name, holds in states if holds),
        steps=logged.steps,
        saved=saved,
        tokens=logged.tokens,
        loss=logged.loss,
        best=logged.best,
        final=logged.final,
        tokens_per_second=at.tokens / at.training_seconds if at and at.training_seconds else None,
        began=began if isinstance(began, str) else None,
        precision=precision if isinstance(precision, str) else None,
        parameters=_whole(environment.get("parameters")),
        problem=printable(problems[0]) if problems else None,
        config=config,
        measure=logged.measure,
        metrics=logged.metrics,
    )


def runs_table(runs: Sequence[RunSummary]) -> Table:
    """One line a run."""
    columns = ("run", "state", "steps", "tokens", "best", "final", "tokens/s", "began", "precision", "parameters")
    rows: list[tuple[Cell, ...]] = [
        (
            r.name, r.state, r.steps, r.tokens, r.best, r.final,
            None if r.tokens_per_second is None else round(r.tokens_per_second), r.began, r.precision, r.parameters,
        )
        for r in runs
    ]  # fmt: skip
    return Table("", columns, tuple(rows))


def differences(runs: Sequence[RunSummary]) -> dict[str, list[Any]]:
    """Every configuration key, as ``a.b``, that differs between ``runs``, and its value in each."""
    flat = [flatten(run.config) for run in runs]
    found = {key: [one.get(key) for one in flat] for one in flat for key in one}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def comparison(runs: Sequence[RunSummary]) -> list[Table]:
    """The results of the runs side by side, and how their configurations differ."""
    names = tuple(run.name for run in runs)
    facts = ("state", "steps", "tokens", "loss", "best", "final", "tokens_per_second", "began", "parameters")
    results = tuple((fact, *(getattr(run, fact) for run in runs)) for fact in facts)
    cells = {
        key: [v if isinstance(v, str | int | float | bool | None) else json.dumps(v) for v in values]
        for key, values in differences(runs).items()
    }
    configuration = tuple((key, *values) for key, values in cells.items())
    return [Table("results", ("", *names), results), Table("configuration", ("key", *names), configuration)]


def _tried(problems: list[str], read: Callable[[], T]) -> T | None:
    """The result of ``read``; None, and one more problem, where a file cannot be read."""
    try:
        return read()
    except InputError as error:
        problems.append(str(error))
    except OSError as error:
        problems.append(f"cannot read {error.filename}: {error.strerror or error}")
    return None


def _last_state(run: RunFolder) -> state.TrainerState | None:
    """That of the last checkpoint; the tensors are not read."""
    last = run.read_pointer("last")
    return None if last is None else state.read_trainer_state(last / state.FOLDER, tensors=False)


class _Log:
    """The figures of a run's log, from one pass over it."""

    def __init__(self, metrics: MetricsLog | None = None) -> None:
        self.steps = self.tokens = 0
        self.loss: float | None = None
        self.best: float | None = None
        self.final: float | None = None
        self.final_step = 0
        self.measure: Literal["bits per byte", "loss"] = "bits per byte"
        self.metrics: dict[str, Any] = {}
        for line in metrics.records() if metrics is not None else ():
            if line["kind"] == "step":
                self.steps, self.tokens = _whole(line["step"]) or 0, _whole(line.get("tokens")) or 0
                self.loss = real(line.get("loss"))
            elif (found := self._found(line)) is not None:
                if line.get("final"):
                    self.final, self.final_step = found, _whole(line["step"]) or 0
                else:
                    self.best = found if self.best is None else min(self.best, found)

    def _found(self, line: dict[str, Any]) -> float | None:
        """Bits per byte where the line has them, otherwise the loss."""
        if (bits := real(line.get("bits_per_byte"))) is not None or "item" not in line:
            return bits
        self.measure, metrics = "loss", line.get("metrics")
        self.metrics = metrics if isinstance(metrics, dict) else {}
        return real(line.get("loss"))


def real(value: object) -> float | None:
    """A number from somebody's file; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
