"""One vector a document: its first token, its last, or the mean of all, by segments and positions, never by ids."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch

from pellucid.nn.norms import at_least_float32
from pellucid.shapes import Float, Int, Tensor
from pellucid.visibility import Coordinates

Pooling = Literal["first", "mean", "last"]


class Documents(NamedTuple):
    """The documents of a batch, row by row and segment by segment; rows without tokens have none.

    Letters here: C documents, P real tokens.
    """

    slots: Int[Tensor, "P"]
    """The flat slot of each real token, document by document, in the order of positions."""
    owners: Int[Tensor, "P"]
    """The number of each of these tokens' document."""
    first: Int[Tensor, "C"]
    """The flat slot of each document's first token."""
    last: Int[Tensor, "C"]

    def logsumexp(self, scores_PX: Float[Tensor, "P X"]) -> Float[Tensor, "C X"]:
        """The logarithm of the summed exponentials of each document's scores."""
        shape = (len(self.first), scores_PX.shape[1])
        nothing = scores_PX.detach().new_full(shape, -torch.inf)
        most = nothing.scatter_reduce(0, self.owners[:, None].expand_as(scores_PX), scores_PX.detach(), "amax")
        sums = scores_PX.new_zeros(shape).index_add(0, self.owners, (scores_PX - most[self.owners]).exp())
        return sums.log() + most


def documents_of(coords: Coordinates) -> Documents:
    """Which slots belong to which document, made once for these coordinates."""
    make = torch.compiler.disable(_documents) if torch.compiler.is_compiling() else _documents
    return coords.cached("documents", lambda: make(coords))


def pooled(x_BTD: Float[Tensor, "B T D"], coords: Coordinates, how: Pooling) -> Float[Tensor, "C D"]:
    """One vector a document. A mean is made in float32 at least; padding is no part of it (B34, B35)."""
    documents = documents_of(coords)
    flat = x_BTD.flatten(0, 1)
    if how != "mean":
        return flat[documents.first if how == "first" else documents.last]
    count = len(documents.first)
    owners = documents.owners
    exact = at_least_float32(flat[documents.slots])
    sums = exact.new_zeros(count, x_BTD.shape[-1]).index_add(0, owners, exact)
    sizes = torch.bincount(owners, minlength=count)[:, None]
    return (sums / sizes).to(x_BTD.dtype)


def _documents(coords: Coordinates) -> Documents:
    layout = coords.read_layout()
    if layout is None:
        raise RuntimeError("documents are counted on the host, which a compiled graph or the meta device cannot do")
    slots, owners = layout.by_document
    begins = np.flatnonzero(np.diff(owners, prepend=-1))
    ends = np.flatnonzero(np.diff(owners, append=-1))
    arrays = (slots, owners, slots[begins], slots[ends])
    return Documents(*(torch.from_numpy(array).to(coords.positions.device) for array in arrays))
