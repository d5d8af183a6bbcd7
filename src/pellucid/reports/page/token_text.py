"""Text on its way into a page: what cannot be seen is spelt out, what a verdict means is said in a word."""

from __future__ import annotations

import math

from pellucid.records import Cell

SYMBOLS = {"pass": "✓", "leak": "✗", "error": "!", "fragile": "~", "not_applicable": "–"}
"""How a verdict is drawn besides its colour and its word."""

_JOINERS = "\u200c\u200d"  # they join letters and pictures, and cannot reorder anything


def shown(text: str, most: int = 0) -> str:
    """``text`` with everything spelt out that a browser would obey or not show; ``most`` characters (0: all)."""
    if most and len(text) > most:
        text = text[: most - 1] + "…"
    return "".join(c if c.isprintable() or c in "\n\t" or c in _JOINERS else _spelt(c) for c in text)


def word(status: str) -> str:
    """A status as a reader says it."""
    return status.replace("_", " ")


def cell(value: Cell) -> str:
    """One cell of a table."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else str(value)
    return f"{value:,}" if isinstance(value, int) and abs(value) >= 10_000 else shown(str(value))


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


def _spelt(character: str) -> str:
    return character.encode("unicode_escape").decode()
