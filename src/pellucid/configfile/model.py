"""``Config``: the base of every configuration, and how two of them differ."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from pellucid.configfile.explain import explain
from pellucid.configfile.files import read_mapping
from pellucid.configfile.overrides import apply_overrides
from pellucid.configfile.yaml import dump_yaml, yaml_repr
from pellucid.errors import ConfigError
from pellucid.messages import join_some

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
