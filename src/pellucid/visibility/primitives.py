"""The single rules, which ``&`` and ``|`` combine. ``named`` has the functions that make them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pellucid.errors import ConfigError
from pellucid.shapes import Tensor
from pellucid.visibility import intervals as iv
from pellucid.visibility.coordinates import Coordinates
from pellucid.visibility.rules import Lookback, Rule


def _q(queries: Coordinates) -> Tensor:
    return queries.positions[:, :, None]


def _k(keys: Coordinates) -> Tensor:
    return keys.positions[:, None, :]


@dataclass(frozen=True)
class Full(Rule):
    """All tokens of the document."""

    lookback = (None, 0)
    lookahead = None

    def _visible(self, queries: Coordinates, keys: Coordinates) -> Tensor:
        return keys.real[:, None, :]

    def intervals(self, length: int) -> iv.Intervals:
        return iv.single(np.zeros(length, dtype=np.int64), np.full(length, length))

    def describe(self) -> str:
        return "full()"


@dataclass(frozen=True)
class Lookahead(Rule):
    """At most ``n`` tokens ahead; the past is free. ``Lookahead(0)`` is causal."""

    n: int
    lookback = (None, 0)

    @property
    def lookahead(self) -> int | None:
        return self.n

    def _visible(self, queries: Coordinates, keys: Coordinates) -> Tensor:
        return _k(keys) <= _q(queries) + self.n

    def intervals(self, length: int) -> iv.Intervals:
        query = np.arange(length)
        return iv.single(np.zeros(length, dtype=np.int64), np.minimum(query + self.n + 1, length))

    def describe(self) -> str:
        return f"lookahead({self.n})" if self.n else "causal()"


@dataclass(frozen=True)
class Window(Rule):
    """The current token and the ``w - 1`` before it; the future is not bounded by this rule."""

    w: int
    lookahead = None

    @property
    def lookback(self) -> Lookback:
        return self.w - 1, 0

    def _visible(self, queries: Coordinates, keys: Coordinates) -> Tensor:
        return _k(keys) > _q(queries) - self.w

    def intervals(self, length: int) -> iv.Intervals:
        query = np.arange(length)
        return iv.single(np.maximum(query - self.w + 1, 0), np.full(length, length))

    def describe(self) -> str:
        return f"window({self.w})"


@dataclass(frozen=True)
class Prefix(Rule):
    """The first ``n`` tokens of the document, seen by all of it (prefix-LM); without ``n``, its grouped tokens."""

    n: int | None = None

    @property
    def lookback(self) -> Lookback:
        return (None, 0) if self.n is None else (0, self.n)

    @property
    def lookahead(self) -> int | None:
        return None if self.n is None else self.n - 1

    @property
    def lookahead_outside_groups(self) -> int | None:
        return 0 if self.uses_prefix_groups else self.lookahead

    @property
    def uses_prefix_groups(self) -> bool:
        return self.n is None

    @property
    def causal_from(self) -> int | None:
        return self.n

    def _visible(self, queries: Coordinates, keys: Coordinates) -> Tensor:
        if self.n is not None:
            return _k(keys) < self.n
        return _need_groups(keys, self)[:, None, :] != 0

    @property
    def positional(self) -> bool:  # type: ignore[override]
        return self.n is not None

    def intervals(self, length: int) -> iv.Intervals:
        end = min(self.n or 0, length)  # without groups nothing belongs to a prefix
        return iv.single(np.zeros(length, dtype=np.int64), np.full(length, end))

    def describe(self) -> str:
        return "prefix()" if self.n is None else f"prefix({self.n})"


@dataclass(frozen=True)
class Sinks(Rule):
    """The first ``n`` tokens of the document, from there on (never ahead): attention sinks."""

    n: int
    lookahead = 0

    @property
    def lookback(self) -> Lookback:
        return 0, self.n

    def _visible(self, queries: Coordinates, keys: Coordinates) -> Tensor:
        return (_k(keys) < self.n) & (_k(keys) <= _q(queries))

    def intervals(self, length: int) -> iv.Intervals:
        query = np.arange(length)
        return iv.single(np.zeros(length, dtype=np.int64), np.minimum(query + 1, self.n))

    def describe(self) -> str:
        return f"sinks({self.n})"


@dataclass(frozen=True)
class Chunk(Rule):
    """The document is cut into chunks of ``n`` positions; a query sees its own chunk."""

    n: int

    @property
    def lookback(self) -> Lookback:
        return self.n - 1, 0

    @property
    def lookahead(self) -> int | None:
        return self.n - 1

    def _visible(self, queries: Coordinates, keys: Coordinates) -> Tensor:
        return _k(keys) // self.n == _q(queries) // self.n

    def intervals(self, length: int) -> iv.Intervals:
        start = np.arange(length) // self.n * self.n
        return iv.single(start, np.minimum(start + self.n, length))

    def describe(self) -> str:
        return f"chunk({self.n})"


@dataclass(frozen=True)
class SameGroup(Rule):
    """Tokens of the same group (≠ 0) see each other both ways: image spans, for example."""

    lookback = (None, 0)
    lookahead = None
    lookahead_outside_groups = 0
    positional = False

    def _visible(self, queries: Coordinates, keys: Coordinates) -> Tensor:
        query, key = _need_groups(queries, self), _need_groups(keys, self)
        return (query[:, :, None] == key[:, None, :]) & (key != 0)[:, None, :]

    def intervals(self, length: int) -> iv.Intervals:
        nothing = np.zeros(length, dtype=np.int64)  # without groups nothing belongs together
        return iv.single(nothing, nothing)

    def describe(self) -> str:
        return "same_group()"


def _need_groups(coordinates: Coordinates, rule: Rule) -> Tensor:
    if coordinates.groups is None:
        raise ConfigError(
            f"{rule} reads groups, but there are none here; give Batch(…, groups=…) or Coordinates(…, groups=…)"
        )
    return coordinates.groups
