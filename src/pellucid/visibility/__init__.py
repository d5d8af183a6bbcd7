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
from pellucid.visibility.from_masks import from_additive, from_hidden, from_visible
from pellucid.visibility.primitives import (
    causal,
    chunk,
    full,
    lookahead,
    parse,
    prefix,
    same_group,
    sinks,
    window,
)
from pellucid.visibility.rules import Rule

__all__ = [
    "Coordinates",
    "Layout",
    "Rule",
    "Run",
    "causal",
    "chunk",
    "from_additive",
    "from_hidden",
    "from_visible",
    "full",
    "lookahead",
    "parse",
    "prefix",
    "same_group",
    "sinks",
    "window",
]
