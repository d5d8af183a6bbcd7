"""Training, from top to bottom: prepare, then step, log, validate and save until the budget is spent."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

from pellucid.data.text import Document
from pellucid.errors import CheckpointError, StorageError
from pellucid.training import state
from pellucid.training.config import TrainConfig
from pellucid.training.events import (
    Finished,
    Interrupted,
    Listener,
    Prepared,
    Resumed,
    Saved,
    Stepped,
    Validated,
)
from pellucid.training.interrupts import Interrupts
from pellucid.training.monitors import Metrics, told
from pellucid.training.prepare import Parts, prepare, refuse_missing_device, settled
from pellucid.training.result import TrainResult
from pellucid.training.run_folder import RunFolder, step_name
from pellucid.training.schedule import multiplier, progress
from pellucid.training.step import StepResult, Where, train_step
from pellucid.training.validation import Validation, bits_per_byte


def train(
    config: TrainConfig, run_folder: str | Path, *, resume: bool | None = None, on_event: Listener | None = None
) -> TrainResult:
    """Train the model that ``config`` describes and keep everything in ``run_folder``.

    A folder that holds a run of the same ``config`` goes on from its last checkpoint, as if it had never stopped;
    one that is finished says so, and nothing is done. ``resume=True`` wants a run there, and lets its budget and
    bookkeeping change; ``False`` wants an empty folder. Anything else that is there is refused. Ctrl-C and SIGTERM
    finish the step, save and return. ``on_event`` is told what happens (see ``training.events``).

    Raises:
        InputError: something in the config, the data or on the disk cannot be used; nothing was trained.
        TrainingError: the run must not go on; the message names the last good checkpoint.
        StorageError: the disk took no more; likewise.
    """
    refuse_missing_device(config.device)
    goes_on = (Path(run_folder) / "config.yaml").is_file() if resume is None else resume
    if goes_on:
        run, config = RunFolder.reopen(run_folder, config, exactly=resume is None)
    else:
        config = settled(config)
        run = RunFolder.create(run_folder, config)
    listener = told([on_event] if on_event else [])
    try:
        return _finished(run, config, listener) or _train(config, run, goes_on, listener)
    finally:
        run.close()


def _finished(run: RunFolder, config: TrainConfig, tell: Listener) -> TrainResult | None:
    """The result of a run that has come to its end; None where something is left to do, or to do in another way."""
    last = run.pointed("last")
    if last is None:
        return None
    counters = state.read_counters(last / state.FOLDER)
    validation = Metrics(run.metrics).final(counters.step)
    longer = "budget" in run.changed and progress(config.budget, counters.step, counters.minutes) < 1
    if validation is None or longer or "validation" in run.changed:
        return None
    tell(Finished(run.path, counters.step))
    return TrainResult.of(run.path, last, counters, validation)


def _train(config: TrainConfig, run: RunFolder, goes_on: bool, tell: Listener) -> TrainResult:
    try:
        parts = prepare(config, run, resume_from=run if goes_on else None)
    except BaseException:
        if not goes_on:
            run.leave_nothing()
        raise
    metrics = Metrics(run.metrics)
    metrics.truncate(parts.counters.step)
    if goes_on:
        tell(Resumed(run.path, parts.counters.step))
    with Interrupts() as interrupts:
        return _Loop(config, run, parts, interrupts, told([metrics, tell])).go()


class _Loop:
    """The state of a run in memory, and what is done with it."""

    def __init__(
        self,
        config: TrainConfig,
        run: RunFolder,
        parts: Parts,
        interrupts: Interrupts,
        tell: Listener,
    ) -> None:
        self.config, self.run, self.parts, self.counters = config, run, parts, parts.counters
        self.interrupts, self.tell = interrupts, tell
        self.last = run.pointed("last")
        self.began = time.monotonic() - 60 * parts.counters.minutes

    def go(self) -> TrainResult:
        self.tell_prepared()
        while self.progress < 1 and not self.interrupts.asked:
            self.step()
            if self.due(self.config.validation.every):
                self.validate(self.parts.sample, final=False)
            if self.due(self.config.save_every):
                self.save()
        if self.interrupts.asked:
            self.tell(Interrupted(self.interrupts.asked.name))
        checkpoint = self.save()
        validation = self.validate(self.parts.heldout.documents("heldout"), final=True)
        interrupted = self.interrupts.asked is not None
        return TrainResult.of(self.run.path, checkpoint, self.counters, validation, interrupted=interrupted)

    # ---- what is done

    def step(self) -> None:
        """One change of the weights."""
        started, counters, parts = time.monotonic(), self.counters, self.parts
        parts.optimizers.set_rate(multiplier(self.config.schedule, self.config.budget, counters.step, self.minutes))
        parts.model.train()
        first = parts.loader.batches
        batches = [next(parts.loader).to(self.config.device) for _ in range(self.config.accumulation)]
        result = train_step(
            parts.model,
            batches,
            parts.optimizers,
            clip_norm=self.config.clip_norm,
            precision=self.config.settled_precision,
            where=Where(counters.step + 1, lambda: self.documents(first), self.last),
        )
        seconds = time.monotonic() - started
        counters.step += 1
        counters.tokens += result.count
        counters.training_seconds += seconds
        self.tell_stepped(result, seconds)

    def validate(self, documents: Iterable[Document], *, final: bool) -> Validation | None:
        """Held-out bits per byte; None if somebody asks the run to stop meanwhile."""
        started, config, counters = time.monotonic(), self.config, self.counters
        length, stride = config.window
        if self.interrupts.asked:
            return None
        found = bits_per_byte(
            self.parts.model,
            self.parts.tokenizer,
            takewhile(lambda _: not self.interrupts.asked, documents),
            length=length,
            stride=stride,
            batch_tokens=config.validation.batch_tokens,
            precision=config.settled_precision,
        )
        if self.interrupts.asked:
            return None
        best = not final and (counters.best is None or found.bits_per_byte < counters.best)
        if best:
            counters.best, counters.best_step = found.bits_per_byte, counters.step
        self.tell(
            Validated(
                step=counters.step,
                bits_per_byte=found.bits_per_byte,
                nats=found.nats,
                nats_per_token=found.nats / found.tokens,
                tokens=found.tokens,
                bytes=found.bytes,
                documents=found.documents,
                final=final,
                best=best,
                seconds=time.monotonic() - started,
            )
        )
        return found

    def save(self) -> Path:
        """A whole checkpoint of this step, unless there is one."""
        parts, counters = self.parts, self.counters
        if self.last is not None and self.last.name == step_name(counters.step):
            return self.last
        counters.minutes, counters.loader = self.minutes, parts.loader.state_dict()
        try:
            self.last = self.run.save(parts.model, parts.tokenizer, counters, parts.optimizers)
            if counters.best_step == counters.step:
                self.run.mark_best(self.last)
            self.run.prune(self.config.keep)
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
        return progress(self.config.budget, self.counters.step, self.minutes)

    def due(self, every: int) -> bool:
        """Whether this step is one of every so many."""
        return bool(every) and self.counters.step % every == 0

    def documents(self, first: int) -> list[str]:
        """The documents of the step whose first batch has this number."""
        numbers = range(first, first + self.config.accumulation)
        return list(dict.fromkeys(name for n in numbers for name in self.parts.loader.names(n)))

    # ---- what is told

    def tell_prepared(self) -> None:
        loader, model = self.parts.loader, self.parts.model
        parameters = sum(parameter.numel() for parameter in model.parameters())
        self.tell(Prepared(self.run.path, parameters, len(loader.store), loader.tokens, loader.rows))

    def tell_stepped(self, result: StepResult, seconds: float) -> None:
        self.tell(
            Stepped(
                step=self.counters.step,
                tokens=self.counters.tokens,
                count=result.count,
                loss=result.loss,
                rate=result.rate,
                grad_norm=result.grad_norm,
                epoch=self.parts.loader.epoch,
                seconds=seconds,
                progress=self.progress,
                minutes=self.minutes,
            )
        )
