"""What was found about a transformers model, and the small questions that finding it takes."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pellucid.batch import Side
from pellucid.errors import UnsupportedError, one_line
from pellucid.probe import Capability

if TYPE_CHECKING:
    from pellucid.audits.probes.hf_base import HFProbe

_NEAR = 1e-4


@dataclass(frozen=True)
class Found:
    """What was found.

    ``offset`` is added to positions (None: none are taken). ``pad`` stands in padded slots where a class counts by
    the ids themselves. ``divisor``: the loss can be asked for as a sum. ``shifts``: labels are shifted inside.
    ``local_mask``: with a cache the mask is that of the new slots only, as recurrent classes take it. ``shifted``:
    sides on which padding is taken and moves positions that cannot be told. ``refused``: what it raised, by side.
    ``tried``: the search is over.
    """

    capabilities: frozenset[Capability] = frozenset()
    kernels: tuple[str, ...] = ()
    sides: tuple[Side, ...] = ("right", "left", "both")
    max_length: int | None = None
    scores: int = 0
    offset: int | None = None
    pad: int | None = None
    divisor: bool = False
    shifts: bool = True
    cache_argument: str = ""
    cache_attribute: str = ""
    local_mask: bool = False
    position_shifting_sides: tuple[Side, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    attention_attribute: str = ""
    tried: bool = False


def longest(probe: HFProbe) -> int | None:
    """How many positions there are: what the table of learned ones holds. Computed ones have no bound."""
    text = getattr(probe.module.config, "text_config", None) or probe.module.config
    names = ("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions", "max_seq_len")
    given = [value for name in names if isinstance(value := getattr(text, name, None), int) and value > 0]
    if not given:
        return None
    words = tried(lambda: probe.module.get_input_embeddings())  # type: ignore[operator]
    for name, part in probe.module.named_modules():
        if not isinstance(part, torch.nn.Embedding) or part is words or not _of_text(name, part):
            continue
        if given[0] <= part.num_embeddings <= given[0] + 4:
            pad = part.padding_idx if part.num_embeddings == given[0] else None
            return given[0] if pad is None else given[0] - pad - 1  # counted from behind the pad id
    return None


def _of_text(name: str, table: torch.nn.Embedding) -> bool:
    """Whether a table may be one of learned places in text: sinusoids grow, other media have their own."""
    other = any(word in name for word in ("audio", "vision", "visual", "image"))
    return not other and "inusoid" not in type(table).__name__


def remembers(module: torch.nn.Module) -> bool:
    """Whether something besides attention carries tokens on: recurrences and convolutions take no positions."""
    if any(isinstance(part, torch.nn.Conv1d) for part in module.modules()):
        return True
    words = ("mamba", "recurrent", "linear_attention", "conv", "hybrid", "compress")
    kinds = getattr(getattr(module.config, "text_config", None) or module.config, "layer_types", None) or ()
    return any(word in str(kind) for kind in kinds for word in words)


def close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and float((a - b).abs().max()) <= _NEAR * (1 + float(a.abs().max()))


def tried(call: Callable[[], Any]) -> Any:
    """What a call gives, None where it raises: anybody's code is tried here."""
    try:
        return call()
    except Exception:  # noqa: BLE001
        return None


def worked(call: Callable[[], bool]) -> bool:
    return tried(call) is True


def raised_by(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return error
    return None


def on_purpose(error: Exception) -> bool:
    """Whether it was raised by a ``raise`` or an ``assert``: a refusal, unlike tensors that do not fit each other."""
    if isinstance(error, NotImplementedError | UnsupportedError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and re.search(r"\b(raise|assert)\b", frames[-1].line or "") is not None


def sides_taken(said: object, raised: Callable[[Side], str | None]) -> tuple[tuple[Side, ...], dict[str, str]]:
    """The sides on which padding is taken, and what is ``raised`` on the others; ``said`` is the target's own word.

    Where there is no side, padding as such is refused.
    """
    sides: list[Side] = []
    refused: dict[str, str] = {}
    for side in ("right", "left", "both"):
        if said in ("right", "left") and side != said:
            continue
        error = raised(side)
        if error is None:
            sides.append(side)
        else:
            refused[side] = error
    if not sides:
        refused["padding"] = next(iter(refused.values()))
    return tuple(sides), refused


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error)}"


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
