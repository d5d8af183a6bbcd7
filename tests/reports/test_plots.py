"""The mask picture says what the rule says, in SVG and PNG, and to a reader who cannot see it."""

import re
import sys
import xml.etree.ElementTree as ET

import pytest

from pellucid.errors import ArgumentError, ConfigError, UnsupportedError
from pellucid.reports import mask_figure, mask_panels, mask_png
from pellucid.reports.plots import COLOURS, ticks
from pellucid.visibility import causal, full, prefix, same_group, window

SVG = "{http://www.w3.org/2000/svg}"


def painted(svg: str, length: int) -> list[list[str]]:
    """The kind of every cell, read back from the paths of the first panel."""
    grid = [["hidden"] * length for _ in range(length)]
    root = ET.fromstring(svg)
    cells = root.find(f".//{SVG}g[@shape-rendering='crispEdges']")
    assert cells is not None
    side = float(cells[0].get("width", "0")) / length
    names = {colour: name for name, colour in COLOURS.items()}
    for path in cells.iter(f"{SVG}path"):
        if path.get("fill") not in names:
            continue
        for x, y, wide in re.findall(r"M(\S+) (\S+)h([\d.]+)v", path.get("d", "")):
            start, row, count = round(float(x) / side), round(float(y) / side), round(float(wide) / side)
            for key in range(start, start + count):
                assert grid[row][key] == "hidden"
                grid[row][key] = names[path.get("fill")]
    return grid


def test_every_cell_is_what_the_rule_says() -> None:
    panels = mask_panels([causal() & window(2) | prefix(2)], documents=[3, 2], layered=False)
    s, p, a, h = "itself", "past", "ahead", "hidden"
    assert painted(mask_figure(panels).svg, 5) == [
        [s, a, h, h, h],
        [p, s, h, h, h],
        [p, p, s, h, h],
        [h, h, h, s, a],
        [h, h, h, p, s],
    ]


def test_one_panel_a_distinct_rule_with_its_layers() -> None:
    local, full = causal() & window(4), causal()
    panels = mask_panels([local, local, full, local, full], documents=[8])
    assert [(panel.rule, panel.layers, panel.heading) for panel in panels] == [
        ("causal() & window(4)", (0, 1, 3), "layers 0–1, 3"),
        ("causal()", (2, 4), "layers 2, 4"),
    ]
    assert [panel.edges for panel in panels] == [local.num_visible_pairs(8), full.num_visible_pairs(8)]
    assert mask_panels([full], layered=False)[0].heading == ""


def test_the_picture_has_words() -> None:
    """Title and description for a screen reader, axes, captions; and rules cannot break the markup."""
    figure = mask_figure(mask_panels([causal() & window(4), full()], documents=[8]), title="A <b> & c")
    root = ET.fromstring(figure.svg)
    labelled = root.get("aria-labelledby", "").split()
    assert [root[0].get("id"), root[1].get("id")] == labelled
    assert root[0].text == "A <b> & c"
    assert root[1].text == figure.caption
    assert root.get("role") == "img"
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"key →", "← query", "causal() & window(4)", "full()", "layer 0", "layer 1"} <= set(texts)
    assert "26 of 64 pairs visible (41%)" in texts
    assert {"past", "itself", "ahead", "hidden"} <= set(texts)
    assert "ahead" not in mask_figure(mask_panels([causal()])).svg


def test_long_rules_are_wrapped_and_nothing_is_cut_off() -> None:
    rule = causal() & (window(2) | window(3)) & (window(4) | window(5) & window(6)) & window(123456)
    root = ET.fromstring(mask_figure(mask_panels([rule, causal(), full()])).svg)
    mono = [t.text or "" for t in root.iter(f"{SVG}text") if "monospace" in t.get("font-family", "")]
    assert " ".join(mono).startswith(rule.describe())
    assert max(map(len, mono)) < 40


def test_the_same_panels_draw_the_same_picture() -> None:
    panels = mask_panels([causal()], documents=[5])
    assert mask_figure(panels) == mask_figure(panels)


@pytest.mark.parametrize("documents", [(1,), (40,), (150, 130)])
def test_all_sizes_have_whole_pixels_and_fit(documents: tuple[int, ...]) -> None:
    root = ET.fromstring(mask_figure(mask_panels([causal()], documents=documents)).svg)
    cells = root.find(f".//{SVG}g[@shape-rendering='crispEdges']")
    assert cells is not None
    side = float(cells[0].get("width", "0"))
    assert side % sum(documents) == 0
    assert side + 24 + 44 < float(root.get("width", "0"))


def test_ticks_are_apart_and_start_at_nought() -> None:
    assert ticks(5, 40.0) == [0, 1, 2, 3, 4]
    assert ticks(100, 4.0) == list(range(0, 100, 10))
    assert ticks(1, 1.0) == [0]


def test_groups_are_drawn() -> None:
    panels = mask_panels([causal() | same_group()], documents=[4], groups=[0, 1, 1, 0])
    assert panels[0].visible[1] == (True, True, True, False)
    with pytest.raises(ConfigError, match="reads groups"):
        mask_panels([same_group()])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"documents": []}, "cannot be drawn"),
        ({"documents": [3, 0]}, "cannot be drawn"),
        ({"documents": [513]}, "draw 1 to 512 tokens"),
        ({"documents": [3], "groups": [1]}, "1 groups for 3 tokens"),
    ],
)
def test_what_cannot_be_drawn(arguments: dict[str, list[int]], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        mask_panels([causal()], **arguments)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="no rule to draw"):
        mask_panels([])


def test_png_shows_the_same_cells() -> None:
    import io

    from matplotlib.image import imread

    panels = mask_panels([causal(), full()], documents=[6, 3])
    data = mask_png(panels)
    assert data.startswith(b"\x89PNG")
    pixels = imread(io.BytesIO(data))[..., :3]
    shares = {}
    for name in ("past", "ahead", "itself"):
        colour = [int(COLOURS[name][i : i + 2], 16) / 255 for i in (1, 3, 5)]
        shares[name] = (abs(pixels - colour).max(axis=2) < 0.01).sum()
    # causal and everything: 36 pairs past, 18 ahead, 18 itself; the white lines take the same from each
    assert shares["past"] / shares["ahead"] == pytest.approx(2, rel=0.1)
    assert shares["ahead"] / shares["itself"] == pytest.approx(1, rel=0.1)


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedError, match=r"pip install 'pellucid\[report\]'"):
        mask_png(mask_panels([causal()]))


def test_what_is_read_of_a_source_is_neither_past_nor_ahead() -> None:
    """L22: a decoder's tokens and its encoder's have no order between them."""
    panels = mask_panels([full()] * 2, documents=[3, 2], part="cross")
    assert panels[0].heading == "decoder to encoder, layers 0–1"
    assert {panels[0].kind(query, key) for query in range(5) for key in range(5)} == {"source"}
    drawn = mask_figure(panels).svg
    assert "token of the source →" in drawn
    assert COLOURS["source"] in drawn
    assert COLOURS["past"] not in drawn
