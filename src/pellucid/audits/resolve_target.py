"""From what a user types to something that can be audited: ``module:attribute``."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from pellucid.audits.probes.hf_load import is_pretrained_class, tiny_model
from pellucid.errors import ArgumentError, one_line
from pellucid.messages import did_you_mean, nearest

_KINDS = "a checkpoint folder, a Hugging Face folder, or module:attribute such as mypackage.models:make_model"


def from_text(text: str) -> object:
    """What ``module:attribute`` names: a model, or what the class or factory of that name makes.

    Modules are looked for in the working directory too. This runs code, as importing does: name what you trust.

    Raises:
        ArgumentError: there is no such thing, or it cannot be made without arguments.
    """
    return _make(find(text), text)


def find(text: str) -> Any:
    """What ``module:attribute`` names, as it is.

    Raises:
        ArgumentError: there is no such thing.
    """
    name, colon, path = text.partition(":")
    if not colon or not name or not path:
        raise ArgumentError(f"{text!r} names nothing that can be audited;{_hint(text)} give {_KINDS}")
    found = _import(name, text)
    for part in path.split("."):
        if not hasattr(found, part):
            names = sorted(n for n in dir(found) if not n.startswith("_"))
            hint = did_you_mean(part, names, "; ", 0.5)
            raise ArgumentError(f"{name} has no {path!r}{hint or ';'} it has {', '.join(names[:12]) or 'nothing'}")
        found = getattr(found, part)
    return found


def _hint(text: str) -> str:
    """What may have been meant by a text that names no attribute of a module, and no folder that is there."""
    if ":" in text:
        return ""
    folder = Path(text)
    if folder.is_file():
        example = f" such as {folder.stem}:make_model" if folder.suffix == ".py" else ""
        return f" it is a file: name its folder, or module:attribute{example};"
    try:
        near = nearest(folder.name, sorted(entry.name for entry in folder.parent.iterdir() if entry.is_dir()))
    except OSError:
        near = None
    if near is not None:
        return f" did you mean the folder {str(folder.parent / near)!r}?"
    module, dot, attribute = text.rpartition(".")
    dotted = bool(dot) and all(part.isidentifier() for part in text.split("."))
    return f" did you mean {f'{module}:{attribute}'!r}?" if dotted else ""


def _import(name: str, text: str) -> Any:
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise ArgumentError(f"there is no module {name!r} to audit {text!r} from; give {_KINDS}") from None
        raise ArgumentError(f"{name} cannot be imported: {error}; install what it needs") from error
    except (Exception, SystemExit) as error:  # anybody's code
        raise ArgumentError(f"{name} cannot be imported: {type(error).__name__}: {one_line(error)}") from error
    finally:
        sys.path.remove(here)


def _make(found: Any, text: str) -> object:
    """A model as it is; a class or a factory is called, if it can be called without arguments."""
    if isinstance(found, nn.Module) or not callable(found):
        return found
    if is_pretrained_class(found):
        return tiny_model(found)
    if not isinstance(found, type) and _takes_an_argument(found):
        return found  # a function of tokens
    try:
        return found()
    except (Exception, SystemExit) as error:  # anybody's code
        hint = "write a factory without arguments and name that"
        raise ArgumentError(f"{text} cannot be made: {type(error).__name__}: {one_line(error)}; {hint}") from error


def _takes_an_argument(function: Callable[..., object]) -> bool:
    """Whether a function needs an argument, as one of tokens does and a factory does not."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
