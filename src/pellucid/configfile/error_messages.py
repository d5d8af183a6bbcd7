"""What pydantic found wrong, as one line: dotted path, value met, what is wanted, nearest known key."""

from __future__ import annotations

import re
import types
from itertools import islice
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from pellucid.configfile.yaml import parse_scalar, yaml_repr
from pellucid.errors import ConfigError
from pellucid.messages import either, nearest

_Met = dict[str, list[tuple[dict[str, Any], Any]]]
"""What is wrong at each path: pydantic's problem, and the type that was wanted there."""
_MOST = 8
_OCTAL = re.compile(r"[-+]?0[0-9][0-9_]*\Z")

_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "finite_number": "a finite number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "list": "a list",
    "dict": "a mapping",
    "mapping": "a mapping",
    "model": "a mapping",
    "model_attributes": "a mapping",
    "none_required": "null",
}


def explain(model: type[BaseModel], error: ValidationError) -> str:
    """All problems of ``error``, met while building ``model``, joined by "; "."""
    met: _Met = {}
    for problem in error.errors(include_url=False):
        path, part = _walk(model, problem["loc"])
        met.setdefault(path, []).append((dict(problem), part))
    causes = _first_causes(met)
    lines = []
    for path, problems in islice(causes.items(), _MOST):  # what is not said is not looked up either
        if len(problems) == 1:
            lines.append(_sentence(path, *problems[0], root=model))
        else:  # the members of a plain union: none of them took the value
            wanted = list(dict.fromkeys(_wanted(problem) for problem, _ in problems))
            lines.append(f"{path} is {yaml_repr(problems[0][0]['input'])}, but must be {either(wanted)}")
    if len(causes) > _MOST:
        lines.append(f"and {len(causes) - _MOST} more problems")
    return "; ".join(lines)


def _first_causes(met: _Met) -> _Met:
    """``met`` without problems that are only others seen again: inside them, or in the part theirs is taken from."""
    around = {path[:end] for path in met for end, letter in enumerate(path) if letter == "."}
    same_key: dict[str, list[str]] = {}
    for path in met:
        same_key.setdefault(path.rpartition(".")[2], []).append(path)
    kept = {}
    for path, problems in met.items():
        alike = same_key[path.rpartition(".")[2]][:_MOST]  # a hostile file has thousands
        if path in around or any(_copied(path, problems[0][0], other, met[other][0][0]) for other in alike):
            continue
        kept[path] = problems
    return kept


def _copied(path: str, problem: dict[str, Any], other: str, first: dict[str, Any]) -> bool:
    """Whether a problem is that of ``other``, in a part that is filled from it (``encoder.norm`` from ``norm``)."""
    here, there = path.split("."), other.split(".")
    while len(there) > 1 and here[0] == there[0]:
        here, there = here[1:], there[1:]
    rest, shorter = ".".join(here), ".".join(there)
    if not (rest.endswith("." + shorter) or ("." in shorter and rest.endswith("_" + shorter))):
        return False
    if any(str(first.get(name)) != str(problem.get(name)) for name in ("type", "ctx", "msg")):
        return False
    return bool(problem["type"] == "missing" or yaml_repr(first["input"]) == yaml_repr(problem["input"]))


def _sentence(path: str, problem: dict[str, Any], part: Any, root: type[BaseModel]) -> str:
    kind, value = problem["type"], problem["input"]
    context = problem.get("ctx", {})
    parent, _, key = path.rpartition(".")
    inside = f"{parent} has" if parent else "there is"
    if kind == "extra_forbidden":
        return f"{inside} no key {yaml_repr(key)}, {_instead(path, part, root)}"
    if kind == "missing":
        return f"{path} is missing"
    if kind == "invalid_key":
        return f"the key {yaml_repr(value)} of {parent or 'the configuration'} is not text, put it in quotes"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _choice(path, value, context, part)
    if kind in ("value_error", "assertion_error"):
        text = str(context.get("error", problem["msg"]))
        return text if not path or path in text else f"{path}: {text}"
    return f"{path} is {yaml_repr(value)}, but must be {_wanted(problem)}" + (
        _hint(kind, value) or _as_mapping(kind, value, part)
    )


def _wanted(problem: dict[str, Any]) -> str:
    kind, context = problem["type"], problem.get("ctx", {})
    if kind in ("literal_error", "enum"):
        return str(context["expected"])
    limits = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "less_than_equal": "le"}
    if kind in limits:
        words = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}
        return f"{words[limits[kind]]} {_number(context[limits[kind]])}"
    if kind in ("too_short", "too_long", "string_too_short", "string_too_long"):
        bound, name = ("at least", "min_length") if kind.endswith("short") else ("at most", "max_length")
        one, many = ("character", "characters") if kind.startswith("string") else ("entry", "entries")
        return f"{bound} {context[name]} {one if context[name] == 1 else many} long"
    if kind == "string_pattern_mismatch":
        return f"text that matches {context['pattern']}"
    if kind == "int_from_float":
        return _WANTED["int"]
    name = kind.removesuffix("_type").removesuffix("_parsing")
    return _WANTED.get(name, problem["msg"][:1].lower() + problem["msg"][1:])


def _number(value: float) -> str:
    return str(int(value)) if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15) else f"{value:g}"


def _hint(kind: str, value: Any) -> str:
    if kind in ("int_type", "float_type") and isinstance(value, str) and _OCTAL.match(value):
        plain = value.lstrip("+-0_") or "0"
        return f": a number that begins with 0 is text in YAML 1.2, write {plain}, or 0o{plain} where it is octal"
    if kind in ("int_type", "float_type") and isinstance(value, str) and _is_number(value):
        return f": it is text, write {value.strip()} without quotes"
    if kind in ("int_type", "int_from_float") and isinstance(value, float) and value.is_integer():
        return f", write {int(value)}"
    if kind == "bool_type" and str(value).lower() in ("yes", "on", "no", "off", "1", "0"):
        return f", write {'true' if str(value).lower() in ('yes', 'on', '1') else 'false'}"
    return ""


def _is_number(text: str) -> bool:
    try:
        return len(text) < 40 and isinstance(parse_scalar(text.strip(), ""), int | float)
    except ConfigError:
        return False


def _as_mapping(kind: str, value: Any, part: Any) -> str:
    """How a part that was given as text or a number is written."""
    if kind not in ("model_type", "model_attributes_type"):
        return ""
    members = [member for member in _members(part) if _is_model(member)]
    tags = [str(tag) for member in members for tag in _tags(member, "kind")]
    if len(members) > 1 and isinstance(value, str):
        near = nearest(value, tags)
        return f": write {{kind: {near}}}" if near else f" with kind: choose {either([repr(tag) for tag in tags])}"
    if len(members) == 1 and members[0].model_fields:
        return f" with keys such as {', '.join(islice(members[0].model_fields, 4))}"
    return ""


def _choice(path: str, value: Any, context: dict[str, Any], part: Any) -> str:
    """A union told apart by a key (``kind``) whose value is absent or unknown."""
    key = context["discriminator"].strip("'")
    tags = [tag for member in _members(part) for tag in _tags(member, key)]
    choices = f"choose {either([repr(tag) for tag in tags])}"
    if context.get("tag") is None:
        if not isinstance(value, dict):
            return f"{path} is {yaml_repr(value)}, but must be a mapping with {key}: {choices}"
        return f"{path}.{key} is missing, {choices}"
    near = nearest(context["tag"], tags)
    hint = f" (did you mean {near!r}?)" if near else ""
    return f"{path}.{key} is {yaml_repr(context['tag'])}, {choices}{hint}"


def _instead(path: str, part: Any, root: type[BaseModel]) -> str:
    """The way out for a key that ``part`` does not know."""
    known, key = list(part.model_fields), path.rpartition(".")[2]
    paths = _paths(root)
    elsewhere = [(other, owner) for other, owner in paths if other.rpartition(".")[2] == key]
    owners = dict.fromkeys(repr(tag) for other, owner in elsewhere if other == path for tag in _tags(owner, "kind"))
    if owners:
        return f"it belongs to kind {either(list(owners))}"
    for other, _ in elsewhere:  # in what is around this part
        outer, inner = other.removesuffix(key), path.rpartition(".")[0]
        if inner.startswith(outer) and inner:
            named = [name for name, _ in paths if name.rpartition(".")[0] == outer[:-1] and name.endswith("_" + key)]
            return f"did you mean {named[0]!r}?" if named else f"it belongs outside {inner}, as {other!r}"
    longer = [name for name in known if name.endswith("_" + key)]
    near = elsewhere[0][0] if elsewhere else longer[0] if longer else nearest(key, known)
    if near is not None:
        return f"did you mean {near!r}?"
    return "known keys are " + (", ".join(known) if known else "none")


# ---------------------------------------------------------------------------------- walking the types


def _walk(annotation: Any, loc: tuple[int | str, ...]) -> tuple[str, Any]:
    """The dotted path of a pydantic location, without the names of union members, and the type it ends in.

    For an unknown key the type is that of the configuration which does not know it.
    """
    path: list[str] = []
    steps = list(loc)
    while steps:
        annotation = _plain(annotation)
        members = _members(annotation)
        if len(members) > 1:
            tag = steps.pop(0)  # pydantic names the member it tried
            models = [m for m in members if _is_model(m) and (tag in _all_tags(m) or tag == m.__name__)]
            annotation = models[0] if models else _member_named(members, str(tag))
            continue
        annotation = members[0]
        step = steps.pop(0)
        path.append(str(step))
        if _is_model(annotation):
            field = annotation.model_fields.get(step)
            if field is None:
                break
            annotation = field.annotation
        else:
            annotation = _item(annotation, step)
            if steps and steps[0] == "[key]":
                break
    return ".".join(path), _plain(annotation)


def _plain(annotation: Any) -> Any:
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation


def _members(annotation: Any) -> list[Any]:
    """The members of a union, None left out; a type that is no union is its own only member."""
    annotation = _plain(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        return [m for arg in get_args(annotation) for m in _members(arg) if m is not type(None)]
    return [annotation]


def _member_named(members: list[Any], name: str) -> Any:
    same = [m for m in members if getattr(get_origin(m) or m, "__name__", "") == name.partition("[")[0]]
    return same[0] if same else Any


def _item(annotation: Any, step: int | str) -> Any:
    args = get_args(annotation)
    if get_origin(annotation) is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return args[0]
        return args[step] if isinstance(step, int) and step < len(args) else Any
    return args[-1] if args else Any


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _tags(model: Any, key: str) -> tuple[Any, ...]:
    field = model.model_fields.get(key) if _is_model(model) else None
    return get_args(field.annotation) if field is not None and get_origin(field.annotation) is Literal else ()


def _all_tags(model: type[BaseModel]) -> list[Any]:
    return [tag for name in model.model_fields for tag in _tags(model, name)]


def _paths(model: type[BaseModel], before: str = "", depth: int = 0) -> list[tuple[str, type[BaseModel]]]:
    """Dotted paths of all keys of ``model`` and of the configurations inside it, each with its owner."""
    result = [(before + name, model) for name in model.model_fields]
    if depth < 4:
        for name, field in model.model_fields.items():
            for member in _members(field.annotation):
                if _is_model(member):
                    result += _paths(member, f"{before}{name}.", depth + 1)
    return result
