"""A small decoder written as plainly as can be: the healthy model behind every broken one.

Its parts are small methods (who sees whom, which positions count, how the loss is summed) so that a broken
model is the same model with one of them wrong. It takes requests as they are and is its own probe's only module.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pellucid.batch import Batch
from pellucid.errors import LengthError
from pellucid.probe import Capability, Probe, Visibility, embeddings_replaced
from pellucid.visibility import causal, window

KERNELS = ("plain", "torch")


@dataclass(frozen=True, eq=False)
class Slots:
    """Where tokens are: ``[B, T]`` positions and segments, and the number of the first slot."""

    positions: Tensor
    segments: Tensor
    first: int = 0

    @property
    def numbers(self) -> Tensor:
        """``[1, T]``: slot numbers, which a healthy model never looks at."""
        return self.first + torch.arange(self.positions.shape[1], device=self.positions.device)[None]


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
        self.k[:, :, self.length :] = value
        self.v[:, :, self.length :] = value


class TinyDecoder(nn.Module):
    """The healthy model: learned or rotary positions, pre-norm layers, one rule for all layers."""

    capabilities: frozenset[Capability] = frozenset(
        (
            *("padding", "packing", "embeddings", "loss", "cache", "reorder", "crop", "snapshot", "unused"),
            *("positions", "kernels", "attention", "checkpointing"),
        )
    )
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
            self.places = nn.Embedding(max_length, width)
            self.layers = nn.ModuleList(
                nn.ModuleDict({name: nn.Linear(width, width) for name in ("q", "k", "v", "out", "up", "down")})
                for _ in range(layers)
            )
            self.head = nn.Linear(width, vocab_size)
        self.norm = nn.LayerNorm(width)
        self.eval()

    # the parts that broken models get wrong

    def sees(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        """``Bool[B, T, S]``: same document, not ahead, within the window."""
        back = queries.positions[:, :, None] - keys.positions[:, None, :]
        same = queries.segments[:, :, None] == keys.segments[:, None, :]
        near = back >= 0 if self.window is None else (back >= 0) & (back < self.window)
        return same & near & (keys.segments[:, None, :] != 0)

    def counted_positions(self, queries: Slots) -> Tensor:
        """The positions that embeddings and rotations use."""
        return queries.positions

    def entry(self, x_BTD: Tensor, queries: Slots, batch: Batch) -> Tensor:
        """What enters the first layer: nothing at padding."""
        return torch.where(queries.segments[:, :, None] != 0, x_BTD, 0.0)

    def mixed(self, x_BTD: Tensor, queries: Slots) -> Tensor:
        """A last step before the head, which leaves everything as it is."""
        return x_BTD

    def weights(self, scores_BTS: Tensor, sees_BTS: Tensor) -> Tensor:
        """Softmax over what is visible; a query that sees nothing has no weights."""
        hidden = scores_BTS.masked_fill(~sees_BTS, -math.inf)
        return torch.where(sees_BTS.any(-1, keepdim=True), hidden, 0.0).softmax(-1) * sees_BTS

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The sum over the tokens to be learnt, each predicted by the slot before it, and their count."""
        scores = self(batch)[:, :-1].log_softmax(-1)
        picked = -scores.gather(-1, batch.tokens[:, 1:, None])[..., 0]
        learnt = batch.loss_mask[:, 1:]
        return torch.where(learnt, picked, 0.0).sum(), learnt.sum()

    def bounded(self, places_BT: Tensor) -> None:
        """Past the last position there is an error."""
        if int(places_BT.max()) >= self.max_length:
            raise LengthError(
                f"position {int(places_BT.max())} is past the last of {self.max_length}; shorten the document"
            )

    def mix(self, q_BTD: Tensor, k_BSD: Tensor, v_BSD: Tensor, sees_BTS: Tensor) -> Tensor:
        """Attention written out, or by torch's kernel: one answer."""
        scale = 1 / math.sqrt(q_BTD.shape[-1])
        if self.kernel == "plain":
            return self.weights(q_BTD @ k_BSD.mT * scale, sees_BTS) @ v_BSD
        some_BT1 = sees_BTS.any(-1, keepdim=True)
        mixed_BTD = functional.scaled_dot_product_attention(q_BTD, k_BSD, v_BSD, sees_BTS | ~some_BT1, scale=scale)
        return torch.where(some_BT1, mixed_BTD, 0.0)

    # the model

    def forward(self, batch: Batch, cache: TinyCache | None = None) -> Tensor:
        queries = Slots(batch.positions, batch.segments, 0 if cache is None else cache.length)
        places_BT = self.counted_positions(queries)
        self.bounded(places_BT)
        x_BTD = self.tokens(batch.tokens)
        if not self.rotary:
            x_BTD = x_BTD + self.places(places_BT)
        x_BTD = self.entry(x_BTD, queries, batch)
        keys = queries if cache is None else self.stored(cache, queries)
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, nn.ModuleDict)
            step = partial(self.block, layer, number)
            if self.checkpointing and self.training and cache is None:
                x_BTD = checkpoint(step, x_BTD, queries, keys, places_BT, use_reentrant=False)
            else:
                x_BTD = step(x_BTD, queries, keys, places_BT, cache)
        if cache is not None:
            cache.length += batch.shape[1]
        return self.head(self.norm(self.mixed(x_BTD, queries)))

    def block(
        self,
        layer: nn.ModuleDict,
        number: int,
        x_BTD: Tensor,
        queries: Slots,
        keys: Slots,
        places_BT: Tensor,
        cache: TinyCache | None = None,
    ) -> Tensor:
        """One pre-norm layer."""
        x_BTD = x_BTD + self.drop(self.attention(layer, number, self.norm(x_BTD), queries, keys, places_BT, cache))
        return x_BTD + self.drop(layer["down"](functional.silu(layer["up"](self.norm(x_BTD)))))

    def attention(
        self,
        layer: nn.ModuleDict,
        number: int,
        x_BTD: Tensor,
        queries: Slots,
        keys: Slots,
        places_BT: Tensor,
        cache: TinyCache | None = None,
    ) -> Tensor:
        q_BTD, k_BSD, v_BSD = (layer[name](x_BTD) for name in "qkv")
        if self.rotary:
            q_BTD, k_BSD = rotated(q_BTD, places_BT), rotated(k_BSD, places_BT)
        if cache is not None:
            stop = cache.length + x_BTD.shape[1]
            cache.k[number, :, cache.length : stop], cache.v[number, :, cache.length : stop] = k_BSD, v_BSD
            held = (keys.segments != 0)[:, :, None]
            k_BSD, v_BSD = torch.where(held, cache.k[number], 0.0), torch.where(held, cache.v[number], 0.0)
        return layer["out"](self.mix(q_BTD, k_BSD, v_BSD, self.sees(queries, keys, number)))

    def stored(self, cache: TinyCache, queries: Slots) -> Slots:
        """Note where the new tokens are; all slots of the cache are keys."""
        stop = cache.length + queries.positions.shape[1]
        cache.positions[:, cache.length : stop] = queries.positions
        cache.segments[:, cache.length : stop] = queries.segments
        return Slots(cache.positions, cache.segments)

    def probe(self) -> TinyProbe:
        """How an audit calls this model."""
        return TinyProbe(self)


def token_losses(scores_BTV: Tensor, tokens_BT: Tensor) -> Tensor:
    """``[B, T]``: the cross-entropy of each token."""
    losses = functional.cross_entropy(scores_BTV.flatten(0, 1), tokens_BT.flatten(), reduction="none")
    return losses.view(tokens_BT.shape)


def rotated(x_BTD: Tensor, places_BT: Tensor) -> Tensor:
    """Half-split rotary positions over the whole width."""
    half = x_BTD.shape[-1] // 2
    rates = 100.0 ** (-torch.arange(half, dtype=torch.float64, device=x_BTD.device) / half)
    angles = places_BT[:, :, None] * rates
    cos, sin = angles.cos().to(x_BTD), angles.sin().to(x_BTD)
    a, b = x_BTD[..., :half], x_BTD[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class TinyProbe(Probe):
    """Calls a :class:`TinyDecoder`; a probe for a model of your own looks much like this one."""

    def __init__(self, toy: TinyDecoder) -> None:
        self.toy, self.module, self.name = toy, toy, type(toy).__name__
        self.vocab_size, self.max_length = toy.tokens.num_embeddings, toy.max_length
        self.capabilities, self.kernels, self.shift_invariant = toy.capabilities, KERNELS, toy.rotary
        rule = causal() if toy.window is None else causal() & window(toy.window)
        self.rules: tuple[Visibility, ...] = (rule,) * len(toy.layers)

    def logits(self, batch: Batch) -> Tensor:
        with embeddings_replaced(self.toy.tokens, batch.inputs_embeds):
            return self.toy(batch)

    def embed(self, batch: Batch) -> Tensor:
        return self.toy.tokens(batch.tokens)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        with embeddings_replaced(self.toy.tokens, batch.inputs_embeds):
            return self.toy.loss(batch)

    def new_cache(self, rows: int, capacity: int) -> TinyCache:
        width, dtype = self.toy.tokens.embedding_dim, self.toy.head.weight.dtype
        return self.toy.cache_class(len(self.toy.layers), rows, capacity, width, dtype)

    def extend(self, batch: Batch, cache: Any) -> Tensor:
        return self.toy(batch, cache)

    def attention(self, batch: Batch) -> list[Tensor]:
        with self.kernel(KERNELS[0]), weights_kept(self.toy) as kept:
            self.logits(batch)
        return kept

    def kernel(self, name: str) -> AbstractContextManager[None]:
        return set_for_now(self.toy, "kernel", name)

    def checkpointing(self) -> AbstractContextManager[None]:
        return set_for_now(self.toy, "checkpointing", True)

    def with_module(self, module: nn.Module) -> TinyProbe:
        assert isinstance(module, TinyDecoder)
        return TinyProbe(module)


@contextmanager
def set_for_now(target: object, name: str, value: object) -> Iterator[None]:
    """While inside, ``target.name`` is ``value``; afterwards the target has what it had of its own, and no more."""
    own, before = name in vars(target), getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        if own:
            setattr(target, name, before)
        else:
            delattr(target, name)


@contextmanager
def weights_kept(toy: TinyDecoder) -> Iterator[list[Tensor]]:
    """While inside, what ``toy.weights`` gives is kept, ``[B, 1, T, T]`` a layer."""
    kept: list[Tensor] = []

    def keeping(scores_BTS: Tensor, sees_BTS: Tensor) -> Tensor:
        weights_BTS: Tensor = type(toy).weights(toy, scores_BTS, sees_BTS)
        kept.append(weights_BTS[:, None])
        return weights_BTS

    with set_for_now(toy, "weights", keeping):
        yield kept
