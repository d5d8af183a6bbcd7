"""``a.b=c`` from the command line, laid over a mapping. The command line wins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pellucid.configfile.yaml import MAX_DEPTH, load_yaml, parse_scalar, yaml_repr
from pellucid.errors import ConfigError


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
