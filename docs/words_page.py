"""``docs/words.md``: every word of a model's and of a run's config, read from the classes that check them."""

from __future__ import annotations

import re
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from pellucid.models.config import ModelConfig
from pellucid.training.config import TrainConfig

INTRODUCTION = """\
# The words of a config

Written by `make docs` from the classes that check them; change it there. A word without a default must be given, unless
what stands beside it says what it is when left out. Where several parts are possible, `kind` says which."""


def words_page() -> str:
    """Both configs, and every part that can stand in them, each once and in the order in which it is met."""
    parts = [INTRODUCTION]
    for root in (ModelConfig, TrainConfig):
        for word in _reached(root, [ModelConfig] if root is TrainConfig else []):
            parts += [f"## {_name(word)}", _told(word.__doc__), _table(word)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _name(word: type[BaseModel]) -> str:
    kind = word.model_fields.get("kind")
    return f"{word.__name__}" + (f" (`kind: {kind.default}`)" if kind is not None else "")


def _table(word: type[BaseModel]) -> str:
    fields = {name: field for name, field in word.model_fields.items() if name != "kind"}
    if not fields:
        return ""
    rows = ["| word | values | default | |", "|---|---|---|---|"]
    rows += [
        f"| `{name}` | {_values(field)} | {_default(field)} | {_told(field.description)} |"
        for name, field in fields.items()
    ]
    return "\n".join(rows)


def _reached(root: type[BaseModel], known: list[type[BaseModel]]) -> list[type[BaseModel]]:
    """``root`` and the parts in it, depth first."""
    found = [root]
    for field in root.model_fields.values():
        for part in _parts(field.annotation):
            if part not in known + found:
                found += _reached(part, known + found)
    return list(dict.fromkeys(found))


def _parts(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [part for inner in get_args(annotation) for part in _parts(inner)]


def _values(field: FieldInfo) -> str:
    return _shown(field.annotation)


def _shown(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _shown(get_args(annotation)[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_shown(inner) for inner in get_args(annotation)))
    if origin is tuple:
        inner = [_shown(value) for value in get_args(annotation) if value is not Ellipsis]
        return (
            f"a list of {inner[0]}"
            if Ellipsis in get_args(annotation)
            else f"a list of {len(inner)}: {', '.join(inner)}"
        )
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation.__name__
    return {int: "whole number", float: "number", str: "text", bool: "true, false"}.get(annotation, str(annotation))


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return ""
    if isinstance(field.default, BaseModel):
        return type(field.default).__name__
    shown = {None: "null", True: "true", False: "false"}
    known = field.default is None or isinstance(field.default, bool)
    return f"`{shown[field.default] if known else field.default}`"


def _told(text: str | None) -> str:
    """One line; double backticks are the code's, single ones the page's."""
    plain = " ".join((text or "").split()).replace("``", "`").replace("|", "\\|")
    return re.sub(r":(?:class|mod|func):`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", plain)
