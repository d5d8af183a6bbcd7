"""``Config``, the base of every configuration, and how two of them differ; files and ``a.b=c``, read as mappings.

Everything in those is hostile until checked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from pellucid.configfile.error_messages import explain
from pellucid.configfile.yaml import MAX_DEPTH, dump_yaml, load_yaml, parse_scalar, yaml_repr
from pellucid.errors import ConfigError
from pellucid.messages import join_some

MAX_BYTES = 1_000_000

C = TypeVar("C", bound="Config")


class Config(BaseModel):
    """Frozen, strict, without unknown keys. Bad input raises one :class:`ConfigError` listing every problem.

    Sequences are tuples (lists are accepted for them); a whole number is accepted for a float; nothing else
    is converted: text is not a number, a boolean is not an integer, NaN and infinity are not numbers. A
    choice between parts is a union told apart by ``kind`` (``Field(discriminator="kind")``). Paths are text.
    """

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
    )

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(explain(type(self), error)) from None

    # Without this mark pydantic would build nested configurations through __init__ too, and lose their paths.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @model_validator(mode="before")
    @classmethod
    def _lists_are_tuples(cls, values: Any) -> Any:
        return {key: _tuples(value) for key, value in values.items()} if isinstance(values, dict) else values

    @classmethod
    def from_mapping(cls: type[C], mapping: object) -> C:
        """The configuration that a mapping from outside describes; anything else is refused."""
        if not isinstance(mapping, Mapping):
            raise ConfigError(f"{cls.__name__} is made from a mapping of keys to values, not from {yaml_repr(mapping)}")
        odd = [key for key in mapping if not isinstance(key, str)]
        if odd:
            raise ConfigError(f"the key {yaml_repr(odd[0])} is not text, put it in quotes")
        return cls(**mapping)

    @classmethod
    def from_file(cls: type[C], path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> C:
        """The configuration of a YAML or JSON file, with ``["a.b=c", …]`` laid over it."""
        mapping = apply_overrides(read_mapping(path), overrides)
        try:
            return cls.from_mapping(mapping)
        except ConfigError as error:
            raise ConfigError(f"{os.fspath(path)}: {error}") from None

    def model_copy(self: C, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> C:
        """A copy; with ``update`` the changed fields are checked like all others."""
        if not update:
            return super().model_copy(deep=deep)
        kept = {name: getattr(self, name) for name in type(self).model_fields}
        return self.from_mapping({**kept, **update})

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The JSON schema of this configuration, for editors and other programs."""
        return cls.model_json_schema()


def to_yaml(config: Config) -> str:
    """``config`` as YAML, in the order of its fields; reading it back gives an equal configuration."""
    return dump_yaml(config.model_dump(mode="json"))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def read_mapping(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The mapping that a ``.yaml``, ``.yml`` or ``.json`` file holds."""
    path = Path(path)
    kind = path.suffix.lower()
    if kind not in (".yaml", ".yml", ".json"):
        found = f"ends in {kind!r}" if kind else "has no suffix"
        raise ConfigError(f"{path}: the name {found}; a configuration is .yaml, .yml or .json")
    content = _read(path)
    data = _json(content, str(path)) if kind == ".json" else load_yaml(content, str(path))
    if not isinstance(data, dict):
        found = "nothing" if data is None else f"a {_NAMES.get(type(data), type(data).__name__)}"
        raise ConfigError(f"{path} holds {found}; a configuration is a mapping of keys to values")
    return data


_NAMES = {list: "list", str: "text", int: "number", float: "number", bool: "boolean"}


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_BYTES} bytes; is it a configuration?")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path} line {line}: byte 0x{content[error.start]:02x} is not UTF-8; save the file as UTF-8"
        ) from error


def _json(content: str, source: str) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in items:
            if key in result:
                raise ConfigError(f"{source}: the key {key!r} is given twice in one object; keep one of them")
            result[key] = value
        return result

    try:
        data = json.loads(content, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source} line {error.lineno}: {error.msg}") from error
    except RecursionError as error:
        raise ConfigError(f"{source}: values are nested deeper than {MAX_DEPTH} levels") from error
    except ConfigError:
        raise
    except ValueError as error:  # a number with more digits than Python converts
        raise ConfigError(f"{source}: {error}") from error
    if _deeper(data, MAX_DEPTH):
        raise ConfigError(f"{source}: values are nested deeper than {MAX_DEPTH} levels")
    return data


def _deeper(data: Any, levels: int) -> bool:
    if not isinstance(data, dict | list):
        return False
    inside = data.values() if isinstance(data, dict) else data
    return levels == 0 or any(_deeper(value, levels - 1) for value in inside)


def apply_overrides(mapping: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of ``mapping`` with each ``"key.path=value"`` set, in order. List entries go by their number.

    Values are read like scalars of a file (``3e-4``, ``true``, ``null``, text); ``[…]``, ``{…}`` and quoted
    text are read as YAML.
    """
    result = _copy(mapping)
    for override in overrides:
        _set(result, override)
    assert isinstance(result, dict)
    return result


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(item) for item in value]
    return value


def _set(root: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    keys = [key.strip() for key in path.split(".")]
    if not equals or not all(keys):
        raise ConfigError(f"{yaml_repr(override)} is not an override; write key=value or outer.inner=value")
    if len(keys) > MAX_DEPTH:
        raise ConfigError(f"{yaml_repr(override)} goes {len(keys)} levels deep, but at most {MAX_DEPTH} are read")
    value = _value(text, override)
    inside: Any = root
    for depth, key in enumerate(keys[:-1]):
        inside = _enter(inside, key, keys[:depth], override)
    where = _place(inside, keys[-1], keys[:-1], override)
    inside[where] = value


def _enter(inside: Any, key: str, path: list[str], override: str) -> Any:
    where = _place(inside, key, path, override)
    if isinstance(inside, dict) and inside.get(key) is None:
        inside[key] = {}
    return inside[where]


def _place(inside: Any, key: str, path: list[str], override: str) -> Any:
    """``key`` as ``inside`` takes it: a name of a mapping, or a number of a list that it has."""
    if isinstance(inside, dict):
        return key
    name = ".".join(path)
    if not isinstance(inside, list):
        raise ConfigError(
            f"{yaml_repr(override)} goes inside {name}, but {name} is {yaml_repr(inside)}, not a mapping or a list"
        )
    number = int(key) if key.isascii() and key.isdecimal() and len(key) < 10 else len(inside)
    if number >= len(inside):
        raise ConfigError(
            f"{yaml_repr(override)} names entry {yaml_repr(key)} of {name}, but {name} is a list of {len(inside)}; "
            "count its entries from 0"
        )
    return number


def _value(text: str, override: str) -> Any:
    text, source = text.strip(), f"override {yaml_repr(override)}"
    if text[:1] in ("[", "{", '"', "'"):
        return load_yaml(text, source)
    return parse_scalar(text, source)


class ConfigDifference(NamedTuple):
    """One value that differs, under a path such as ``model.layers[0]``."""

    path: str
    was: Any
    now: Any

    @property
    def top(self) -> str:
        """The first part of the path."""
        return self.path.partition(".")[0].partition("[")[0]


def config_diff(was: Config, now: Config, name: str = "") -> list[ConfigDifference]:
    """Every value that differs between two configurations, in the order of the fields."""
    return list(_differences(was.model_dump(), now.model_dump(), name))


def format_differences(found: Sequence[ConfigDifference]) -> str:
    """The first three in words."""
    return join_some([f"{d.path}: was {format_value(d.was)}, is {format_value(d.now)}" for d in found], 3, "; ")


def format_value(value: Any) -> str:
    """A value as an error shows it: text without quotes."""
    return value[:80] if isinstance(value, str) and value.isprintable() and value else yaml_repr(value)


def flatten(mapping: Any, name: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``; lists and empty mappings stay as they are."""
    if not isinstance(mapping, dict) or (name and not mapping):
        return {name: mapping}
    parts = (flatten(value, f"{name}.{key}" if name else str(key)) for key, value in mapping.items())
    return {key: value for part in parts for key, value in part.items()}


def _differences(was: Any, now: Any, name: str) -> Iterator[ConfigDifference]:
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys((*was, *now)):
            yield from _differences(was.get(key), now.get(key), f"{name}.{key}" if name else str(key))
    elif isinstance(was, list | tuple) and isinstance(now, list | tuple):
        for index, (a, b) in enumerate(zip_longest(was, now)):
            yield from _differences(a, b, f"{name}[{index}]")
    elif was != now:
        yield ConfigDifference(name, was, now)
