"""Where the logits and the loss are in what a target returns: a tensor, a tuple, a mapping, an object with fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn


def logits_in(result: object, shape: tuple[int, ...]) -> Tensor | None:
    """What is called ``logits``; else the first tensor of three dimensions, of ``shape`` ``[B, T]`` if there is one."""
    if isinstance(result, Tensor):
        return result
    named = dict(_fields(result))
    if isinstance(named.get("logits"), Tensor):
        return named["logits"]
    tensors = [each for each in _flat(named.values()) if each.is_floating_point() and each.dim() == 3]
    return next((each for each in tensors if each.shape[:2] == shape), tensors[0] if tensors else None)


def loss_in(result: object) -> Tensor | None:
    """What is called ``loss``; else the first single number."""
    named = dict(_fields(result))
    if isinstance(named.get("loss"), Tensor):
        return named["loss"] if named["loss"].numel() == 1 else None
    given = [result] if isinstance(result, Tensor) else _flat(named.values())
    return next((each for each in given if each.is_floating_point() and each.numel() == 1 and each.dim() < 2), None)


def described(result: object) -> str:
    """A result in words: what is in it."""
    named = dict(_fields(result))
    shapes = [f"{name} {tuple(value.shape)}" for name, value in named.items() if isinstance(value, Tensor)]
    kind = type(result).__name__
    return f"{kind} ({', '.join(shapes)})" if shapes else kind


def shape_hint(shape: tuple[int, ...], rows: int, slots: int) -> str:
    """What a wrong shape looks like, and the way out; empty where it looks like nothing known."""
    if len(shape) == 3 and rows != slots and tuple(shape[:2]) == (slots, rows):
        return "slots stand before rows: return logits.transpose(0, 1)"
    if len(shape) == 3 and shape[0] == rows and shape[2] == slots:
        return "the vocabulary stands before the slots: return logits.transpose(1, 2)"
    if (len(shape) == 3 and tuple(shape[:2]) == (rows, 1)) or (len(shape) == 2 and shape[0] == rows):
        return "it scores one slot of a row only, the last perhaps: return the logits of every slot"
    if len(shape) == 2 and shape[0] == rows * slots:
        return f"rows and slots are flattened: return logits.view({rows}, {slots}, -1)"
    return ""


def factory_hint(result: object) -> str:
    """For what makes a model in place of answering."""
    return "; it makes a model: call it, and audit what it made" if isinstance(result, nn.Module) else ""


def _fields(result: object) -> Iterator[tuple[str, Any]]:
    if isinstance(result, Mapping):
        yield from ((str(name), value) for name, value in result.items())
    elif is_dataclass(result) and not isinstance(result, type):
        yield from ((field.name, getattr(result, field.name, None)) for field in fields(result))
    elif isinstance(result, tuple | list):
        names = getattr(result, "_fields", range(len(result)))
        yield from ((str(name), value) for name, value in zip(names, result, strict=True))
    elif not isinstance(result, Tensor):
        known = ((name, getattr(result, name, None)) for name in ("logits", "loss"))
        yield from ((name, value) for name, value in known if value is not None)


def _flat(values: Any) -> list[Tensor]:
    """The tensors, those of tuples and lists too."""
    return [
        tensor
        for value in values
        for tensor in (
            _flat(value) if isinstance(value, tuple | list) else [value] if isinstance(value, Tensor) else []
        )
    ]
