"""A transformers cache as an audit sees it: whatever the model returned, and which slots in it hold tokens."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pellucid.errors import UnsupportedError


@dataclass(eq=False)
class HFCache:
    """``held`` is the model's own, None before the first tokens; ``real`` is ``Bool[B, S]``."""

    held: Any = None
    real: Tensor | None = None

    @property
    def slots(self) -> int:
        return 0 if self.real is None else self.real.shape[1]

    def with_next(self, real_BT: Tensor) -> Tensor:
        """All slots so far and the next ones."""
        return real_BT if self.real is None else torch.cat([self.real, real_BT], 1)

    def reorder(self, index_B: Tensor) -> None:
        assert self.real is not None
        self.held.reorder_cache(index_B)
        self.real = self.real[index_B]

    def crop(self, keep: int) -> None:
        """transformers takes the number of tokens to remove, as a negative number."""
        remove = min(self.slots - keep if keep >= 0 else -keep, self.slots)
        if remove <= 0 or self.real is None:
            return
        try:
            self.held.crop(-remove)
        except (RuntimeError, ValueError, NotImplementedError, AttributeError) as error:
            said = str(error).partition(".")[0] or type(error).__name__
            raise UnsupportedError(f"the cache cannot be cropped: {said}") from error
        self.real = self.real[:, : self.slots - remove]

    def snapshot(self) -> HFCache:
        return copy.deepcopy(self)


def refuse_gaps(name: str, real_BS: Tensor) -> None:
    """Padding between tokens of one row: transformers generates from left-padded prompts only."""
    begun_BS = real_BS.cumsum(1) > 0
    goes_on_BS = real_BS.flip(1).cumsum(1).flip(1) > 0
    if bool((begun_BS & goes_on_BS & ~real_BS).any()):
        raise UnsupportedError(f"{name} goes on from left-padded prompts only; pad on the left")
