"""Exit codes, one-line errors, lazy imports."""

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from pellucid.cli import main as cli
from pellucid.errors import ConfigError, StorageError, TrainingError


def process(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    code = "from pellucid.cli.main import run; run()"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)  # type: ignore[call-overload, no-any-return]


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Make the application raise what it is told to."""

    def arrange(error: BaseException) -> None:
        def app(**_: object) -> None:
            raise error

        monkeypatch.setattr(cli, "app", app)

    return arrange


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("a is 1, but must be 2"), 2, "error: a is 1, but must be 2\n"),
        (ConfigError("two\nlines"), 2, "error: two lines\n"),
        (TrainingError("step 7: the loss is nan"), 1, "error: step 7: the loss is nan\n"),
        (StorageError("cannot write x: the disk is full"), 2, "error: cannot write x: the disk is full\n"),
        (KeyboardInterrupt(), 130, "stopped by Ctrl-C\n"),
        (typer.Abort(), 130, "stopped by Ctrl-C\n"),
        (typer.BadParameter("no good"), 2, "error: Invalid value: no good\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/a"),
            2,
            "error: runs/a: no space left on device; free some space, or write elsewhere\n",
        ),
        (
            OSError(errno.EROFS, "Read-only file system", "/x"),
            2,
            "error: /x: read-only file system; write to a folder that is not read-only\n",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "/x"),
            2,
            "error: /x: permission denied; choose a file or folder that you may use\n",
        ),
        (OSError("odd"), 2, "error: odd\n"),
    ],
)
def test_ends_become_exit_codes_and_one_line(
    raising: Callable[[BaseException], None],
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    said: str,
) -> None:
    raising(error)
    assert cli.main([]) == code
    assert capsys.readouterr().err == said


def test_our_own_mistakes_show_their_traceback(raising: Callable[[BaseException], None]) -> None:
    raising(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        cli.main([])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["genrate"], "No such command 'genrate'"),
        (["generate"], "Missing argument 'CKPT'"),
        (["--nope"], "No such option"),
        (["draw", "causal", "--length", "x"], "--length"),
    ],
)
def test_bad_usage_is_one_line_and_two(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert said in lines[0]


def test_no_verb_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "generate" in capsys.readouterr().out


def test_every_verb_has_help_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in cli.VERBS:
        assert cli.main([verb.__name__, "--help"]) == 0
        text = capsys.readouterr().out
        assert re.search(rf"Example:\s+pellucid {verb.__name__} ", text)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert re.fullmatch(r"pellucid \d+\.\d+\.\S+\n", capsys.readouterr().out)


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; from pellucid.cli.main import main\n"
        "codes = [main([]), main(['--help']), main(['generate', '--help']), main(['draw', 'x', '-o', 'x'])]\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert codes == [2, 0, 0, 2], codes\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_process_ends_with_the_code_and_without_a_traceback(tmp_path: Path) -> None:
    done = process("draw", "causal & wndow(3)", "-o", str(tmp_path / "x.svg"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_behind_the_output_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", "from pellucid.cli.main import run; run(['--help'])"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 2
    assert done.stderr == "error: no space left on device; free some space, or write elsewhere\n"


def test_a_reader_that_goes_away_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-c", "from pellucid.cli.main import run; run(['--help'])"],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 141
    assert done.stderr == ""
