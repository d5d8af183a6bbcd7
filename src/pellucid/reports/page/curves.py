"""Curves as inline SVG: readable without colour, without a script and on a telephone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from pellucid.records import Curve, Curves
from pellucid.reports.page.text import cell, shown

_WIDTH, _HEIGHT = 420, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 12, 12, 38
_COLOURS = 6
_FEW = 24  # points that are marked one by one
_MOST = 600

Point = tuple[float, float]


class _Scale(NamedTuple):
    """Numbers to pixels."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def at(self, value: float) -> float:
        value, low, high = (math.log10(v) if self.log else v for v in (value, self.low, self.high))
        return self.start + (value - low) / (high - low) * (self.stop - self.start)


def curves_block(record: Curves) -> Mapping[str, Any]:
    """The template's values for ``record``."""
    series = [_points(curve, record.log) for curve in record.curves]
    legend = [
        {"name": curve.name, "colour": index % _COLOURS, "last": cell(float(points[-1][1])) if points else "no value"}
        for index, (curve, points) in enumerate(zip(record.curves, map(_whole, series), strict=True))
    ]
    svg = _svg(record, series) if any(map(_whole, series)) else None
    return {"kind": "curves", "title": record.title, "caption": record.caption, "legend": legend, "svg": svg}


def _points(curve: Curve, log: bool) -> list[list[Point]]:
    """The curve in unbroken pieces: what cannot be drawn is a gap. Long ones keep each stretch's extremes."""
    pieces: list[list[Point]] = [[]]
    for x, y in zip(curve.x, curve.y, strict=True):
        if math.isfinite(x) and math.isfinite(y) and abs(y) < 1e300 and (y > 0 or not log):
            pieces[-1].append((float(x), float(y)))
        elif pieces[-1]:
            pieces.append([])
    kept = [piece for piece in pieces if piece]
    size = math.ceil(2 * sum(map(len, kept)) / _MOST)
    return [_thinned(piece, size) for piece in kept]


def _thinned(points: list[Point], size: int) -> list[Point]:
    if size <= 2:
        return points
    thin = [points[0]]
    for start in range(0, len(points), size):
        part = points[start : start + size]
        thin += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return [*thin, points[-1]]


def _whole(pieces: list[list[Point]]) -> list[Point]:
    return [point for piece in pieces for point in piece]


def _svg(record: Curves, series: list[list[list[Point]]]) -> Markup:
    points = [point for pieces in series for point in _whole(pieces)]
    x = _scale([p[0] for p in points], _LEFT, _WIDTH - _RIGHT, False)
    y = _scale([p[1] for p in points], _HEIGHT - _BOTTOM, _TOP, record.log)
    parts = [_axes(x, y, record)]
    for index, pieces in enumerate(series):
        parts.append(_line(pieces, x, y, index % _COLOURS))
    label = f"{record.title}: " + "; ".join(
        f"{curve.name} from {cell(first[0][1])} to {cell(first[-1][1])}"
        for curve, first in zip(record.curves, map(_whole, series), strict=True)
        if first
    )
    return Markup(
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(shown(label))}">{"".join(parts)}</svg>'
    )


def _scale(values: Sequence[float], start: float, stop: float, log: bool) -> _Scale:
    low, high = min(values), max(values)
    if log:
        low, high = (low, high) if high / low > 1.5 else (low / 1.5, high * 1.5)
    elif high - low <= 1e-9 * max(abs(low), abs(high)):
        room = abs(low) / 2 or 1.0
        low, high = low - room, high + room
    return _Scale(low, high, start, stop, log)


def _axes(x: _Scale, y: _Scale, record: Curves) -> str:
    parts = []
    for value in ticks(y.low, y.high, y.log):
        at = _n(y.at(value))
        parts.append(f'<path class="grid" d="M{_LEFT} {at}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{at}" dy="4" text-anchor="end">{tick(value)}</text>')
    below = _HEIGHT - _BOTTOM
    for value in ticks(x.low, x.high):
        at = _n(x.at(value))
        parts.append(f'<path class="axis" d="M{at} {below}v4"/>')
        parts.append(f'<text class="tick" x="{at}" y="{below + 17}" text-anchor="middle">{tick(value)}</text>')
    parts.append(f'<path class="axis" d="M{_LEFT} {below}H{_WIDTH - _RIGHT}"/>')
    middle, label = (_LEFT + _WIDTH - _RIGHT) / 2, escape(shown(record.x_label, 60))
    parts.append(f'<text class="tick" x="{_n(middle)}" y="{_HEIGHT - 4}" text-anchor="middle">{label}</text>')
    if record.y_label:
        label = escape(shown(record.y_label, 40))
        turned = f"translate(11 {_n((_TOP + below) / 2)}) rotate(-90)"
        parts.append(f'<text class="tick" transform="{turned}" text-anchor="middle">{label}</text>')
    return "".join(parts)


def _line(pieces: list[list[Point]], x: _Scale, y: _Scale, colour: int) -> str:
    placed = [[f"{_n(x.at(p[0]))} {_n(y.at(p[1]))}" for p in piece] for piece in pieces]
    path = "".join("M" + "L".join(piece) for piece in placed)
    parts = [f'<path class="line c{colour}" d="{path}"/>']
    if sum(map(len, placed)) <= _FEW:
        dots = "".join(f'<circle cx="{at.split()[0]}" cy="{at.split()[1]}" r="3"/>' for p in placed for at in p)
        parts.append(f'<g class="dot c{colour}">{dots}</g>')
    return "".join(parts)


def ticks(low: float, high: float, log: bool = False) -> list[float]:
    """Round numbers from ``low`` to ``high``: four to seven of them, or powers of ten and their 2 and 5."""
    if log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        every = max(1, len(powers) // 6)
        bases = (1, 2, 5) if len(powers) <= 4 else (1,)
        found = [base * 10.0**power for power in powers[::every] for base in bases]
        return [value for value in found if low <= value <= high]
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(base * power for base in (1, 2, 5, 10) if base * power >= rough)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def tick(value: float) -> str:
    """A round number, short."""
    size = abs(value)
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= 10 * unit or (letter != "k" and size >= unit):
            return f"{value / unit:.4g}{letter}"
    return "0" if size < 1e-300 else f"{value:.4g}" if size >= 1e-4 else f"{value:.2g}".replace("e-0", "e-")


def _n(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")
