"""How large a model the demo can teach in its minutes on this machine.

A model that is too large sees too little text, one that is too small has no room for it. On this data a model of N
parameters wants about N/2 tokens at least, which cost 6 · N · N/2 operations, forward and backward (Kaplan et al.
2020 §2.1).
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Size(NamedTuple):
    """A model of the demo's kind."""

    hidden: int
    layers: int
    heads: int
    inner: int
    batch: int

    @property
    def parameters(self) -> int:
        """Matrices of the blocks and the tied table of 4096 tokens."""
        block = 4 * self.hidden**2 + 3 * self.hidden * self.inner
        return self.layers * block + 4096 * self.hidden

    def overrides(self) -> list[str]:
        """Settings of ``demo.yaml`` that make this size."""
        rules = ["causal & window(8)", *["causal"] * (self.layers - 1)]
        return [
            f"model.hidden_size={self.hidden}",
            f"model.layers={rules}",
            f"model.attention.num_attention_heads={self.heads}",
            f"model.ffn.intermediate_size={self.inner}",
            f"batch_size={self.batch}",
        ]


SIZES = (Size(128, 3, 2, 384, 2), Size(192, 4, 3, 512, 2), Size(256, 6, 4, 688, 4), Size(384, 8, 6, 1024, 8))

_USED = 0.5  # of the speed of a bare matrix product, what a training step of a small model reaches


def choose_size(minutes: float, operations_per_second: float) -> Size:
    """The largest size that can see half a token for each of its parameters, or else the smallest."""
    operations = operations_per_second * _USED * 60 * minutes
    affordable = math.sqrt(operations / 3)
    fitting = [size for size in SIZES if size.parameters <= affordable]
    return fitting[-1] if fitting else SIZES[0]


def size_for_this_machine(minutes: float) -> Size:
    """The size that follows from how fast this machine multiplies matrices."""
    from pellucid.training.environment import fastest_precision, operations_per_second

    return choose_size(minutes, operations_per_second(fastest_precision()))
