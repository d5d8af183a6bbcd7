"""Masks of other libraries, converted by name: nobody has to remember whose ``True`` means what.

``from_hidden``    ``True`` hides: ``attn_mask``, ``key_padding_mask`` of ``nn.MultiheadAttention``
``from_visible``   ``True`` shows: ``scaled_dot_product_attention``, the ``attention_mask`` of transformers
``from_additive``  0 shows, minus infinity (or a dtype's lowest number) hides

Each returns a :class:`Rule`, to be combined with the others by ``&`` and ``|``. A mask that can be recognised
as upside down is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pellucid.errors import ShapeError
from pellucid.shapes import Tensor, broadcasts_to
from pellucid.visibility.coordinates import Coordinates
from pellucid.visibility.rules import Intervals, Lookback, Rule

_LOWEST = -1e4  # additive masks use -inf or some dtype's minimum; the smallest of these in use is fp16's -65504


@dataclass(frozen=True, eq=False)
class MaskRule(Rule):
    """A rule that is a matrix: ``visible`` is broadcastable to ``[B, T, S]``."""

    visible: Tensor
    lookback: Lookback = (None, 0)
    lookahead: int | None = None
    positional = False
    is_slot_mask = True

    def _visible(self, q_coords: Coordinates, k_coords: Coordinates) -> Tensor:
        want = (q_coords.shape[0], q_coords.shape[1], k_coords.shape[1])
        if not broadcasts_to(self.visible.shape, want):
            raise ShapeError(
                f"the given mask has shape {tuple(self.visible.shape)}, but queries and keys need {want}; cut the mask "
                "to the rows, queries and keys of this pass (for one query at slot t: mask[..., t : t + 1, :])"
            )
        return self.visible.to(q_coords.positions.device)

    def intervals(self, length: int) -> Intervals:
        raise ShapeError("a given mask has no edges of its own; count its True entries")

    def describe(self) -> str:
        raise ShapeError("a given mask has no text; a contract needs rules made of functions")

    def __str__(self) -> str:
        return f"given{tuple(self.visible.shape)}"


def from_visible(mask: Tensor, *, padding: bool = False) -> Rule:
    """``True`` (or 1) means visible.

    ``mask`` is ``[T, S]``, ``[B, T, S]`` or ``[B, 1, T, S]``; with ``padding=True`` it is ``[B, S]``, one entry a key.
    """
    if mask.dtype.is_floating_point:
        raise ShapeError(f"from_visible takes a boolean mask, not {mask.dtype}; use from_additive for numbers to add")
    if mask.dtype != torch.bool:
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise ShapeError(f"from_visible takes 0 and 1, but the mask holds {int(mask.max())}")
        mask = mask.bool()
    if padding:
        if mask.dim() != 2:
            raise ShapeError(f"a padding mask is [B, S], not {tuple(mask.shape)}")
        visible = mask[:, None, :]
    elif mask.dim() == 4 and mask.shape[1] == 1:
        visible = mask[:, 0]
    elif mask.dim() in (2, 3):
        visible = mask
    else:
        raise ShapeError(f"a mask is [T, S], [B, T, S] or [B, 1, T, S], not {tuple(mask.shape)}")
    _refuse_inverted(visible)
    return MaskRule(visible)


def from_hidden(mask: Tensor, *, padding: bool = False) -> Rule:
    """``True`` (or 1) means hidden. Shapes as in :func:`from_visible`."""
    if mask.dtype.is_floating_point:
        raise ShapeError(f"from_hidden takes a boolean mask, not {mask.dtype}; use from_additive for numbers to add")
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ShapeError(f"from_hidden takes 0 and 1, but the mask holds {int(mask.max())}")
    return from_visible(mask == 0, padding=padding)


def from_additive(mask: Tensor, *, padding: bool = False) -> Rule:
    """0 means visible, minus infinity or a dtype's lowest number means hidden; anything between is a bias, refused."""
    if not mask.dtype.is_floating_point:
        raise ShapeError(
            f"from_additive takes floating-point numbers to add, not {mask.dtype}; use from_hidden or from_visible"
        )
    hidden = mask <= _LOWEST
    if not bool((hidden | (mask == 0)).all()):
        raise ShapeError(
            "from_additive found numbers that are neither 0 nor minus infinity; they are a position bias: "
            "pass them to attend(bias=…)"
        )
    return from_visible(~hidden, padding=padding)


def _refuse_inverted(visible: Tensor) -> None:
    if visible.numel() and not bool(visible.any()):
        raise ShapeError(
            "the mask hides everything; is it upside down? (from_hidden: True hides, from_visible: True shows)"
        )
    rows, columns = visible.shape[-2:]
    if rows != columns or rows < 2:
        return
    lower = torch.ones(rows, columns, dtype=torch.bool, device=visible.device).tril()
    if bool((visible & lower).any()) or not bool(visible[..., 0, 1:].any()):
        return
    raise ShapeError(
        "the mask lets every query see only the future and not itself: it is a causal mask upside down "
        "(from_hidden: True hides, from_visible: True shows)"
    )
