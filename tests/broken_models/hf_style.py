"""A small decoder in the manner of Hugging Face: ids, a mask of ones and zeros, position ids; masks that are added.

:class:`HFStyleDecoder` is healthy; its parts are small methods that broken models get wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pellucid.batch import Batch
from pellucid.probe import Capability, Probe, Visibility, embeddings_replaced
from pellucid.visibility import causal

WIDTH, HEADS = 16, 2


@dataclass
class Answer:
    """What a model of this kind returns."""

    logits: Tensor


class Layer(nn.Module):
    """Attention with rotary positions, and a feed-forward."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention_dropout = dropout

    def heads(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class HFStyleDecoder(nn.Module):
    """The healthy model. Rotary angles, pre-norm, a causal plane joined with the caller's mask before it is added."""

    kernels: tuple[str, ...] = ("eager", "sdpa")

    def __init__(self, vocab_size: int = 23, layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.implementation, self.recomputes = "eager", False
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.table = nn.Embedding(vocab_size, WIDTH)
            self.layers = nn.ModuleList(Layer(dropout) for _ in range(layers))
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocab_size, bias=False)

    # the parts that broken models get wrong

    def angles(self, position_ids: Tensor) -> Tensor:
        """``[B, T, H/2]``, in float64 whatever the model's dtype."""
        pairs = WIDTH // HEADS // 2
        rates = 100.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
        return position_ids[:, :, None] * rates

    def visible(self, mask_BT: Tensor) -> Tensor:
        """``Bool[B, 1, T, T]``: not ahead, and not padding."""
        slots = mask_BT.shape[1]
        past_TT = torch.ones(slots, slots, dtype=torch.bool).tril()
        return past_TT & mask_BT.bool()[:, None, None, :]

    def hide(self, scores_BNTT: Tensor, visible_B1TT: Tensor) -> Tensor:
        """The smallest number of the dtype where nothing may be seen: a query that sees nothing averages all."""
        return scores_BNTT.masked_fill(~visible_B1TT, torch.finfo(scores_BNTT.dtype).min)

    def probabilities(self, scores_BNTT: Tensor) -> Tensor:
        return scores_BNTT.softmax(-1)

    def scale(self) -> float:
        return 1 / math.sqrt(WIDTH // HEADS)

    def mix(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor, visible_B1TT: Tensor) -> Tensor:
        """``[B, N, T, H]`` by the implementation that is switched on."""
        dropped = layer.attention_dropout if self.training else 0.0
        if self.implementation == "sdpa":
            kept = visible_B1TT | ~visible_B1TT.any(-1, keepdim=True)
            return functional.scaled_dot_product_attention(q, k, v, kept, dropped, scale=self.scale())
        weights_BNTT = self.probabilities(self.hide(q @ k.mT * self.scale(), visible_B1TT))
        return functional.dropout(weights_BNTT, layer.attention_dropout, self.training) @ v

    def step(self, layer: Layer, x_BTD: Tensor, visible_B1TT: Tensor, angles_BTP: Tensor) -> Tensor:
        """One layer."""
        h_BTD = layer.norm_1(x_BTD)
        q, k = (turned(layer.heads(part(h_BTD)), angles_BTP) for part in (layer.q, layer.k))
        mixed = self.mix(layer, q, k, layer.heads(layer.v(h_BTD)), visible_B1TT)
        x_BTD = x_BTD + layer.o(mixed.transpose(1, 2).flatten(-2))
        return x_BTD + layer.down(functional.gelu(layer.up(layer.norm_2(x_BTD))))

    def recomputed(self, step: Callable[..., Tensor], x_BTD: Tensor, *rest: Tensor) -> Tensor:
        """A layer whose activations are computed again in the backward pass."""
        result: Tensor = checkpoint(step, x_BTD, *rest, use_reentrant=False)
        return result

    def entry(self, x_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """What enters the first layer."""
        return x_BTD

    def leave(self, x_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """What goes to the last norm."""
        return x_BTD

    # the model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Answer:
        mask_BT = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if position_ids is None:
            position_ids = (mask_BT.cumsum(-1) - 1).clamp(min=0)
        angles_BTP, visible_B1TT = self.angles(position_ids), self.visible(mask_BT)
        x_BTD = self.entry(self.table(input_ids), mask_BT)
        for layer in self.layers:
            assert isinstance(layer, Layer)

            def step(x: Tensor, *rest: Tensor, layer: Layer = layer) -> Tensor:
                return self.step(layer, x, *rest)

            if self.recomputes and self.training:
                x_BTD = self.recomputed(step, x_BTD, visible_B1TT, angles_BTP)
            else:
                x_BTD = step(x_BTD, visible_B1TT, angles_BTP)
        return Answer(self.head(self.norm(self.leave(x_BTD, mask_BT))))

    def probe(self) -> HFStyleProbe:
        """How an audit calls this model."""
        return HFStyleProbe(self)


def turned(x_BNTH: Tensor, angles_BTP: Tensor) -> Tensor:
    """Half-split rotary positions."""
    cos, sin = angles_BTP.cos().to(x_BNTH)[:, None], angles_BTP.sin().to(x_BNTH)[:, None]
    a, b = x_BNTH.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class HFStyleProbe(Probe):
    """Ids, mask and positions, as a caller of such a model hands them over."""

    capabilities: frozenset[Capability] = frozenset({"padding", "positions", "embeddings", "kernels", "checkpointing"})
    shift_invariant = True

    def __init__(self, model: HFStyleDecoder) -> None:
        self.model, self.module, self.name = model, model, type(model).__name__
        self.vocab_size, self.kernels = model.table.num_embeddings, model.kernels
        self.rules: tuple[Visibility, ...] = (causal(),) * len(model.layers)

    def logits(self, batch: Batch) -> Tensor:
        mask_BT = batch.token_mask.long()
        with embeddings_replaced(self.model.table, batch.inputs_embeds):
            answer: Answer = self.model(batch.tokens, attention_mask=mask_BT, position_ids=batch.positions)
        return answer.logits

    def embed(self, batch: Batch) -> Tensor:
        result: Tensor = self.model.table(batch.tokens)
        return result

    @contextmanager
    def kernel(self, name: str) -> Iterator[None]:
        before, self.model.implementation = self.model.implementation, name
        try:
            yield
        finally:
            self.model.implementation = before

    @contextmanager
    def checkpointing(self) -> Iterator[None]:
        before, self.model.recomputes = self.model.recomputes, True
        try:
            yield
        finally:
            self.model.recomputes = before

    def with_module(self, module: nn.Module) -> HFStyleProbe:
        assert isinstance(module, HFStyleDecoder)
        return HFStyleProbe(module)
