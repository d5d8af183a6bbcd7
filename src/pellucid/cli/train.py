"""``pellucid train``."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    bool, typer.Option("--resume", help="Want a run to go on with; its budget and bookkeeping may change.")
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
    """Train a model; Ctrl-C finishes the step, saves and stops.

    A run folder that holds a run of the same configuration goes on from its last checkpoint, as if it had never
    stopped.

    \b
    Example:
      pellucid train examples/small.yaml budget.steps=2000 --out runs/small
    """
    from pellucid.configfile import to_yaml
    from pellucid.training.config import TrainConfig

    file, folder = _places(config, out, resume)
    wanted = TrainConfig.from_file(file, overrides or [])
    if print_config:
        if as_json:
            common.print_json(wanted.model_dump(mode="json"))
        else:
            typer.echo(to_yaml(wanted), nl=False)
        return

    result = _run(wanted, folder, resume, tensorboard)
    if as_json:
        common.print_json(result.to_dict())
    else:
        typer.echo(str(result))
    if result.interrupted:
        raise typer.Exit(130)


def _run(wanted: TrainConfig, folder: Path, resume: bool, tensorboard: bool) -> TrainResult:
    from pellucid.training.loop import train as run
    from pellucid.training.monitors import console_listener, told
    from pellucid.training.tensorboard import tensorboard_listener

    with ExitStack() as stack:
        listeners = [stack.enter_context(tensorboard_listener(folder))] if tensorboard else []
        listeners.append(stack.enter_context(console_listener()))
        return run(wanted, folder, resume=True if resume else None, on_event=told(listeners))


def _places(config: str, out: Path | None, resume: bool) -> tuple[Path, Path]:
    """The configuration's file and the run's folder."""
    path = Path(config)
    if path.is_dir():
        if not resume or out is not None:
            raise typer.BadParameter(
                f"{config} is a folder; give a configuration, or {config} --resume to go on with its run"
            )
        return path / "config.yaml", path
    return path, out if out is not None else Path("runs") / path.stem
