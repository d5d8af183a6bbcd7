"""YAML as Pellucid reads and writes it: plain data, no surprises.

Read as in YAML 1.2: only ``true`` and ``false`` are booleans (``no`` is text, also as a country), ``3e-4``
and ``1e5`` are numbers, ``2026-01-01`` and ``12:30`` are text. Refused, with the line: duplicate keys, keys
that are not text, anchors and aliases, tags, nesting deeper than :data:`MAX_DEPTH`, more than
:data:`MAX_VALUES` values (they would take minutes to read).
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from pellucid.errors import ConfigError

MAX_DEPTH = 32
MAX_VALUES = 20_000

_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*|0x[0-9a-fA-F]+|0o[0-7]+)\Z")
_FLOAT = re.compile(
    r"""[-+]?(?:[0-9]+\.[0-9]*(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+
        |\.(?:inf|Inf|INF))\Z|\.(?:nan|NaN|NAN)\Z""",
    re.VERBOSE,
)
_RESOLVERS = (
    ("bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), "tTfF"),
    ("null", re.compile(r"(?:~|null|Null|NULL|)\Z"), ["~", "n", "N", ""]),
    ("int", _INT, "-+0123456789"),
    ("float", _FLOAT, "-+0123456789."),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own attribute, filled below
    depth = 0
    values = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise _problem("anchors and aliases (& and *) are not read; write it out or quote it", event)
        if getattr(event, "tag", None):
            raise _problem(f"tags such as {event.tag!r} are not read; leave the tag out, or quote it", event)
        if self.depth > MAX_DEPTH:
            raise _problem(f"values are nested deeper than {MAX_DEPTH} levels", event)
        self.values += 1
        if self.values > MAX_VALUES:
            raise _problem(f"more than {MAX_VALUES} values are not read", event)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[str, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise _problem(f"the key {yaml_repr(key)} is not text, put it in quotes", key_node)
            if key in lines:
                first = f"was already given on line {lines[key]}, keep one"
                raise _problem(f"the key {yaml_repr(key)} {first}", key_node)
            lines[key] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep)

    def number(self, node: yaml.ScalarNode) -> int | float:
        text = node.value.replace("_", "").lower()
        try:
            if _INT.match(node.value):
                return int(text, 0)
            return float(text.replace(".inf", "inf").replace(".nan", "nan"))
        except ValueError as error:  # more digits than Python converts
            raise _problem(f"a number of {len(text)} digits is too long", node) from error


for _name, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_TAG + _name, _pattern, list(_first))
_Loader.add_constructor(_TAG + "int", _Loader.number)
_Loader.add_constructor(_TAG + "float", _Loader.number)


class _Dumper(yaml.SafeDumper):
    """Quotes what any YAML reader, ours or an older one, would take for something other than text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def text(self, data: str) -> yaml.ScalarNode:
        """Line breaks of every kind and invisible characters are spelt out between double quotes."""
        return self.represent_scalar(_TAG + "str", data, style=None if data.isprintable() else '"')


_Dumper.add_representer(str, _Dumper.text)
for _name, _pattern, _first in _RESOLVERS:
    _Dumper.add_implicit_resolver(_TAG + _name, _pattern, list(_first))


def load_yaml(text: str, source: str) -> Any:
    """The plain data that YAML ``text`` holds; ``source`` names it in errors."""
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if mark else ""
        parts = [part for part in (error.context, error.problem) if part]
        raise ConfigError(f"{source}{line}: {', '.join(parts)}") from error
    except yaml.reader.ReaderError as error:
        number = text.count("\n", 0, error.position) + 1
        character = chr(error.character)
        raise ConfigError(f"{source} line {number}: the character {character!r} is not allowed") from error


def parse_scalar(text: str, source: str) -> Any:
    """The value of one plain scalar: a number, a boolean, null, or the text as it stands."""
    loader = _Loader("")
    try:
        tag = loader.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
        return loader.construct_object(yaml.ScalarNode(tag, text))
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{source}: {error.problem}") from error
    finally:
        loader.dispose()


def dump_yaml(data: Any) -> str:
    """Plain data as YAML, keys in the order given, one line a value."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**9)


def yaml_repr(value: Any) -> str:
    """A value as an error shows it: on one line, in YAML's words, cut when long."""
    words = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    if value == ():
        return "[]"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…" + text[-1]


def _problem(text: str, where: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=where.start_mark)
