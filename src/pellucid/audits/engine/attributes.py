"""The plain values that a module keeps in attributes of its own, of its classes and of the files that define them."""

from __future__ import annotations

import functools
import hashlib
import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.audits.engine.state import Leaves, is_hooks

_DEPTH = 6
_LEAVES = 4000  # of one module tree: beyond them nothing is looked at
_ITEMS = 256  # of one list, set or mapping
_NUMBERS = 2**20  # of one tensor: of larger ones only the first and last are compared

_FOREIGN = frozenset({"torch", "builtins", "typing", "abc", "transformers", "numpy"})
_INNER = frozenset(
    {"_parameters", "_buffers", "_modules", "training", "_non_persistent_buffers_set", "_c", "_concrete_type"}
)


_HOLDERS = (
    *(int, float, str, bytes, tuple, list, dict, set, deque, Tensor),
    *(random.Random, torch.Generator),
)


def snapshot_attributes(module: nn.Module | None) -> Leaves:
    """Every plain value reachable from the attributes of a module, its parts and their classes.

    Registered weights and buffers are not among them; cycles, depth and number are bounded.
    """
    leaves: Leaves = {}
    if module is None:
        return leaves
    seen: set[int] = {id(part) for part in module.modules()}
    parts = module.named_modules()
    sources = [(f"{name}.{key}".lstrip("."), value, _DEPTH) for name, part in parts for key, value in _attributes(part)]
    sources += [(path, value, 2) for path, value in _globals(module)]
    for place, value, depth in sources:
        try:
            for path, leaf in _walk(value, place, depth, seen):
                leaves[path] = leaf
                if len(leaves) >= _LEAVES:
                    return leaves
        except Exception:  # noqa: BLE001 (anybody's objects: what cannot be looked at is not looked at)
            continue
    return leaves


def _globals(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Values in the files that define the module's own classes, and by other classes of these files."""
    for name in dict.fromkeys(type(part).__module__ for part in module.modules()):
        if name.partition(".")[0] in _FOREIGN or name not in sys.modules:
            continue
        for key, value in list(vars(sys.modules[name]).items()):
            own = getattr(type(value), "__module__", None) == name
            if _is_state(key, value) or (own and not isinstance(value, nn.Module)):
                yield f"{name}.{key}", value
            elif isinstance(value, type) and value.__module__ == name and not issubclass(value, nn.Module):
                yield from (
                    (f"{name}.{key}.{inner}", state) for inner, state in vars(value).items() if _is_state(inner, state)
                )


def _is_cache(value: object) -> bool:
    """What ``functools.lru_cache`` makes."""
    return isinstance(value, functools._lru_cache_wrapper)


def _attributes(part: nn.Module) -> Iterator[tuple[str, Any]]:
    for base in type(part).__mro__:
        if base.__module__.partition(".")[0] not in _FOREIGN:
            for key, value in vars(base).items():
                plain = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
                if _is_state(key, plain):
                    yield key, plain
    yield from ((key, value) for key, value in vars(part).items() if _is_own(key))


def _is_own(key: str) -> bool:
    return key not in _INNER and not is_hooks(key)


def _is_state(key: str, value: object) -> bool:
    """A name that holds something, as opposed to methods, descriptors and what Python puts there."""
    state = value is None or isinstance(value, _HOLDERS) or _is_cache(value)
    return state and not key.startswith("__")


def _walk(value: object, path: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Leaves of one value. What cannot be looked at counts as its type."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
        yield path, value if value == value else "nan"
    elif isinstance(value, Tensor):
        yield path, _of_tensor(value)
    elif isinstance(value, random.Random):
        yield path, value.getstate()
    elif isinstance(value, torch.Generator):
        yield path, tuple(value.get_state().tolist())
    elif _is_cache(value):
        yield f"entries of {path}", value.cache_info().currsize  # type: ignore[attr-defined]
    elif isinstance(value, (type, FunctionType, ModuleType)) or depth == 0:
        yield path, type(value).__name__
    elif id(value) in seen:
        return
    else:
        seen.add(id(value))
        yield path, type(value).__name__
        for inner, item in _inside(value, path):
            yield from _walk(item, inner, depth - 1, seen)


def _inside(value: object, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield f"len({path})", len(value)
        yield from ((f"{path}[{_short(key)}]", item) for key, item in list(value.items())[:_ITEMS])
    elif isinstance(value, (list, tuple, deque)):
        yield f"len({path})", len(value)
        yield from ((f"{path}[{index}]", item) for index, item in enumerate(list(value)[:_ITEMS]))
    elif isinstance(value, (set, frozenset)):
        yield f"len({path})", len(value)
        yield path, sorted(map(_short, value))[:_ITEMS].__repr__()
    elif isinstance(value, nn.Module):  # not registered: its weights are found nowhere else
        named = [*value.named_parameters(), *value.named_buffers()]
        yield from ((f"{path}.{name}", tensor) for name, tensor in named)
        yield from ((f"{path}.{key}", item) for key, item in vars(value).items() if _is_own(key))
    elif hasattr(value, "tobytes") and hasattr(value, "shape"):
        yield f"{path}.bytes", (str(getattr(value, "dtype", "")), value.shape, _digest(value.tobytes()))
    else:
        own = getattr(value, "__dict__", None)
        slots = [key for kind in type(value).__mro__ for key in _slots(kind) if hasattr(value, key)]
        yield from ((f"{path}.{key}", item) for key, item in list((own or {}).items())[:_ITEMS])
        yield from ((f"{path}.{key}", getattr(value, key)) for key in slots[:_ITEMS])


def _slots(kind: type) -> tuple[str, ...]:
    names = vars(kind).get("__slots__", ())
    return (names,) if isinstance(names, str) else tuple(name for name in names if not name.startswith("__"))


def _short(key: object) -> str:
    return repr(key)[:60] if isinstance(key, (str, int, float, bool, tuple, bytes)) else type(key).__name__


def _of_tensor(tensor: Tensor) -> tuple[Any, ...]:
    """Shape, dtype and content: of what cannot be read, its kind only."""
    head = (tuple(tensor.shape), str(tensor.dtype), tensor.device.type)
    try:
        flat = tensor.detach().flatten()
        half = _NUMBERS // 2
        some = flat if len(flat) <= _NUMBERS else torch.cat([flat[:half], flat[-half:]])
        return (*head, _digest(some.cpu().contiguous().view(torch.uint8).numpy().tobytes()))
    except (RuntimeError, TypeError, NotImplementedError):  # meta, sparse, quantized, nested
        return head


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
