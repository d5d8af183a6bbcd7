"""What a forward pass is asked for, and what it gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from pellucid.nn.cache import ContiguousCache
from pellucid.nn.losses import Loss
from pellucid.nn.moe import LoadBalanceStats
from pellucid.shapes import Float, Tensor

Want = Literal["logits", "loss", "hidden"]
WANTS: tuple[str, ...] = get_args(Want)


@dataclass(frozen=True, eq=False)
class Output:
    """What a forward pass gave; what was not wanted is None.

    ``logits`` are ``[B, T, V]`` for heads that mark tokens, and one row a document for heads about documents, in the
    order of ``Batch.targets``. ``routing`` has the sums of each layer that
    routed in this pass, an encoder's first.
    """

    hidden: Float[Tensor, "B T D"]
    logits: Float[Tensor, "..."] | None = None
    loss: Loss | None = None
    cache: ContiguousCache | None = None
    routing: tuple[LoadBalanceStats, ...] = ()
