"""The page says what the records say, whatever they hold, and to those who have no script, colour or network."""

import base64
import json
import math
import os
import random
import re
import unicodedata
from html.parser import HTMLParser
from pathlib import Path

import pytest

from helpers.browser import drive, needs_chromium
from pellucid.errors import ArgumentError, ShapeError
from pellucid.records import Curve, Curves, Figure, Flow, Table, TokenView
from pellucid.reports import page_html, write_page
from pellucid.reports.page.curves import tick, ticks
from pellucid.reports.page.matrices import MOST, difference
from pellucid.reports.page.text import SYMBOLS, name_of, pieces, shown

HOSTILE = (
    "</script><script>document.title='run'</script>",
    "<img src=x onerror=\"document.title='run'\">",
    "'\"><svg onload=document.title='run'>",
    "{{ 7 * 7 }} {% raw %} &lt;b&gt; ]]> -->",
    "nul\x00 bell\x07 escape\x1b[2J return\r del\x7f c1\x85",
    "lone \ud800 and \udfff surrogates",
    "over \u202e ride \u2066 isolate \u200f mark",
    "line \u2028 and paragraph \u2029 \ufeff",
    "",
    "   ",
    "\n\t\n",
    "long " * 5000,
    "W" * 9000,
)
VERDICTS = Table(
    "audit of a model",
    ("check", "verdict", "what was seen"),
    tuple((f"check {n}", status, f"message {n}") for n, status in enumerate([*SYMBOLS, "pass", "leak"])),
)


class Elements(HTMLParser):
    """What a browser that keeps to the standard makes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.inside: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self.inside.append(f"/{tag}")

    def handle_data(self, data: str) -> None:
        if self.inside and self.inside[-1] not in ("script", "style"):
            self.text.append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def said(self) -> str:
        return "".join(self.text)


def view(count: int = 12, layers: int = 2, heads: int = 3, tokens: tuple[str, ...] = ()) -> TokenView:
    """Causal, with weights and movements that are all different, and one leak at (4, 7)."""
    draw = random.Random(0)
    may = [[key <= query for key in range(count)] for query in range(count)]

    def row(query: int) -> list[float]:
        some = [draw.random() ** 3 if key <= query else 0.0 for key in range(count)]
        return [weight / sum(some) for weight in some]

    attention = [[[row(query) for query in range(count)] for _ in range(heads)] for _ in range(layers)]
    moved = [[draw.random() if key <= query else 0.0 for key in range(count)] for query in range(count)]
    if count > 7:
        moved[4][7] = 0.5
    names = tokens or tuple(f" t{n}" if n % 4 else f"\nt{n}" for n in range(count))
    return TokenView("text", names, may, attention, moved)


def hostile_sections() -> list[tuple[str, list[object]]]:
    count = len(HOSTILE)
    matrix = [[key <= query for key in range(count)] for query in range(count)]
    sizes = [[math.nan if k == q else math.inf if k > q else None for k in range(count)] for q in range(count)]
    everywhere = []
    for text in HOSTILE:
        everywhere += [
            text,
            Table(text, (text, "b"), ((text, "leak"), (math.nan, None))),
            Figure(text, f"<svg onload=\"top.document.title='run'\"><script>1</script>{text}</svg>", text),
            Curves(text, (Curve(text, (0, 1, math.inf), (1.0, math.nan, 1e308)),), text, text, caption=text),
        ]
    flow = Flow(HOSTILE[0], matrix, sizes, HOSTILE, HOSTILE, HOSTILE[1])
    text = TokenView(
        HOSTILE[1], HOSTILE, matrix, [[[[math.nan] * count] * count]], sizes, (HOSTILE[0],), HOSTILE[2], HOSTILE[5]
    )
    return [(HOSTILE[0], everywhere), (HOSTILE[6], [flow, text])]


# ------------------------------------------------------------------------------------------------ as text


def test_nothing_on_the_page_asks_a_network() -> None:
    html = page_html("t", [("a", [VERDICTS, Figure("f", "<svg/>"), view()])])
    found = Elements(html)
    policy = found.of("meta")[1]["content"]
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert not re.search(r"https?://|//[a-z]+\.|@import|url\(", html)
    assert not found.of("link")
    for _, attributes in found.tags:
        for name in ("src", "href", "action", "data", "srcset", "poster"):
            assert (attributes.get(name) or "#").startswith(("#", "data:image/svg+xml;base64,"))
        assert "style" not in attributes


def test_hostile_text_is_text() -> None:
    html = page_html(HOSTILE[0], hostile_sections(), subtitle=HOSTILE[1])  # type: ignore[arg-type]
    odd = {c for c in html if c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    assert not odd
    html.encode("utf-8")
    found = Elements(html)
    for _, attributes in found.tags:
        assert not [name for name in attributes if name.startswith("on")]
    for image in found.of("img"):
        assert (image["src"] or "").startswith("data:image/svg+xml;base64,")
    kinds = [script.get("type") for script in found.of("script")]
    assert kinds == ["application/json", None]
    for text in HOSTILE[:4]:
        assert text in found.said
    for spelt in (r"nul\x00 bell\x07 escape\x1b[2J return\r", r"lone \ud800 and \udfff", r"over \u202e ride"):
        assert spelt in found.said
    assert "49 " not in found.said.split("<b>")[0]
    blob = re.search(r'<script type="application/json" class="data">(.*?)</script>', html, re.DOTALL)
    assert blob is not None
    assert blob[1].isascii()
    assert not set("<>&") & set(blob[1])
    assert json.loads(blob[1])["names"][0] == "</script><script…"


def test_verdicts_are_words_and_signs() -> None:
    html = page_html("t", [("a", [VERDICTS])])
    found = Elements(html)
    assert found.of("script") == []
    for status, sign in SYMBOLS.items():
        assert f"{sign} {status.replace('_', ' ')}" in found.said
    counts = re.findall(r'<strong>(\d)</strong> <span class="badge (\w+)">', html)
    assert counts == [("2", "leak"), ("1", "error"), ("1", "fragile"), ("2", "pass"), ("1", "not_applicable")]


def test_a_table_of_plain_words_has_no_verdicts_and_a_long_one_is_folded() -> None:
    few = page_html("t", [("a", [Table("x", ("n", "word"), tuple((n, "passed") for n in range(30)))])])
    many = page_html("t", [("a", [Table("x", ("n", "word"), tuple((n, "passed") for n in range(31)))])])
    assert "badge" not in few.split("</style>")[1]
    assert "<details>" not in few
    assert "<summary>31 rows</summary>" in many


def painted(html: str, rows: int, columns: int) -> list[list[list[str]]]:
    """The kind of every cell of each matrix, read back from its SVG."""
    grids = []
    for svg in re.findall(r'<svg class="matrix".*?</svg>', html, re.DOTALL):
        width = re.search(r'<rect class="none" width="(\d+)"', svg)
        assert width is not None
        side = int(width[1]) // columns
        grid = [[""] * columns for _ in range(rows)]
        for kind, path in re.findall(r'<path class="(\w+)" d="(M\d+ \d+h[^"]*)"/>', svg):
            for x, y, wide in re.findall(r"M(\d+) (\d+)h(\d+)v\d+h-\d+z", path):
                for column in range(int(x) // side, (int(x) + int(wide)) // side):
                    assert grid[int(y) // side][column] == ""
                    grid[int(y) // side][column] = kind
        grids.append(grid)
    return grids


def test_every_cell_of_the_matrices_is_what_the_flow_says() -> None:
    declared = [[True, False, False, True], [True, True, False, False], [False, True, True, False]]
    measured = [[1.0, 0.0, 0.05, 0.0], [0.001, math.nan, None, 0.0], [1e-9, 0.0, 0.3, None]]
    flow = Flow("f", declared, measured, ("a", "b", "c"), ("w", "x", "y", "z"))
    html = page_html("t", [("a", [flow])])
    may, does, differs = painted(html, 3, 4)
    assert may == [["may", "", "", "may"], ["may", "may", "", ""], ["", "may", "may", ""]]
    assert does == [["m4", "", "m3", ""], ["m1", "m4", "untried", ""], ["m1", "", "m4", "untried"]]
    assert differs[:2] == [["seen", "", "leak", "quiet"], ["seen", "seen", "untried", ""]]
    assert differs[2:] == [["leak", "quiet", "seen", "untried"]]
    said = Elements(html).said
    assert "4 pairs see as declared; 2 may, but nothing moved; 2 were not tried; 2 see what they" in said
    assert "query 0 “a” sees key 2 “y”" in said
    assert "query 2 “c” sees key 0 “w”" in said
    assert flow.leaks == [(0, 2), (2, 0)]
    signs = re.search(r'<path class="leak-sign" d="([^"]*)"/>', html)
    assert signs is not None
    assert signs[1].count("M") == 2


def test_a_flow_without_faults_says_so() -> None:
    may = [[True, False], [True, True]]
    said = Elements(page_html("t", [("a", [Flow("f", may, may)])])).said
    assert "3 pairs see as declared; none sees what it must not." in said


def test_a_large_flow_is_sampled_with_its_leaks_and_says_so() -> None:
    count = 150
    declared = [[key <= query for key in range(count)] for query in range(count)]
    measured = [[float(sees) for sees in row] for row in declared]
    measured[37][141] = 1.0
    html = page_html("t", [("a", [Flow("f", declared, measured)])])
    grids = painted(html, MOST, MOST)
    assert sum(row.count("leak") for row in grids[2]) == 1
    said = Elements(html).said
    assert "64 of 150 queries and 64 of 150 keys are drawn, those with leaks first" in said
    assert f"{count * (count + 1) // 2:,} pairs see as declared; 1 sees what it must not" in said
    assert "query 37 sees key 141" in said


def test_differences() -> None:
    flow = Flow("f", [[True, False]], [[0.0, -1.0]])
    assert [difference(flow, 0, key) for key in (0, 1)] == ["quiet", "leak"]
    assert page_html("t", [("a", [Flow("nothing", [], [])])])


def points(html: str) -> list[list[tuple[float, float]]]:
    """The pieces of each drawn line, in pixels."""
    paths = re.findall(r'<path class="line c\d" d="(M[\d. ]+L[^"]*|M[\d. M]+)"/>', html)
    return [[tuple(map(float, at.split())) for at in re.split("[ML]", path)[1:]] for path in paths if "H" not in path]  # type: ignore[misc]


def test_curves_are_drawn_to_scale() -> None:
    record = Curves("loss", (Curve("train", (0, 5, 10), (4.0, 2.0, 1.0)), Curve("held out", (10,), (2.5,))))
    html = page_html("t", [("a", [record])])
    (x0, y0), (x1, y1), (x2, y2) = points(html)[0]
    assert x1 == pytest.approx((x0 + x2) / 2)
    assert (y1 - y0) / (y2 - y0) == pytest.approx(2 / 3, abs=0.01)
    assert points(html)[1] == [(x2, pytest.approx(y0 + (y2 - y0) / 2, abs=0.2))]
    assert html.count("<circle") == 4
    said = Elements(html).said
    assert "train ends at 1" in said
    assert "held out ends at 2.5" in said


def test_gaps_break_a_curve_and_nothing_is_drawn_of_nothing() -> None:
    nan = math.nan
    broken = Curves("a", (Curve("c", tuple(range(6)), (1.0, 2.0, nan, 3.0, math.inf, 2.0)),))
    path = re.search(r'class="line c0" d="(M[^"H]*)"', page_html("t", [("a", [broken])]))
    assert path is not None
    assert path[1].count("M") == 3
    log = Curves("a", (Curve("c", (0, 1, 2), (0.0, -1.0, 10.0)),), log=True)
    assert page_html("t", [("a", [log])]).count("<circle") == 1
    for nothing in (Curve("c", (), ()), Curve("c", (1,), (nan,))):
        said = Elements(page_html("t", [("a", [Curves("a", (nothing,))])])).said
        assert "There is nothing to draw." in said
        assert "c ends at no value" in said


def test_long_curves_keep_their_extremes() -> None:
    y = [1.0 + (n % 7) / 10 for n in range(50_000)]
    y[31_234], y[40_001] = 9.0, -3.0
    html = page_html("t", [("a", [Curves("a", (Curve("c", tuple(range(50_000)), tuple(y)),))])])
    drawn = [at[1] for at in points(html)[0]]
    assert 300 < len(drawn) < 700
    assert (min(drawn), max(drawn)) == (12, 202)
    assert 125 < sorted(drawn)[len(drawn) // 2] < 140  # 1.3 on a scale from -3 to 9


@pytest.mark.parametrize(("low", "high"), [(0, 1), (1.2, 9.7), (-5, 5), (1e-5, 3e-5), (0, 123456), (-1e9, -2e8)])
def test_ticks_are_few_and_inside(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 2 <= len(found) <= 7
    assert all(low - 1e-6 * abs(low) <= value <= high + 1e-6 * abs(high) for value in found)
    assert len({tick(value) for value in found}) == len(found)


def test_ticks_of_a_logarithmic_scale() -> None:
    assert ticks(0.5, 30, log=True) == [0.5, 1, 2, 5, 10, 20]
    assert ticks(1e-6, 1e6, log=True) == pytest.approx([1e-6, 1e-4, 1e-2, 1, 1e2, 1e4, 1e6])
    assert [tick(v) for v in (0, 0.002, 1500, 20_000, 3e6, 2e-5)] == ["0", "0.002", "1500", "20k", "3M", "2e-5"]


def test_words() -> None:
    assert pieces("\n  if\tx") == [("↵", True), ("  if", False), ("→", True), ("x", False)]
    assert pieces("   ") == [("···", True)]
    assert pieces("") == [("∅", True)]
    assert name_of(" a\nb") == "·a↵b"
    assert name_of("x" * 99) == "x" * 16 + "…"
    assert shown("a\u200db \u05d0") == "a\u200db \u05d0"
    assert shown("abcdef", 4) == "abc…"


def test_a_large_sample_stays_below_a_megabyte() -> None:
    html = page_html("t", [("a", [view(64, 6, 6)])])
    assert len(html.encode()) < 1_000_000
    blob = re.search(r'class="data">(.*?)</script>', html, re.DOTALL)
    assert blob is not None
    kept = base64.b64decode(json.loads(blob[1])["attention"])
    flat = [w for heads in view(64, 6, 6).attention for rows in heads for row in rows for w in row]
    assert len(kept) == len(flat) == 6 * 6 * 64 * 64
    assert all((byte == 0) == (weight == 0) and abs(byte / 255 - weight) < 1 / 254 for byte, weight in zip(kept, flat))  # noqa: B905 (lengths are compared above)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: view(65), "has 65 tokens; show 1 to 64"),
        (lambda: TokenView("v", (), ()), "has 0 tokens"),
        (lambda: TokenView("v", ("a",), [[True, True]]), "may_see of token view 'v' has 1 rows of 2 cells, but 1 rows"),
        (lambda: TokenView("v", ("a",), [[True]], [[[[1.0]]], []]), r"layers of \[0, 1\] heads; give one"),
        (lambda: TokenView("v", ("a",), [[True]], [[[[1.0], [1.0]]]]), r"attention\[0\]\[0\] of token view"),
        (
            lambda: TokenView("v", ("a",), [[True]], [[[[1.0]]]], (), ("x", "y")),
            "names 2 of 1 layers; name all",
        ),
        (lambda: TokenView("v", ("a",), [[True]], moved=[[]]), "moved of token view 'v' has 1 rows of 0 cells"),
        (lambda: view(64, 16, 17), "more than 1048576 weights; show fewer"),
        (lambda: Flow("f", [[True]], [[1.0], [1.0]]), "measured of flow 'f' has 2 rows of 1 cells, but 1 rows of 1"),
        (lambda: Flow("f", [[True]], [[1.0]], ("a", "b")), "names 2 queries but its matrices have 1"),
        (lambda: Curve("c", (1, 2), (1.0,)), "has 2 x but 1 y; give one y an x"),
    ],
)
def test_records_that_do_not_fit_are_refused(make: object, words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        make()  # type: ignore[operator]


def test_new_records_go_into_json() -> None:
    flow = Flow("f", [[True]], [[math.nan]])
    curves = Curves("c", (Curve("x", (1,), (math.inf,)),))
    told = json.loads(json.dumps([flow.to_dict(), curves.to_dict(), view(2).to_dict()], allow_nan=False))
    assert told[0]["measured"] == [["nan"]]
    assert told[1]["curves"] == [{"name": "x", "x": [1], "y": ["inf"]}]
    assert told[2]["tokens"] == ["\nt0", " t1"]


# ------------------------------------------------------------------------------------------------ as a file


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    write_page(path, "first", [("a", ["text"])])
    before = path.read_text(encoding="utf-8")
    assert "<title>first</title>" in before
    with pytest.raises(ArgumentError, match="a page cannot draw a dict; give Table, Figure, Flow"):
        write_page(path, "second", [("a", [{}])])  # type: ignore[list-item]

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*page\.html"):
        write_page(path, "second", [("a", ["text"])])
    assert path.read_text(encoding="utf-8") == before
    assert os.listdir(tmp_path) == ["page.html"]


# ------------------------------------------------------------------------------------------------ in a browser

READ = """
const all = [...document.querySelectorAll(".words .tok")];
const mouse = (kind, element) => element.dispatchEvent(
  new PointerEvent(kind, { bubbles: kind !== "pointerenter" && kind !== "pointerleave", pointerType: "mouse" }));
const key = (name) => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true }));
const choose = (name, value) => {
  const select = document.querySelector(name);
  select.value = value;
  select.dispatchEvent(new Event("change"));
};
const state = () => ({
  looks: all.findIndex((t) => t.classList.contains("looks")),
  hidden: all.flatMap((t, n) => (t.classList.contains("hid") ? [n] : [])),
  leaks: all.flatMap((t, n) => (t.classList.contains("leak") ? [n] : [])),
  weights: all.map((t) => Number(t.dataset.weight)),
  moved: all.map((t) => Number(t.dataset.moved)),
  deep: all.map((t) => Number(t.style.getPropertyValue("--a"))),
  label: all[0].getAttribute("aria-label"),
  reading: document.querySelector(".reading").innerText,
  focused: all.indexOf(document.activeElement),
});
"""


@needs_chromium
def test_pointing_tapping_and_keys_show_what_the_matrices_say(tmp_path: Path) -> None:
    text = view()
    write_page(tmp_path / "p.html", "t", [("a", [VERDICTS, text])])
    told = drive(
        tmp_path / "p.html",
        READ
        + """
        told.first = state();
        mouse("pointerenter", all[4]); told.pointed = state();
        choose(".layer", "1"); choose(".head", "2"); told.chosen = state();
        mouse("pointerleave", document.querySelector(".words")); told.left = state();
        all[9].dispatchEvent(new PointerEvent("pointerenter", { pointerType: "touch" })); told.touched = state();
        all[9].click(); told.tapped = state();
        all[9].focus(); key("ArrowRight"); told.right = state();
        key("Home"); key("ArrowLeft"); told.home = state();
        told.stops = all.filter((t) => t.tabIndex === 0).length;
        """,
        tmp_path,
        size=(360, 740),
    )
    assert (told["heard"], told["fetched"], told["console"]) == ([], [], [])
    assert told["inner"] == 360
    assert told["width"] <= 360

    def agrees(state: dict, query: int, layer: int, heads: range) -> None:
        assert state["looks"] == query
        assert state["hidden"] == [key for key in range(12) if not text.may_see[query][key]]
        assert state["leaks"] == ([7] if query == 4 else [])
        want = [sum(text.attention[layer][h][query][k] for h in heads) / len(heads) for k in range(12)]
        assert state["weights"] == pytest.approx(want, abs=1 / 255)
        assert state["moved"] == pytest.approx(text.moved[query], rel=6e-3)
        deep = [math.sqrt(weight / max(want)) for weight in want]
        assert state["deep"] == pytest.approx(deep, abs=0.15)
        assert f"{query + 1} of 12 tokens: 0" in state["reading"]

    everywhere = range(3)
    agrees(told["first"], 7, 0, everywhere)
    agrees(told["pointed"], 4, 0, everywhere)
    agrees(told["chosen"], 4, 1, range(2, 3))
    agrees(told["left"], 7, 1, range(2, 3))
    agrees(told["touched"], 7, 1, range(2, 3))
    agrees(told["tapped"], 9, 1, range(2, 3))
    agrees(told["right"], 10, 1, range(2, 3))
    agrees(told["home"], 0, 1, range(2, 3))
    assert "✗ moved by 1 token that it must not see: 7" in told["pointed"]["reading"]
    assert "must not see" not in told["first"]["reading"]
    assert "layer 1, head 2" in told["chosen"]["reading"].lower()
    assert told["home"]["label"].startswith("↵t0, token 0, may be seen, attention 100 %, moved it by ")
    assert told["home"]["focused"] == 0
    assert told["stops"] == 1
    largest = max(range(5), key=lambda k: text.attention[1][2][4][k])
    assert re.search(rf"head 2\s+{largest} ·t{largest}\s", told["chosen"]["reading"].replace("↵", "·"))


@needs_chromium
def test_a_hostile_page_runs_nothing_and_does_not_scroll_sideways(tmp_path: Path) -> None:
    write_page(tmp_path / "p.html", "quiet", hostile_sections(), subtitle=HOSTILE[2])  # type: ignore[arg-type]
    told = drive(
        tmp_path / "p.html",
        READ
        + """
        told.title = document.title;
        told.scripts = document.scripts.length;
        told.tokens = all.length;
        all.forEach((token) => token.click());
        told.last = state();
        told.text = all.map((token) => token.innerText);
        told.inline = document.querySelectorAll("[onerror],[onload],[style*=url]").length;
        """,
        tmp_path,
        size=(360, 740),
    )
    assert told["title"] == "quiet"
    assert told["scripts"] == 4  # its data and its own, and the two of this test
    assert set(told["heard"]) <= {"unloaded: IMG"}  # pictures that are no SVG
    assert (told["fetched"], told["console"], told["inline"]) == ([], [], 0)
    assert told["tokens"] == len(HOSTILE)
    assert told["text"][0].startswith("</script><script>document")
    assert told["last"]["hidden"] == []
    assert "NaN" in told["last"]["reading"] or "nan" in told["last"]["reading"]
    assert told["width"] <= told["inner"] == 360


@needs_chromium
def test_wide_things_scroll_in_their_own_box(tmp_path: Path) -> None:
    count = 64
    may = [[key <= query for key in range(count)] for query in range(count)]
    wide = Table("wide", tuple(f"column {n}" for n in range(30)), (tuple(range(30)),))
    curves = Curves("c", tuple(Curve(f"series {n}", (0, 1), (n, 2.0)) for n in range(8)))
    big = Figure("f", '<svg xmlns="http://www.w3.org/2000/svg" width="2000" height="50"/>')
    sections = [("a", [wide, Flow("f", may, may), curves, big, view(64, 2, 2)])]
    write_page(tmp_path / "p.html", "t", sections)
    told = drive(
        tmp_path / "p.html",
        """
        const boxes = [...document.querySelectorAll(".scroll")];
        told.over = boxes.map((box) => box.scrollWidth > box.clientWidth && box.clientWidth <= innerWidth);
        told.svg = document.querySelector(".curves > svg").getBoundingClientRect().width;
        told.reading = getComputedStyle(document.querySelector(".reading")).position;
        """,
        tmp_path,
        size=(360, 740),
    )
    assert told["heard"] == []
    assert told["width"] <= told["inner"] == 360
    assert told["over"][0]
    assert told["over"][-1]
    assert 250 < told["svg"] <= 360
    assert told["reading"] == "sticky"
