"""How an audit calls our models, each through the ``forward``, objective and cache that training and use go through."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pellucid.batch import IGNORED, Batch
from pellucid.data.objectives import causal
from pellucid.models import configs
from pellucid.models.config import ModelConfig
from pellucid.models.heads import LanguageModelHead
from pellucid.models.model import Decoder, EncoderDecoder, Model
from pellucid.nn.attend import BACKENDS
from pellucid.nn.attention import CrossAttention, GroupedQueryAttention
from pellucid.nn.cache import ContiguousCache
from pellucid.nn.mla import MLA
from pellucid.probe import Capability, Probe
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

    cache: ContiguousCache

    def reorder(self, index_B: Tensor) -> None:
        self.cache.reorder(index_B)

    def crop(self, keep: int) -> None:
        self.cache.crop(keep)

    def snapshot(self) -> ProbedCache:
        return ProbedCache(self.cache.snapshot())

    def fill_unused(self, value: float) -> None:
        for layer in self.cache.layers:
            for tensor in layer.tensors:
                tensor[:, self.cache.length :] = value


class ModelProbe(Probe):
    """How audits call a :class:`Model`. One without logits for each token gives its hidden states."""

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
        if schemes == {configs.NoPositionsConfig()}:  # positions only decide who is seen
            self.capabilities -= {"positions"}
        self.speaks_tokens = isinstance(model.head, LanguageModelHead)
        if self.speaks_tokens:
            self.capabilities |= {"loss"}

    def logits(self, batch: Batch) -> Tensor:
        return self._scores(self.prepared(batch))

    def embed(self, batch: Batch) -> Tensor:
        embeddings_BTD: Tensor = self.model.embed_tokens(batch.tokens)
        return embeddings_BTD

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss = self.model(self.labelled(self.prepared(batch)), want="loss").loss
        return loss.total, loss.count

    def labelled(self, batch: Batch) -> Batch:
        """With the labels of the model's objective: here the next token's."""
        labelled = causal(batch)
        if batch.target_mask is None:
            return labelled
        assert labelled.labels is not None
        next_BT = torch.roll(batch.target_mask, -1, 1)  # a row's last slot has no label in any case
        return labelled.with_labels(torch.where(next_BT, labelled.labels, IGNORED))

    def attention(self, batch: Batch) -> list[Tensor]:
        """Computed from what each layer's own attention is given in a forward pass."""
        given: list[Tensor] = []

        def note(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            x_BTD, ctx = arguments
            given.append(module.weights(x_BTD, ctx))  # type: ignore[operator]

        with ExitStack() as hooks:
            for block in self.model.layers:
                hooks.callback(block.attention.register_forward_pre_hook(note).remove)  # type: ignore[union-attr]
            self.logits(batch)
        return given

    @contextmanager
    def kernel(self, name: str) -> Iterator[None]:
        parts = [part for part in self.model.modules() if isinstance(part, _ATTENTION)]
        with ExitStack() as stack:
            for part in parts:
                stack.callback(setattr, part, "options", part.options)
                # an unknown name is refused by the layer
                part.options = replace(part.options, backend=name)  # type: ignore[arg-type]
            yield

    @contextmanager
    def checkpointing(self) -> Iterator[None]:
        before = self.model.gradient_checkpointing
        self.model.gradient_checkpointing = True
        try:
            yield
        finally:
            self.model.gradient_checkpointing = before

    def with_module(self, module: nn.Module) -> ModelProbe:
        assert isinstance(module, Model)
        return type(self)(module, self.name)

    def prepared(self, batch: Batch) -> Batch:
        """On the model's device, with the groups that its rules go by."""
        batch = batch.to(self.model.device)
        if not self.by_groups:
            return batch
        return batch.replace(groups=((batch.positions < PREFIX) & batch.token_mask).long())

    def _scores(self, batch: Batch, cache: ContiguousCache | None = None) -> Tensor:
        if self.speaks_tokens:
            logits: Tensor = self.model(batch, cache=cache).logits
            return logits
        hidden: Tensor = self.model(batch, cache=cache, want="hidden").hidden
        return hidden


class EncoderProbe(ModelProbe):
    """An encoder: a label belongs to the token at its own slot."""

    predicts_from = 0

    def labelled(self, batch: Batch) -> Batch:
        return batch.with_labels(torch.where(batch.loss_mask, batch.tokens, IGNORED))


class DecoderProbe(ModelProbe):
    """A decoder, which also continues from a cache."""

    def __init__(self, model: Decoder, name: str | None = None) -> None:
        super().__init__(model, name)
        self.capabilities |= _CACHE

    def new_cache(self, rows: int, capacity: int) -> ProbedCache:
        return ProbedCache(self.model.new_cache(rows, capacity))  # type: ignore[operator]

    def extend(self, batch: Batch, cache: ProbedCache) -> Tensor:
        """A part of a batch keeps the positions of the whole; the model gets a chunk whose positions start at 0.

        Where the row continues is for the model's cache to know: passing it in would hide a fault there.
        """
        batch, device = self.prepared(batch), batch.tokens.device
        real_BT = batch.token_mask
        first_B1 = batch.positions.masked_fill(~real_BT, torch.iinfo(torch.int64).max).amin(1, keepdim=True)
        relative_BT = torch.where(real_BT, batch.positions - first_B1, 0)
        if cache.cache.encoder_coords is not None:
            batch = batch.replace(source=None)
        host = batch.to("cpu").replace(positions=relative_BT.cpu())  # where its layout can be read off
        return self._scores(host.to(device), cache.cache)


class EncoderDecoderProbe(DecoderProbe):
    """A decoder that reads an encoder's output for a batch's source."""

    memory_name = "encoder.norm"

    def __init__(self, model: EncoderDecoder, name: str | None = None) -> None:
        super().__init__(model, name)
        self.source_rules = model.encoder.rules
        self.capabilities |= {"source"}

    def prepared(self, batch: Batch) -> Batch:
        batch, source = super().prepared(batch), batch.source
        if source is None:
            raise ValueError(f"{self.name} reads a source; give the batch one")
        most = int(batch.segments.max()) if batch.segments.numel() else 0
        if most > 1 and int(source.segments.max()) == 1:  # one source for each of the row's documents
            source = Batch(
                source.tokens.repeat(1, most),
                source.positions.repeat(1, most),
                torch.cat([source.segments * number for number in range(1, most + 1)], 1),
            )
        return batch.replace(source=source)


def probe_of(model: Model) -> ModelProbe:
    """The probe for a model of any family."""
    if isinstance(model, EncoderDecoder):
        return EncoderDecoderProbe(model)
    return DecoderProbe(model) if isinstance(model, Decoder) else EncoderProbe(model)


def _counted(rule: Rule) -> Rule:
    """A rule by groups as one by the number of first tokens that an audit puts into a group."""
    return parse(rule.describe().replace("prefix()", f"prefix({PREFIX})"))
