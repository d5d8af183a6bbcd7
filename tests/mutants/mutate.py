"""Faulty copies of our own source, one small change each: a comparison flipped, a mask dropped, an index shifted."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "pellucid"

FILES = (
    "visibility/coordinates.py",
    "visibility/from_masks.py",
    "visibility/primitives.py",
    "visibility/rules.py",
    "nn/attend.py",
    "nn/attention.py",
    "nn/backends/inputs.py",
    "nn/backends/reference.py",
    "nn/backends/sdpa.py",
    "nn/cache.py",
    "nn/embedding.py",
    "nn/losses.py",
    "nn/positions/biases.py",
    "nn/positions/rotary.py",
    "nn/positions/absolute.py",
    "data/objectives/causal_lm.py",
    "models/model.py",
)
"""Where visibility, positions, caches and losses are made."""

_FLIPPED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
"""One step to the side, and all the way round."""

_SWAPPED = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}
_MASKS = ("masked_fill", "clamp")


@dataclass(frozen=True)
class Mutant:
    """One changed file: its module, where the change is, what stood there and what stands there now."""

    file: str
    function: str
    line: int
    before: str
    after: str
    source: str
    number: int = 1  # among those of its function that read alike

    @property
    def module(self) -> str:
        return "pellucid." + self.file.removesuffix(".py").replace("/", ".")

    @property
    def name(self) -> str:
        """What stays the same when lines move."""
        again = f" ({self.number})" if self.number > 1 else ""
        return f"{self.file} {self.function}: {self.before} -> {self.after}{again}"


@cache
def mutants(file: str) -> tuple[Mutant, ...]:
    """All mutants of one file, in the order of its lines."""
    return tuple(_mutants(file))


def _mutants(file: str) -> Iterator[Mutant]:
    tree = ast.parse((SOURCE / file).read_text(encoding="utf-8"))
    alike: Counter[tuple[str, str, str]] = Counter()
    for function, node in _nodes(tree):
        for changed in _changes(node):
            before = copy.copy(node)
            node.__dict__.update(changed.__dict__)
            node.__class__ = changed.__class__
            text = ast.unparse(ast.fix_missing_locations(tree))
            after = ast.unparse(node)
            node.__class__ = before.__class__
            node.__dict__.clear()
            node.__dict__.update(before.__dict__)
            words = function, ast.unparse(before), after
            alike[words] += 1
            yield Mutant(file, function, before.lineno, *words[1:], text, alike[words])


def _nodes(tree: ast.Module) -> list[tuple[str, ast.expr | ast.AugAssign]]:
    """All that computes inside a function, outside of what only makes messages, with the function's name."""
    found: list[tuple[str, ast.expr | ast.AugAssign]] = []

    def visit(node: ast.AST, function: str) -> None:
        kept = {id(getattr(node, name, None)) for name in ("annotation", "returns")}
        for child in ast.iter_child_nodes(node):
            if id(child) in kept or isinstance(child, ast.Raise | ast.JoinedStr | ast.Assert | ast.arguments):
                continue
            inside = function
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inside = f"{function}.{child.name}".lstrip(".")
            if function and isinstance(child, ast.expr | ast.AugAssign):
                found.append((function, child))
            visit(child, inside)

    visit(tree, "")
    return found


def _changes(node: ast.expr | ast.AugAssign) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(left, ops, comparators):
            for place, op in enumerate(ops):
                for flipped in _FLIPPED[type(op)]:
                    yield ast.Compare(left, [*ops[:place], flipped(), *ops[place + 1 :]], comparators)
        case ast.BinOp(left, ast.BitAnd() | ast.BitOr(), right):
            yield from (left, right)
        case ast.BinOp(left, ast.Add(), right):
            yield ast.BinOp(left, ast.Sub(), right)
        case ast.BinOp(left, ast.Sub(), right):
            yield ast.BinOp(left, ast.Add(), right)
        case ast.AugAssign(target, ast.Add(), value):
            yield ast.AugAssign(target, ast.Sub(), value)
        case ast.AugAssign(target, ast.Sub(), value):
            yield ast.AugAssign(target, ast.Add(), value)
        case ast.AugAssign(op=ast.BitAnd() | ast.BitOr()):
            yield ast.Pass()
        case ast.UnaryOp(ast.Invert() | ast.Not(), operand):
            yield operand
        case ast.BoolOp(op, [_, _, _, *_] as values):
            for place in range(len(values)):
                yield ast.BoolOp(op, values[:place] + values[place + 1 :])
        case ast.BoolOp(_, values):
            yield from values
        case ast.Subscript(value, index, context):
            for moved in _shifted(index):
                yield ast.Subscript(value, moved, context)
        case ast.Call():
            yield from _changed_calls(node)


def _changed_calls(call: ast.Call) -> Iterator[ast.expr]:
    """A mask that is not applied, a bound on the wrong side, a range that begins or ends too late."""
    name = ast.unparse(call.func)
    if name == "torch.where" and len(call.args) == 3:
        yield from call.args[1:]
    if isinstance(call.func, ast.Attribute) and call.func.attr in _MASKS:
        yield call.func.value
    if (last := name.rpartition(".")[2]) in _SWAPPED and name in (last, f"np.{last}", f"torch.{last}"):
        other = ast.parse(name.removesuffix(last) + _SWAPPED[last], mode="eval").body
        yield ast.Call(other, call.args, call.keywords)
    if name in ("slice", "range"):
        for place, bound in enumerate(call.args):
            if ast.unparse(bound) != "None":
                yield ast.Call(call.func, [*call.args[:place], _plus_one(bound), *call.args[place + 1 :]], [])


def _shifted(index: ast.expr) -> Iterator[ast.expr]:
    """The index with one number or bound in it moved by one."""
    match index:
        case ast.Tuple(parts):
            for place, part in enumerate(parts):
                for moved in _shifted(part):
                    yield ast.Tuple([*parts[:place], moved, *parts[place + 1 :]], ast.Load())
        case ast.Slice(lower, upper, step):
            if lower is not None:
                yield ast.Slice(_plus_one(lower), upper, step)
            if upper is not None:
                yield ast.Slice(lower, _plus_one(upper), step)
        case ast.Constant(int()) | ast.UnaryOp(ast.USub(), ast.Constant(int())):
            yield _plus_one(index)


def _plus_one(number: ast.expr) -> ast.expr:
    return ast.BinOp(number, ast.Add(), ast.Constant(1))
