"""Training, from top to bottom: set up, then step, log, evaluate and save until the run is over."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from pellucid.checkpoints.saving import Proof, add_witness
from pellucid.data.corpus import Document
from pellucid.data.loader import Prefetcher
from pellucid.errors import ArgumentError, CheckpointError, StorageError
from pellucid.files import checked_path
from pellucid.training.config import TrainConfig
from pellucid.training.environment import SignalHandler, write_environment
from pellucid.training.evaluation import bits_per_byte
from pellucid.training.loggers import MetricsLog, broadcast
from pellucid.training.results import (
    Event,
    Finished,
    Interrupted,
    Listener,
    Prepared,
    Resumed,
    Saved,
    Stepped,
    TrainResult,
    Validated,
    Validation,
    Warned,
)
from pellucid.training.run_folder import RunFolder, step_name
from pellucid.training.setup import (
    RunComponents,
    check_resume_point,
    final,
    find_resume_point,
    prepare,
    refuse_missing_device,
    reopen,
    repair_folder,
    resolve_auto,
)
from pellucid.training.step import StepContext, TrainStepResult, lr_multiplier, progress, train_step


def train(
    config: TrainConfig, run_folder: str | Path, *, resume: bool | None = None, on_event: Listener | None = None
) -> TrainResult:
    """Train the model that ``config`` describes and keep everything in ``run_folder``.

    A run of the same ``config`` that is in the folder is resumed from its last checkpoint, as if it had never stopped;
    if it is finished, nothing is done. ``resume=True`` requires a run there, whose length and bookkeeping may change;
    ``False`` requires an empty folder. Anything else in the folder is refused. Ctrl-C and SIGTERM finish the step with
    its evaluation, save and return; before the first step, or sent twice, they raise ``KeyboardInterrupt``.
    ``on_event`` is called with what happens (see ``training.results``); without it, warnings are Python's.

    Raises:
        InputError: something in the config, the data or on the disk cannot be used; nothing was trained, and no
            folder changed.
        TrainingError: the run cannot continue; the message names the last good checkpoint.
        StorageError: the disk took no more; likewise.
    """
    if not isinstance(config, TrainConfig):
        raise ArgumentError(
            f"config is {str(config)[:80]!r}, but must be a TrainConfig; make one with TrainConfig.from_file or "
            ".from_mapping"
        )
    run, listener = RunFolder(checked_path(run_folder, "the run folder")), on_event or _warn
    refuse_missing_device(config.device)
    try:
        with SignalHandler() as signals:
            if run.holds_run() if resume is None else resume:
                return _resume(config, run, resume is None, signals, listener)
            return _start(config, run, signals, listener)
    finally:
        run.close()


def _start(config: TrainConfig, run: RunFolder, signals: SignalHandler, listener: Listener) -> TrainResult:
    """A new run. An error before its first step leaves nothing behind."""
    try:
        config = resolve_auto(config)
        run.begin(config)
        components = prepare(config, run, None, lambda message: listener(Warned(message)))
        write_environment(run.path, 0, components.facts)
        signals.begin()
    except BaseException:
        run.rollback()
        raise
    return Trainer(config, run, components, signals, listener).run()


def _resume(
    config: TrainConfig, run: RunFolder, exactly: bool, signals: SignalHandler, listener: Listener
) -> TrainResult:
    """A run that was begun. Everything that can be refused is, before anything is changed."""
    config = reopen(run, config, exactly=exactly)
    point = find_resume_point(run)
    check_resume_point(config, run, point)
    if validation := final(config, run, point):
        assert point.checkpoint is not None
        repair_folder(run, point, listener)
        listener(Finished(run.path, point.trainer_state.step))
        return TrainResult.of(run.path, point.checkpoint, point.trainer_state, validation)
    components = prepare(config, run, point.checkpoint, lambda message: listener(Warned(message)))
    metrics = MetricsLog(run.metrics)
    metrics.refuse_other_kinds()
    repair_folder(run, point, listener)
    run.write_config(config)
    metrics.truncate(components.trainer_state.step)
    run.prune(config.save_total_limit)
    write_environment(run.path, components.trainer_state.step, components.facts)
    signals.begin()
    listener(Resumed(run.path, components.trainer_state.step))
    return Trainer(config, run, components, signals, listener).run()


def _warn(event: Event) -> None:
    """Without a listener, warnings are Python's."""
    if isinstance(event, Warned):
        warnings.warn(event.message, RuntimeWarning, stacklevel=2)


T = TypeVar("T")


class StopRequested(Exception):  # noqa: N818
    """A signal asked the run to stop during its final evaluation."""


class Trainer:
    """A run in memory: :meth:`run` steps, evaluates and saves until the run is over or a signal asks it to stop."""

    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        components: RunComponents,
        signals: SignalHandler,
        listener: Listener,
    ) -> None:
        self.config, self.folder, self.components = config, folder, components
        self.state, self.precision = components.trainer_state, config.resolved_precision
        self.signals, self.emit = signals, broadcast([MetricsLog(folder.metrics), listener])
        self.batches = Prefetcher(components.loader, config.device)
        self.last_checkpoint = folder.read_pointer("last")
        self.interruption_emitted = False
        self.started = time.monotonic() - 60 * self.state.minutes

    def run(self) -> TrainResult:
        """Train until the run is over."""
        self.emit_prepared()
        try:
            while not self.stopping:
                self.step()
                self.emit_interrupted()
                best = False
                if self.due(
                    self.config.eval_steps
                ):  # also after an interrupted step, as the log of the whole run would have it
                    best = self.evaluate()
                if best or self.due(self.config.save_steps):
                    self.save()
        finally:
            self.batches.close()
        self.emit_interrupted()
        checkpoint = self.save()
        validation = self.evaluate_all()
        self.emit_interrupted()
        signal = self.signals.requested if validation is None else None
        return TrainResult.of(
            self.folder.path, checkpoint, self.state, validation, signal="" if signal is None else signal.name
        )

    def step(self) -> None:
        """One training step."""
        started, state, components = time.monotonic(), self.state, self.components
        components.optimizers.set_learning_rate(lr_multiplier(self.config, state.step, self.minutes))
        components.model.train()
        first = components.loader.batches
        result = train_step(
            components.model,
            [self.batches.next() for _ in range(self.config.gradient_accumulation_steps)],
            components.optimizers,
            max_grad_norm=self.config.max_grad_norm,
            precision=self.precision,
            load_balancing=self.config.load_balancing,
            context=StepContext(state.step + 1, lambda: self.documents(first), self.last_checkpoint),
        )
        seconds = time.monotonic() - started
        state.step += 1
        state.tokens += result.num_targets
        state.training_seconds += seconds
        self.emit_stepped(result, seconds)

    def evaluate(self) -> bool:
        """Evaluate a sample of the held-out documents; returns whether it is the best result so far."""
        started, state, evaluator = time.monotonic(), self.state, self.components.evaluator
        if evaluator is None:
            found = self.bits_per_byte(self.components.sample)
        else:
            found = evaluator.evaluate(self.components.model, final=False)
        best = math.isfinite(found.measure) and (state.best is None or found.measure < state.best)
        if best:
            state.best, state.best_step = found.measure, state.step
        self.emit(Validated(state.step, found, final=False, best=best, seconds=time.monotonic() - started))
        return best

    def evaluate_all(self) -> Validation | None:
        """Evaluate all held-out documents; None if a signal asks the run to stop before that is done."""
        started, evaluator = time.monotonic(), self.components.evaluator
        try:
            if evaluator is None:
                found = self.bits_per_byte(self.until_requested(self.components.heldout.documents("heldout")))
            else:
                found = evaluator.evaluate(self.components.model, final=True, watch=self.until_requested)
        except StopRequested:
            return None
        self.emit(Validated(self.state.step, found, final=True, best=False, seconds=time.monotonic() - started))
        return found

    def bits_per_byte(self, documents: Iterable[Document]) -> Validation:
        """Bits per byte of the model as it is."""
        length, stride = self.config.window
        return bits_per_byte(
            self.components.model,
            self.components.tokenizer,
            documents,
            length=length,
            stride=stride,
            batch_tokens=self.config.evaluation.batch_tokens,
            precision=self.precision,
        )

    def until_requested(self, items: Iterable[T]) -> Iterator[T]:
        """Yields ``items``; raises StopRequested as soon as a signal asks the run to stop."""
        for item in items:
            if self.signals.requested:
                raise StopRequested
            yield item
        if self.signals.requested:
            raise StopRequested

    def save(self) -> Path:
        """A whole checkpoint of this step, unless there is one.

        The first and the last one of a run carry a witness; those in between are proved by digests.
        """
        components, state, last = self.components, self.state, self.last_checkpoint
        try:
            if last is not None and last.name == step_name(state.step):
                if self.stopping:
                    add_witness(last, components.model, components.tokenizer)
                return last
            state.minutes, state.loader = self.minutes, components.loader.state_dict()
            prove: Proof = "witness" if last is None or self.stopping else "digests"
            self.last_checkpoint = last = self.folder.save(
                components.model,
                components.tokenizer,
                state,
                components.optimizers,
                components.label_names,
                prove=prove,
            )
            if state.best_step == state.step:
                self.folder.mark_best(last)
            self.folder.prune(self.config.save_total_limit)
        except CheckpointError as error:
            raise StorageError(
                f"step {state.step}: {error}. Last good checkpoint: {self.last_checkpoint or 'none yet'}"
            ) from error
        self.emit(Saved(state.step, last))
        return last

    @property
    def minutes(self) -> float:
        """Minutes since the first step."""
        return (time.monotonic() - self.started) / 60

    @property
    def progress(self) -> float:
        """The fraction of the run that is over."""
        return progress(self.config, self.state.step, self.minutes)

    @property
    def stopping(self) -> bool:
        """Whether no step follows."""
        return bool(self.signals.requested) or self.progress >= 1

    def due(self, every: int) -> bool:
        """Whether this step is one of every so many."""
        return bool(every) and self.state.step % every == 0

    def documents(self, first: int) -> list[str]:
        """The names of the documents in the step whose first micro-batch has this number."""
        numbers = range(first, first + self.config.gradient_accumulation_steps)
        return list(dict.fromkeys(name for n in numbers for name in self.components.loader.names(n)))

    def emit_interrupted(self) -> None:
        """Report once that a signal asked the run to stop."""
        if self.signals.requested and not self.interruption_emitted:
            self.interruption_emitted = True
            self.emit(Interrupted(self.signals.requested.name))

    def emit_prepared(self) -> None:
        loader, model = self.components.loader, self.components.model
        parameters = sum(parameter.numel() for parameter in model.parameters())
        self.emit(Prepared(self.folder.path, parameters, len(loader.store), loader.tokens, loader.rows))

    def emit_stepped(self, result: TrainStepResult, seconds: float) -> None:
        evaluator = self.components.evaluator
        self.emit(
            Stepped(
                step=self.state.step,
                tokens=self.state.tokens,
                num_targets=result.num_targets,
                loss=result.loss,
                learning_rate=result.learning_rate,
                grad_norm=result.grad_norm,
                epoch=self.components.loader.epoch,
                seconds=seconds,
                progress=self.progress,
                minutes=self.minutes,
                item="token" if evaluator is None else evaluator.item,
                routing=result.routing,
            )
        )
