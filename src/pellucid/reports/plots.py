"""The mask picture: who may see whom, one panel a distinct rule, as SVG written by hand."""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

import torch

from pellucid.errors import ArgumentError
from pellucid.records import Figure
from pellucid.visibility import Coordinates, Rule

LONGEST = 512
COLOURS = {"past": "#7fa8d9", "itself": "#1d4e89", "ahead": "#e9a13b", "source": "#5a9e6f", "hidden": "#f1f3f6"}
"""What a visible key is to its query, and cells that are hidden."""

_INK, _FAINT, _LINE = "#1b2430", "#5b6675", "#c9cfd8"
_SANS = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
_MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


@dataclass(frozen=True)
class Panel:
    """One rule over one row of documents, and the layers that follow it (empty: no model was named)."""

    rule: str
    layers: tuple[int, ...]
    documents: tuple[int, ...]
    visible: tuple[tuple[bool, ...], ...]
    part: Literal["", "encoder", "decoder", "cross"] = ""
    """Whose layers these are; ``cross``: a decoder's, whose keys are the tokens that the encoder read."""

    @property
    def edges(self) -> int:
        """Visible (query, key) pairs."""
        return sum(map(sum, self.visible))

    @property
    def length(self) -> int:
        return len(self.visible)

    @property
    def heading(self) -> str:
        """The layers in words."""
        if not self.layers:
            return ""
        words = f"layer{'s' if len(self.layers) > 1 else ''} {_ranges(self.layers)}"
        if self.part == "cross":
            return f"decoder to encoder, {words}"
        return f"{self.part} {words}".lstrip()

    @property
    def summary(self) -> str:
        """What can be counted."""
        return f"{self.edges} of {self.length**2} pairs visible ({self.edges / self.length**2:.0%})"

    def kind(self, query: int, key: int) -> str:
        """What a visible key is to its query."""
        return "source" if self.part == "cross" else kind(query, key)


def mask_panels(
    rules: Sequence[Rule],
    *,
    documents: Sequence[int] = (16,),
    groups: Sequence[int] | None = None,
    layered: bool = True,
    part: Literal["", "encoder", "decoder", "cross"] = "",
) -> list[Panel]:
    """One panel a distinct rule, in the order of first use.

    ``rules`` are those of layers 0, 1, …; with ``layered=False`` they belong to no model.
    ``documents`` are the lengths of the documents packed in the row; ``groups`` gives each token's group, for
    rules that read groups. ``part`` says whose layers they are; the sources of ``cross`` are as long as the documents.
    """
    if not rules:
        raise ArgumentError("there is no rule to draw; give at least one")
    total = sum(documents)
    if not documents or min(documents) < 1 or total > LONGEST:
        raise ArgumentError(f"documents of {list(documents)} tokens cannot be drawn; draw 1 to {LONGEST} tokens in all")
    if groups is not None and len(groups) != total:
        raise ArgumentError(f"{len(groups)} groups for {total} tokens; give one group a token")
    where = _coordinates(documents, groups)
    panels = []
    for text, layers in _by_rule(rules).items():
        visible = rules[layers[0]].mask(where, where)[0, 0].tolist()
        shown = tuple(layers) if layered else ()
        panels.append(Panel(text, shown, tuple(documents), tuple(map(tuple, visible)), part))
    return panels


def mask_figure(panels: Sequence[Panel], *, title: str = "Who may see whom") -> Figure:
    """The panels as one picture."""
    columns = min(3, len(panels))
    cell = min(40, max(1, (420 if columns == 1 else 264) // panels[0].length))
    step = max(cell * panels[0].length, 200) + 92
    body, top = [], 96
    for start in range(0, len(panels), columns):
        row = [_Panel(panel, cell, width=step - 48) for panel in panels[start : start + columns]]
        above = max(drawn.above for drawn in row)  # so that the cells of one row of panels start level
        for index, drawn in enumerate(row):
            body.append(f'<g transform="translate({index * step + 24} {top})">{drawn.svg(above)}</g>')
        top += above + row[0].side + 62
    caption = "; ".join(_sentence(panel) for panel in panels)
    head = _text(24, 36, title, size=18, weight=600) + _legend(24, 62, kinds(panels))
    width = max(columns * step + 24, 24 + 11 * len(title))
    return Figure(title, _document(width, top, title, caption, head + "".join(body)), caption)


def _sentence(panel: Panel) -> str:
    layers = f"{panel.heading}: " if panel.layers else ""
    return f"{layers}{panel.rule}, {panel.summary}"


def _coordinates(documents: Sequence[int], groups: Sequence[int] | None) -> Coordinates:
    positions = [position for length in documents for position in range(length)]
    segments = [number for number, length in enumerate(documents, 1) for _ in range(length)]
    group = None if groups is None else torch.tensor([list(groups)])
    return Coordinates(torch.tensor([positions]), torch.tensor([segments]), group)


def _by_rule(rules: Sequence[Rule]) -> dict[str, list[int]]:
    result: dict[str, list[int]] = {}
    for layer, rule in enumerate(rules):
        result.setdefault(rule.describe(), []).append(layer)
    return result


def _ranges(numbers: Sequence[int]) -> str:
    """``0–2, 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def axis_name(panel: Panel) -> str:
    """What the keys are."""
    return "token of the source →" if panel.part == "cross" else "key →"


def kind(query: int, key: int) -> str:
    """What a visible key is to its query."""
    return "itself" if query == key else "past" if key < query else "ahead"


def kinds(panels: Iterable[Panel]) -> list[str]:
    """What is to be seen in ``panels``, in the order of :data:`COLOURS`."""
    seen = {
        panel.kind(query, key)
        for panel in panels
        for query, row in enumerate(panel.visible)
        for key, sees in enumerate(row)
        if sees
    }
    return [name for name in COLOURS if name in seen or name == "hidden"]


# --------------------------------------------------------------------------------------------------- SVG


class _Panel:
    """One panel at its place: heading and rule above, axes with words, cells, what is counted below."""

    def __init__(self, panel: Panel, cell: int, width: int) -> None:
        self.panel, self.cell, self.side = panel, cell, cell * panel.length
        self.rule = textwrap.wrap(panel.rule, int(width / 8)) or [""]
        self.above = 18 * (bool(panel.heading) + len(self.rule)) + 34

    def svg(self, above: int) -> str:
        """The panel with its cells ``above`` pixels below its top."""
        lines = [_text(44, 0, self.panel.heading, weight=600)] if self.panel.heading else []
        first = 18 if self.panel.heading else 0
        lines += [_text(44, first + 18 * n, part, font=_MONO) for n, part in enumerate(self.rule)]
        cells = f'<g transform="translate(44 {above})" shape-rendering="crispEdges">{self._cells()}</g>'
        below = _text(44, above + self.side + 22, self.panel.summary, size=12, fill=_FAINT)
        return "".join([*lines, self._axes(above), cells, below])

    def _axes(self, above: int) -> str:
        parts = [
            _text(44 + self.side / 2, above - 24, axis_name(self.panel), size=12, fill=_FAINT, anchor="middle"),
            f'<g transform="translate(12 {_n(above + self.side / 2)}) rotate(-90)">'
            + _text(0, 0, "← query", size=12, fill=_FAINT, anchor="middle")
            + "</g>",
        ]
        for tick in ticks(self.panel.length, self.cell):
            at = (tick + 0.5) * self.cell
            parts.append(_text(44 + at, above - 6, str(tick), size=10, fill=_FAINT, anchor="middle"))
            parts.append(_text(38, above + at + 3.5, str(tick), size=10, fill=_FAINT, anchor="end"))
        return "".join(parts)

    def _cells(self) -> str:
        side = _n(self.side)
        parts = [f'<rect width="{side}" height="{side}" fill="{COLOURS["hidden"]}"/>']
        paths: dict[str, list[str]] = {}
        for query, row in enumerate(self.panel.visible):
            for name, start, stop in _runs(self.panel, query, row):
                width = (stop - start) * self.cell
                corner = f"M{_n(start * self.cell)} {_n(query * self.cell)}"
                paths.setdefault(name, []).append(f"{corner}h{_n(width)}v{_n(self.cell)}h{_n(-width)}z")
        parts += [f'<path fill="{COLOURS[name]}" d="{"".join(steps)}"/>' for name, steps in paths.items()]
        if self.cell >= 8:
            parts.append(self._lines(range(1, self.panel.length), "#ffffff", 1))
        edges, at = [], 0
        for length in self.panel.documents[:-1]:
            at += length
            edges.append(at)
        if edges:
            parts.append(self._lines(edges, _INK, 1.5))
        return "".join(parts) + f'<rect width="{side}" height="{side}" fill="none" stroke="{_LINE}"/>'

    def _lines(self, places: Iterable[int], colour: str, width: float) -> str:
        side = _n(self.side)
        steps = "".join(f"M{_n(p * self.cell)} 0v{side}M0 {_n(p * self.cell)}h{side}" for p in places)
        return f'<path d="{steps}" stroke="{colour}" stroke-width="{width}" fill="none"/>'


def _runs(panel: Panel, query: int, row: Sequence[bool]) -> list[tuple[str, int, int]]:
    """Neighbouring visible keys of one kind as (kind, start, stop)."""
    runs: list[tuple[str, int, int]] = []
    for key, sees in enumerate(row):
        if not sees:
            continue
        name = panel.kind(query, key)
        if runs and runs[-1][0] == name and runs[-1][2] == key:
            runs[-1] = (name, runs[-1][1], key + 1)
        else:
            runs.append((name, key, key + 1))
    return runs


def ticks(length: int, cell: float) -> list[int]:
    """Places to number, at least 22 pixels apart, in steps of 1, 2, 5, 10, …"""
    steps = (base * 10**power for power in range(4) for base in (1, 2, 5))
    step = next(step for step in steps if step * cell >= 22 or step >= length)
    return list(range(0, length, step))


def _legend(x: float, y: float, names: Sequence[str]) -> str:
    parts = []
    for name in names:
        box = f'x="{_n(x)}" y="{_n(y - 10)}" width="12" height="12" fill="{COLOURS[name]}"'
        parts.append(f'<rect {box} stroke="{_LINE}"/>' + _text(x + 18, y, name, size=12, fill=_FAINT))
        x += 18 + 6.6 * len(name) + 20
    return "".join(parts)


def _text(
    x: float, y: float, text: str, *, size: int = 13, fill: str = _INK, weight: int = 400,
    anchor: str = "start", font: str = _SANS,
) -> str:  # fmt: skip
    return (
        f'<text x="{_n(x)}" y="{_n(y)}" font-family="{font}" font-size="{size}" font-weight="{weight}" '
        f'fill="{fill}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _document(width: float, height: float, title: str, description: str, body: str) -> str:
    name = hashlib.sha256((title + description).encode()).hexdigest()[:8]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(width)} {_n(height)}" width="{_n(width)}" '
        f'height="{_n(height)}" role="img" aria-labelledby="t{name} d{name}">'
        f'<title id="t{name}">{escape(title)}</title><desc id="d{name}">{escape(description)}</desc>'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{body}</svg>\n'
    )


def _n(value: float) -> str:
    """A number as SVG needs it, without a tail of zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
