"""The documentation, checked: runs the Python in every page and writes the command line's help.

    python docs/build.py            run every page, write docs/cli.md, docs/words.md and docs/api.md
    python docs/build.py --check    the same, but fail where one of the three is stale

The ``python`` blocks of a page share one namespace and run in an empty folder, with warnings as errors. A ``text``
block right behind a ``python`` block is what that block prints.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shlex
import sys
import tempfile
import warnings
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CLI = ROOT / "docs" / "cli.md"
WORDS = ROOT / "docs" / "words.md"
API = ROOT / "docs" / "api.md"
WIDTH = 88

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """Fenced text of a page; ``line`` is where it starts, ``prints`` what it must print (None: anything)."""

    language: str
    text: str
    line: int
    prints: str | None


class StalePageError(Exception):
    """A page does not say what the code does."""


def pages() -> list[Path]:
    """Every page with code in it."""
    found = [*ROOT.glob("README*.md"), ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")]
    return sorted(page for page in found if page not in (CLI, API))


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = list(_FENCE.finditer(text))
    result = []
    for match, behind in zip_longest(found, found[1:]):
        follows = behind is not None and behind[1] == "text" and not text[match.end() : behind.start()].strip()
        prints = behind[2] if behind is not None and follows else None
        result.append(Block(match[1], match[2], text.count("\n", 0, match.start(2)) + 1, prints))
    return result


def run_page(page: Path) -> int:
    """Run a page's Python and compare what it prints; the number of blocks that ran."""
    chosen = [block for block in blocks(page) if block.language == "python"]
    names: dict[str, Any] = {"__name__": page.stem}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("error")
        for block in chosen:
            # empty lines in front let a traceback name the line of the page
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(code, names)
            if block.prints is not None and printed.getvalue().strip() != block.prints.strip():
                raise StalePageError(f"{page}:{block.line} prints\n{printed.getvalue()}\nbut says\n{block.prints}")
    return len(chosen)


def command_lines(page: Path) -> Iterator[list[str]]:
    """The words of each shell command that a page shows."""
    for block in blocks(page):
        if block.language in ("console", "sh"):
            for line in block.text.splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                if words and (block.language == "sh" or line.startswith("$ ")):
                    yield words


def parse_command(words: list[str]) -> None:
    """Refuse a ``pellucid`` command line that the command line itself would refuse."""
    group, _ = _commands()
    verb, *arguments = words[1:]
    if verb in ("--help", "--version"):
        return
    if verb not in group.commands:
        raise StalePageError(f"{shlex.join(words)}: there is no verb {verb!r}")
    group.commands[verb].make_context(verb, [word for word in arguments if word != "--help"])


def cli_page() -> str:
    """``docs/cli.md``: the help of every verb."""
    group, context = _commands()
    parts = [
        "# The command line",
        "Written by `make docs` from the help of each verb; change it there.",
        _help(group, context),
    ]
    for name, command in sorted(group.commands.items()):
        own = command.context_class(command, info_name=name, parent=context, terminal_width=WIDTH)
        parts += [f"## pellucid {name}", _help(command, own)]
    codes = (
        "Exit codes: 0 done; 1 a check failed (an audit found a leak, a run had to stop); 2 bad usage or input, or the "
        "system refused; 130 Ctrl-C; 141 the reader of the output went away; 143 SIGTERM."
    )
    return "\n\n".join([*parts, codes]) + "\n"


def _commands() -> tuple[Any, Any]:
    import typer

    from pellucid.cli.main import app

    group = typer.main.get_command(app)
    return group, group.context_class(group, info_name="pellucid", terminal_width=WIDTH)


def _help(command: Any, context: Any) -> str:
    return f"```text\n{command.get_help(context).rstrip()}\n```"


def words_page() -> str:
    """``docs/words.md``: every word of a config."""
    return str(_beside("words_page").words_page())


def api_page() -> str:
    """``docs/api.md``: every exported name."""
    return str(_beside("api_page").api_page())


def _beside(name: str) -> Any:
    if str(ROOT / "docs") not in sys.path:
        sys.path.insert(0, str(ROOT / "docs"))
    return importlib.import_module(name)


def main(arguments: list[str]) -> int:
    """Run everything; 1 when a page is stale."""
    for page in pages():
        print(f"{page.relative_to(ROOT)}: {run_page(page)} blocks")
        for words in command_lines(page):
            if words[0] == "pellucid":
                parse_command(words)
    stale = False
    for page, fresh in ((CLI, cli_page()), (WORDS, words_page()), (API, api_page())):
        if "--check" not in arguments:
            page.write_text(fresh, encoding="utf-8")
        elif not page.is_file() or page.read_text(encoding="utf-8") != fresh:
            print(f"docs/{page.name} is stale; run: make docs", file=sys.stderr)
            stale = True
    return int(stale)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
