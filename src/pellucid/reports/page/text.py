"""Text of a page: hostile text made visible, table cells, verdicts, tokens, and sample texts token by token."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

from pellucid.records import Cell, TokenView
from pellucid.reports.table import cell_text

SYMBOLS = {"pass": "✓", "leak": "✗", "error": "!", "fragile": "~", "not_applicable": "–"}
"""The symbol of a verdict, besides its color and its word."""

_JOINERS = "\u200c\u200d"  # they join letters and pictures, and cannot reorder anything


def shown(text: str, most: int = 0) -> str:
    """``text`` with everything escaped that a browser would obey or not show; ``most`` characters (0: all)."""
    if most and len(text) > most:
        text = text[: most - 1] + "…"
    return "".join(
        c if c.isprintable() or c in "\n\t" or c in _JOINERS else c.encode("unicode_escape").decode() for c in text
    )


def cell(value: Cell) -> str:
    """One cell of a table."""
    if isinstance(value, int) and abs(value) >= 10_000:
        return f"{value:,}"
    return shown(value) if isinstance(value, str) else cell_text(value)


def pieces(token: str) -> list[tuple[str, bool]]:
    """A token in runs of ``(text, mark)``: line ends, tabs and a token that is only blanks become marks."""
    text = shown(token, 48)
    if not text:
        return [("∅", True)]
    if not text.strip(" "):
        return [("·" * len(text), True)]
    runs: list[tuple[str, bool]] = []
    for character in text:
        mark = {"\n": "↵", "\t": "→"}.get(character)
        if runs and runs[-1][1] == (mark is not None):
            runs[-1] = (runs[-1][0] + (mark or character), runs[-1][1])
        else:
            runs.append((mark or character, mark is not None))
    return runs


def name_of(token: str) -> str:
    """A token on one line, cut short, with a mark for a blank before it."""
    name = "".join(text for text, _ in pieces(token[:16] + ("…" if len(token) > 16 else "")))
    return "·" + name[1:] if name.startswith(" ") else name


# ---- a sample text: masks as text, one byte a weight, rounded sizes


def tokens_block(view: TokenView) -> Mapping[str, Any]:
    """The template's values for ``view``."""
    weights, bad = _weights(view)
    notes = [view.note] if view.note else []
    if bad:
        notes.append(f"{bad:,} attention weights are not finite; they are shown as 0.")
    heads = len(view.attention[0]) if view.attention else 0
    return {
        "kind": "tokens",
        "title": view.title,
        "measure": view.measure,
        "notes": notes,
        "layers": view.layers or tuple(str(n) for n in range(len(view.attention))),
        "heads": heads,
        "moves": bool(view.moved),
        "tokens": [
            {"pieces": pieces(token), "newline": index > 0 and "\n" in token} for index, token in enumerate(view.tokens)
        ],
        "data": {
            "names": [name_of(token) for token in view.tokens],
            "may": ["".join("1" if sees else "0" for sees in row) for row in view.may_see],
            "heads": heads,
            "layers": len(view.attention),
            "attention": base64.b64encode(weights).decode("ascii"),
            "moved": [[_size(size) for size in row] for row in view.moved],
        },
    }


def _weights(view: TokenView) -> tuple[bytes, int]:
    """``[layer][head][query][key]``, 255 being 1 and 0 being 0 alone; and how many were not finite."""
    flat = [w for heads in view.attention for rows in heads for row in rows for w in row]
    bad = sum(not math.isfinite(w) for w in flat)
    return bytes(max(1, min(255, round(255 * w))) if math.isfinite(w) and w > 0 else 0 for w in flat), bad


def _size(size: float | None) -> float | str | None:
    """Three digits; what is not finite as its name."""
    if size is None:
        return None
    return float(f"{size:.3g}") if math.isfinite(size) else str(float(size))
