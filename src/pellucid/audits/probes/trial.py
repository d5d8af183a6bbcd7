"""Calling a target to see what works: anybody's code, which may raise anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from pellucid.audits.engine.compare import unless_it_raises
from pellucid.batch import Side
from pellucid.errors import one_line

TOLERANCE = 1e-4


def close(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding."""
    return a.shape == b.shape and float((a - b).abs().max()) <= TOLERANCE * (1 + float(a.abs().max()))


def works(call: Callable[[], bool]) -> bool:
    """Whether a call returns True."""
    return unless_it_raises(call, False) is True


def raised_by(call: Callable[[], Any]) -> Exception | None:
    """What a call raises."""
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return error
    return None


def supported_sides(
    padding_side: object, raised: Callable[[Side], str | None]
) -> tuple[tuple[Side, ...], dict[str, str]]:
    """The sides on which padding works, and what was ``raised`` on the others.

    ``padding_side`` is the target's own setting. Where no side works, padding as such is refused.
    """
    sides: list[Side] = []
    refused: dict[str, str] = {}
    for side in ("right", "left", "both"):
        if padding_side in ("right", "left") and side != padding_side:
            continue
        error = raised(side)
        if error is None:
            sides.append(side)
        else:
            refused[side] = error
    if not sides:
        refused["padding"] = next(iter(refused.values()))
    return tuple(sides), refused


def error_text(error: BaseException) -> str:
    """An exception on one line."""
    return f"{type(error).__name__}: {one_line(error)}"


@contextmanager
def attribute_set(owner: Any, name: str, value: Any) -> Iterator[None]:
    """While inside, ``owner.name`` is ``value``; afterwards it is what it was, on the owner or on its class."""
    own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
