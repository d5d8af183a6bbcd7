"""Files of configuration, read as plain mappings. Everything in them is hostile until checked."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pellucid.configfile.yaml import MAX_DEPTH, load_yaml
from pellucid.errors import ConfigError

MAX_BYTES = 1_000_000


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
