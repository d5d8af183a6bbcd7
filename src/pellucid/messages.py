"""How messages are worded: values on one line, the nearest known name, lists cut short."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

__all__ = ["did_you_mean", "either", "join_some", "nearest", "printable", "repr_short"]


def repr_short(value: object, most: int = 80) -> str:
    """``repr(value)`` on one line, cut to ``most`` characters."""
    text = " ".join(repr(value).split()) if "\n" in repr(value) else repr(value)
    return text if len(text) <= most else text[: most - 3] + "…" + text[-1]


def printable(value: object) -> str:
    """``str(value)`` with everything escaped that would break the line or move a terminal's cursor."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(value))


def nearest(name: object, known: Iterable[object], cutoff: float = 0.6) -> str | None:
    """The entry of ``known`` that is spelt most like ``name``, or None where none is alike enough."""
    return next(iter(difflib.get_close_matches(str(name), [str(entry) for entry in known], 1, cutoff)), None)


def did_you_mean(name: object, known: Iterable[object], before: str = ", ", cutoff: float = 0.6) -> str:
    """``, did you mean 'name'?`` with the nearest of ``known``; empty where none is alike enough."""
    near = nearest(name, known, cutoff)
    return "" if near is None else f"{before}did you mean {near!r}?"


def either(words: Sequence[str]) -> str:
    """``a, b or c``."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def join_some(parts: Sequence[object], most: int, separator: str = ", ") -> str:
    """``a, b and 3 more``: the first ``most`` parts and how many follow; ``a; b; and 3 more`` between semicolons."""
    shown = separator.join(map(str, parts[:most]))
    if len(parts) <= most:
        return shown
    return f"{shown}{';' if separator == '; ' else ''} and {len(parts) - most} more"
