"""Who may see whom, written once.

>>> from pellucid.visibility import Coordinates, causal, window
>>> rule = causal() & window(2)
>>> rule.describe(), rule.edges(4)
('causal() & window(2)', 7)
>>> tokens = Coordinates.range(3)
>>> rule.mask(tokens, tokens)[0, 0].int().tolist()
[[1, 0, 0], [1, 1, 0], [0, 1, 1]]
"""

from pellucid.visibility.coordinates import Coordinates, Layout, Run
from pellucid.visibility.foreign import from_additive, from_hidden, from_visible
from pellucid.visibility.named import (
    blocks,
    causal,
    chunk,
    everything,
    lookahead,
    prefix,
    sinks,
    window,
)
from pellucid.visibility.rules import Rule
from pellucid.visibility.text import parse

__all__ = [
    "Coordinates",
    "Layout",
    "Rule",
    "Run",
    "blocks",
    "causal",
    "chunk",
    "everything",
    "from_additive",
    "from_hidden",
    "from_visible",
    "lookahead",
    "parse",
    "prefix",
    "sinks",
    "window",
]
