"""How anyone's model is called: a :class:`~pellucid.batch.Batch` is the input, a ``Probe`` knows how to run it.

An audit reaches a model through these two only. To audit a model of your own that takes more than tokens,
subclass :class:`Probe`, list in ``capabilities`` what it supports, and write the methods that these need.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from pellucid.batch import Batch, Side
from pellucid.errors import UnsupportedError

Capability = Literal[
    "padding",  # segment 0 marks slots that hold no token, on any side
    "packing",  # several documents in one row, segments 1, 2, …
    "embeddings",  # embed(), and batches with inputs_embeds
    "loss",  # loss()
    "cache",  # new_cache() and extend()
    "reorder",  # cache.reorder(index_B): row r continues as row index_B[r]
    "crop",  # cache.crop(keep): only the first ``keep`` slots stay; a negative number drops that many, or is refused
    "snapshot",  # cache.snapshot(): a copy that shares nothing
    "unused",  # cache.fill_unused(value): writes into every slot that holds no token yet
    "source",  # batches with a source: an encoder, and a decoder that attends to its output
    "positions",  # the positions of a batch are obeyed, also where nothing else implies them
    "kernels",  # kernel(name): inside, one of the attention implementations in ``kernels`` is used
    "attention",  # attention(): the weights of every layer
    "checkpointing",  # checkpointing(): inside, activations are recomputed in the backward pass
]


class Visibility(Protocol):
    """What a declared rule answers; every rule of ``pellucid.visibility`` does."""

    @property
    def lookahead(self) -> int | None: ...

    @property
    def lookback(self) -> tuple[int | None, int]: ...

    def mask(self, queries: Any, keys: Any) -> Tensor: ...

    def describe(self) -> str: ...


class Probe(Protocol):
    """How one target is called. Anything with these attributes will do; subclassing fills in the defaults.

    Attributes:
        rules: the visibility rules that the target declares, one a layer; what an audit expects follows from them.
        rules_declared: False where the rules are only assumed: seeing less than they show is then no fault.
        source_rules, source_rules_declared: the same of an encoder whose output the target reads.
        layer_names: the submodules that are the layers, each from a hidden stream ``[B, T, D]`` to the next;
            None: an audit looks for them.
        memory_name: the submodule whose output a decoder attends to.
        max_length: how many positions a document can have; None: no limit.
        shift_invariant: adding one number to all positions changes nothing.
        forbidden_tokens: ids that an audit must not use as text (padding, end of text, image placeholders).
        end_tokens: ids that end a text; a true end token has to be learned.
        sides: the sides on which the target can be padded.
        position_shifting_sides: sides on which padding is accepted but moves the positions, which the target does not
            take. Outputs are not compared there with those of an unpadded row, but what is hidden must stay hidden;
            ``shift_allowed``: it is meant so.
        refused: what the target raised when it was tried, by what was tried (a capability, a side).
        call_modes: other ways to run the same batch (see :meth:`call_mode`).
        predicts_from: how many slots before a scored token its prediction stands: 1, and 0 for a model that fills gaps.
    """

    name: str
    vocab_size: int
    rules: tuple[Visibility, ...]
    rules_declared: bool = True
    source_rules: tuple[Visibility, ...] = ()
    source_rules_declared: bool = True
    layer_names: tuple[str, ...] | None = None
    memory_name: str | None = None
    module: nn.Module | None = None
    max_length: int | None = None
    shift_invariant: bool = False
    kernels: tuple[str, ...] = ()
    forbidden_tokens: frozenset[int] = frozenset()
    end_tokens: tuple[int, ...] = ()
    sides: tuple[Side, ...] = ("right", "left", "both")
    position_shifting_sides: tuple[Side, ...] = ()
    shift_allowed: bool = True
    refused: Mapping[str, str] = MappingProxyType({})
    call_modes: tuple[str, ...] = ()
    predicts_from: int = 1
    capabilities: frozenset[Capability] = frozenset()

    def logits(self, batch: Batch) -> Tensor:
        """``[B, T, V]`` scores; those at padding are never looked at."""
        ...

    def with_module(self, module: nn.Module) -> Probe:
        """A probe that calls another module of the same kind in the same way: the audit's float64 copy."""
        raise UnsupportedError(f"{self.name} cannot be called over a copy; write with_module(module)")

    def embed(self, batch: Batch) -> Tensor:
        """``[B, T, D]``: the embeddings of the tokens, which ``batch.inputs_embeds`` would replace."""
        raise UnsupportedError(f"{self.name} has no embeddings to give; leave 'embeddings' out")

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The sum of the losses of the tokens in ``batch.loss_mask``, in nats, and their number."""
        raise UnsupportedError(f"{self.name} has no loss; leave 'loss' out")

    def new_cache(self, rows: int, capacity: int) -> Any:
        """An empty cache of ``capacity`` slots."""
        raise UnsupportedError(f"{self.name} has no cache; leave 'cache' out")

    def extend(self, batch: Batch, cache: Any) -> Tensor:
        """``[B, T, V]`` scores of the next slots, which are appended to the cache."""
        raise UnsupportedError(f"{self.name} has no cache; leave 'cache' out")

    def attention(self, batch: Batch) -> list[Tensor]:
        """Each layer's attention weights, ``[B, N, T, T]``."""
        raise UnsupportedError(f"{self.name} does not give its attention weights; leave 'attention' out")

    def kernel(self, name: str) -> AbstractContextManager[None]:
        """While inside, the attention implementation called ``name`` is used."""
        raise UnsupportedError(f"{self.name} has one attention implementation; leave 'kernels' out")

    def call_mode(self, name: str) -> AbstractContextManager[None]:
        """While inside, the target is called in another way that means the same."""
        raise UnsupportedError(f"{self.name} is called in one way only; leave 'call_modes' empty")

    def checkpointing(self) -> AbstractContextManager[None]:
        """While inside, and in train mode, activations are recomputed in the backward pass."""
        raise UnsupportedError(f"{self.name} does not recompute activations; leave 'checkpointing' out")


@contextmanager
def embeddings_replaced(embedding: nn.Module, embeddings_BTD: Tensor | None) -> Iterator[None]:
    """While inside, ``embedding`` returns these embeddings, whatever its input (None: nothing changes)."""
    if embeddings_BTD is None:
        yield
        return
    handle = embedding.register_forward_hook(lambda *_: embeddings_BTD.clone())
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """While inside, ``model`` is in eval mode and has no gradients; afterwards every part is in its own mode again."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
