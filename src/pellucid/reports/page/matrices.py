"""Who may see whom, who really sees whom, and where the two differ: three matrices as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from markupsafe import Markup

from pellucid.records import Flow, has_moved
from pellucid.reports.page.text import name_of

MOST = 64
"""The most queries, and the most keys, that are drawn."""

_SIDE, _MARGIN = 264, 30
_LISTED = 8


def flow_block(flow: Flow) -> Mapping[str, Any]:
    """The template's values for ``flow``."""
    queries, keys, note = _drawn(flow)
    counts = _counts(flow)
    may = [["may" if flow.declared[q][k] else "" for k in keys] for q in queries]
    differs = [[difference(flow, q, k) for k in keys] for q in queries]
    panels = [
        ("may see", may, f"{counts['seen'] + counts['quiet'] + counts['untried may']} pairs"),
        ("does see", _strengths(flow, queries, keys), f"{counts['seen'] + counts['leak']} pairs"),
        ("difference", differs, "1 leak" if counts["leak"] == 1 else f"{counts['leak']} leaks"),
    ]
    return {
        "kind": "flow",
        "title": flow.title,
        "panels": [
            {"title": t, "svg": _svg(grid, t, queries, keys), "caption": caption} for t, grid, caption in panels
        ],
        "summary": _summary(counts),
        "leaks": [
            f"query {q}{_named(flow.queries, q)} sees key {k}{_named(flow.keys, k)}" for q, k in flow.leaks[:_LISTED]
        ],
        "more": max(0, counts["leak"] - _LISTED),
        "untried": counts["untried"] + counts["untried may"],
        "quiet": counts["quiet"],
        "notes": [text for text in (note, flow.note) if text],
    }


def difference(flow: Flow, query: int, key: int) -> str:
    """What one pair is: ``seen`` (may and does), ``quiet`` (may, nothing moved), ``leak``, ``untried`` or nothing."""
    may, size = flow.declared[query][key], flow.measured[query][key]
    if size is None:
        return "untried"
    if has_moved(size):
        return "seen" if may else "leak"
    return "quiet" if may else ""


def _counts(flow: Flow) -> dict[str, int]:
    counts = dict.fromkeys(("seen", "quiet", "leak", "untried", "untried may", ""), 0)
    for query, may in enumerate(flow.declared):
        for key, sees in enumerate(may):
            kind = difference(flow, query, key)
            counts["untried may" if kind == "untried" and sees else kind] += 1
    return counts


def _summary(counts: Mapping[str, int]) -> str:
    parts = [f"{counts['seen']:,} pairs see as declared"]
    if counts["quiet"]:
        parts.append(f"{counts['quiet']:,} may, but nothing moved")
    if counts["untried"] + counts["untried may"]:
        parts.append(f"{counts['untried'] + counts['untried may']:,} were not tried")
    leaks = counts["leak"]
    parts.append(f"{leaks:,} see what they must not" if leaks > 1 else f"{leaks or 'none'} sees what it must not")
    return "; ".join(parts) + "."


def _named(names: Sequence[str], index: int) -> str:
    return f" “{name_of(names[index])}”" if names else ""


def _drawn(flow: Flow) -> tuple[list[int], list[int], str]:
    """Which queries and keys are drawn, and a note where that is not all of them."""
    rows, columns = len(flow.declared), len(flow.declared[0]) if flow.declared else 0
    leaks = flow.leaks
    queries = _chosen(rows, [query for query, _ in leaks])
    keys = _chosen(columns, [key for _, key in leaks])
    if len(queries) == rows and len(keys) == columns:
        return queries, keys, ""
    return queries, keys, (
        f"{len(queries)} of {rows} queries and {len(keys)} of {columns} keys are drawn, those with leaks first; "
        "all pairs are counted."
    )  # fmt: skip


def _chosen(count: int, first: Sequence[int]) -> list[int]:
    if count <= MOST:
        return list(range(count))
    wanted = list(dict.fromkeys(first))[: MOST - 2]
    evenly = [round(n * (count - 1) / (MOST - 1)) for n in range(MOST)]
    spare = [n for n in evenly if n not in set(wanted)]
    room = min(MOST - len(wanted), len(spare))
    return sorted([*wanted, *(spare[n * len(spare) // room] for n in range(room))])


def _strengths(flow: Flow, queries: Sequence[int], keys: Sequence[int]) -> list[list[str]]:
    """``m1`` … ``m4``: how far each pair moved, in tenfold steps below the largest."""
    finite = [float(s) for row in flow.measured for s in row if s is not None and math.isfinite(s) and s != 0]
    largest = max(map(abs, finite), default=1.0)

    def strength(size: float | None) -> str:
        if size is None:
            return "untried"
        if not has_moved(size):
            return ""
        if not math.isfinite(size):
            return "m4"
        return f"m{max(1, 4 + math.ceil(math.log10(abs(size) / largest) - 1e-9))}"

    return [[strength(flow.measured[q][k]) for k in keys] for q in queries]


def _svg(grid: list[list[str]], title: str, queries: Sequence[int], keys: Sequence[int]) -> Markup:
    rows, columns = len(queries), len(keys)
    cell = max(3, min(26, _SIDE // max(rows, columns, 1)))
    width, height = cell * columns, cell * rows
    paths: dict[str, list[str]] = {}
    for row, kinds in enumerate(grid):
        for kind, start, stop in _runs(kinds):
            x, y, wide = start * cell, row * cell, (stop - start) * cell
            paths.setdefault(kind, []).append(f"M{x} {y}h{wide}v{cell}h{-wide}z")
            for column in range(start, stop):
                if sign := _sign(kind, column * cell, y, cell):
                    paths.setdefault(f"{kind}-sign", []).append(sign)
    cells = "".join(f'<path class="{kind}" d="{"".join(steps)}"/>' for kind, steps in paths.items())
    lines = "".join(f"M{n * cell} 0v{height}" for n in range(1, columns)) if cell >= 8 else ""
    lines += "".join(f"M0 {n * cell}h{width}" for n in range(1, rows)) if cell >= 8 else ""
    arrows = "".join(
        f"M-8 {row * cell + cell / 2 - 3:g}l6 3l-6 3z" for row, kinds in enumerate(grid) if "leak" in kinds
    )
    return Markup(
        f'<svg class="matrix" width="{width + _MARGIN + 10}" height="{height + _MARGIN + 10}" role="img" '
        f'aria-label="{title}: {rows} queries by {columns} keys"><g transform="translate({_MARGIN} {_MARGIN})">'
        f'<rect class="none" width="{width}" height="{height}"/>{cells}<path class="lines" d="{lines}"/>'
        f'<rect class="frame" width="{width}" height="{height}"/><path class="leak" d="{arrows}"/>'
        f"{_numbers(queries, keys, cell)}</g></svg>"
    )


def _runs(kinds: Sequence[str]) -> list[tuple[str, int, int]]:
    """Neighbours of one kind as (kind, start, stop), those of no kind left out."""
    runs, stop = [], 0
    for kind, group in groupby(kinds):
        start, stop = stop, stop + len(list(group))
        if kind:
            runs.append((kind, start, stop))
    return runs


def _sign(kind: str, x: int, y: int, cell: int) -> str:
    """What is drawn over a cell, so that no colour is needed to read it."""
    room = max(1, cell // 5)
    far = cell - 2 * room
    if kind == "leak" and cell >= 6:
        return f"M{x + room} {y + room}l{far} {far}m0 {-far}l{-far} {far}"
    if kind == "quiet":
        return f"M{x + room} {y + cell - room}l{far} {-far}"
    if kind == "untried":
        return f"M{x + cell / 2 - 0.5:g} {y + cell / 2:g}h1"
    return ""


def _numbers(queries: Sequence[int], keys: Sequence[int], cell: int) -> str:
    parts = []
    every = next(step for step in (1, 2, 5, 10, 20, 50) if step * cell >= 20 or step == 50)
    for place, key in enumerate(keys):
        if place % every == 0:
            parts.append(f'<text class="tick" x="{(place + 0.5) * cell:g}" y="-6" text-anchor="middle">{key}</text>')
    for place, query in enumerate(queries):
        if place % every == 0:
            at = (place + 0.5) * cell
            parts.append(f'<text class="tick" x="-10" y="{at:g}" dy="4" text-anchor="end">{query}</text>')
    return "".join(parts)
