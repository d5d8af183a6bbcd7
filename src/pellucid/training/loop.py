"""Training, from top to bottom: prepare, then step, log, validate and save until the budget is spent."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from pellucid.data.text import Document
from pellucid.errors import CheckpointError, StorageError
from pellucid.training.config import TrainConfig
from pellucid.training.events import Event, Interrupted, Listener, Prepared, Saved, Stepped, Validated
from pellucid.training.interrupts import Interrupts
from pellucid.training.monitors import Metrics
from pellucid.training.prepare import Parts, prepare, settled
from pellucid.training.run_folder import RunFolder, step_name
from pellucid.training.schedule import multiplier, progress
from pellucid.training.step import StepResult, Where, train_step
from pellucid.training.validation import Validation, bits_per_byte


@dataclass(frozen=True)
class TrainResult:
    """What a run came to."""

    run: Path
    checkpoint: Path
    steps: int
    tokens: int
    """Predictions that were learnt from."""
    tokens_per_second: float
    """While stepping: validation and saving left out."""
    validation: Validation | None
    """Over all held-out documents; None when the run was interrupted."""
    interrupted: bool

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        found = self.validation
        return {
            "run": str(self.run),
            "checkpoint": str(self.checkpoint),
            "steps": self.steps,
            "tokens_trained": self.tokens,
            "train_tokens_per_second": self.tokens_per_second,
            "heldout_bits_per_byte": None if found is None else found.bits_per_byte,
            "heldout_bytes": None if found is None else found.bytes,
            "heldout_documents": None if found is None else found.documents,
            "interrupted": self.interrupted,
        }

    def __str__(self) -> str:
        end = "interrupted" if self.validation is None else f"{self.validation.bits_per_byte:.4f} bits/byte held out"
        return (
            f"{self.checkpoint}: {self.steps:,} steps, {self.tokens:,} tokens, "
            f"{self.tokens_per_second:,.0f} tokens/s, {end}"
        )


def train(
    config: TrainConfig, run_folder: str | Path, *, resume: bool = False, on_event: Listener | None = None
) -> TrainResult:
    """Train the model that ``config`` describes and keep everything in ``run_folder``.

    A folder that holds something is refused, unless ``resume`` says to go on from its last checkpoint. Ctrl-C
    finishes the step, saves and returns. ``on_event`` is told what happens (see ``training.events``).

    Raises:
        InputError: something in the config, the data or on the disk cannot be used; nothing was trained.
        TrainingError: the run must not go on; the message names the last good checkpoint.
        StorageError: the disk took no more; likewise.
    """
    if resume:
        run, config = RunFolder.reopen(run_folder, config)
    else:
        config = settled(config)
        run = RunFolder.create(run_folder, config)
    try:
        parts = prepare(config, run, resume_from=run if resume else None)
    except BaseException:
        run.leave_nothing()
        raise
    metrics = Metrics(run.metrics)
    metrics.truncate(parts.counters.step)
    with Interrupts() as interrupts:
        return _Loop(config, run, parts, interrupts, [metrics, *([on_event] if on_event else [])]).go()


class _Loop:
    """The state of a run in memory, and what is done with it."""

    def __init__(
        self,
        config: TrainConfig,
        run: RunFolder,
        parts: Parts,
        interrupts: Interrupts,
        listeners: Sequence[Listener],
    ) -> None:
        self.config, self.run, self.parts, self.counters = config, run, parts, parts.counters
        self.interrupts, self.listeners = interrupts, listeners
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
        return self.result(checkpoint, validation)

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

    def tell(self, event: Event) -> None:
        for listener in self.listeners:
            listener(event)

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

    def result(self, checkpoint: Path, validation: Validation | None) -> TrainResult:
        counters = self.counters
        speed = counters.tokens / counters.training_seconds if counters.training_seconds else 0.0
        return TrainResult(
            run=self.run.path,
            checkpoint=checkpoint,
            steps=counters.step,
            tokens=counters.tokens,
            tokens_per_second=speed,
            validation=validation,
            interrupted=self.interrupts.asked is not None,
        )
