"""``docs/api.md``: every exported name, read from signatures, docstrings and the source.

An argument is described where it stands (a docstring that names it, the docstring below a field) or in
:data:`COMMON`, where words that mean the same everywhere are described once. Errors are those that a function or what
it calls constructs. An example is the shortest statement of the documentation's tested code that uses the name.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from pellucid.errors import InputError, PellucidError

ROOT = Path(__file__).resolve().parent.parent
ROOMS = (
    "pellucid",
    "pellucid.errors",
    "pellucid.visibility",
    "pellucid.nn",
    "pellucid.nn.positions",
    "pellucid.nn.moe",
    "pellucid.data",
    "pellucid.data.objectives",
    "pellucid.models",
    "pellucid.checkpoints",
    "pellucid.generation",
    "pellucid.training",
    "pellucid.audits",
    "pellucid.audits.broken",
    "pellucid.reports",
    "pellucid.configfile",
)
INTRODUCTION = """\
# The Python interface

Written by `make docs` from the source: signatures, docstrings, the errors that the code constructs, and examples from
the pages whose code is run by the tests. What is not listed here is private. The words of a config, and what they mean,
are in [words.md](words.md); the letters of shapes are in [design.md](design.md). Every error is an
`InputError` of some kind unless it says otherwise: one line with the value met, the value wanted, and the way out."""

COMMON = {
    line.partition(": ")[0]: line.partition(": ")[2]
    for line in (ROOT / "docs" / "arguments.txt").read_text(encoding="utf-8").splitlines()
    if ": " in line
}
"""What an argument means wherever it has this name."""

_NOT_SHOWN = ("self", "cls", "args", "kwargs")


def api_page() -> str:
    """Every room and every name that it exports, each described once."""
    seen: dict[int, str] = {}
    parts = [INTRODUCTION]
    for room in ROOMS:
        module = importlib.import_module(room)
        summary = (module.__doc__ or "").strip().splitlines()[0]
        parts += [f"## {room}", summary]
        for name, value in exports(module):
            if id(value) in seen and not isinstance(value, int | str):
                parts.append(f"### {room}.{name}\n\nThe same as `{seen[id(value)]}`.")
                continue
            seen[id(value)] = f"{room}.{name}"
            parts += described(room, name, value)
    return "\n\n".join(part for part in parts if part) + "\n"


def exports(module: ModuleType) -> list[tuple[str, Any]]:
    """The names of a module's ``__all__`` with their values."""
    return [(name, getattr(module, name)) for name in module.__all__]


def described(room: str, name: str, value: Any) -> Iterator[str]:
    """The paragraphs about one name."""
    yield f"### {room}.{name}"
    if not callable(value):
        yield f"`{textwrap.shorten(_plain(repr(value)), 160)}`"
        return
    if not (isinstance(value, type) and issubclass(value, Exception)):
        yield f"```py\n{signature(name, value)}\n```"
    yield prose(inspect.getdoc(value) if value.__doc__ else "")
    rows = list(arguments(value))
    if rows:
        yield "\n".join(
            ["| argument | type | default | |", "|---|---|---|---|"]
            + [f"| `{n}` | {t} | {d} | {text} |" for n, t, d, text in rows]
        )
    if isinstance(value, type) and not issubclass(value, Exception):
        methods = [f"- `{signature(n, m)}`: {first_sentence(m)}" for n, m in public_methods(value)]
        if methods:
            yield "\n".join(methods)
    found = sorted(errors(value))
    if found:
        yield f"Raises {', '.join(f'`{error}`' for error in found)}."
    if (example := example_of(name, value)) is not None:
        page, code = example
        yield f"From [{page}]({page if page != 'README.md' else '../README.md'}):\n\n```py\n{code}\n```"


# ------------------------------------------------------------------------------------------- signatures, arguments


def signature(name: str, value: Any) -> str:
    """A signature as it is written, on several lines where it is long; a config's fields are in the table."""
    if isinstance(value, type) and issubclass(value, BaseModel):
        return f"{name}(**fields)"
    try:
        found = inspect.signature(value)
    except ValueError:
        return f"{name}(…)"
    parameters = [p.replace(annotation=p.empty) for p in found.parameters.values() if p.name not in ("self", "cls")]
    result = "" if isinstance(value, type) or found.return_annotation in (found.empty, "None") else (
        f" -> {_type(found.return_annotation).replace('`', '')}"
    )  # fmt: skip
    plain = f"{name}{found.replace(parameters=parameters, return_annotation=found.empty)}{result}"
    return _plain(plain)


def arguments(value: Any) -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and meaning of each argument."""
    if isinstance(value, type) and issubclass(value, BaseModel):
        for name, field in value.model_fields.items():
            default = "" if field.default is PydanticUndefined else f"`{field.default!r}`"
            if isinstance(field.default, BaseModel):
                default = f"`{type(field.default).__name__}`"
            yield name, _type(value.__annotations__.get(name, "")), default, field.description or meaning(value, name)
        return
    if isinstance(value, type) and issubclass(value, Exception):
        return
    try:
        parameters = inspect.signature(value).parameters.values()
    except ValueError:
        return
    for parameter in parameters:
        if parameter.name in _NOT_SHOWN or parameter.name.startswith("_"):
            continue
        default = "" if parameter.default is parameter.empty else f"`{_default(parameter.default)}`"
        yield parameter.name, _type(parameter.annotation), default, meaning(value, parameter.name)


def _default(value: object) -> str:
    text = repr(value) if not inspect.isroutine(value) and not inspect.isclass(value) else value.__name__
    return _plain(text)


def _plain(text: str) -> str:
    """A representation without addresses: functions by their names, other objects as ``…``."""
    return re.sub(r"<object object at 0x\w+>|<factory>", "…", re.sub(r"<function ([\w.]+) at 0x\w+>", r"\1", text))


def _type(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty or annotation == "":
        return ""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    text = re.sub(r"\b(?:collections\.abc|typing|pellucid(?:\.\w+)*)\.", "", text)
    return f"`{' '.join(text.split())}`".replace("|", "\\|")


def meaning(value: Any, name: str) -> str:
    """What an argument is: its own docstring, the sentence that names it, or the common meaning of its name."""
    if isinstance(value, type):
        for cls in value.__mro__:
            if name in (own := field_docs(cls)):
                return prose(own[name]).replace("\n", " ")
    if own := COMMON.get(f"{value.__name__}.{name}"):
        return own
    docs = [inspect.getdoc(value) or ""]
    if isinstance(value, type):
        docs.append(inspect.getdoc(value.__init__) or "")
    bare = re.sub(r"_[A-Z][A-Z0-9]*$", "", name)
    for doc in docs:
        if listed := re.search(rf"^ +{re.escape(name)}: (.*(?:\n {{6,}}.*)*)", doc, re.MULTILINE):
            return prose(" ".join(listed[1].split()))
    for doc in docs:
        for sentence in re.split(r"(?<=[.;])\s+|\n\n", re.sub(r"\n(?!\n)", " ", doc)):
            if re.search(rf"``[^`]*\b{re.escape(name)}\b[^`]*``", sentence):
                return prose(" ".join(sentence.split())).replace("|", "\\|")
    return COMMON.get(name, COMMON.get(bare, ""))


@cache
def field_docs(cls: type) -> dict[str, str]:
    """The docstrings below the fields of a class."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    found = {}
    for field, text in pairwise(body):
        named = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if named and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[field.target.id] = str(text.value.value)
    return found


def public_methods(cls: type) -> Iterator[tuple[str, Any]]:
    """The methods that a class defines itself, those of a config aside."""
    for name, method in sorted(vars(cls).items()):
        plain = method.__func__ if isinstance(method, classmethod | staticmethod) else method
        if not name.startswith("_") and inspect.isfunction(plain) and plain.__doc__:
            yield name, plain


def first_sentence(method: Any) -> str:
    text = " ".join((inspect.getdoc(method) or "").split())
    return prose(re.split(r"(?<=[.:;])\s", text)[0])


def prose(text: str | None) -> str:
    """A docstring as Markdown: its own marks of code and references become the page's."""
    plain = (text or "").replace("``", "`")
    plain = re.sub(r":(?:class|mod|func|meth|data|attr):`~?([\w.]+)`", lambda m: f"`{m[1].rpartition('.')[2]}`", plain)
    return re.sub(r"::\n", ":\n", plain)


# ---------------------------------------------------------------------------------------------------- errors


def errors(value: Any) -> set[str]:
    """The errors of Pellucid that ``value`` and what it calls construct, by name."""
    if isinstance(value, type) and issubclass(value, BaseModel):
        return {"ConfigError"}
    if isinstance(value, type) and issubclass(value, Exception):
        return set()
    found: set[str] = set()
    for function in _functions(value):
        found |= _constructed(function, 5)
    return found


def _functions(value: Any) -> Iterable[Callable[..., Any]]:
    if not isinstance(value, type):
        return [value]
    names = ("__init__", "__post_init__", "__call__", "forward", *(name for name, _ in public_methods(value)))
    return [f for f in (inspect.getattr_static(value, n, None) for n in names) if f is not None]


@cache
def _constructed(function: Any, depth: int) -> frozenset[str]:
    function = getattr(function, "__func__", function)
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if depth == 0 or code is None or "pellucid" not in getattr(function, "__module__", ""):
        return frozenset()
    scope = {**function.__globals__, **_inner_imports(function)}
    found: set[str] = set()
    owner = scope.get(function.__qualname__.partition(".")[0])
    for call in ast.walk(_tree(function)):
        if not isinstance(call, ast.Call):
            continue
        target = _resolved(call.func, scope, owner)
        if isinstance(target, type) and issubclass(target, PellucidError):
            if target is not InputError:
                found.add(target.__name__)
        elif isinstance(target, type) and target.__module__.startswith("pellucid"):
            if issubclass(target, BaseModel):
                found.add("ConfigError")
            elif dataclasses.is_dataclass(target) and hasattr(target, "__post_init__"):
                found |= _constructed(target.__post_init__, depth - 1)
        elif inspect.isroutine(target):
            found |= _constructed(target, depth - 1)
    return frozenset(found)


@cache
def _tree(function: Any) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):
        return ast.Module(body=[], type_ignores=[])


def _inner_imports(function: Any) -> dict[str, Any]:
    found = {}
    for node in ast.walk(_tree(function)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("pellucid"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                found[alias.asname or alias.name] = getattr(module, alias.name, None)
    return found


def _resolved(node: ast.expr, scope: dict[str, Any], owner: Any) -> Any:
    if isinstance(node, ast.Name):
        return scope.get(node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        base = owner if node.value.id in ("self", "cls") else scope.get(node.value.id)
        return inspect.getattr_static(base, node.attr, None) if isinstance(base, type | ModuleType) else None
    return None


# -------------------------------------------------------------------------------------------------- examples


@cache
def examples() -> dict[str, tuple[str, str]]:
    """For each name, the page and the shortest statement of its tested code that uses it."""
    found: dict[str, tuple[str, str]] = {}
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for page in pages:
        if page.name == "api.md":
            continue
        for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            for statement in ast.parse(block).body:
                if isinstance(statement, ast.Import | ast.ImportFrom):
                    continue
                code = ast.get_source_segment(block, statement) or ""
                for name in {n.id for n in ast.walk(statement) if isinstance(n, ast.Name)} | {
                    n.attr for n in ast.walk(statement) if isinstance(n, ast.Attribute)
                }:
                    if name not in found or len(code) < len(found[name][1]):
                        found[name] = (page.name, code)
    return found


def example_of(name: str, value: Any) -> tuple[str, str] | None:
    """An example of ``name``, of a function that returns it, or of a class below it."""
    if name in examples():
        return examples()[name]
    for room in ROOMS:
        for other, found in exports(importlib.import_module(room)):
            returned = str(getattr(found, "__annotations__", {}).get("return", "")) if inspect.isfunction(found) else ""
            below = isinstance(value, type) and isinstance(found, type) and value in found.__mro__
            if (re.search(rf"\b{name}\b", returned) or below) and other in examples():
                return examples()[other]
    return None


def gaps() -> list[str]:
    """What the page does not say: names without a docstring or an example, arguments without a meaning."""
    missing, seen = [], set()
    for room in ROOMS:
        for name, value in exports(importlib.import_module(room)):
            if not callable(value) or id(value) in seen:
                continue
            seen.add(id(value))
            if not value.__doc__:
                missing.append(f"{room}.{name} has no docstring")
            missing += [
                f"{room}.{name}: {argument} is not described" for argument, *_, text in arguments(value) if not text
            ]
            if not (isinstance(value, type) and issubclass(value, Exception)) and not example_of(name, value):
                missing.append(f"{room}.{name} has no example in README.md or docs/")
    return missing
