"""``pellucid verify``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from pellucid.cli import common

if TYPE_CHECKING:
    from pellucid.checkpoints.loading import Check

Level = Annotated[
    str | None,
    typer.Option(
        help="headers (names, shapes, types, text files), digests (also weights) or witness (also the outputs). "
        "The default is witness, or digests for a checkpoint that was saved with digests only."
    ),
]


def verify(checkpoint: common.Checkpoint, level: Level = None, as_json: common.Json = False) -> None:
    """Prove that a checkpoint still is what was saved.

    Exits with 1 when it is not what its contract says, and with 2 when it cannot be read.

    \b
    Example:
      pellucid verify my-model --level digests
    """
    from pellucid.checkpoints import verify as verify_folder
    from pellucid.reports import show

    found = verify_folder(checkpoint, None if level is None else _level(level))
    if as_json:
        common.print_json(found.to_dict())
    else:
        if found.differences:
            show(found.to_table(), sys.stdout)
        typer.echo(f"passed ({found.level})" if found.passed else f"failed: {common.printable(found.problem)}")
    raise typer.Exit(0 if found.passed else 1)


def _level(text: str) -> Check:
    from pellucid.checkpoints.loading import LEVELS

    for level in LEVELS:
        if text == level:
            return level
    raise typer.BadParameter(f"{text!r} is no level; choose one of {', '.join(LEVELS)}", param_hint="--level")
