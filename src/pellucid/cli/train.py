"""``pellucid train``."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pellucid.cli import common

if TYPE_CHECKING:
    from pellucid.training import TrainConfig, TrainResult

Config = Annotated[
    str,
    typer.Argument(metavar="CONFIG", help="A YAML or JSON file; with --resume also a run folder.", show_default=False),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[A.B=C]...", help="Settings that win over the file's.", show_default=False),
]
Out = Annotated[
    Path | None,
    typer.Option(help="The run folder. Default: runs/ and the config's name.", show_default=False),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Require a run to resume; its length and bookkeeping may change.")
]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Write scalars for TensorBoard too.")]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="Print the whole configuration and stop.")]


def train(
    config: Config,
    overrides: Overrides = None,
    out: Out = None,
    resume: Resume = False,
    tensorboard: TensorBoard = False,
    print_config: PrintConfig = False,
    as_json: common.Json = False,
) -> None:
    """Train a model; Ctrl-C or SIGTERM finishes the step with its validation, saves and stops.

    The exit code is then 130 or 143, and a second signal stops at once. A run folder that holds a run of the same
    configuration is resumed from its last checkpoint, as if it had never stopped. Its report.html shows the run.

    \b
    Example:
      pellucid train examples/small.yaml max_steps=2000 --out runs/small
    """
    try:
        with _DeferSignals():
            from pellucid.configfile import to_yaml
            from pellucid.training.config import TrainConfig

        file, folder = _places(config, out, resume)
        wanted = TrainConfig.from_file(file, overrides or [])
        if not print_config:
            _train(wanted, folder, resume, tensorboard, as_json)
        elif as_json:
            common.print_json(wanted.model_dump(mode="json"))
        else:
            typer.echo(to_yaml(wanted), nl=False)
    except KeyboardInterrupt as error:
        raise _exit(getattr(error, "signal", signal.SIGINT), aloud=True) from None


def _train(wanted: TrainConfig, folder: Path, resume: bool, tensorboard: bool, as_json: bool) -> None:
    from pellucid.cli.html_report import refresh_run_page

    result = _run(wanted, folder, resume, tensorboard)
    if as_json:
        common.print_json(result.to_dict())
    else:
        typer.echo(str(result))
    refresh_run_page(result)
    if result.interrupted:
        raise _exit(signal.Signals[result.signal])


def _run(wanted: TrainConfig, folder: Path, resume: bool, tensorboard: bool) -> TrainResult:
    from pellucid.training.loggers import broadcast, console_listener, tensorboard_listener
    from pellucid.training.loop import train as run

    with ExitStack() as stack:
        listeners = [stack.enter_context(tensorboard_listener(folder))] if tensorboard else []
        listeners.append(stack.enter_context(console_listener()))
        return run(wanted, folder, resume=True if resume else None, on_event=broadcast(listeners))


def _places(config: str, out: Path | None, resume: bool) -> tuple[Path, Path]:
    """The configuration's file and the run's folder."""
    from pellucid.errors import RunError
    from pellucid.files import checked_path

    path = checked_path(config, "the configuration")
    is_name = path.suffix.lower() not in (".yaml", ".yml", ".json")
    if resume and is_name and not (path / "config.yaml").is_file():
        raise RunError(f"there is no run in {path}: leave --resume out, and name a configuration to begin one")
    if path.is_dir():
        if not resume or out is not None:
            raise typer.BadParameter(
                f"{config} is a folder; give a configuration, or {config} --resume to resume its run"
            )
        return path / "config.yaml", path
    return path, out if out is not None else Path("runs") / path.stem


# ---- signals


class _DeferSignals:
    """While the program loads, a signal is noted, and the next one ends it at once: nothing has begun yet."""

    def __init__(self) -> None:
        self._noted: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            if handler is not None:  # None: not Python's to put back
                signal.signal(number, handler)
        if self._noted is not None:
            raise _exit(self._noted, aloud=True)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted is not None:
            os.write(2, f"{_stopped_by(number)}\n".encode())
            os._exit(128 + number)
        self._noted = signal.Signals(number)


_SECONDS_DEAF = 2.0


def _exit(number: signal.Signals, *, aloud: bool = False) -> typer.Exit:
    """The end after a signal. Those that follow it at once, as when a key is hammered, change nothing any more."""
    if threading.current_thread() is threading.main_thread():
        until = time.monotonic() + _SECONDS_DEAF
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, _deaf(signal.getsignal(each), until))
    if aloud:
        typer.echo(_stopped_by(number), err=True)
    return typer.Exit(128 + number)


def _deaf(before: Any, until: float) -> Any:
    """A handler that does nothing for a while, and then leaves it to the one ``before``."""

    def handle(number: int, frame: FrameType | None) -> None:
        if time.monotonic() >= until:
            signal.signal(number, before)
            os.kill(os.getpid(), number)

    return handle


def _stopped_by(number: int) -> str:
    return "stopped by Ctrl-C" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"
