"""Records to one HTML file: template, style and script, each allowed by its hash and nothing else.

Every text goes through :func:`~pellucid.reports.page.text.shown` and the template's escaping; SVG that a
:class:`~pellucid.records.Figure` brings along is shown as an image, in which nothing can run; numbers for the
script travel as JSON in which no character can end the element.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import BaseLoader, Environment, StrictUndefined, Template
from markupsafe import Markup

from pellucid.errors import ArgumentError
from pellucid.files import replace_file
from pellucid.records import SEVERITY, Cell, Curves, Figure, Flow, Table, TokenView
from pellucid.reports.page.curves import curves_block
from pellucid.reports.page.matrices import flow_block
from pellucid.reports.page.text import SYMBOLS, cell, shown, tokens_block

Record = Table | Figure | Flow | TokenView | Curves | str
Section = tuple[str, Sequence[Record]]
Block = Mapping[str, Any]

_FOLDED = 30


def page_html(title: str, sections: Sequence[Section], *, subtitle: str = "") -> str:
    """The whole page as text."""
    drawn: list[Block] = [
        {"heading": heading, "blocks": [_block(record) for record in records]} for heading, records in sections
    ]
    style, script = _part("page.css"), _part("page.js")
    return _template().render(
        title=title,
        subtitle=subtitle,
        sections=drawn,
        views=any(block["kind"] == "tokens" for section in drawn for block in section["blocks"]),
        style=Markup(style),
        script=Markup(script),
        style_hash=_hash(style),
        script_hash=_hash(script),
    )


def write_page(path: str | Path, title: str, sections: Sequence[Section], *, subtitle: str = "") -> None:
    """Write the page with these ``(heading, records)`` to ``path``: whole, or not at all.

    Raises:
        ArgumentError: a record that the page cannot draw.
        OSError: what the disk refused, with the path as its filename.
    """
    replace_file(path, page_html(title, sections, subtitle=subtitle).encode())


def _block(record: Record) -> Block:
    match record:
        case str():
            return {"kind": "text", "text": record}
        case Table():
            return _table_block(record)
        case Figure():
            return _figure_block(record)
        case Flow():
            return flow_block(record)
        case Curves():
            return curves_block(record)
        case TokenView():
            return tokens_block(record)
    raise ArgumentError(
        f"a page cannot draw a {type(record).__name__}; give Table, Figure, Flow, TokenView, Curves or text"
    )


def _table_block(table: Table) -> Block:
    verdicts = Counter(value for row in table.rows for value in row if isinstance(value, str) and value in SYMBOLS)
    order = sorted(verdicts, key=lambda status: -SEVERITY[status])
    numeric = [all(map(_is_number, column)) for column in zip(*table.rows, strict=True)]
    rows = [[_cell_block(value, right) for value, right in zip(row, numeric, strict=True)] for row in table.rows]
    return {
        "kind": "table",
        "title": table.title,
        "columns": table.columns,
        "rows": rows,
        "counts": [{"count": verdicts[status], **_badge(status)} for status in order],
        "folded": len(rows) > _FOLDED,
        "stacked": bool(verdicts),
    }


def _cell_block(value: Cell, right: bool) -> Block:
    if isinstance(value, str) and value in SYMBOLS:
        return {"text": "", "right": False, **_badge(value)}
    return {"text": cell(value), "right": right, "status": ""}


def _is_number(value: Cell) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _badge(status: str) -> Block:
    return {"status": status, "word": status.replace("_", " "), "symbol": SYMBOLS[status]}


def _figure_block(figure: Figure) -> Block:
    data = base64.b64encode(figure.svg.encode("utf-8", errors="replace")).decode("ascii")
    return {"kind": "figure", "title": figure.title, "caption": figure.caption, "data": data}


def _json(value: Any) -> Markup:
    """JSON for inside an element: it holds no ``<``, ``>`` or ``&``, and nothing but ASCII."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


@lru_cache(maxsize=1)
def _template() -> Template:
    environment = Environment(
        loader=BaseLoader(), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["shown"] = shown
    environment.filters["json"] = _json
    return environment.from_string(_part("page.html"))


def _part(name: str) -> str:
    return (files("pellucid.reports.page") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """How a content security policy names the one text that it allows."""
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
