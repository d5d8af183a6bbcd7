"""How an audit calls our models, each through the ``forward``, objective and cache that training and use go through."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pellucid.batch import IGNORED, Batch
from pellucid.data.objectives import causal
from pellucid.models import configs
from pellucid.models.config import ModelConfig
from pellucid.models.decoder import Decoder
from pellucid.models.encoder_decoder import EncoderDecoder
from pellucid.models.heads import LanguageModelHead
from pellucid.models.model import Model
from pellucid.nn.attend import BACKENDS
from pellucid.nn.attention import CrossAttention, GroupedQueryAttention
from pellucid.nn.cache import ContiguousCache
from pellucid.nn.mla import MLA
from pellucid.probe import Capability, Probe, Request, embeddings_replaced
from pellucid.shapes import Tensor
from pellucid.visibility import Rule, parse

PREFIX = 3
"""How many first tokens an audit marks as the prefix where a model's rules go by groups."""

_ATTENTION = (GroupedQueryAttention, CrossAttention, MLA)
_COMMON: frozenset[Capability] = frozenset(
    {"padding", "packing", "embeddings", "positions", "kernels", "attention", "checkpointing"}
)
_CACHE: frozenset[Capability] = frozenset({"cache", "reorder", "crop", "snapshot", "unused"})


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
            for tensor in layer.tensors:
                tensor[:, self.held.length :] = value


class ModelProbe(Probe):
    """All that a :class:`Model` can be asked. What has no logit for each token answers with its hidden states."""

    kernels: tuple[str, ...] = BACKENDS

    def __init__(self, model: Model, name: str | None = None) -> None:
        config = model.config
        assert isinstance(config, ModelConfig)
        self.model = self.module = model
        self.name = name or type(model).__name__
        self.vocab_size, self.max_length = config.vocab_size, model.max_length
        self.by_groups = any(rule.uses_prefix_groups for rule in model.rules)
        self.rules = tuple(_counted(rule) for rule in model.rules)
        self.capabilities = _COMMON
        schemes = {layer.position or config.position for layer in config.each_layer}
        turning = [scheme for scheme in schemes if isinstance(scheme, configs.RopeConfig)]
        self.shift_invariant = not isinstance(
            config.position, configs.LearnedPositionsConfig | configs.SinusoidalPositionsConfig
        ) and not any(
            scheme.scaling is not None and scheme.scaling.kind in ("dynamic", "longrope") for scheme in turning
        )
        if schemes == {configs.NoPositionsConfig()}:  # positions still say who is seen, which no other number changes
            self.capabilities -= {"positions"}
        self.speaks_tokens = isinstance(model.head, LanguageModelHead)
        if self.speaks_tokens:
            self.capabilities |= {"loss"}

    def logits(self, request: Request) -> Tensor:
        with self._embeddings(request):
            return self._answer(self.batch(request).to(self.model.device))

    def embed(self, request: Request) -> Tensor:
        embeddings_BTD: Tensor = self.model.embed_tokens(request.tokens)
        return embeddings_BTD

    def loss(self, request: Request) -> tuple[Tensor, Tensor]:
        batch = self.labelled(request)
        with self._embeddings(request):
            loss = self.model(batch.to(self.model.device), want="loss").loss
        return loss.total, loss.count

    def labelled(self, request: Request) -> Batch:
        """What must be predicted, as the model's objective marks it: here the next token."""
        batch = causal(self.batch(request))
        if request.targets is None:
            return batch
        assert batch.labels is not None
        next_BT = torch.roll(request.targets.cpu(), -1, 1)  # a row's last slot has no label in any case
        return batch.with_labels(torch.where(next_BT, batch.labels, IGNORED))

    def attention(self, request: Request) -> list[Tensor]:
        """Computed from what each layer's own attention is given in a forward pass."""
        given: list[Tensor] = []

        def note(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            x_BTD, places, _, _, bias = arguments
            given.append(module.weights(x_BTD, places, bias))  # type: ignore[operator]

        with ExitStack() as hooks:
            for block in self.model.layers:
                hooks.callback(block.attention.register_forward_pre_hook(note).remove)  # type: ignore[union-attr]
            self.logits(request)
        return given

    @contextmanager
    def kernel(self, name: str) -> Iterator[None]:
        parts = [part for part in self.model.modules() if isinstance(part, _ATTENTION)]
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

    def over(self, module: nn.Module) -> ModelProbe:
        assert isinstance(module, Model)
        return type(self)(module, self.name)

    def batch(self, request: Request) -> Batch:
        """The request on the host, where its layout can be read off."""
        batch = Batch(request.tokens.cpu(), request.positions.cpu(), request.segments.cpu())
        if not self.by_groups:
            return batch
        return replace(batch, groups=((batch.positions < PREFIX) & (batch.segments != 0)).long())

    def _answer(self, batch: Batch, cache: ContiguousCache | None = None) -> Tensor:
        if self.speaks_tokens:
            logits: Tensor = self.model(batch, cache=cache).logits
            return logits
        hidden: Tensor = self.model(batch, cache=cache, want="hidden").hidden
        return hidden

    def _embeddings(self, request: Request) -> AbstractContextManager[None]:
        return embeddings_replaced(self.model.embed_tokens, request.embeddings)


class EncoderProbe(ModelProbe):
    """An encoder: a label belongs to the token it stands at."""

    predicts_from = 0

    def labelled(self, request: Request) -> Batch:
        batch = self.batch(request)
        return batch.with_labels(torch.where(request.learnt.cpu(), batch.tokens, IGNORED))


class DecoderProbe(ModelProbe):
    """A decoder, which also goes on from a cache."""

    def __init__(self, model: Decoder, name: str | None = None) -> None:
        super().__init__(model, name)
        self.capabilities |= _CACHE

    def new_cache(self, rows: int, capacity: int) -> ProbedCache:
        return ProbedCache(self.model.new_cache(rows, capacity))  # type: ignore[operator]

    def extend(self, request: Request, cache: ProbedCache) -> Tensor:
        """A part of a request keeps the positions of the whole; the model gets a chunk that counts from 0.

        Where the row went on is for the model's cache to know: handing it over would hide a fault there.
        """
        batch = self.batch(request)
        real_BT = batch.segments != 0
        first_B1 = batch.positions.masked_fill(~real_BT, torch.iinfo(torch.int64).max).amin(1, keepdim=True)
        relative_BT = torch.where(real_BT, batch.positions - first_B1, 0)
        batch = replace(batch, positions=relative_BT, layout=None)
        if cache.held.memory is not None:
            batch = replace(batch, source=None)
        with self._embeddings(request):
            return self._answer(batch.to(self.model.device), cache.held)


class EncoderDecoderProbe(DecoderProbe):
    """A decoder that reads what an encoder made of a request's source."""

    memory_name = "encoder.norm"

    def __init__(self, model: EncoderDecoder, name: str | None = None) -> None:
        super().__init__(model, name)
        self.source_rules = model.encoder.rules
        self.capabilities |= {"source"}

    def batch(self, request: Request) -> Batch:
        source = request.source
        if source is None:
            raise ValueError(f"{self.name} reads a source; give the request one")
        given = Batch(source.tokens.cpu(), source.positions.cpu(), source.segments.cpu())
        most = int(request.segments.max()) if request.segments.numel() else 0
        if most > 1 and int(given.segments.max()) == 1:  # one source for each of the row's documents
            given = Batch(
                given.tokens.repeat(1, most),
                given.positions.repeat(1, most),
                torch.cat([given.segments * number for number in range(1, most + 1)], 1),
            )
        return replace(super().batch(request), source=given)

    def _embeddings(self, request: Request) -> AbstractContextManager[None]:
        """Only the decoder's own reading of the table is replaced."""
        if request.embeddings is None:
            return super()._embeddings(request)
        assert isinstance(self.model, EncoderDecoder)
        return _own_embeddings(self.model, request.embeddings)


@contextmanager
def _own_embeddings(model: EncoderDecoder, embeddings_BTD: Tensor) -> Iterator[None]:
    """While inside, the token table gives these embeddings to the decoder; the encoder, which may share it, its own."""
    reading_source = False

    def enters(*_: Any) -> None:
        nonlocal reading_source
        reading_source = True

    def leaves(*_: Any) -> None:
        nonlocal reading_source
        reading_source = False

    def replaced(*_: Any) -> Tensor | None:
        return None if reading_source else embeddings_BTD.clone()

    with ExitStack() as hooks:
        hooks.callback(model.encoder.register_forward_pre_hook(enters).remove)
        hooks.callback(model.encoder.register_forward_hook(leaves, always_call=True).remove)
        hooks.callback(model.embed_tokens.register_forward_hook(replaced).remove)
        yield


def probe_of(model: Model) -> ModelProbe:
    """The probe for a model of any family."""
    if isinstance(model, EncoderDecoder):
        return EncoderDecoderProbe(model)
    return DecoderProbe(model) if isinstance(model, Decoder) else EncoderProbe(model)


def _counted(rule: Rule) -> Rule:
    """A rule by groups as one by the number of first tokens that an audit puts into a group."""
    return parse(rule.describe().replace("prefix()", f"prefix({PREFIX})"))
