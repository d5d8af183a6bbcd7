"""The decoder-only Transformer: its forward pass fits on this screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pellucid.data.batch import Batch
from pellucid.errors import InputError
from pellucid.models.config import ModelConfig
from pellucid.nn.cache import ContiguousCache
from pellucid.nn.embed import silenced
from pellucid.nn.losses import Loss, linear_cross_entropy
from pellucid.nn.positions import LearnedPositions
from pellucid.probe import Probe
from pellucid.shapes import Float, Tensor
from pellucid.visibility import Coordinates, Rule

Want = Literal["logits", "loss", "hidden"]


@dataclass(frozen=True, eq=False)
class Output:
    """What a forward pass gave; what was not wanted is None."""

    hidden: Float[Tensor, "B T D"]
    logits: Float[Tensor, "B T V"] | None = None
    loss: Loss | None = None
    cache: ContiguousCache | None = None


class Decoder(nn.Module):
    """Tokens in, a distribution over the next token out, for every position at once."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        embed_tokens: nn.Embedding,
        positions: nn.Module,
        layers: Sequence[nn.Module],
        norm: nn.Module,
        lm_head: nn.Linear,
    ) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = embed_tokens
        self.positions = positions
        self.embedding_dropout = nn.Dropout(config.dropout.embedding)
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.lm_head = lm_head
        self.rules: tuple[Rule, ...] = config.rules
        self.gradient_checkpointing = False

    def forward(self, batch: Batch, *, cache: ContiguousCache | None = None, want: Want = "logits") -> Output:
        """Run ``batch``; with a ``cache``, its rows go on from what the cache holds.

        ``want="loss"`` gives ``Output.loss`` = (total, count) over ``batch.labels`` and never holds all logits;
        ``want="hidden"`` stops before the head.
        """
        self._check(batch, want)
        queries, keys = self._place(batch, cache)
        x_BTD = self.positions(self.embed_tokens(batch.tokens), queries)
        x_BTD = self.embedding_dropout(silenced(x_BTD, queries))
        for index, block in enumerate(self.layers):
            if self.gradient_checkpointing and self.training and cache is None:
                x_BTD = checkpoint(block, x_BTD, queries, keys, use_reentrant=False)
            else:
                x_BTD = block(x_BTD, queries, keys, cache.layers[index] if cache else None)
        x_BTD = self.norm(x_BTD)
        if cache is not None:
            cache.commit()
        match want:
            case "hidden":
                return Output(x_BTD, cache=cache)
            case "loss":
                return Output(x_BTD, loss=self.loss(x_BTD, batch), cache=cache)
        return Output(x_BTD, logits=self.head(x_BTD), cache=cache)

    def head(self, hidden_BTD: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        """Hidden states to logits."""
        logits_BTV = self.lm_head(hidden_BTD)
        cap = self.config.final_logit_softcapping
        return logits_BTV if cap is None else cap * torch.tanh(logits_BTV / cap)

    def loss(self, hidden_BTD: Float[Tensor, "B T D"], batch: Batch) -> Loss:
        """Summed cross-entropy in nats over the positions that ``batch.labels`` counts."""
        assert batch.labels is not None
        return linear_cross_entropy(
            hidden_BTD,
            self.lm_head.weight,
            batch.labels,
            bias_V=self.lm_head.bias,
            counted=batch.counted,
            softcap=self.config.final_logit_softcapping,
        )

    def new_cache(self, rows: int, capacity: int) -> ContiguousCache:
        """An empty cache for ``rows`` rows of up to ``capacity`` slots (padding takes slots too)."""
        part, weight = self.config.attention, self.lm_head.weight
        return ContiguousCache(
            layers=len(self.layers),
            rows=rows,
            capacity=capacity,
            kv_heads=part.num_key_value_heads,
            head_size=part.head_dim,
            dtype=weight.dtype,
            device=weight.device,
        )

    def probe(self) -> Probe:
        """How an audit asks this model."""
        from pellucid.models.probe import DecoderProbe

        return DecoderProbe(self)

    @property
    def max_length(self) -> int | None:
        """The longest document that has positions (None: any length)."""
        return self.positions.length if isinstance(self.positions, LearnedPositions) else None

    def _place(self, batch: Batch, cache: ContiguousCache | None) -> tuple[Coordinates, Coordinates]:
        chunk = batch.coordinates()
        return (chunk, chunk) if cache is None else cache.place(chunk, self.rules)

    @staticmethod
    def _check(batch: Batch, want: str) -> None:
        if not isinstance(batch, Batch):
            raise InputError(
                f"a model takes a Batch, not {type(batch).__name__}; make one with Batch.from_rows([[5, 8, 2], [7]])"
            )
        if want not in ("logits", "loss", "hidden"):
            raise InputError(f"want is {want!r}; choose logits, loss or hidden")
        if want == "loss" and batch.labels is None:
            raise InputError("want='loss' needs labels; make them with pellucid.data.objectives.causal(batch)")
