"""Rules as text: ``"causal & (window(256) | sinks(4))"``. Reads what ``Rule.describe`` writes."""

import ast
import difflib
from collections.abc import Sequence

from pellucid.errors import ConfigError
from pellucid.visibility import primitives
from pellucid.visibility.rules import Rule

_WRITTEN = {
    "same_group": "same_group()",
    "causal": "causal()",
    "chunk": "chunk(64)",
    "full": "full()",
    "lookahead": "lookahead(2)",
    "prefix": "prefix() or prefix(16)",
    "sinks": "sinks(4)",
    "window": "window(256)",
}
NAMES = tuple(_WRITTEN)
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
            numbers = [value for arg in args for value in _number(arg)]
            if len(numbers) == len(args):
                return _call(name, numbers, text)
    raise ConfigError(
        f"visibility rule {text!r} holds {ast.unparse(node)!r}; write rules like {EXAMPLE!r} "
        f"from {', '.join(NAMES)}, & and |"
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
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, 1)
        hint = f"did you mean {near[0]!r}? There" if near else "there"
        raise ConfigError(f"visibility rule {text!r}: there is no rule {name!r}; {hint} are {', '.join(NAMES)}")
    try:
        made = getattr(primitives, name)(*numbers)
    except TypeError as error:
        raise ConfigError(
            f"visibility rule {text!r}: {name} was given {len(numbers)} numbers; write it like {_WRITTEN[name]}"
        ) from error
    assert isinstance(made, Rule)
    return made
