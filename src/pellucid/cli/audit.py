"""``pellucid audit``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from pellucid.cli import common

Checks = Annotated[
    str | None,
    typer.Option(help="Only these checks, such as future,cache. Default: all.", show_default=False),
]
Strict = Annotated[bool, typer.Option("--strict", help="Fail on what is fragile too.")]


def audit(
    checkpoint: common.Checkpoint, checks: Checks = None, strict: Strict = False, as_json: common.Json = False
) -> None:
    """Prove that information flows only where it should.

    Exits with 1 when something leaks.

    \b
    Example:
      pellucid audit my-model --checks future,padding,cache
    """
    from pellucid.audits import audit as ask
    from pellucid.checkpoints import load
    from pellucid.models.probe import DecoderProbe
    from pellucid.reports import show

    model = load(checkpoint).model
    report = ask(model, DecoderProbe(model, checkpoint), common.names(checks))
    passed = report.passed and not (strict and "fragile" in report.verdicts.values())
    if as_json:
        common.print_json({**report.to_dict(), "passed": passed})
    else:
        show(report.table(), sys.stdout)
        typer.echo("passed" if passed else "failed")
    raise typer.Exit(0 if passed else 1)
