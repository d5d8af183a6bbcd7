"""Rules as text: ``"causal & (window(256) | sinks(4))"``. Reads what ``Rule.describe`` writes."""

import ast
from collections.abc import Sequence

from pellucid.errors import ConfigError
from pellucid.visibility import named
from pellucid.visibility.rules import Rule

NAMES = ("blocks", "causal", "chunk", "everything", "lookahead", "prefix", "sinks", "window")
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


EXAMPLE = "causal & (window(256) | sinks(4))"


def _build(node: ast.expr, text: str) -> Rule:
    match node:
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _build(left, text) & _build(right, text)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _build(left, text) | _build(right, text)
        case ast.Name(id=name):
            return _call(name, [], text)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            numbers = [arg.value for arg in args if isinstance(arg, ast.Constant)]
            if len(numbers) == len(args):
                return _call(name, numbers, text)
    raise ConfigError(
        f"visibility rule {text!r} holds {ast.unparse(node)!r}; write rules like {EXAMPLE!r} "
        f"from {', '.join(NAMES)}, & and |"
    )


def _call(name: str, numbers: Sequence[object], text: str) -> Rule:
    if name not in NAMES:
        raise ConfigError(f"visibility rule {text!r}: there is no rule {name!r}; there are {', '.join(NAMES)}")
    try:
        made = getattr(named, name)(*numbers)
    except TypeError as error:
        raise ConfigError(
            f"visibility rule {text!r}: {name} was given {len(numbers)} numbers; see pellucid.visibility.{name}"
        ) from error
    assert isinstance(made, Rule)
    return made
