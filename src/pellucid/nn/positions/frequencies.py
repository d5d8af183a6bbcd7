"""What sinusoidal and rotary positions share: the frequencies, and how long the document of a token is."""

from __future__ import annotations

import torch

from pellucid.errors import ShapeError
from pellucid.shapes import Float, Int, Tensor
from pellucid.visibility import Coordinates, Layout


def frequencies(size: int, base: float, device: torch.device | None = None) -> Float[Tensor, "pairs"]:
    """``base ** (-2i / size)`` for each pair i, in float64 (Vaswani et al. 2017 §3.5; Su et al. 2021 §3.2.2)."""
    pairs = torch.arange((size + 1) // 2, dtype=torch.float64, device=device)
    return base ** (-2 * pairs / size)


def refuse_misplaced(x_BT: Tensor, coordinates: Coordinates) -> None:
    """Raises ShapeError where ``x`` has not one place a token: either would be spread over the other."""
    if tuple(x_BT.shape[:2]) != coordinates.shape:
        raise ShapeError(
            f"x has {tuple(x_BT.shape[:2])} rows and tokens, but its coordinates are {coordinates.shape}; give one "
            "place a token"
        )


def document_lengths(coordinates: Coordinates) -> Int[Tensor, "B T"]:
    """For each slot, how long its document is as far as these coordinates reach: its last position plus one.

    A document that goes on from a cache counts its past, because its positions do. Padding counts as a document of
    its own, and its numbers mean nothing.
    """
    return coordinates.cached("document lengths", lambda: _lengths(coordinates))


def host_layout(coordinates: Coordinates) -> Layout | None:
    """The layout, read off the device once where the host was not told it; None where there is nothing to read yet."""
    if coordinates.layout is not None:
        return coordinates.layout
    if coordinates.positions.device.type == "meta" or torch.compiler.is_compiling():
        return None
    return coordinates.cached("host layout", lambda: Layout.of(coordinates.positions.cpu(), coordinates.segments.cpu()))


def _lengths(coordinates: Coordinates) -> Tensor:
    order_BT = coordinates.segments.argsort(stable=True, dim=1)
    segments_BT = coordinates.segments.gather(1, order_BT)
    first_B1 = torch.zeros_like(segments_BT[:, :1])
    document_BT = torch.cat([first_B1, (segments_BT.diff(dim=1) != 0).cumsum(1)], 1)
    ends_BT = (coordinates.positions + 1).gather(1, order_BT)
    longest_BT = torch.zeros_like(ends_BT).scatter_reduce(1, document_BT, ends_BT, "amax", include_self=False)
    return torch.empty_like(ends_BT).scatter(1, order_BT, longest_BT.gather(1, document_BT))
