"""Listeners of a run: the metrics log, a progress bar on a terminal, plain lines elsewhere, TensorBoard."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from pellucid.errors import CheckpointError, StorageError, UnsupportedError
from pellucid.records import number
from pellucid.training.results import (
    Event,
    Finished,
    Interrupted,
    Listener,
    Prepared,
    Resumed,
    Saved,
    Stepped,
    Validated,
    Validation,
    Warned,
    parse_validation,
)

_SECONDS_BETWEEN_LINES = 10.0
_LONGEST_LINE = 1 << 16


class MetricsLog:
    """``metrics.jsonl``: one line a step and a validation, each written whole and at once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, event: Event) -> None:
        if isinstance(event, Stepped):
            values = {field.name: getattr(event, field.name) for field in fields(event)}
            routing, _ = values.pop("routing"), values.pop("item")
            self._write({"kind": "step", **values} | ({} if routing is None else {"routing": routing._asdict()}))
        elif isinstance(event, Validated):
            found = event.result
            bits = {"bits_per_byte": found.bits_per_byte} if found.bytes else {}
            sums = {name: getattr(found, name) for name in ("nats", "loss", "tokens", "bytes", "documents")}
            about = {"final": event.final, "best": event.best, "seconds": event.seconds}
            self._write({"kind": "validation", "step": event.step, **bits, **sums, **about, **found.to_dict()})

    def _write(self, record: dict[str, Any]) -> None:
        line = (json.dumps(_json_numbers(record), allow_nan=False) + "\n").encode()
        try:
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                written = os.write(handle, line)
            finally:
                os.close(handle)
        except OSError as error:
            raise StorageError(f"cannot write {self.path}: {error.strerror}; free space there and resume") from error
        if written != len(line):
            raise StorageError(f"cannot write {self.path}: the disk is full; free space there and resume")

    def refuse_other_kinds(self) -> None:
        """Raises where the log is not a file that can be written."""
        if os.path.lexists(self.path) and not (self.path.is_file() and os.access(self.path, os.W_OK)):
            raise CheckpointError(f"{self.path} is not a file that can be written; put the log back, or move that away")

    def truncate(self, step: int) -> None:
        """Remove what was logged after ``step``, the final evaluation and a torn line: the run continues there."""
        if not self.path.exists():
            return
        kept = 0
        try:
            with open(self.path, "rb+") as file:
                for line in file:
                    record = _record(line)
                    if record is None or type(record["step"]) is not int:
                        break
                    if record["step"] > step or (record["step"] == step and record.get("final")):
                        break
                    kept += len(line)
                file.truncate(kept)
        except OSError as error:
            raise StorageError(f"cannot write {self.path}: {error.strerror}; make it a file that can be") from error

    def records(self) -> Iterator[dict[str, Any]]:
        """The lines as they were written, up to one that was cut off."""
        try:
            with open(self.path, "rb") as file:
                while (record := _record(file.readline(_LONGEST_LINE))) is not None:
                    yield record
        except FileNotFoundError:
            return
        except OSError as error:
            raise CheckpointError(
                f"cannot read {self.path}: {error.strerror or error}; make it a file that can be"
            ) from error

    def final(self, step: int) -> Validation | None:
        """The evaluation at the end, if the log has one of ``step``."""
        found = None
        for line in self.records():
            if line["kind"] == "validation" and line["step"] == step and line.get("final") is True:
                found = parse_validation(line) or found
        return found


def _json_numbers(value: Any) -> Any:
    """Numbers that JSON can write, at every depth."""
    if isinstance(value, dict):
        return {key: _json_numbers(part) for key, part in value.items()}
    return number(value) if isinstance(value, float) else value


def _record(line: bytes) -> dict[str, Any] | None:
    """A whole line of the log as a mapping; None for a torn or foreign one."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and {"kind", "step"} <= set(record) else None


def broadcast(listeners: Sequence[Listener]) -> Listener:
    """One listener that calls all of them."""

    def emit(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return emit


@contextmanager
def console_listener(console: Console | None = None) -> Iterator[Listener]:
    """A listener for people: a bar with the numbers on a terminal, otherwise a line every few seconds."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _ConsoleListener(console)
        return
    columns = BarColumn(bar_width=24), TextColumn("{task.percentage:>3.0f}%"), TextColumn("{task.description}")
    with Progress(*columns, console=console, transient=True) as bar:
        yield _ConsoleListener(console, bar)


def describe(event: Event, speed: float = 0.0) -> str:
    """An event in one line."""
    match event:
        case Prepared():
            return (
                f"{event.parameters:,} parameters, {event.documents:,} documents, {event.tokens:,} tokens "
                f"in {event.rows:,} rows -> {event.run}"
            )
        case Stepped():
            return (
                f"step {event.step}  loss {event.loss:.4f}  learning rate {event.learning_rate:.2e}  "
                f"gradient {event.grad_norm:.3f}  {speed:,.0f} {event.item}s/s  {clock(event.minutes_left)} left"
            )
        case Validated():
            count = event.result.documents
            what, best = f"all {count}" if event.final else str(count), ", the best so far" if event.best else ""
            return f"step {event.step}  {event.result} on {what} held-out documents{best}"
        case Saved():
            return f"step {event.step}  saved {event.path}"
        case Resumed():
            where = f"after step {event.step}" if event.step else "from its start: it had saved nothing yet"
            return f"the run in {event.run} continues {where}"
        case Finished():
            return f"the run in {event.run} is finished at step {event.step}: nothing is left to do"
        case Interrupted():
            return f"{event.signal}: finishing the step and saving; send it again to stop at once"
        case Warned():
            return f"warning: {event.message}"


def clock(minutes: float) -> str:
    """``m:ss``, or ``h:mm:ss``."""
    seconds = round(minutes * 60)
    hours, rest = divmod(seconds, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


class _ConsoleListener:
    """Prints events; of steps a bar, or a line every few seconds, with the tokens a second of the recent ones."""

    def __init__(self, console: Console, bar: Progress | None = None) -> None:
        self._console, self._bar = console, bar
        self._task = None if bar is None else bar.add_task("preparing", total=1.0)
        self._tokens = self._seconds = self._next = 0.0

    def __call__(self, event: Event) -> None:
        if not isinstance(event, Stepped):
            self._print(describe(event))
            return
        self._tokens = 0.95 * self._tokens + event.num_targets
        self._seconds = 0.95 * self._seconds + event.seconds
        line = describe(event, self._tokens / self._seconds if self._seconds else 0.0)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=event.progress, description=line)
        elif time.monotonic() >= self._next or event.progress >= 1:
            self._next = time.monotonic() + _SECONDS_BETWEEN_LINES
            self._print(line)

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


FOLDER = "tensorboard"


@contextmanager
def tensorboard_listener(run_folder: str | Path) -> Iterator[Listener]:
    """Write scalars into ``tensorboard`` in the run's folder, from the first step on."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UnsupportedError(
            "TensorBoard is not installed, so nothing can be written for it; pip install 'pellucid[tensorboard]', "
            "or leave it out: metrics.jsonl holds the same numbers"
        ) from error
    listener = _Scalars(Path(run_folder) / FOLDER, SummaryWriter)
    try:
        yield listener
    finally:
        listener.close()


class _Scalars:
    def __init__(self, folder: Path, writer: Any) -> None:
        self._folder, self._writer_class = folder, writer
        self._writer: Any = None

    def __call__(self, event: Event) -> None:
        match event:
            case Stepped():
                numbers = {"loss": event.loss, "learning_rate": event.learning_rate, "gradient_norm": event.grad_norm}
                numbers |= {"epoch": event.epoch, "tokens": event.tokens}
                numbers["tokens_per_second"] = event.num_targets / event.seconds if event.seconds else 0.0
                if event.routing is not None:
                    numbers |= {f"routing_{name}": value for name, value in event.routing._asdict().items()}
                self._write("train", event.step, numbers)
            case Validated():
                found = event.result
                numbers = {"bits_per_byte": found.bits_per_byte} if found.bytes else {"loss": found.loss}
                numbers |= {metric.name.replace(" ", "_"): metric.value for metric in found.metrics[1:]}
                self._write("heldout" if event.final else "heldout_sample", event.step, numbers)

    def _write(self, kind: str, step: int, numbers: dict[str, float]) -> None:
        if self._writer is None:  # purges later steps that were written before the run was resumed
            self._writer = self._writer_class(str(self._folder), purge_step=step)
        for name, value in numbers.items():
            self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
