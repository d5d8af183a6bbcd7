"""How anyone's model is called: a ``Request`` says what is asked, a ``Probe`` knows how to ask it.

An audit speaks to a model through these two only. To audit a model of your own that takes more than tokens,
subclass :class:`Probe`, say in ``capabilities`` what it can be asked, and write the methods these need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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

    ``tokens``, ``positions`` and ``segments`` are ``[B, T]`` integers. Segment 0 is padding, documents are
    1, 2, … within a row; positions restart at 0 in each document, and a part of a request (for a cache) keeps
    the positions of the whole. ``targets`` (``[B, T]`` booleans) says which tokens have to be predicted from
    what precedes them; None means every token but the first of its document. A shift of labels is the
    target's own business. ``embeddings`` (``[B, T, D]``) stand in for the embeddings of the tokens.
    """

    tokens: Tensor
    positions: Tensor
    segments: Tensor
    targets: Tensor | None = None
    embeddings: Tensor | None = None

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
        laid_out = [_lay_out(row, side, slots) for row in rows]
        return cls(*torch.tensor(laid_out, dtype=torch.int64).reshape(len(rows), 3, slots).unbind(1))

    @property
    def shape(self) -> tuple[int, int]:
        """``(rows, slots)``."""
        rows, slots = self.tokens.shape
        return rows, slots

    @property
    def real(self) -> Tensor:
        """``Bool[B, T]``: which slots hold a token."""
        return self.segments != 0

    @property
    def learnt(self) -> Tensor:
        """``Bool[B, T]``: which tokens must be predicted, the first token of a document never being one."""
        possible = self.real & (self.positions > 0)
        return possible if self.targets is None else possible & self.targets

    def slots(self, row: int, segment: int = 1) -> Tensor:
        """The slots of one document, in order."""
        return (self.segments[row] == segment).nonzero()[:, 0]

    def part(self, start: int, stop: int) -> Request:
        """Slots ``start … stop-1`` of every row."""
        return self._each(lambda field: field[:, start:stop])

    def row(self, row: int) -> Request:
        """One row alone, as wide as it was."""
        return self._each(lambda field: field[row : row + 1])

    def _each(self, cut: Callable[[Tensor], Tensor]) -> Request:
        given = {name: value for name, value in vars(self).items() if value is not None}
        return replace(self, **{name: cut(value) for name, value in given.items()})

    def with_token(self, row: int, slot: int, token: int) -> Request:
        """The same request with another token in one slot."""
        tokens_BT = self.tokens.clone()
        tokens_BT[row, slot] = token
        return replace(self, tokens=tokens_BT)

    def with_tokens(self, tokens_BT: Tensor) -> Request:
        """The same places with other tokens."""
        return replace(self, tokens=tokens_BT)

    def with_targets(self, targets_BT: Tensor) -> Request:
        """The same request in which only these tokens must be predicted."""
        return replace(self, targets=targets_BT)

    def with_embeddings(self, embeddings_BTD: Tensor) -> Request:
        """The same request with these embeddings in place of the tokens' own."""
        return replace(self, embeddings=embeddings_BTD)

    def to(self, device: torch.device) -> Request:
        """A copy on ``device`` that shares no integer tensor with this one."""
        given = {name: value for name, value in vars(self).items() if value is not None and name != "embeddings"}
        return replace(self, **{name: value.to(device, copy=True) for name, value in given.items()})


def _lay_out(documents: Sequence[Sequence[int]], side: Side, slots: int) -> list[list[int]]:
    """Tokens, positions and segments of one row."""
    held = [document for document in documents if len(document)]
    free = slots - sum(map(len, held))
    before = {"right": 0, "left": free, "both": free // 2}[side]
    fields = (
        [token for document in held for token in document],
        [position for document in held for position in range(len(document))],
        [number for number, document in enumerate(held, 1) for _ in document],
    )
    return [[0] * before + field + [0] * (free - before) for field in fields]


class Visibility(Protocol):
    """What a declared rule answers; every rule of ``pellucid.visibility`` does."""

    @property
    def ahead(self) -> int | None: ...

    @property
    def reach(self) -> tuple[int | None, int]: ...

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
        """``[B, T, D]``: the embeddings that ``request.embeddings`` would stand in for."""
        raise UnsupportedError(f"{self.name} has no embeddings to give; leave 'embeddings' out")

    def loss(self, request: Request) -> tuple[Tensor, Tensor]:
        """The sum of the losses of ``request.learnt`` in natural logarithms, and how many were counted."""
        raise UnsupportedError(f"{self.name} has no loss; leave 'loss' out")

    def new_cache(self, rows: int, capacity: int) -> Any:
        """An empty cache of ``capacity`` slots."""
        raise UnsupportedError(f"{self.name} has no cache; leave 'cache' out")

    def extend(self, request: Request, cache: Any) -> Tensor:
        """``[B, T, V]`` scores of the next slots, which the cache then holds too."""
        raise UnsupportedError(f"{self.name} has no cache; leave 'cache' out")


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
