"""The single rules, which ``&`` and ``|`` combine, the functions that make them, and ``parse``, which reads them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pellucid.errors import ConfigError
from pellucid.messages import nearest
from pellucid.shapes import Tensor
from pellucid.visibility.coordinates import Coordinates
from pellucid.visibility.rules import Intervals, Lookback, Rule


def _q(q_coords: Coordinates) -> Tensor:
    return q_coords.positions[:, :, None]


def _k(k_coords: Coordinates) -> Tensor:
    return k_coords.positions[:, None, :]


@dataclass(frozen=True)
class Full(Rule):
    lookback = (None, 0)
    lookahead = None

    def _visible(self, q_coords: Coordinates, k_coords: Coordinates) -> Tensor:
        return k_coords.real[:, None, :]

    def intervals(self, length: int) -> Intervals:
        return [(np.zeros(length, dtype=np.int64), np.full(length, length))]

    def describe(self) -> str:
        return "full()"


@dataclass(frozen=True)
class Lookahead(Rule):
    n: int
    lookback = (None, 0)

    @property
    def lookahead(self) -> int | None:
        return self.n

    def _visible(self, q_coords: Coordinates, k_coords: Coordinates) -> Tensor:
        return _k(k_coords) <= _q(q_coords) + self.n

    def intervals(self, length: int) -> Intervals:
        query = np.arange(length)
        return [(np.zeros(length, dtype=np.int64), np.minimum(query + self.n + 1, length))]

    def describe(self) -> str:
        return f"lookahead({self.n})" if self.n else "causal()"


@dataclass(frozen=True)
class Window(Rule):
    w: int
    lookahead = None

    @property
    def lookback(self) -> Lookback:
        return self.w - 1, 0

    def _visible(self, q_coords: Coordinates, k_coords: Coordinates) -> Tensor:
        return _k(k_coords) > _q(q_coords) - self.w

    def intervals(self, length: int) -> Intervals:
        query = np.arange(length)
        return [(np.maximum(query - self.w + 1, 0), np.full(length, length))]

    def describe(self) -> str:
        return f"window({self.w})"


@dataclass(frozen=True)
class Prefix(Rule):
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

    def _visible(self, q_coords: Coordinates, k_coords: Coordinates) -> Tensor:
        if self.n is not None:
            return _k(k_coords) < self.n
        return _need_groups(k_coords, self)[:, None, :] != 0

    @property
    def positional(self) -> bool:  # type: ignore[override]
        return self.n is not None

    def intervals(self, length: int) -> Intervals:
        end = min(self.n or 0, length)  # without groups nothing belongs to a prefix
        return [(np.zeros(length, dtype=np.int64), np.full(length, end))]

    def describe(self) -> str:
        return "prefix()" if self.n is None else f"prefix({self.n})"


@dataclass(frozen=True)
class Sinks(Rule):
    n: int
    lookahead = 0

    @property
    def lookback(self) -> Lookback:
        return 0, self.n

    def _visible(self, q_coords: Coordinates, k_coords: Coordinates) -> Tensor:
        return (_k(k_coords) < self.n) & (_k(k_coords) <= _q(q_coords))

    def intervals(self, length: int) -> Intervals:
        query = np.arange(length)
        return [(np.zeros(length, dtype=np.int64), np.minimum(query + 1, self.n))]

    def describe(self) -> str:
        return f"sinks({self.n})"


@dataclass(frozen=True)
class Chunk(Rule):
    n: int

    @property
    def lookback(self) -> Lookback:
        return self.n - 1, 0

    @property
    def lookahead(self) -> int | None:
        return self.n - 1

    def _visible(self, q_coords: Coordinates, k_coords: Coordinates) -> Tensor:
        return _k(k_coords) // self.n == _q(q_coords) // self.n

    def intervals(self, length: int) -> Intervals:
        start = np.arange(length) // self.n * self.n
        return [(start, np.minimum(start + self.n, length))]

    def describe(self) -> str:
        return f"chunk({self.n})"


@dataclass(frozen=True)
class SameGroup(Rule):
    lookback = (None, 0)
    lookahead = None
    lookahead_outside_groups = 0
    positional = False

    def _visible(self, q_coords: Coordinates, k_coords: Coordinates) -> Tensor:
        query, key = _need_groups(q_coords, self), _need_groups(k_coords, self)
        return (query[:, :, None] == key[:, None, :]) & (key != 0)[:, None, :]

    def intervals(self, length: int) -> Intervals:
        nothing = np.zeros(length, dtype=np.int64)  # without groups nothing belongs together
        return [(nothing, nothing)]

    def describe(self) -> str:
        return "same_group()"


def _need_groups(coordinates: Coordinates, rule: Rule) -> Tensor:
    if coordinates.groups is None:
        raise ConfigError(
            f"{rule} reads groups, but there are none here; give Batch(…, groups=…) or Coordinates(…, groups=…)"
        )
    return coordinates.groups


_MOST = 1 << 40


def _count(value: int, name: str, least: int, hint: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} takes a whole number, not {value!r}")
    if value > _MOST:
        shown = value if value.bit_length() <= 128 else f"a number of {value.bit_length()} bits"
        raise ConfigError(f"{name} is {shown}, but must be at most {_MOST}; {hint}")
    if value < least:
        raise ConfigError(f"{name} is {value}, but must be at least {least}; {hint}")
    return value


def full() -> Rule:
    """All tokens of the document, both ways."""
    return Full()


def causal() -> Rule:
    """The token itself and all before it."""
    return Lookahead(0)


def lookahead(n: int) -> Rule:
    """At most ``n`` tokens ahead (right context); ``lookahead(0)`` is ``causal()``."""
    return Lookahead(_count(n, "lookahead(n)", 0, "use window(w) to bound the past"))


def window(w: int) -> Rule:
    """The current token and the ``w - 1`` before it. Bounds the past only: combine with ``causal()``."""
    return Window(_count(w, "window(w)", 1, "leave the rule out for no window"))


def prefix(n: int | None = None) -> Rule:
    """The first ``n`` tokens of each document (or, without ``n``, its tokens with a group) are seen by all of it."""
    return Prefix(None if n is None else _count(n, "prefix(n)", 1, "leave the rule out for no prefix"))


def chunk(n: int) -> Rule:
    """Only the chunk of ``n`` positions that the query is in."""
    return Chunk(_count(n, "chunk(n)", 1, "leave the rule out for no chunks"))


def sinks(n: int) -> Rule:
    """The first ``n`` tokens of the document, never ahead: ``causal() & (window(w) | sinks(n))``."""
    return Sinks(_count(n, "sinks(n)", 1, "leave the rule out for no sinks"))


def same_group() -> Rule:
    """Tokens of one group see each other both ways: ``causal() | same_group()``."""
    return SameGroup()


_FUNCTIONS: dict[str, tuple[Callable[..., Rule], str]] = {
    "same_group": (same_group, "same_group()"),
    "causal": (causal, "causal()"),
    "chunk": (chunk, "chunk(64)"),
    "full": (full, "full()"),
    "lookahead": (lookahead, "lookahead(2)"),
    "prefix": (prefix, "prefix() or prefix(16)"),
    "sinks": (sinks, "sinks(4)"),
    "window": (window, "window(256)"),
}
"""By name, each with an example."""
EXAMPLE = "causal & (window(256) | sinks(4))"
_LONGEST = 500


def parse(text: str) -> Rule:
    """The rule that ``text`` describes. Names without brackets are allowed; nothing is evaluated."""
    if len(text) > _LONGEST:
        raise ConfigError(f"a visibility rule has {len(text)} characters, but at most {_LONGEST} are read")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"visibility rule {text!r} cannot be read; write it like {EXAMPLE!r}") from error
    return _build(tree, text)


def _build(node: ast.expr, text: str) -> Rule:
    match node:
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _build(left, text) & _build(right, text)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _build(left, text) | _build(right, text)
        case ast.Name(id=name):
            return _call(name, [], text)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            numbers = [value for arg in args for value in _number(arg)]
            if len(numbers) == len(args):
                return _call(name, numbers, text)
    raise ConfigError(
        f"visibility rule {text!r} holds {ast.unparse(node)!r}; write rules like {EXAMPLE!r} "
        f"from {', '.join(_FUNCTIONS)}, & and |"
    )


def _number(arg: ast.expr) -> list[object]:
    """The number that is written there, a negative one too; nothing for anything else."""
    match arg:
        case ast.Constant(value=value):
            return [value]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return [-value]
    return []


def _call(name: str, numbers: Sequence[object], text: str) -> Rule:
    if name not in _FUNCTIONS:
        near = nearest(name, _FUNCTIONS)
        hint = f"did you mean {near!r}? There" if near else "there"
        raise ConfigError(f"visibility rule {text!r}: there is no rule {name!r}; {hint} are {', '.join(_FUNCTIONS)}")
    function, example = _FUNCTIONS[name]
    try:
        return function(*numbers)
    except TypeError as error:
        raise ConfigError(
            f"visibility rule {text!r}: {name} was given {len(numbers)} numbers; write it like {example}"
        ) from error
