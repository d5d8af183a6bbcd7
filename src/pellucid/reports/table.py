"""Tables of records: drawn on a terminal, plain aligned lines elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Drawn
from rich.text import Text

from pellucid.messages import printable
from pellucid.records import Cell, Table

STYLES: Mapping[str, str] = {"pass": "green", "leak": "bold red", "error": "bold red", "fragile": "yellow"}
"""How cells that hold exactly this word are coloured on a terminal."""


def show(table: Table, file: TextIO, *, styles: Mapping[str, str] = STYLES) -> None:
    """Write ``table`` to ``file``: drawn when that is a terminal, plain lines when it is not."""
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        file.write("\n".join(plain_lines(table)) + "\n")
        return
    drawn = Drawn(title=printable(table.title) or None, title_justify="left", header_style="bold")
    for index, name in enumerate(table.columns):
        drawn.add_column(printable(name), justify="right" if _numeric(table, index) else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(text, styles.get(text, "")) for text in map(cell_text, row)))
    console.print(drawn)


def plain_lines(table: Table) -> list[str]:
    """The table as lines: title, columns, rows; cells are two spaces apart."""
    lines = [
        [printable(name) for name in table.columns],
        *([cell_text(cell) for cell in row] for row in table.rows),
    ]
    widths = [max(cell_len(line[index]) for line in lines) for index in range(len(table.columns))]
    right = [_numeric(table, index) for index in range(len(table.columns))]
    aligned = ["  ".join(map(_aligned, line, widths, right)).rstrip() for line in lines]
    return [printable(table.title), *aligned] if table.title else aligned


def cell_text(cell: Cell) -> str:
    """One cell as text on one line."""
    if cell is None:
        return "–"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return f"{cell:.4g}" if math.isfinite(cell) else str(cell)
    return printable(str(cell))


def _numeric(table: Table, index: int) -> bool:
    cells = [row[index] for row in table.rows if row[index] is not None]
    return bool(cells) and all(isinstance(c, int | float) and not isinstance(c, bool) for c in cells)


def _aligned(text: str, width: int, right: bool) -> str:
    space = " " * (width - cell_len(text))
    return space + text if right else text + space
