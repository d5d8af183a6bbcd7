"""What several commands share: options, progress, output."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Annotated, Any

import typer

Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="CKPT", help="A checkpoint folder, or one of a run: RUN, RUN/best, RUN/last.", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value instead of text.")]
NewTokens = Annotated[int, typer.Option(help="The most tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token; higher is more varied.")]
TopK = Annotated[int | None, typer.Option(help="Keep this many most likely tokens.", show_default=False)]
TopP = Annotated[float, typer.Option(help="Keep the fewest tokens whose probabilities sum to this.")]
MinP = Annotated[float, typer.Option(help="Keep tokens this likely, relative to the most likely one.")]
Seed = Annotated[int | None, typer.Option(help="Seed for reproducible sampling.", show_default=False)]


class Progress:
    """The current step on one line of a terminal, cleared at the end; nothing where stderr is no terminal."""

    def __init__(self, silent: bool = False) -> None:
        self._shown = not silent and sys.stderr.isatty()

    def __enter__(self) -> Progress:
        return self

    def step(self, name: str) -> None:
        """Show what has begun."""
        if self._shown:
            sys.stderr.write(f"\r\x1b[2K{printable(name)} …")
            sys.stderr.flush()

    def __exit__(self, *_: object) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Inside, what foreign code prints goes to stderr and does not mix with our own output."""
    with redirect_stdout(sys.stderr):
        yield


def print_json(value: Any) -> None:
    """One JSON value on standard output."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def write(text: str) -> None:
    """Write text from a model and flush. A terminal gets no control characters: they could move its cursor."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def printable(text: str) -> str:
    """``text`` with control characters, except newline and tab, as U+FFFD."""
    return "".join(c if c.isprintable() or c in "\n\t " else "\ufffd" for c in text)


def names(text: str | None) -> list[str] | None:
    """``a,b`` as a list; None stays None."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def numbers(text: str, option: str) -> list[int]:
    """``3,5,1`` as whole numbers."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a list of whole numbers; write it like 3,5,1", param_hint=option
        ) from None
