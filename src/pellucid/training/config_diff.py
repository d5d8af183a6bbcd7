"""Where two configurations differ: the path of each value that is not the same, and both values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from pellucid.configfile import Config
from pellucid.configfile.yaml import yaml_repr

_MOST = 3


class ConfigDifference(NamedTuple):
    """One value, under a path such as ``model.layers[0]``."""

    path: str
    was: Any
    now: Any

    @property
    def top(self) -> str:
        """The first part of the path."""
        return self.path.partition(".")[0].partition("[")[0]


def differences(was: Config, now: Config, name: str = "") -> list[ConfigDifference]:
    """Every value that is not the same in both, in the order of the fields."""
    return list(_walk(was.model_dump(), now.model_dump(), name))


def told(found: Sequence[ConfigDifference]) -> str:
    """The first few in words."""
    words = [f"{path}: was {plain(was)}, is {plain(now)}" for path, was, now in found[:_MOST]]
    if len(found) > _MOST:
        words.append(f"and {len(found) - _MOST} more")
    return "; ".join(words)


def plain(value: Any) -> str:
    """A value as an error shows it: text without quotes."""
    return value[:80] if isinstance(value, str) and value.isprintable() and value else yaml_repr(value)


def _walk(was: Any, now: Any, name: str) -> Iterator[ConfigDifference]:
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys((*was, *now)):
            yield from _walk(was.get(key), now.get(key), f"{name}.{key}" if name else str(key))
    elif isinstance(was, list | tuple) and isinstance(now, list | tuple):
        for index, (a, b) in enumerate(zip_longest(was, now)):
            yield from _walk(a, b, f"{name}[{index}]")
    elif was != now:
        yield ConfigDifference(name, was, now)
