"""Tiny random models of transformers, and ours of the same config with the same weights.

A :class:`Family` says what both configs are and where each of our tensors comes from: a list of patterns of our names
with their names, in which the first match counts, or a function that cuts a fused tensor.
"""

import re
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from pellucid.models import Model, ModelConfig, build


@contextmanager
def exact():
    """While inside, what a model of transformers computes in float32 is computed in float64."""
    before = torch.float32, torch.float, torch.Tensor.float, torch.get_default_dtype()
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float, default = before
        torch.set_default_dtype(default)


@dataclass(frozen=True)
class Family:
    theirs: Callable[[], Any]
    ours: dict[str, Any]
    names: list[tuple[str, Any]]
    sides: tuple[str, ...] = ("right", "left")
    pairs: bool = False
    positions: bool = True
    """Whether theirs takes position ids (others count distances, or slots)."""
    prepare: Callable[[Any], None] = field(default=lambda model: None)
    computed: str = "nothing"
    """Pattern of tensors of theirs that ours computes."""


def pair_of_models(family: Family) -> tuple[Any, Model]:
    """Theirs and ours in float64, every weight drawn anew, so that no norm is 1 and no bias 0."""
    with exact():
        made = family.theirs()
        made.config._attn_implementation = made.config._experts_implementation = "eager"
        theirs = type(made)(made.config).double().eval()
    dice = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, tensor in [*theirs.named_parameters(), *theirs.named_buffers()]:
            drawn = torch.randn(tensor.shape, generator=dice, dtype=torch.float64)
            if tensor.ndim and tensor.is_floating_point() and "inv_freq" not in key:
                tensor.copy_(drawn * 0.4 + (1.0 if "norm" in key.lower() and key.endswith("weight") else 0.0))
        family.prepare(theirs)
    ours = build(ModelConfig(**family.ours), dtype=torch.float64)
    copy_weights(family, theirs.state_dict(), ours)
    return theirs, ours


def copy_weights(family: Family, state: dict[str, torch.Tensor], ours: Model) -> None:
    """Each of our tensors from one of theirs; all of theirs must have been used."""
    used: set[str] = set()

    def take(key: str) -> torch.Tensor:
        used.add(key)
        return state[key]

    for name, tensor in ours.state_dict().items():
        matches = ((re.fullmatch(pattern, name), where) for pattern, where in family.names)
        match, where = next(((match, where) for match, where in matches if match), (None, None))
        assert match is not None, f"no source for {name}"
        found = take(match.expand(where)) if isinstance(where, str) else where(take, match)
        assert found.shape == tensor.shape, (name, found.shape, tensor.shape)
        tensor.copy_(found)
    known = {state[key].data_ptr() for key in used}
    left = [key for key in state if key not in used and state[key].data_ptr() not in known]
    left = [key for key in left if not re.search(family.computed, key)]
    assert not left, f"never read: {left}"
