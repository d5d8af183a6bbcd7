"""Faulty copies of our own source, one small change each: a comparison flipped, a mask dropped, an index shifted."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "pellucid"

FILES = (
    "visibility/coordinates.py",
    "visibility/intervals.py",
    "visibility/rules.py",
    "nn/attend.py",
    "nn/attention.py",
    "nn/backends/ragged.py",
    "nn/backends/reference.py",
    "nn/backends/sdpa.py",
    "nn/cache.py",
    "nn/embed.py",
    "nn/losses.py",
    "nn/positions/angles.py",
    "nn/positions/biases.py",
    "nn/positions/rotary.py",
    "nn/positions/tables.py",
    "data/objectives.py",
    "models/decoder.py",
)
"""Where visibility, positions, caches and losses are made."""

_FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


@dataclass(frozen=True)
class Mutant:
    """One changed file: its module, where the change is, what stood there and what stands there now."""

    file: str
    function: str
    line: int
    before: str
    after: str
    source: str

    @property
    def module(self) -> str:
        return "pellucid." + self.file.removesuffix(".py").replace("/", ".")

    @property
    def name(self) -> str:
        """What stays the same when lines move."""
        return f"{self.file} {self.function}: {self.before} -> {self.after}"


def mutants(file: str) -> Iterator[Mutant]:
    """All mutants of one file, in the order of its lines."""
    tree = ast.parse((SOURCE / file).read_text(encoding="utf-8"))
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
            yield Mutant(file, function, before.lineno, ast.unparse(before), after, text)


def _nodes(tree: ast.Module) -> list[tuple[str, ast.expr]]:
    """Every expression inside a function, outside of what only makes messages, with the function's name."""
    found: list[tuple[str, ast.expr]] = []

    def visit(node: ast.AST, function: str) -> None:
        kept = {id(getattr(node, name, None)) for name in ("annotation", "returns")}
        for child in ast.iter_child_nodes(node):
            if id(child) in kept or isinstance(child, ast.Raise | ast.JoinedStr | ast.Assert | ast.arguments):
                continue
            inside = function
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inside = f"{function}.{child.name}".lstrip(".")
            if function and isinstance(child, ast.expr):
                found.append((function, child))
            visit(child, inside)

    visit(tree, "")
    return found


def _changes(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _FLIPPED:
        yield ast.Compare(node.left, [_FLIPPED[type(node.ops[0])]()], node.comparators)
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.BitAnd | ast.BitOr):
            yield from (node.left, node.right)
        if isinstance(node.op, ast.Add):
            yield ast.BinOp(node.left, ast.Sub(), node.right)
        if isinstance(node.op, ast.Sub):
            yield ast.BinOp(node.left, ast.Add(), node.right)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert | ast.Not):
        yield node.operand
    if isinstance(node, ast.BoolOp):
        yield from node.values
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.where" and len(node.args) == 3:
        yield from node.args[1:]
    if isinstance(node, ast.Slice):
        for name in ("lower", "upper"):
            bound = getattr(node, name)
            if bound is not None:
                shifted = ast.BinOp(bound, ast.Add(), ast.Constant(1))
                yield ast.Slice(**{"lower": node.lower, "upper": node.upper, "step": node.step, name: shifted})
