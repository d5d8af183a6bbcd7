"""How an audit calls our decoder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pellucid.data.batch import IGNORED, Batch
from pellucid.data.objectives import causal
from pellucid.models.decoder import Decoder
from pellucid.nn.attend import BACKENDS
from pellucid.nn.attention import GroupedAttention
from pellucid.nn.cache import ContiguousCache
from pellucid.probe import Capability, Probe, Request, embeddings_replaced
from pellucid.shapes import Tensor


@dataclass(eq=False)
class ProbedCache:
    """A contiguous cache whose unused slots can be written to, to see that nobody reads them."""

    held: ContiguousCache

    def reorder(self, index_B: Tensor) -> None:
        self.held.reorder(index_B)

    def crop(self, keep: int) -> None:
        self.held.crop(keep)

    def snapshot(self) -> ProbedCache:
        return ProbedCache(self.held.snapshot())

    def fill_unused(self, value: float) -> None:
        for layer in self.held.layers:
            layer.k[:, self.held.length :] = value
            layer.v[:, self.held.length :] = value


class DecoderProbe(Probe):
    """All that a :class:`Decoder` can be asked, through the ``forward`` and objective that training uses."""

    capabilities: frozenset[Capability] = frozenset(
        {
            "padding", "packing", "embeddings", "loss", "cache", "reorder", "crop", "snapshot", "unused", "positions",
            "kernels", "attention", "checkpointing",
        }
    )  # fmt: skip
    kernels: tuple[str, ...] = BACKENDS

    def __init__(self, model: Decoder, name: str | None = None) -> None:
        self.model = self.module = model
        self.name = name or type(model).__name__
        self.vocab_size, self.rules, self.max_length = model.config.vocab_size, model.rules, model.max_length
        scheme = model.config.position.kind
        self.shift_invariant = scheme in ("rope", "none")
        if scheme == "none":  # positions still say who is seen, which no other number changes in a causal model
            self.capabilities -= {"positions"}

    def logits(self, request: Request) -> Tensor:
        with self._embeddings(request):
            logits: Tensor = self.model(_batch(request).to(self._device)).logits
        return logits

    def embed(self, request: Request) -> Tensor:
        embeddings_BTD: Tensor = self.model.embed_tokens(request.tokens)
        return embeddings_BTD

    def loss(self, request: Request) -> tuple[Tensor, Tensor]:
        batch = causal(_batch(request))
        if request.targets is not None:
            assert batch.labels is not None
            next_BT = torch.roll(request.targets.cpu(), -1, 1)  # a row's last slot has no label in any case
            batch = batch.with_labels(torch.where(next_BT, batch.labels, IGNORED))
        with self._embeddings(request):
            loss = self.model(batch.to(self._device), want="loss").loss
        return loss.total, loss.count

    def new_cache(self, rows: int, capacity: int) -> ProbedCache:
        return ProbedCache(self.model.new_cache(rows, capacity))

    def extend(self, request: Request, cache: ProbedCache) -> Tensor:
        """A part of a request keeps the positions of the whole; the model gets a chunk that counts from 0.

        Where the row went on is for the model's cache to know: handing it over would hide a fault there.
        """
        batch = _batch(request)
        real_BT = batch.segments != 0
        first_B1 = batch.positions.masked_fill(~real_BT, torch.iinfo(torch.int64).max).amin(1, keepdim=True)
        relative_BT = torch.where(real_BT, batch.positions - first_B1, 0)
        batch = replace(batch, positions=relative_BT, layout=None)
        with self._embeddings(request):
            logits: Tensor = self.model(batch.to(self._device), cache=cache.held).logits
        return logits

    def attention(self, request: Request) -> list[Tensor]:
        """Computed from what each layer's attention is given in a forward pass."""
        given: list[Tensor] = []

        def note(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            assert isinstance(module, GroupedAttention)
            given.append(module.weights(arguments[0], arguments[1]))

        with ExitStack() as hooks:
            for module in self.model.layers.modules():
                if isinstance(module, GroupedAttention):
                    hooks.callback(module.register_forward_pre_hook(note).remove)
            self.logits(request)
        return given

    @contextmanager
    def kernel(self, name: str) -> Iterator[None]:
        parts = [part for part in self.model.modules() if isinstance(part, GroupedAttention)]
        with ExitStack() as stack:
            for part in parts:
                stack.callback(setattr, part, "backend", part.backend)
                part.backend = name  # type: ignore[assignment]  # an unknown name is refused by the layer
            yield

    @contextmanager
    def checkpointing(self) -> Iterator[None]:
        before = self.model.gradient_checkpointing
        self.model.gradient_checkpointing = True
        try:
            yield
        finally:
            self.model.gradient_checkpointing = before

    def over(self, module: nn.Module) -> DecoderProbe:
        assert isinstance(module, Decoder)
        return DecoderProbe(module, self.name)

    def _embeddings(self, request: Request) -> AbstractContextManager[None]:
        return embeddings_replaced(self.model.embed_tokens, request.embeddings)

    @property
    def _device(self) -> torch.device:
        return self.model.lm_head.weight.device


def _batch(request: Request) -> Batch:
    """On the host, where its layout can be read off."""
    return Batch(request.tokens.cpu(), request.positions.cpu(), request.segments.cpu())
