"""Models known by name: ``preset("gpt2")`` is the config of GPT-2, ``names()`` lists them all.

Each is a YAML file beside this one. Wherever a model's config is a mapping, ``preset: NAME`` begins with a preset and
what stands beside it is laid over; wherever it is a file, a preset's name will do.

>>> from pellucid.models.presets import preset
>>> preset("gpt2").hidden_size, preset("gpt2", ["num_hidden_layers=2"]).layers
(768, ('causal()', 'causal()'))
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid.configfile import read_mapping
from pellucid.configfile.yaml import yaml_repr
from pellucid.errors import ConfigError

if TYPE_CHECKING:
    from pellucid.models.config import ModelConfig

_FOLDER = Path(__file__).parent


def names() -> tuple[str, ...]:
    """The presets there are."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def preset(name: str, overrides: Iterable[str] = ()) -> ModelConfig:
    """The config called ``name``, with ``["a.b=c", …]`` laid over it.

    Raises:
        ConfigError: there is none of this name, or an override does not fit it.
    """
    from pellucid.models.config import ModelConfig

    _known(name)
    return ModelConfig.from_file(name, overrides)


def laid_over(name: object, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping of a preset, short forms and all, with ``changes`` laid over it.

    A mapping is laid over a mapping key by key, unless it says another ``kind``; anything else takes
    the place of what was there. ``layers`` takes the place of ``num_hidden_layers`` and ``rule``; of a preset that
    lists its layers, ``num_hidden_layers`` takes the first ones.
    """
    mapping = read_mapping(_FOLDER / f"{_known(name)}.yaml")
    if "layers" in changes:
        mapping = {key: value for key, value in mapping.items() if key not in ("num_hidden_layers", "rule")}
    count = changes.get("num_hidden_layers")
    if "layers" in mapping and "layers" not in changes and type(count) is int and 0 < count <= len(mapping["layers"]):
        mapping = {**mapping, "layers": mapping["layers"][:count]}
    merged = _merged(mapping, changes)
    assert isinstance(merged, dict)
    return merged


def _known(name: object) -> str:
    known = names()
    if name in known:
        return str(name)
    near = difflib.get_close_matches(str(name), known, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
    raise ConfigError(f"there is no preset {yaml_repr(name)}; {hint}")


def _merged(below: Any, above: Any) -> Any:
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return above
    if "kind" in above and above["kind"] != below.get("kind", "grouped"):  # only attention may leave its kind out
        return above
    return {**below, **{key: _merged(below.get(key), value) for key, value in above.items()}}
