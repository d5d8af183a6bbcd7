"""What the rooms report and ``reports`` draws: findings, tables, figures. Plain values, ready for JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pellucid.errors import InputError, ShapeError

Status = Literal["pass", "leak", "fragile", "not_applicable", "error"]
Cell = str | int | float | bool | None

SEVERITY: dict[str, int] = {"not_applicable": 0, "pass": 1, "fragile": 2, "error": 3, "leak": 4}
"""Statuses from harmless to worst: the verdict over several findings is the worst of them."""


@dataclass(frozen=True)
class Where:
    """The first place that is wrong: slots of the request that the finding's case describes.

    ``key`` is the slot that must not (or must) be seen by ``query``; it lies in ``key_row`` when that is
    another row. What is not known is None.
    """

    row: int
    query: int | None = None
    key: int | None = None
    key_row: int | None = None

    def __str__(self) -> str:
        parts = [f"row {self.row}"]
        if self.query is not None:
            parts.append(f"query {self.query}")
        if self.key is not None:
            parts.append(f"key {self.key}" + ("" if self.key_row is None else f" of row {self.key_row}"))
        return ", ".join(parts)

    def to_dict(self) -> dict[str, int | None]:
        return {"row": self.row, "query": self.query, "key": self.key, "key_row": self.key_row}


@dataclass(frozen=True)
class Finding:
    """One answer of one check.

    ``pass``            what must hold, held
    ``leak``            it did not: finite content moved an output that must not see it, or a sum is wrong
    ``fragile``         it held for finite content only, or nothing could have shown a leak
    ``not_applicable``  the target cannot be asked this (the message says why)
    ``error``           the target raised

    ``size`` is the largest change that was seen and ``decided`` says how rounding was told from a leak.
    """

    check: str
    status: Status
    message: str
    case: str = ""
    where: Where | None = None
    size: float | None = None
    decided: str = ""

    def __post_init__(self) -> None:
        if self.status not in get_args(Status):
            known = ", ".join(get_args(Status))
            raise InputError(f"a finding's status is {self.status!r}; choose one of {known}")

    @property
    def failed(self) -> bool:
        """Whether this finding fails an audit."""
        return self.status in ("leak", "error")

    def to_dict(self) -> dict[str, Any]:
        return {
            "check": self.check,
            "case": self.case,
            "status": self.status,
            "message": self.message,
            "where": None if self.where is None else self.where.to_dict(),
            "size": number(self.size),
            "decided": self.decided,
        }


def worst(findings: tuple[Finding, ...]) -> Status:
    """The verdict over several findings."""
    return max((f.status for f in findings), key=lambda status: SEVERITY[status], default="not_applicable")


@dataclass(frozen=True)
class Table:
    """Rows of plain cells under named columns."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        for index, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ShapeError(
                    f"row {index} of table {self.title!r} has {len(row)} cells, but the table has "
                    f"{len(self.columns)} columns; give one cell a column"
                )

    def to_dict(self) -> dict[str, Any]:
        rows = [[number(cell) if isinstance(cell, float) else cell for cell in row] for row in self.rows]
        return {"title": self.title, "columns": list(self.columns), "rows": rows}


@dataclass(frozen=True)
class Figure:
    """A picture as self-contained SVG."""

    title: str
    svg: str
    caption: str = ""

    def to_dict(self) -> dict[str, str]:
        return {"title": self.title, "svg": self.svg, "caption": self.caption}


def number(value: float | None) -> float | str | None:
    """A float as JSON can hold it: what is not finite becomes its name."""
    return value if value is None or math.isfinite(value) else str(value)
