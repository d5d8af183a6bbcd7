"""What the rooms report and ``reports`` draws: findings, tables, figures, flows. Plain values, ready for JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, get_args

from pellucid.errors import ArgumentError, ShapeError

Status = Literal["pass", "leak", "fragile", "not_applicable", "error"]
Cell = str | int | float | bool | None
Sees = Sequence[Sequence[bool]]
"""``[query][key]``: whether the query may see the key."""
Sizes = Sequence[Sequence[float | None]]
"""``[query][key]``: how far the query's output moved when the key was changed; None where it was not tried."""

LONGEST_VIEW = 64
"""The most tokens of a :class:`TokenView`."""
MOST_WEIGHTS = 1 << 20
"""The most attention weights of a :class:`TokenView`, over all layers and heads."""

SEVERITY: dict[str, int] = {"not_applicable": 0, "pass": 1, "fragile": 2, "error": 3, "leak": 4}
"""Statuses from harmless to worst: the verdict over several findings is the worst of them."""


class AsDict:
    """Base of the records below."""

    def to_dict(self) -> dict[str, Any]:
        """As plain data that JSON can hold."""
        found: dict[str, Any] = plain(self)
        return found


@dataclass(frozen=True)
class Location(AsDict):
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


@dataclass(frozen=True)
class Finding(AsDict):
    """One answer of one check.

    ``pass``            what must hold holds
    ``leak``            it does not: finite content moved an output that must not see it, or a sum is wrong
    ``fragile``         it holds for finite content only, or nothing could have shown a leak
    ``not_applicable``  the check does not apply to the target (the message says why)
    ``error``           the target raised

    ``size`` is the largest change that was seen and ``decided`` says how rounding was distinguished from a leak.
    """

    check: str
    status: Status
    message: str
    case: str = ""
    where: Location | None = None
    size: float | None = None
    decided: str = ""

    def __post_init__(self) -> None:
        if self.status not in get_args(Status):
            known = ", ".join(get_args(Status))
            raise ArgumentError(f"a finding's status is {self.status!r}; choose one of {known}")

    @property
    def failed(self) -> bool:
        """Whether this finding fails an audit."""
        return self.status in ("leak", "error")


def worst(findings: tuple[Finding, ...]) -> Status:
    """The verdict over several findings."""
    return max((f.status for f in findings), key=lambda status: SEVERITY[status], default="not_applicable")


@dataclass(frozen=True)
class Table(AsDict):
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


@dataclass(frozen=True)
class Figure(AsDict):
    """A picture as self-contained SVG."""

    title: str
    svg: str
    caption: str = ""


@dataclass(frozen=True)
class Flow(AsDict):
    """Who may see whom (``declared``) beside who really does (``measured``), over the slots of one request.

    Rows are queries, columns keys; ``queries`` and ``keys`` name them (empty: they are numbered).
    """

    title: str
    declared: Sees
    measured: Sizes
    queries: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        rows, columns = len(self.declared), len(self.declared[0]) if self.declared else 0
        for name, matrix in (("declared", self.declared), ("measured", self.measured)):
            _refuse_shape(f"{name} of flow {self.title!r}", matrix, rows, columns)
        for name, names, want in (("queries", self.queries, rows), ("keys", self.keys, columns)):
            if names and len(names) != want:
                raise ShapeError(
                    f"flow {self.title!r} names {len(names)} {name} but its matrices have {want}; name all or none"
                )

    @property
    def leaks(self) -> list[tuple[int, int]]:
        """``(query, key)`` pairs that moved although they must not."""
        return [
            (query, key)
            for query, (may, sizes) in enumerate(zip(self.declared, self.measured, strict=True))
            for key, (sees, size) in enumerate(zip(may, sizes, strict=True))
            if has_moved(size) and not sees
        ]


@dataclass(frozen=True)
class TokenView(AsDict):
    """A sample text, token by token.

    ``may_see`` is what may reach each token through all layers; ``attention`` holds ``[layer][head][query][key]``
    weights (empty: not known) and ``layers`` names the layers (empty: they are numbered). ``moved`` says how far
    the output at each query moved when the key was replaced, and ``measure`` what its numbers mean. A text is at
    most :data:`LONGEST_VIEW` tokens long.
    """

    title: str
    tokens: tuple[str, ...]
    may_see: Sees
    attention: Sequence[Sequence[Sequence[Sequence[float]]]] = ()
    moved: Sizes = ()
    layers: tuple[str, ...] = ()
    measure: str = "relative to the largest change"
    note: str = ""

    def __post_init__(self) -> None:
        count, what = len(self.tokens), f"of token view {self.title!r}"
        if not 1 <= count <= LONGEST_VIEW:
            raise ShapeError(f"token view {self.title!r} has {count} tokens; show 1 to {LONGEST_VIEW}")
        _refuse_shape(f"may_see {what}", self.may_see, count, count)
        if self.moved:
            _refuse_shape(f"moved {what}", self.moved, count, count)
        if any(len(heads) != len(self.attention[0]) for heads in self.attention):
            raise ShapeError(f"attention {what} has layers of {sorted(set(map(len, self.attention)))} heads; give one")
        if len(self.attention) * len(self.attention[0] if self.attention else ()) * count**2 > MOST_WEIGHTS:
            raise ShapeError(
                f"attention {what} has {len(self.attention)} layers of {len(self.attention[0])} heads over {count} "
                f"tokens, more than {MOST_WEIGHTS} weights; show fewer tokens, layers or heads"
            )
        for layer, heads in enumerate(self.attention):
            for head, weights in enumerate(heads):
                _refuse_shape(f"attention[{layer}][{head}] {what}", weights, count, count)
        if self.layers and len(self.layers) != len(self.attention):
            raise ShapeError(
                f"layers {what} names {len(self.layers)} of {len(self.attention)} layers; name all or none"
            )


@dataclass(frozen=True)
class Curve(AsDict):
    """One named series; points that are not finite are gaps."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ShapeError(f"curve {self.name!r} has {len(self.x)} x but {len(self.y)} y; give one y an x")


@dataclass(frozen=True)
class Curves(AsDict):
    """Series over one axis; ``log`` draws y on a logarithmic scale."""

    title: str
    curves: tuple[Curve, ...]
    x_label: str = "step"
    y_label: str = ""
    log: bool = False
    caption: str = ""


def has_moved(size: float | None) -> bool:
    """Whether a measured size means that something moved; NaN does."""
    return size is not None and size != 0


def _refuse_shape(name: str, matrix: Sequence[Sequence[Any]], rows: int, columns: int) -> None:
    widths = {len(row) for row in matrix}
    if len(matrix) != rows or (rows and widths != {columns}):
        got = f"{len(matrix)} rows of {', '.join(map(str, sorted(widths))) or 'no'} cells"
        raise ShapeError(f"{name} has {got}, but {rows} rows of {columns} are needed")


def number(value: float | None) -> float | str | None:
    """A float as JSON can hold it: what is not finite becomes its name."""
    return value if value is None or math.isfinite(value) else str(value)


def plain(value: Any) -> Any:
    """Records, lists and numbers as JSON can hold them."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return number(value) if isinstance(value, float) else value
