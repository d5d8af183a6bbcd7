"""Training, from top to bottom: prepare, then step, log, validate and save until the budget is spent."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from pellucid.data.corpus import Document
from pellucid.errors import CheckpointError, ConfigError, StorageError
from pellucid.training.config import TrainConfig
from pellucid.training.environment import write_environment
from pellucid.training.events import (
    Event,
    Finished,
    Interrupted,
    Listener,
    Prepared,
    Resumed,
    Saved,
    Stepped,
    Validated,
    Warned,
)
from pellucid.training.loggers import MetricsLog, broadcast
from pellucid.training.result import TrainResult
from pellucid.training.results import Validation
from pellucid.training.resume import final, find_resume_point, refuse_other_model, refuse_shorter, repair_folder
from pellucid.training.run_folder import RunFolder, checked_path, step_name
from pellucid.training.schedule import lr_multiplier, progress
from pellucid.training.setup import RunComponents, prepare, refuse_missing_device, resolve_auto
from pellucid.training.signals import SignalHandler
from pellucid.training.step import StepContext, StepResult, train_step
from pellucid.training.validation import bits_per_byte


def train(
    config: TrainConfig, run_folder: str | Path, *, resume: bool | None = None, on_event: Listener | None = None
) -> TrainResult:
    """Train the model that ``config`` describes and keep everything in ``run_folder``.

    A folder that holds a run of the same ``config`` goes on from its last checkpoint, as if it had never stopped;
    one that is finished says so, and nothing is done. ``resume=True`` wants a run there, and lets its budget and
    bookkeeping change; ``False`` wants an empty folder. Anything else that is there is refused. Ctrl-C and SIGTERM
    finish the step and what belongs to it, save and return; before the first step, or given twice, they raise
    ``KeyboardInterrupt``. ``on_event`` is told what happens (see ``training.events``); without it, warnings are
    Python's.

    Raises:
        InputError: something in the config, the data or on the disk cannot be used; nothing was trained, and no
            folder changed.
        TrainingError: the run must not go on; the message names the last good checkpoint.
        StorageError: the disk took no more; likewise.
    """
    if not isinstance(config, TrainConfig):
        raise ConfigError(
            f"config is {str(config)[:80]!r}, but must be a TrainConfig; make one with TrainConfig.from_file or "
            ".from_mapping"
        )
    run, tell = RunFolder(checked_path(run_folder)), on_event or _warn
    refuse_missing_device(config.device)
    try:
        with SignalHandler() as interrupts:
            if run.holds_run() if resume is None else resume:
                return _resume(config, run, resume is None, interrupts, tell)
            return _start(config, run, interrupts, tell)
    finally:
        run.close()


def _start(config: TrainConfig, run: RunFolder, interrupts: SignalHandler, tell: Listener) -> TrainResult:
    """A new run. What goes wrong before its first step leaves nothing behind."""
    try:
        config = resolve_auto(config)
        run.begin(config)
        parts = prepare(config, run, None, lambda message: tell(Warned(message)))
        write_environment(run.path, 0, parts.facts)
        interrupts.begin()
    except BaseException:
        run.rollback()
        raise
    return Trainer(config, run, parts, interrupts, tell).go()


def _resume(
    config: TrainConfig, run: RunFolder, exactly: bool, interrupts: SignalHandler, tell: Listener
) -> TrainResult:
    """A run that was begun. First everything is asked that can refuse, and only then something is changed."""
    config = run.reopen(config, exactly=exactly)
    choice = find_resume_point(run)
    refuse_other_model(config, choice)
    refuse_shorter(config, run, choice.counters)
    if validation := final(config, run, choice):
        assert choice.checkpoint is not None
        repair_folder(run, choice, tell)
        tell(Finished(run.path, choice.counters.step))
        return TrainResult.of(run.path, choice.checkpoint, choice.counters, validation)
    parts = prepare(config, run, choice.checkpoint, lambda message: tell(Warned(message)))
    metrics = MetricsLog(run.metrics)
    metrics.refuse_other_kinds()
    repair_folder(run, choice, tell)
    run.write_config(config)
    metrics.truncate(parts.counters.step)
    run.prune(config.save_total_limit)
    write_environment(run.path, parts.counters.step, parts.facts)
    interrupts.begin()
    tell(Resumed(run.path, parts.counters.step))
    return Trainer(config, run, parts, interrupts, tell).go()


def _warn(event: Event) -> None:
    """Where nobody listens, a warning is one of Python's."""
    if isinstance(event, Warned):
        warnings.warn(event.message, RuntimeWarning, stacklevel=2)


T = TypeVar("T")


class StopRequested(Exception):  # noqa: N818
    """Ends the validation at the end of a run that is to stop."""


class Trainer:
    """The state of a run in memory, and what is done with it."""

    def __init__(
        self,
        config: TrainConfig,
        run: RunFolder,
        parts: RunComponents,
        interrupts: SignalHandler,
        tell: Listener,
    ) -> None:
        self.config, self.run, self.parts, self.counters = config, run, parts, parts.counters
        self.interrupts, self.tell = interrupts, broadcast([MetricsLog(run.metrics), tell])
        self.said_so = False
        self.last = run.read_pointer("last")
        self.began = time.monotonic() - 60 * parts.counters.minutes

    def go(self) -> TrainResult:
        self.tell_prepared()
        while self.progress < 1 and not self.interrupts.asked:
            self.step()
            self.tell_interrupted()
            best = False
            if self.due(self.config.eval_steps):  # of an interrupted step too: the log must not lack it
                best = self.validate()
            if best or self.due(self.config.save_steps):
                self.save()
        self.tell_interrupted()
        checkpoint = self.save()
        validation = self.validate_all()
        self.tell_interrupted()
        asked = self.interrupts.asked if validation is None else None
        return TrainResult.of(
            self.run.path, checkpoint, self.counters, validation, signal="" if asked is None else asked.name
        )

    # ---- what is done

    def step(self) -> None:
        """One change of the weights."""
        started, counters, parts = time.monotonic(), self.counters, self.parts
        parts.optimizers.set_learning_rate(lr_multiplier(self.config, counters.step, self.minutes))
        parts.model.train()
        first = parts.loader.batches
        batches = [next(parts.loader).to(self.config.device) for _ in range(self.config.gradient_accumulation_steps)]
        result = train_step(
            parts.model,
            batches,
            parts.optimizers,
            max_grad_norm=self.config.max_grad_norm,
            precision=self.config.resolved_precision,
            load_balancing=self.config.load_balancing,
            where=StepContext(counters.step + 1, lambda: self.documents(first), self.last),
        )
        seconds = time.monotonic() - started
        counters.step += 1
        counters.tokens += result.num_targets
        counters.training_seconds += seconds
        self.tell_stepped(result, seconds)

    def validate(self) -> bool:
        """Held-out loss on the way; whether it is the best so far."""
        started, counters, evaluator = time.monotonic(), self.counters, self.parts.evaluator
        if evaluator is None:
            found = self.bits_per_byte(self.parts.sample)
        else:
            found = evaluator.validate(self.parts.model, final=False)
        best = math.isfinite(found.measure) and (counters.best is None or found.measure < counters.best)
        if best:
            counters.best, counters.best_step = found.measure, counters.step
        self.tell_validated(found, started, best=best, final=False)
        return best

    def validate_all(self) -> Validation | None:
        """The same over all held-out documents; None if somebody asks the run to stop before that is done."""
        started, evaluator = time.monotonic(), self.parts.evaluator
        try:
            if evaluator is None:
                found = self.bits_per_byte(self.until_asked(self.parts.heldout.documents("heldout")))
            else:
                found = evaluator.validate(self.parts.model, final=True, watch=self.until_asked)
        except StopRequested:
            return None
        self.tell_validated(found, started, best=False, final=True)
        return found

    def bits_per_byte(self, documents: Iterable[Document]) -> Validation:
        """Of the model as it is."""
        length, stride = self.config.window
        return bits_per_byte(
            self.parts.model,
            self.parts.tokenizer,
            documents,
            length=length,
            stride=stride,
            batch_tokens=self.config.evaluation.batch_tokens,
            precision=self.config.resolved_precision,
        )

    def until_asked(self, items: Iterable[T]) -> Iterator[T]:
        """The documents or batches; an end, and no result, when the run is to stop."""
        for item in items:
            if self.interrupts.asked:
                raise StopRequested
            yield item
        if self.interrupts.asked:
            raise StopRequested

    def save(self) -> Path:
        """A whole checkpoint of this step, unless there is one."""
        parts, counters = self.parts, self.counters
        if self.last is not None and self.last.name == step_name(counters.step):
            return self.last
        counters.minutes, counters.loader = self.minutes, parts.loader.state_dict()
        try:
            self.last = self.run.save(parts.model, parts.tokenizer, counters, parts.optimizers, parts.classes)
            if counters.best_step == counters.step:
                self.run.mark_best(self.last)
            self.run.prune(self.config.save_total_limit)
        except CheckpointError as error:
            raise StorageError(
                f"step {counters.step}: {error}. Last good checkpoint: {self.last or 'none yet'}"
            ) from error
        self.tell(Saved(counters.step, self.last))
        return self.last

    # ---- where the run is

    @property
    def minutes(self) -> float:
        """Since the first step."""
        return (time.monotonic() - self.began) / 60

    @property
    def progress(self) -> float:
        """How much of the budget is used."""
        return progress(self.config, self.counters.step, self.minutes)

    def due(self, every: int) -> bool:
        """Whether this step is one of every so many."""
        return bool(every) and self.counters.step % every == 0

    def documents(self, first: int) -> list[str]:
        """The documents of the step whose first batch has this number."""
        numbers = range(first, first + self.config.gradient_accumulation_steps)
        return list(dict.fromkeys(name for n in numbers for name in self.parts.loader.names(n)))

    # ---- what is told

    def tell_interrupted(self) -> None:
        """That somebody asked the run to stop, once."""
        if self.interrupts.asked and not self.said_so:
            self.said_so = True
            self.tell(Interrupted(self.interrupts.asked.name))

    def tell_validated(self, found: Validation, started: float, *, best: bool, final: bool) -> None:
        seconds = time.monotonic() - started
        self.tell(Validated.of(found, self.counters.step, best=best, final=final, seconds=seconds))

    def tell_prepared(self) -> None:
        loader, model = self.parts.loader, self.parts.model
        parameters = sum(parameter.numel() for parameter in model.parameters())
        self.tell(Prepared(self.run.path, parameters, len(loader.store), loader.tokens, loader.rows))

    def tell_stepped(self, result: StepResult, seconds: float) -> None:
        self.tell(
            Stepped(
                step=self.counters.step,
                tokens=self.counters.tokens,
                num_targets=result.num_targets,
                loss=result.loss,
                learning_rate=result.learning_rate,
                grad_norm=result.grad_norm,
                epoch=self.parts.loader.epoch,
                seconds=seconds,
                progress=self.progress,
                minutes=self.minutes,
                item="token" if self.parts.evaluator is None else self.parts.evaluator.item,
                routing=result.routing,
            )
        )
