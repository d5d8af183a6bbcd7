"""How anyone's model is called: a ``Request`` says what is asked, a ``Probe`` knows how to ask it.

An audit speaks to a model through these two only. To audit a model of your own that takes more than tokens,
subclass :class:`Probe`, say in ``capabilities`` what it can be asked, and write the methods these need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
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
    "crop",  # cache.crop(keep): only the first ``keep`` slots stay; a negative number drops that many, or is refused
    "snapshot",  # cache.snapshot(): a copy that shares nothing
    "unused",  # cache.fill_unused(value): writes into every slot that holds no token yet
    "source",  # requests that carry a source: an encoder and a decoder that reads it
    "positions",  # the positions of a request are obeyed where nothing else gives them away
    "kernels",  # kernel(name): inside, one of the attention implementations in ``kernels`` is used
    "attention",  # attention(): the weights of every layer
    "checkpointing",  # checkpointing(): inside, activations are recomputed in the backward pass
]


@dataclass(frozen=True, eq=False)
class Request:
    """What a model is asked: tokens, and where they are.

    ``tokens``, ``positions`` and ``segments`` are ``[B, T]`` integers. Segment 0 is padding, documents are
    1, 2, … within a row; positions restart at 0 in each document, and a part of a request (for a cache) keeps
    the positions of the whole. ``targets`` (``[B, T]`` booleans) says which tokens have to be predicted from
    what precedes them; None means every token but the first of its document. A shift of labels is the
    target's own business. ``embeddings`` (``[B, T, D]``) stand in for the embeddings of the tokens. ``source``
    is what the encoder of an encoder–decoder reads, row by row.
    """

    tokens: Tensor
    positions: Tensor
    segments: Tensor
    targets: Tensor | None = None
    embeddings: Tensor | None = None
    source: Request | None = None

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]], *, side: Side = "right", length: int | None = None) -> Request:
        """One document a row, padded with token 0 to ``length`` slots on the ``side``."""
        return cls.from_documents([[row] for row in rows], side=side, length=length)

    @classmethod
    def packed(cls, documents: Sequence[Sequence[int]], *, length: int | None = None) -> Request:
        """Several documents in one row."""
        return cls.from_documents([documents], length=length)

    @classmethod
    def from_pairs(
        cls, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], *, side: Side = "right"
    ) -> Request:
        """One source and one target a row."""
        return replace(cls.from_rows(targets, side=side), source=cls.from_rows(sources, side=side))

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
        tokens, positions, segments = torch.tensor(laid_out, dtype=torch.int64).reshape(len(rows), 3, slots).unbind(1)
        return cls(tokens, positions, segments)

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
        """Slots ``start … stop-1`` of every row; the whole of a source."""
        return self._each(lambda field: field[:, start:stop])

    def row(self, row: int) -> Request:
        """One row alone, as wide as it was."""
        source = None if self.source is None else self.source.row(row)
        return replace(self._each(lambda field: field[row : row + 1]), source=source)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Request:
        given: dict[str, Any] = {name: change(v) for name, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **given)

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

    def with_source(self, source: Request | None) -> Request:
        """The same request beside another source."""
        return replace(self, source=source)

    def to(self, device: torch.device) -> Request:
        """A copy on ``device`` that shares no integer tensor with this one."""
        copied = self._each(lambda field: field if field.is_floating_point() else field.to(device, copy=True))
        return replace(copied, source=None if self.source is None else self.source.to(device))


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
    def lookahead(self) -> int | None: ...

    @property
    def lookback(self) -> tuple[int | None, int]: ...

    def mask(self, queries: Any, keys: Any) -> Tensor: ...

    def describe(self) -> str: ...


class Probe(Protocol):
    """How one target is called. Anything of this shape will do; subclassing it fills in the rest.

    ``rules`` is the target's own declaration, one rule a layer: what the audit expects follows from it
    (``declared`` is False where they are only assumed: seeing less is then no fault). ``source_rules`` are those
    of an encoder whose memory the target reads (``source_declared`` is False where they are assumed).
    ``layer_names`` are the submodules that are these layers, each
    from a hidden stream ``[B, T, D]`` to the next; None: they are looked for. ``memory_name`` is the submodule
    whose output a decoder reads. ``max_length`` is how many positions a document can have (None: no bound).
    ``shift_invariant``: adding one number to all positions changes nothing. ``forbidden_tokens`` are ids that an
    audit must not use as text (pads, ends, image marks); ``end_tokens`` are those that end a text, of which each that
    stands in one has to be learnt. ``sides`` are those on which the target says it can be padded. ``shifted`` are
    sides on which padding is taken, but moves the positions, which cannot be told: answers are not compared with
    those of a row alone there, but what is hidden must be hidden all the same; ``shift_allowed`` says that it is
    meant so. ``refused`` is what the target raised when it was tried, by what was tried (a capability, a side).
    ``ways`` are other ways of asking the same (see :meth:`asked`). A token that is learnt is predicted by the slot
    ``predicts_from`` before it: 1, and 0 for a target that fills gaps.
    """

    name: str
    vocab_size: int
    rules: tuple[Visibility, ...]
    declared: bool = True
    source_rules: tuple[Visibility, ...] = ()
    source_declared: bool = True
    layer_names: tuple[str, ...] | None = None
    memory_name: str | None = None
    module: nn.Module | None = None
    max_length: int | None = None
    shift_invariant: bool = False
    kernels: tuple[str, ...] = ()
    forbidden_tokens: frozenset[int] = frozenset()
    end_tokens: tuple[int, ...] = ()
    sides: tuple[Side, ...] = ("right", "left", "both")
    shifted: tuple[Side, ...] = ()
    shift_allowed: bool = True
    refused: Mapping[str, str] = MappingProxyType({})
    ways: tuple[str, ...] = ()
    predicts_from: int = 1
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

    def attention(self, request: Request) -> list[Tensor]:
        """Each layer's attention weights, ``[B, N, T, T]``."""
        raise UnsupportedError(f"{self.name} does not give its attention weights; leave 'attention' out")

    def kernel(self, name: str) -> AbstractContextManager[None]:
        """While inside, the attention implementation called ``name`` is used."""
        raise UnsupportedError(f"{self.name} has one attention implementation; leave 'kernels' out")

    def asked(self, way: str) -> AbstractContextManager[None]:
        """While inside, requests are put to the target in another way that means the same."""
        raise UnsupportedError(f"{self.name} is asked in one way; leave 'ways' empty")

    def checkpointing(self) -> AbstractContextManager[None]:
        """While inside, and in train mode, activations are recomputed in the backward pass."""
        raise UnsupportedError(f"{self.name} does not recompute activations; leave 'checkpointing' out")


@contextmanager
def embeddings_replaced(embedding: nn.Module, embeddings_BTD: Tensor | None) -> Iterator[None]:
    """While inside, ``embedding`` returns these embeddings, whatever it is asked (None: leaves it alone)."""
    if embeddings_BTD is None:
        yield
        return
    handle = embedding.register_forward_hook(lambda *_: embeddings_BTD.clone())
    try:
        yield
    finally:
        handle.remove()
