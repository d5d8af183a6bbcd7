"""The names by which rules are made: ``causal() & (window(256) | sinks(4))``."""

from pellucid.errors import ConfigError
from pellucid.visibility.primitives import Chunk, Full, Lookahead, Prefix, SameGroup, Sinks, Window
from pellucid.visibility.rules import Rule

_MOST = 1 << 40


def _count(value: int, name: str, least: int, hint: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} takes a whole number, not {value!r}")
    if value > _MOST:
        said = value if value.bit_length() <= 128 else f"a number of {value.bit_length()} bits"
        raise ConfigError(f"{name} is {said}, but must be at most {_MOST}; {hint}")
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
