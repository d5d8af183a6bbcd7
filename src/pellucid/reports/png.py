"""The mask picture as PNG, drawn with matplotlib (the extra ``report``)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import accumulate
from textwrap import wrap

from pellucid.errors import UnsupportedError
from pellucid.reports.plots import COLOURS, Panel, axis_name, kinds, ticks


def mask_png(panels: Sequence[Panel], *, title: str = "Who may see whom") -> bytes:
    """The panels as one picture, 150 dots an inch."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise UnsupportedError(
            "a PNG needs matplotlib, which is not installed: pip install 'pellucid[report]', or draw an .svg"
        ) from error
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(max(4.6 * columns, 5.2), 5.0 * rows + 0.9), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # type: ignore[union-attr,call-arg]
    figure.suptitle(title, fontsize=14, fontweight="bold")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, panel in zip(axes, panels, strict=False):
        _draw(axis, panel)
    for axis in axes[len(panels) :]:
        axis.axis("off")
    patches = [Patch(facecolor=COLOURS[name], edgecolor="#c9cfd8", label=name) for name in kinds(panels)]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Title": title})
    return out.getvalue()


def _draw(axis: object, panel: Panel) -> None:
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap

    assert isinstance(axis, Axes)
    names = list(COLOURS)
    numbers = [
        [names.index(panel.kind(q, k) if sees else "hidden") for k, sees in enumerate(row)]
        for q, row in enumerate(panel.visible)
    ]
    colours = ListedColormap(list(COLOURS.values()))
    axis.imshow(numbers, cmap=colours, vmin=0, vmax=len(names) - 1, interpolation="nearest")
    places = ticks(panel.length, 264 / panel.length)
    axis.set_xticks(places)
    axis.set_yticks(places)
    axis.tick_params(labelsize=8, length=0)
    axis.xaxis.tick_top()
    axis.xaxis.set_label_position("top")
    axis.set_xlabel(axis_name(panel), fontsize=9)
    axis.set_ylabel("← query", fontsize=9)
    if panel.length <= 32:
        edges = [n - 0.5 for n in range(1, panel.length)]
        axis.hlines(edges, -0.5, panel.length - 0.5, color="white", linewidth=0.6)
        axis.vlines(edges, -0.5, panel.length - 0.5, color="white", linewidth=0.6)
    for edge in list(accumulate(panel.documents))[:-1]:
        axis.axhline(edge - 0.5, color="#1b2430", linewidth=1)
        axis.axvline(edge - 0.5, color="#1b2430", linewidth=1)
    for spine in axis.spines.values():
        spine.set_color("#c9cfd8")
    words = [panel.heading, *wrap(panel.rule, 40)]
    axis.set_title("\n".join(filter(None, words)), fontsize=9, loc="left")
    axis.text(0, -0.03, panel.summary, transform=axis.transAxes, fontsize=8, color="#5b6675", va="top")
