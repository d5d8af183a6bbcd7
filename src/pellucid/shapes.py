"""The letters that name the axes of a tensor, everywhere in Pellucid.

======  ==============================================
letter  axis
======  ==============================================
B       batch (rows)
T       query position (a slot of the current chunk)
S       key position (a slot of everything visible)
D       model width (``hidden_size``)
N       query heads
K       key/value heads
G       query heads per key/value head (N = K · G)
H       head size
U       value head size, where it differs from H
F       feed-forward width
V       vocabulary
E       experts
L       layers
======  ==============================================

``x_BTD`` says its shape in its name; public signatures say it in their annotation. Tests check the
annotations at run time (jaxtyping with beartype); ordinary runs do not pay for it.
"""

from collections.abc import Sequence

from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["Bool", "Float", "Int", "Tensor", "broadcasts_to"]


def broadcasts_to(shape: Sequence[int], want: Sequence[int]) -> bool:
    """Whether a tensor of ``shape`` broadcasts to ``want`` and no further: axes of 1 grow, those of ``want`` do not."""
    return len(shape) <= len(want) and all(
        got in (1, wanted) for got, wanted in zip(reversed(shape), reversed(want), strict=False)
    )
