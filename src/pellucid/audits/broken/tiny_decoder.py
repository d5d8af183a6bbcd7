"""A small decoder written as plainly as can be: the healthy model behind the broken ones, and the probe that calls it.

Its parts are small methods (who sees whom, which positions count, how the loss is summed), so that a broken model is
the same model with one of them wrong.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pellucid.audits.probes.trial import attribute_set
from pellucid.batch import Batch
from pellucid.errors import LengthError
from pellucid.probe import Capability, Probe, Visibility, embeddings_replaced
from pellucid.visibility import causal, window

KERNELS = ("plain", "torch")


@dataclass(frozen=True, eq=False)
class Slots:
    """Where tokens are: ``[B, T]`` positions and segments, and the index of the first slot."""

    positions: Tensor
    segments: Tensor
    first: int = 0

    @property
    def indices(self) -> Tensor:
        """``[1, T]``: slot indices, which a healthy model never looks at."""
        return self.first + torch.arange(self.positions.shape[1], device=self.positions.device)[None]

    def distance(self, keys: Slots) -> Tensor:
        """``[B, T, S]``: how far back keys are."""
        return self.positions[:, :, None] - keys.positions[:, None, :]

    def same_document(self, keys: Slots) -> Tensor:
        """``Bool[B, T, S]``: which keys are tokens of the query's document."""
        return (self.segments[:, :, None] == keys.segments[:, None, :]) & (keys.segments[:, None, :] != 0)


class TinyCache:
    """Keys, values and coordinates of every slot; slots without a token have segment 0."""

    def __init__(self, layers: int, rows: int, capacity: int, width: int, dtype: torch.dtype) -> None:
        self.k = torch.zeros(layers, rows, capacity, width, dtype=dtype)
        self.v = torch.zeros_like(self.k)
        self.positions = torch.zeros(rows, capacity, dtype=torch.int64)
        self.segments = torch.zeros_like(self.positions)
        self.length = 0

    def reorder(self, index_B: Tensor) -> None:
        self.k, self.v = self.k[:, index_B], self.v[:, index_B]
        self.positions, self.segments = self.positions[index_B], self.segments[index_B]

    def crop(self, keep: int) -> None:
        self.length = max(0, min(self.length, keep if keep >= 0 else self.length + keep))
        self.segments[:, self.length :] = 0

    def snapshot(self) -> TinyCache:
        copy = object.__new__(type(self))
        copy.__dict__ = {name: v.clone() if isinstance(v, Tensor) else v for name, v in self.__dict__.items()}
        return copy

    def fill_unused(self, value: float) -> None:
        self.k[:, :, self.length :] = self.v[:, :, self.length :] = value


class TinyDecoder(nn.Module):
    """The healthy model: learned or rotary positions, pre-norm layers, one rule for all layers."""

    cache_class: type[TinyCache] = TinyCache

    def __init__(
        self,
        vocab_size: int = 29,
        *,
        width: int = 16,
        layers: int = 2,
        rotary: bool = False,
        window: int | None = None,
        max_length: int = 64,
        dropout: float = 0.1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.rotary, self.window, self.max_length = rotary, window, max_length
        self.kernel, self.checkpointing = KERNELS[0], False
        self.drop = nn.Dropout(dropout)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.tokens = nn.Embedding(vocab_size, width)
            self.position_embedding = nn.Embedding(max_length, width)
            self.layers = nn.ModuleList(
                nn.ModuleDict({name: nn.Linear(width, width) for name in ("q", "k", "v", "out", "up", "down")})
                for _ in range(layers)
            )
            self.head = nn.Linear(width, vocab_size)
        self.norm = nn.LayerNorm(width)
        self.eval()

    # the parts that broken models get wrong

    def visible(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        """``Bool[B, T, S]``: same document, not ahead, within the window."""
        distance_BTS = queries.distance(keys)
        near_BTS = distance_BTS >= 0 if self.window is None else (distance_BTS >= 0) & (distance_BTS < self.window)
        return queries.same_document(keys) & near_BTS

    def position_ids(self, queries: Slots) -> Tensor:
        """The positions that embeddings and rotations use."""
        return queries.positions

    def check_positions(self, positions_BT: Tensor) -> None:
        """Past the last position there is an error."""
        last = int(positions_BT.max())
        if last >= self.max_length:
            raise LengthError(f"position {last} is past the last of {self.max_length}; shorten the document")

    def first_hidden(self, x_BTD: Tensor, queries: Slots, batch: Batch) -> Tensor:
        """What enters the first layer: nothing at padding."""
        return torch.where(queries.segments[:, :, None] != 0, x_BTD, 0.0)

    def final_hidden(self, x_BTD: Tensor, queries: Slots) -> Tensor:
        """A last step before the head, which leaves everything as it is."""
        return x_BTD

    def attention_weights(self, scores_BTS: Tensor, visible_BTS: Tensor) -> Tensor:
        """Softmax over what is visible; a query that sees nothing has no weights."""
        hidden_BTS = scores_BTS.masked_fill(~visible_BTS, -math.inf)
        return torch.where(visible_BTS.any(-1, keepdim=True), hidden_BTS, 0.0).softmax(-1) * visible_BTS

    def attend(self, q_BTD: Tensor, k_BSD: Tensor, v_BSD: Tensor, visible_BTS: Tensor) -> Tensor:
        """Attention written out, or by torch's kernel: one answer."""
        scale = 1 / math.sqrt(q_BTD.shape[-1])
        if self.kernel == "plain":
            return self.attention_weights(q_BTD @ k_BSD.mT * scale, visible_BTS) @ v_BSD
        some_BT1 = visible_BTS.any(-1, keepdim=True)
        mixed_BTD = functional.scaled_dot_product_attention(q_BTD, k_BSD, v_BSD, visible_BTS | ~some_BT1, scale=scale)
        return torch.where(some_BT1, mixed_BTD, 0.0)

    def append_coordinates(self, cache: TinyCache, queries: Slots) -> Slots:
        """Note where the new tokens are; all slots of the cache are keys."""
        stop = cache.length + queries.positions.shape[1]
        cache.positions[:, cache.length : stop] = queries.positions
        cache.segments[:, cache.length : stop] = queries.segments
        return Slots(cache.positions, cache.segments)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The sum over the tokens that are scored, each predicted by the slot before it, and their number."""
        losses_BT, scored_BT = token_losses(self(batch)[:, :-1], batch.tokens[:, 1:]), batch.loss_mask[:, 1:]
        return torch.where(scored_BT, losses_BT, 0.0).sum(), scored_BT.sum()

    # the model

    def forward(self, batch: Batch, cache: TinyCache | None = None) -> Tensor:
        queries = Slots(batch.positions, batch.segments, 0 if cache is None else cache.length)
        positions_BT = self.position_ids(queries)
        self.check_positions(positions_BT)
        x_BTD = self.tokens(batch.tokens)
        if not self.rotary:
            x_BTD = x_BTD + self.position_embedding(positions_BT)
        x_BTD = self.first_hidden(x_BTD, queries, batch)
        keys = queries if cache is None else self.append_coordinates(cache, queries)
        for layer in range(len(self.layers)):
            if self.checkpointing and self.training and cache is None:
                x_BTD = checkpoint(self.block, layer, x_BTD, queries, keys, use_reentrant=False)
            else:
                x_BTD = self.block(layer, x_BTD, queries, keys, cache)
        if cache is not None:
            cache.length += batch.shape[1]
        return self.head(self.norm(self.final_hidden(x_BTD, queries)))

    def block(self, layer: int, x_BTD: Tensor, queries: Slots, keys: Slots, cache: TinyCache | None = None) -> Tensor:
        """One pre-norm layer."""
        parts: Any = self.layers[layer]
        x_BTD = x_BTD + self.drop(self.attention(layer, self.norm(x_BTD), queries, keys, cache))
        return x_BTD + self.drop(parts["down"](functional.silu(parts["up"](self.norm(x_BTD)))))

    def attention(
        self, layer: int, x_BTD: Tensor, queries: Slots, keys: Slots, cache: TinyCache | None = None
    ) -> Tensor:
        parts: Any = self.layers[layer]
        q_BTD, k_BSD, v_BSD = (parts[name](x_BTD) for name in "qkv")
        if self.rotary:
            positions_BT = self.position_ids(queries)
            q_BTD, k_BSD = rotate(q_BTD, positions_BT), rotate(k_BSD, positions_BT)
        if cache is not None:
            stop = cache.length + x_BTD.shape[1]
            cache.k[layer, :, cache.length : stop], cache.v[layer, :, cache.length : stop] = k_BSD, v_BSD
            used_BS1 = (keys.segments != 0)[:, :, None]
            k_BSD, v_BSD = torch.where(used_BS1, cache.k[layer], 0.0), torch.where(used_BS1, cache.v[layer], 0.0)
        mixed_BTD: Tensor = parts["out"](self.attend(q_BTD, k_BSD, v_BSD, self.visible(queries, keys, layer)))
        return mixed_BTD

    def probe(self) -> TinyProbe:
        """How an audit calls this model."""
        return TinyProbe(self)


def token_losses(scores_BTV: Tensor, tokens_BT: Tensor) -> Tensor:
    """``[B, T]``: the cross-entropy of each token."""
    losses = functional.cross_entropy(scores_BTV.flatten(0, 1), tokens_BT.flatten(), reduction="none")
    return losses.view(tokens_BT.shape)


def rotate(x_BTD: Tensor, positions_BT: Tensor) -> Tensor:
    """Half-split rotary positions over the whole width."""
    half = x_BTD.shape[-1] // 2
    rates = 100.0 ** (-torch.arange(half, dtype=torch.float64, device=x_BTD.device) / half)
    angles = positions_BT[:, :, None] * rates
    cos, sin = angles.cos().to(x_BTD), angles.sin().to(x_BTD)
    a, b = x_BTD.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class TinyProbe(Probe):
    """Calls a :class:`TinyDecoder`; a probe for a model of your own looks much like this one."""

    capabilities: frozenset[Capability] = frozenset(
        (
            *("padding", "packing", "embeddings", "loss", "cache", "reorder", "crop", "snapshot", "unused"),
            *("positions", "kernels", "attention", "checkpointing"),
        )
    )
    kernels = KERNELS

    def __init__(self, model: TinyDecoder) -> None:
        self.model, self.module, self.name = model, model, type(model).__name__
        self.vocab_size, self.max_length = model.tokens.num_embeddings, model.max_length
        self.shift_invariant = model.rotary
        rule = causal() if model.window is None else causal() & window(model.window)
        self.rules: tuple[Visibility, ...] = (rule,) * len(model.layers)

    def logits(self, batch: Batch) -> Tensor:
        return self.extend(batch, None)

    def extend(self, batch: Batch, cache: Any) -> Tensor:
        with embeddings_replaced(self.model.tokens, batch.inputs_embeds):
            logits_BTV: Tensor = self.model(batch, cache)
        return logits_BTV

    def embed(self, batch: Batch) -> Tensor:
        return self.model.tokens(batch.tokens)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        with embeddings_replaced(self.model.tokens, batch.inputs_embeds):
            return self.model.loss(batch)

    def new_cache(self, rows: int, capacity: int) -> TinyCache:
        width, dtype = self.model.tokens.embedding_dim, self.model.head.weight.dtype
        return self.model.cache_class(len(self.model.layers), rows, capacity, width, dtype)

    def attention(self, batch: Batch) -> list[Tensor]:
        captured: list[Tensor] = []

        def weights(scores_BTS: Tensor, visible_BTS: Tensor) -> Tensor:
            weights_BTS = type(self.model).attention_weights(self.model, scores_BTS, visible_BTS)
            captured.append(weights_BTS[:, None])
            return weights_BTS

        with self.kernel(KERNELS[0]), attribute_set(self.model, "attention_weights", weights):
            self.logits(batch)
        return captured

    def kernel(self, name: str) -> AbstractContextManager[None]:
        return attribute_set(self.model, "kernel", name)

    def checkpointing(self) -> AbstractContextManager[None]:
        return attribute_set(self.model, "checkpointing", True)

    def with_module(self, module: nn.Module) -> TinyProbe:
        assert isinstance(module, TinyDecoder)
        return TinyProbe(module)
