"""Mask pictures: who may see whom, one panel for each distinct rule, drawn by matplotlib as SVG or PNG."""

from __future__ import annotations

import hashlib
import io
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import torch

from pellucid.errors import ArgumentError
from pellucid.records import Figure
from pellucid.visibility import Coordinates, Rule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

MAX_LENGTH = 512
COLORS = {"past": "#7fa8d9", "itself": "#1d4e89", "ahead": "#e9a13b", "source": "#5a9e6f", "hidden": "#f1f3f6"}
"""The color of a visible key, by where it stands from its query; and that of hidden keys."""

_INK, _FAINT, _LINE = "#1b2430", "#5b6675", "#c9cfd8"
_STYLE: Any = {
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "pellucid",
    "text.color": _INK,
    "text.parse_math": False,
}


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
        if self.part == "cross":
            return "source"
        return "itself" if query == key else "past" if key < query else "ahead"


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
    if not documents or min(documents) < 1 or total > MAX_LENGTH:
        raise ArgumentError(
            f"documents of {list(documents)} tokens cannot be drawn; draw 1 to {MAX_LENGTH} tokens in all"
        )
    if groups is not None and len(groups) != total:
        raise ArgumentError(f"{len(groups)} groups for {total} tokens; give one group a token")
    positions = [position for length in documents for position in range(length)]
    segments = [number for number, length in enumerate(documents, 1) for _ in range(length)]
    group = None if groups is None else torch.tensor([list(groups)])
    where = Coordinates(torch.tensor([positions]), torch.tensor([segments]), group)
    layers_of: dict[str, list[int]] = {}
    for layer, rule in enumerate(rules):
        layers_of.setdefault(rule.describe(), []).append(layer)
    panels = []
    for text, layers in layers_of.items():
        visible = rules[layers[0]].mask(where, where)[0, 0].tolist()
        shown = tuple(layers) if layered else ()
        panels.append(Panel(text, shown, tuple(documents), tuple(map(tuple, visible)), part))
    return panels


def mask_figure(panels: Sequence[Panel], *, title: str = "Who may see whom") -> Figure:
    """The panels as one SVG picture, the same bytes for the same panels.

    The picture has a title and a description for screen readers, and its words are text.
    """
    caption = "; ".join(
        f"{f'{panel.heading}: ' if panel.layers else ''}{panel.rule}, {panel.summary}" for panel in panels
    )
    text = _rendered(panels, title, "svg").decode()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = text.replace('<g id="panel', '<g shape-rendering="crispEdges" id="panel')  # no seams between the cells
    name = hashlib.sha256((title + caption).encode()).hexdigest()[:8]
    words = f'<title id="t{name}">{escape(title)}</title><desc id="d{name}">{escape(caption)}</desc>'
    opening = re.sub(r'="([\d.]+)pt"', r'="\1"', text[: text.index(">")])
    return Figure(
        title, f'{opening} role="img" aria-labelledby="t{name} d{name}">{words}{text[text.index(">") + 1 :]}', caption
    )


def mask_png(panels: Sequence[Panel], *, title: str = "Who may see whom") -> bytes:
    """The panels as one PNG picture, 150 dots an inch."""
    return _rendered(panels, title, "png")


def _ranges(numbers: Sequence[int]) -> str:
    """``0–2, 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


# ------------------------------------------------------------------------------------------------- drawing


def _rendered(panels: Sequence[Panel], title: str, kind: Literal["svg", "png"]) -> bytes:
    import matplotlib

    metadata: dict[str, Any] = {"Title": title} if kind == "png" else {"Date": None}
    out = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        _drawn(panels, title).savefig(out, format=kind, dpi=150 if kind == "png" else 72, metadata=metadata)
    return out.getvalue()


def _drawn(panels: Sequence[Panel], title: str) -> Canvas:
    from matplotlib.figure import Figure as Canvas
    from matplotlib.patches import Patch

    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    canvas = Canvas(figsize=(max(4.6 * columns, 5.2), 4.9 * rows + 0.9), layout="constrained")
    canvas.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # type: ignore[union-attr, call-arg]
    canvas.suptitle("\n".join(textwrap.wrap(title, 40 * columns)), fontsize=14, fontweight="bold")
    axes = canvas.subplots(rows, columns, squeeze=False).flatten()
    for number, (axis, panel) in enumerate(zip(axes, panels, strict=False)):
        _draw_panel(axis, panel, number)
    for axis in axes[len(panels) :]:
        axis.axis("off")
    seen = {"hidden", *(name for panel in panels for name in _cells(panel))}
    patches = [Patch(facecolor=COLORS[name], edgecolor=_LINE, label=name) for name in COLORS if name in seen]
    canvas.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, labelcolor=_FAINT)
    return canvas


def _draw_panel(axis: Axes, panel: Panel, number: int) -> None:
    """Heading and rule above, axes with words, cells, and what is counted below."""
    axis.set(xlim=(0, panel.length), ylim=(panel.length, 0), aspect="equal", facecolor=COLORS["hidden"])
    for name, runs in _cells(panel).items():
        _draw_cells(axis, runs, COLORS[name], f"panel{number}-{name}")
    places = ticks(panel.length, 264 / panel.length)
    centers = [place + 0.5 for place in places]
    axis.set_xticks(centers, [str(place) for place in places])
    axis.set_yticks(centers, [str(place) for place in places])
    axis.tick_params(labelsize=8, length=0, labelcolor=_FAINT)
    axis.xaxis.tick_top()
    axis.xaxis.set_label_position("top")
    axis.set_xlabel("token of the source →" if panel.part == "cross" else "key →", color=_FAINT)
    axis.set_ylabel("← query", color=_FAINT)
    if panel.length <= 32:
        inner = range(1, panel.length)
        axis.hlines(inner, 0, panel.length, color="white", linewidth=0.6)
        axis.vlines(inner, 0, panel.length, color="white", linewidth=0.6)
    for edge in list(accumulate(panel.documents))[:-1]:
        axis.axhline(edge, color=_INK, linewidth=1)
        axis.axvline(edge, color=_INK, linewidth=1)
    for spine in axis.spines.values():
        spine.set_color(_LINE)
    axis.set_title("\n".join(filter(None, [panel.heading, *textwrap.wrap(panel.rule, 38)])), fontsize=9, loc="left")
    axis.text(0, -0.03, panel.summary, transform=axis.transAxes, fontsize=8, color=_FAINT, va="top")


def _cells(panel: Panel) -> dict[str, list[tuple[int, int, int]]]:
    """Neighboring visible keys of one kind as (query, first key, key behind the last), by kind."""
    runs: dict[str, list[tuple[int, int, int]]] = {}
    for query, row in enumerate(panel.visible):
        for key, sees in enumerate(row):
            if sees:
                same = runs.setdefault(panel.kind(query, key), [])
                if same and same[-1][::2] == (query, key):
                    same[-1] = (query, same[-1][1], key + 1)
                else:
                    same.append((query, key, key + 1))
    return runs


def _draw_cells(axis: Axes, runs: Sequence[tuple[int, int, int]], color: str, name: str) -> None:
    """All cells of one kind as one path, so that a large mask stays a small file."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    corners = [
        [(start, query), (stop, query), (stop, query + 1), (start, query + 1), (start, query)]
        for query, start, stop in runs
    ]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(corners)
    path = Path([corner for box in corners for corner in box], codes)
    axis.add_patch(PathPatch(path, facecolor=color, linewidth=0, antialiased=False, gid=name))


def ticks(length: int, cell: float) -> list[int]:
    """Places to number, at least 22 pixels apart, in steps of 1, 2, 5, 10, …"""
    steps = (base * 10**power for power in range(4) for base in (1, 2, 5))
    step = next(step for step in steps if step * cell >= 22 or step >= length)
    return list(range(0, length, step))
