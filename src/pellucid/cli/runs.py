"""``pellucid runs``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pellucid.cli import common

Folders = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="FOLDER",
        help="A folder that holds runs (default: runs), or two or more runs to compare.",
        show_default=False,
    ),
]


def runs(folders: Folders = None, as_json: common.Json = False) -> None:
    """List runs, or compare them.

    best and final are bits per byte of held-out text: of the validations on the way, and over all of it.

    \b
    Example:
      pellucid runs runs
      pellucid runs runs/small runs/wide
    """
    from pellucid.reports import show
    from pellucid.training.run_summary import comparison, differences, find_runs, read_run, runs_table

    if folders is not None and len(folders) > 1:
        found = [read_run(folder) for folder in folders]
        tables = comparison(found)
    else:
        found = [read_run(path) for path in find_runs(folders[0] if folders else Path("runs"))]
        tables = [runs_table(found)]
    if as_json:
        value = {"runs": [run.to_dict() for run in found]}
        common.print_json(value if len(tables) == 1 else {**value, "differences": differences(found)})
        return
    for number, table in enumerate(tables):
        if number:
            typer.echo("")
        show(table, sys.stdout)
    for run in found:
        if run.problem is not None:
            typer.echo(common.printable(f"{run.name}: {run.problem}"), err=True)
