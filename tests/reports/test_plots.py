"""The mask picture says what the rule says, in SVG and PNG, and to a reader who cannot see it."""

import re
import xml.etree.ElementTree as ET

import pytest

from pellucid.errors import ArgumentError, ConfigError
from pellucid.reports import mask_figure, mask_panels, mask_png
from pellucid.reports.plots import COLORS, ticks
from pellucid.visibility import causal, full, prefix, same_group, window

SVG = "{http://www.w3.org/2000/svg}"


def cells(svg: str, panel: int = 0) -> dict[str, list[list[tuple[float, float]]]]:
    """The corners of each drawn run of cells of one panel, by kind, read back from the picture."""
    found = {}
    for group in ET.fromstring(svg).iter(f"{SVG}g"):
        number, _, kind = (group.get("id") or "").partition("-")
        if number == f"panel{panel}" and kind:
            assert f"fill: {COLORS[kind]}" in group[0].get("style", "")
            boxes = group[0].get("d", "").split("z")[:-1]
            found[kind] = [[(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", box)] for box in boxes]
    return found


def painted(svg: str, length: int) -> list[list[str]]:
    """The kind of every cell of the first panel; its diagonal is visible, so its cells span the panel."""
    grid = [["hidden"] * length for _ in range(length)]
    runs = cells(svg)
    points = [point for boxes in runs.values() for box in boxes for point in box]
    left, top = (min(point[axis] for point in points) for axis in (0, 1))
    side = (max(point[0] for point in points) - left) / length
    for kind, boxes in runs.items():
        for box in boxes:
            (start, stop), (row, below) = (
                [round((edge(point[axis] for point in box) - origin) / side) for edge in (min, max)]
                for axis, origin in ((0, left), (1, top))
            )
            assert below == row + 1
            for key in range(start, stop):
                assert grid[row][key] == "hidden"
                grid[row][key] = kind
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
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert rule.describe() in " ".join(texts)
    assert max(map(len, texts)) < 40


def test_the_same_panels_draw_the_same_bytes() -> None:
    panels = mask_panels([causal(), full()], documents=[5])
    assert mask_figure(panels) == mask_figure(panels)
    assert mask_png(panels) == mask_png(panels)


def test_a_dollar_sign_is_no_formula() -> None:
    assert "a $x$ b" in mask_figure(mask_panels([causal()]), title="a $x$ b").svg


@pytest.mark.parametrize("documents", [(1,), (40,), (150, 130)])
def test_all_sizes_fit_and_tile(documents: tuple[int, ...]) -> None:
    svg = mask_figure(mask_panels([causal()], documents=documents)).svg
    root, length = ET.fromstring(svg), sum(documents)
    assert sum(row.count("itself") for row in painted(svg, length)) == length
    points = [point for boxes in cells(svg).values() for box in boxes for point in box]
    for axis, size in ((0, "width"), (1, "height")):
        assert min(point[axis] for point in points) > 24
        assert max(point[axis] for point in points) < float(root.get(size, "0")) - 24


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
        color = [int(COLORS[name][i : i + 2], 16) / 255 for i in (1, 3, 5)]
        shares[name] = (abs(pixels - color).max(axis=2) < 0.01).sum()
    # causal and everything: 36 pairs past, 18 ahead, 18 itself; the white lines take the same from each
    assert shares["past"] / shares["ahead"] == pytest.approx(2, rel=0.1)
    assert shares["ahead"] / shares["itself"] == pytest.approx(1, rel=0.1)


def test_what_is_read_of_a_source_is_neither_past_nor_ahead() -> None:
    """L22: a decoder's tokens and its encoder's have no order between them."""
    panels = mask_panels([full()] * 2, documents=[3, 2], part="cross")
    assert panels[0].heading == "decoder to encoder, layers 0–1"
    assert {panels[0].kind(query, key) for query in range(5) for key in range(5)} == {"source"}
    drawn = mask_figure(panels).svg
    assert "token of the source →" in drawn
    assert COLORS["source"] in drawn
    assert COLORS["past"] not in drawn
