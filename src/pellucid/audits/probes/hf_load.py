"""A transformers model from a folder, or from a class: with the library's own loaders, and none of a file's code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from torch import nn

from pellucid.errors import InputError, one_line


def transformers_module() -> Any:
    """The library, or a clear word that it is missing."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        message = "auditing Hugging Face models needs transformers; install it with pip install 'pellucid[hf]'"
        raise InputError(message) from error
    return transformers


def is_hf_folder(path: Path) -> bool:
    """Whether a folder looks like a saved transformers model."""
    return (path / "config.json").is_file()


def from_folder(path: Path) -> nn.Module:
    """The model that the folder's ``config.json`` names, from safetensors only.

    Raises:
        InputError: no class of the installed transformers is named, or the weights cannot be read.
    """
    transformers = transformers_module()
    config = _read(path / "config.json")
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    kind = getattr(transformers, name, None) if name and name.isidentifier() else None
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        known = f"transformers {transformers.__version__} has no such model"
        raise InputError(f"{path / 'config.json'} names the architecture {name!r}, but {known}; its code is not run")
    try:
        model: nn.Module = cast(Any, kind).from_pretrained(
            path, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
    except Exception as error:  # anybody's files
        raise InputError(f"{path} cannot be loaded as {name}: {type(error).__name__}: {one_line(error)}") from error
    return model


def _read(file: Path) -> dict[str, Any]:
    if file.stat().st_size > 1 << 24:
        raise InputError(f"{file} has {file.stat().st_size} bytes, which is no model's config")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"{file} holds {type(config).__name__}, but a mapping is needed")
    return config
