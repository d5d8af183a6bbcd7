"""How anyone's model is called: a ``Request`` says what is asked, a ``Probe`` knows how to ask it.

An audit speaks to a model through these two only. To audit a model of your own that takes more than tokens,
subclass :class:`Probe`, say in ``capabilities`` what it can be asked, and write the methods these need.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from pellucid.errors import ShapeError, UnsupportedError

Side = Literal["right", "left", "both"]
Capability = Literal[
    "padding",  # segment 0 marks slots that hold no token, on any side
    "packing",  # several documents in one row, segments 1, 2, …
    "embeddings",  # embed(), and requests that carry embeddings in place of the tokens' own
    "loss",  # loss()
    "cache",  # new_cache() and extend()
    "reorder",  # cache.reorder(index_B): row r goes on as row index_B[r]
    "crop",  # cache.crop(keep): only the first ``keep`` slots stay
    "snapshot",  # cache.snapshot(): a copy that shares nothing
    "unused",  # cache.fill_unused(value): writes into every slot that holds no token yet
]


@dataclass(frozen=True, eq=False)
class Request:
    """What a model is asked: tokens, and where they are.

    Segment 0 is padding, documents are 1, 2, … within a row; positions restart at 0 in each document, and a part
    of a request (for a cache) keeps the positions of the whole. ``targets_BT`` says which tokens have to be
    predicted from what precedes them; None means every token but the first of its document. A shift of labels is
    the target's own business. ``embeddings_BTD`` stand in for the embeddings of the tokens.
    """

    tokens_BT: Tensor
    positions_BT: Tensor
    segments_BT: Tensor
    targets_BT: Tensor | None = None
    embeddings_BTD: Tensor | None = None

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]], *, side: Side = "right", length: int | None = None) -> Request:
        """One document a row, padded with token 0 to ``length`` slots on the ``side``."""
        return cls.from_documents([[row] for row in rows], side=side, length=length)

    @classmethod
    def packed(cls, documents: Sequence[Sequence[int]], *, length: int | None = None) -> Request:
        """Several documents in one row."""
        return cls.from_documents([documents], length=length)

    @classmethod
    def from_documents(
        cls, rows: Sequence[Sequence[Sequence[int]]], *, side: Side = "right", length: int | None = None
    ) -> Request:
        """Rows of documents."""
        longest = max(sum(map(len, row)) for row in rows)
        slots = longest if length is None else length
        if longest > slots:
            raise ShapeError(f"a row holds {longest} tokens, but length is {slots}; raise length")
        fields = [[_lay_out(row, side, slots)[name] for row in rows] for name in range(3)]
        return cls(*(torch.tensor(field, dtype=torch.int64).reshape(len(rows), slots) for field in fields))

    @property
    def shape(self) -> tuple[int, int]:
        """``(rows, slots)``."""
        rows, slots = self.tokens_BT.shape
        return rows, slots

    @property
    def real_BT(self) -> Tensor:
        """``Bool[B, T]``: which slots hold a token."""
        return self.segments_BT != 0

    @property
    def learnt_BT(self) -> Tensor:
        """``Bool[B, T]``: which tokens must be predicted, the first token of a document never being one."""
        possible = self.real_BT & (self.positions_BT > 0)
        return possible if self.targets_BT is None else possible & self.targets_BT

    def slots(self, row: int, segment: int = 1) -> Tensor:
        """The slots of one document, in order."""
        return (self.segments_BT[row] == segment).nonzero()[:, 0]

    def part(self, start: int, stop: int) -> Request:
        """Slots ``start … stop-1`` of every row."""
        fields = ("tokens_BT", "positions_BT", "segments_BT", "targets_BT", "embeddings_BTD")
        cut = {name: None if (v := getattr(self, name)) is None else v[:, start:stop] for name in fields}
        return replace(self, **cut)

    def with_token(self, row: int, slot: int, token: int) -> Request:
        """The same request with another token in one slot."""
        tokens_BT = self.tokens_BT.clone()
        tokens_BT[row, slot] = token
        return replace(self, tokens_BT=tokens_BT)

    def with_tokens(self, tokens_BT: Tensor) -> Request:
        """The same places with other tokens."""
        return replace(self, tokens_BT=tokens_BT)

    def with_targets(self, targets_BT: Tensor) -> Request:
        """The same request in which only these tokens must be predicted."""
        return replace(self, targets_BT=targets_BT)

    def with_embeddings(self, embeddings_BTD: Tensor) -> Request:
        """The same request with these embeddings in place of the tokens' own."""
        return replace(self, embeddings_BTD=embeddings_BTD)

    def to(self, device: torch.device) -> Request:
        """A copy on ``device`` that shares no integer tensor with this one."""
        fields = ("tokens_BT", "positions_BT", "segments_BT", "targets_BT")
        moved = {name: None if (v := getattr(self, name)) is None else v.to(device, copy=True) for name in fields}
        return replace(self, **moved)


def _lay_out(documents: Sequence[Sequence[int]], side: Side, slots: int) -> tuple[list[int], list[int], list[int]]:
    held = [document for document in documents if len(document)]
    free = slots - sum(map(len, held))
    before = {"right": 0, "left": free, "both": free // 2}[side]
    after = free - before
    tokens = [token for document in held for token in document]
    positions = [position for document in held for position in range(len(document))]
    segments = [number for number, document in enumerate(held, 1) for _ in document]
    pad = ([0] * before, [0] * after)
    return pad[0] + tokens + pad[1], pad[0] + positions + pad[1], pad[0] + segments + pad[1]


class Visibility(Protocol):
    """What a declared rule answers; every rule of ``pellucid.visibility`` does."""

    @property
    def ahead(self) -> int | None: ...

    def mask(self, queries: Any, keys: Any) -> Tensor: ...

    def describe(self) -> str: ...


class Probe(Protocol):
    """How one target is called. Anything of this shape will do; subclassing it fills in the rest.

    ``rules`` is the target's own declaration, one rule a layer: what the audit expects follows from it.
    ``max_length`` is how many positions a document can have (None: no bound).
    """

    name: str
    vocab_size: int
    rules: tuple[Visibility, ...]
    module: nn.Module | None = None
    max_length: int | None = None
    capabilities: frozenset[Capability] = frozenset()

    def logits(self, request: Request) -> Tensor:
        """``[B, T, V]`` scores; what stands at padding is never looked at."""
        ...

    def over(self, module: nn.Module) -> Probe:
        """The same way of calling for another module of the same kind: the audit's float64 copy."""
        raise UnsupportedError(f"{self.name} cannot be called over a copy; write over(module)")

    def embed(self, request: Request) -> Tensor:
        """``[B, T, D]``: the embeddings that ``request.embeddings_BTD`` would stand in for."""
        raise UnsupportedError(f"{self.name} has no embeddings to give; leave 'embeddings' out of its capabilities")

    def loss(self, request: Request) -> tuple[Tensor, Tensor]:
        """The sum of the losses of ``request.learnt_BT`` in natural logarithms, and how many were counted."""
        raise UnsupportedError(f"{self.name} has no loss; leave 'loss' out of its capabilities")

    def new_cache(self, rows: int, capacity: int) -> Any:
        """An empty cache of ``capacity`` slots."""
        raise UnsupportedError(f"{self.name} has no cache; leave 'cache' out of its capabilities")

    def extend(self, request: Request, cache: Any) -> Tensor:
        """``[B, T, V]`` scores of the next slots, which the cache then holds too."""
        raise UnsupportedError(f"{self.name} has no cache; leave 'cache' out of its capabilities")


@contextmanager
def embeddings_replaced(embedding: nn.Module, embeddings_BTD: Tensor | None) -> Iterator[None]:
    """While inside, ``embedding`` returns these embeddings, whatever it is asked (None: leaves it alone)."""
    if embeddings_BTD is None:
        yield
        return
    handle = embedding.register_forward_hook(lambda *_: embeddings_BTD)
    try:
        yield
    finally:
        handle.remove()
