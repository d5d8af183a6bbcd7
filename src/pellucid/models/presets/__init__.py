"""Models known by name: ``preset("gpt2")`` is the config of GPT-2, ``names()`` lists them all.

Each is a YAML file beside this one. Wherever a model's config is a mapping, ``preset: NAME`` starts from a preset and
the other keys override it; wherever it is a file, a preset's name will do.

>>> from pellucid.models.presets import preset
>>> preset("gpt2").hidden_size, preset("gpt2", ["num_hidden_layers=2"]).layers
(768, ('causal()', 'causal()'))
"""

from __future__ import annotations

from collections.abc import Iterable

from pellucid.models.config import ModelConfig
from pellucid.models.defaults import known_preset
from pellucid.models.defaults import preset_names as names

__all__ = ["names", "preset"]


def preset(name: str, overrides: Iterable[str] = ()) -> ModelConfig:
    """The config called ``name``, overridden by ``["a.b=c", …]``.

    Raises:
        ConfigError: there is none of this name, or an override does not fit it.
    """
    return ModelConfig.from_file(known_preset(name), overrides)
