"""``pellucid``: the commands, and how they end: exit codes.

====  ======================================================================
code  meaning
====  ======================================================================
0     done
1     a check failed (an audit found a leak, a training run had to stop)
2     bad usage or input, or the system failed (no space, no permission)
130   Ctrl-C; files written before are whole
141   the reader of the output closed it
143   SIGTERM, likewise
====  ======================================================================

A command is a function in a file of its own, listed in :data:`VERBS`. It imports what is heavy inside, so that
``pellucid --help`` starts without torch.
"""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import typer

from pellucid.cli.audit import audit
from pellucid.cli.chat import chat
from pellucid.cli.demo import demo
from pellucid.cli.draw import draw
from pellucid.cli.generate import generate
from pellucid.cli.runs import runs
from pellucid.cli.show import show
from pellucid.cli.train import train
from pellucid.cli.verify import verify
from pellucid.errors import InputError, StorageError, TrainingError

# ClickException, which is click's own or, with newer typers, that of the copy inside typer.
_USAGE = cast(type[Exception], typer.BadParameter.__mro__[2])
assert _USAGE.__name__ == "ClickException"

_STOPPED = "stopped by Ctrl-C"

VERBS: tuple[Callable[..., Any], ...] = (audit, chat, demo, draw, generate, runs, show, train, verify)

app = typer.Typer(
    name="pellucid",
    help="Transformers in which who may see whom is written once, obeyed everywhere, drawn, and proved.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _interruptible(verb: Callable[..., Any]) -> Callable[..., Any]:
    """``verb`` with a message when Ctrl-C ends it; some versions of typer would end silently."""

    @functools.wraps(verb)
    def run_verb(**options: Any) -> Any:
        try:
            return verb(**options)
        except KeyboardInterrupt:
            raise typer.Exit(_end(130, _STOPPED)) from None

    return run_verb


for _verb in VERBS:
    app.command()(_interruptible(_verb))


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and stop."),
) -> None:
    if version:
        from importlib.metadata import version as version_of

        typer.echo(f"pellucid {version_of('pellucid')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


def run(arguments: Sequence[str] | None = None) -> NoReturn:
    """The entry point of the ``pellucid`` command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a narrow terminal must not end a long run
    # Threads that wait for each other by spinning take the cores from one another when anything else runs: a training
    # step on two cores took twice to ten times as long beside one busy process. Read when torch is loaded.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    sys.exit(main(arguments))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns its exit code. Only mistakes of our own show a traceback."""
    try:
        code = app(args=None if arguments is None else list(arguments), standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        return _end(130, _STOPPED)
    except _USAGE as error:
        return _end(2, f"error: {error.format_message()}")  # type: ignore[attr-defined]
    except (InputError, StorageError) as error:
        return _end(2, f"error: {error}")
    except TrainingError as error:
        return _end(1, f"error: {error}")
    except (BrokenPipeError, SystemExit):  # click itself turns the first into the second, and only that
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to flush at exit
        return 141
    except OSError as error:
        return _end(2, f"error: {_system_error(error)}")
    return code if isinstance(code, int) else 0


def _end(code: int, line: str) -> int:
    typer.echo(" ".join(line.split("\n")), err=True)
    return code


_WAYS_OUT = {
    errno.ENOSPC: "free some space, or write elsewhere",
    errno.EDQUOT: "free some space, or write elsewhere",
    errno.EROFS: "write to a folder that is not read-only",
    errno.EACCES: "choose a file or folder that you may use",
    errno.EPERM: "choose a file or folder that you may use",
}


def _system_error(error: OSError) -> str:
    """An error of the operating system on one line, with the way out."""
    what = (error.strerror or str(error) or type(error).__name__).lower()
    name = f"{error.filename}: " if error.filename is not None else ""
    way = _WAYS_OUT.get(error.errno or 0)
    return f"{name}{what}" + (f"; {way}" if way else "")
