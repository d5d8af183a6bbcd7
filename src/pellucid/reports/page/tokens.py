"""A sample text for the template, and what its script needs: masks as text, one byte a weight, rounded sizes."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

from pellucid.records import TokenView
from pellucid.reports.page.token_text import name_of, pieces


def tokens_block(view: TokenView) -> Mapping[str, Any]:
    """What the template needs to show ``view``."""
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
