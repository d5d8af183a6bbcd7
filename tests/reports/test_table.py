"""Tables: drawn on a terminal, plain lines elsewhere; cells cannot command the terminal."""

import io

import pytest

from pellucid.records import Table
from pellucid.reports import plain_lines, show

ODD = ("[red]x[/red]", None, True, "a\x1b[2Jb\nc")
TABLE = Table(
    "audit",
    ("check", "size", "passed", "where"),
    (
        ("future", 0.123456, False, "row 0"),
        ("漢字", 12, True, None),
        ("[red]x[/red]", None, True, "a\x1b[2Jb\nc"),
    ),
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_are_aligned_by_width_on_the_screen() -> None:
    assert plain_lines(TABLE) == [
        "audit",
        "check           size  passed  where",
        "future        0.1235  no      row 0",
        "漢字              12  yes     –",
        "[red]x[/red]       –  yes     a\\x1b[2Jb\\nc",
    ]


def test_a_pipe_gets_plain_lines() -> None:
    out = io.StringIO()
    show(TABLE, out)
    assert out.getvalue() == "\n".join(plain_lines(TABLE)) + "\n"


def test_a_terminal_gets_a_drawn_table_without_foreign_commands() -> None:
    out = Terminal()
    show(TABLE, out)
    text = out.getvalue()
    assert "┃" in text or "│" in text
    assert "[red]x[/red]" in text
    assert "\x1b[2J" not in text


def test_statuses_are_coloured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    show(Table("", ("check", "verdict"), (("future", "leak"), ("cache", "pass"))), out)
    assert "\x1b[1;31mleak" in out.getvalue()
    assert "\x1b[32mpass" in out.getvalue()


def test_numbers_that_are_none_have_names() -> None:
    assert plain_lines(Table("", ("s",), ((float("nan"),), (True,))))[1:] == ["nan", "yes"]


def test_a_table_without_rows_is_its_columns() -> None:
    assert plain_lines(Table("none", ("a", "b"), ())) == ["none", "a  b"]
