"""Ten broken models, each a healthy one with one part wrong, as seen in public code.

Every check has to catch the models that are broken in its way; ``BROKEN_MODELS`` says which. To see an audit fail::

    audit(broken.SeesOneAhead(), checks=["future"])
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pellucid.audits.broken.tiny_decoder import Slots, TinyDecoder, token_losses
from pellucid.audits.probes.torch_layers_probe import TorchLayersProbe
from pellucid.batch import Batch
from pellucid.probe import Probe
from pellucid.records import Status


@dataclass(frozen=True)
class BrokenModel:
    """A faulty model, the check that has to catch it, and the verdict that it deserves."""

    make: Callable[[], nn.Module]
    check: str
    verdict: Status = "leak"

    @property
    def name(self) -> str:
        return getattr(self.make, "__name__", str(self.make))

    @property
    def fault(self) -> str:
        """What is wrong with it."""
        return " ".join((self.make.__doc__ or "").split())

    def probe(self) -> Probe:
        probe: Probe = self.make().probe()  # type: ignore[operator]
        return probe


class SeesOneAhead(TinyDecoder):
    """The mask is cut one diagonal too late: every token sees its own answer."""

    def visible(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        return queries.same_document(keys) & (queries.distance(keys) >= -1)


class WindowOneTooWide(TinyDecoder):
    """A window of w was handed to a kernel that counts w keys besides the query itself."""

    def __init__(self, window: int = 3, layers: int = 1) -> None:
        super().__init__(window=window, layers=layers)

    def visible(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        assert self.window is not None
        distance = queries.distance(keys)
        return queries.same_document(keys) & (distance >= 0) & (distance <= self.window)


class MeanOverPads(TinyDecoder):
    """A running mean over time divides by slots, pads included."""

    def final_hidden(self, x_BTD: Tensor, queries: Slots) -> Tensor:
        return x_BTD + x_BTD.cumsum(1) / (queries.indices + 1)[:, :, None]


class NoIsolation(TinyDecoder):
    """Packed documents see each other."""

    def visible(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        earlier_BTS = (keys.segments[:, None, :] != 0) & (queries.segments[:, :, None] > keys.segments[:, None, :])
        return earlier_BTS | super().visible(queries, keys, layer)


class SharedCounter(TinyDecoder):
    """Chunks after the first take the cache's length as position of every row, padded or not."""

    def position_ids(self, queries: Slots) -> Tensor:
        return queries.indices.expand_as(queries.positions) if queries.first else queries.positions


class DropsOutInEval(TinyDecoder):
    """Functional dropout without the training flag."""

    def final_hidden(self, x_BTD: Tensor, queries: Slots) -> Tensor:
        return functional.dropout(x_BTD, 0.1, training=True)


class WindowLostByOneKernel(TinyDecoder):
    """The kernel that knows no windows sees everything before it."""

    def __init__(self) -> None:
        super().__init__(window=3)

    def visible(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        if self.kernel == "plain":
            return super().visible(queries, keys, layer)
        return queries.same_document(keys) & (queries.distance(keys) >= 0)


class ShiftedTwice(TinyDecoder):
    """Labels are shifted by the data and again by the model: token t + 2 is predicted at t."""

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        scored_BT = batch.loss_mask[:, 2:] & (batch.positions[:, 2:] > 1)
        losses_BT = token_losses(self(batch)[:, :-2], batch.tokens[:, 2:])
        return torch.where(scored_BT, losses_BT, 0.0).sum(), scored_BT.sum()


class InvertedMask(TinyDecoder):
    """The padding mask is read upside down: only padding is seen."""

    def visible(self, queries: Slots, keys: Slots, layer: int) -> Tensor:
        past_BTS = queries.indices[:, :, None] >= keys.indices[:, None, :]
        if bool((keys.segments != 0).all()):
            return super().visible(queries, keys, layer)
        return past_BTS & (keys.segments == 0)[:, None, :]


class CrossIsCausal(nn.TransformerDecoderLayer):
    """The decoder's causal mask was handed to cross-attention too: query 0 sees the first source token only."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            super().__init__(16, 2, 32, dropout=0.1, batch_first=True)

    def forward(self, tgt: Tensor, memory: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        hidden_TS = torch.ones(tgt.shape[1], memory.shape[1], dtype=torch.bool, device=tgt.device).triu(1)
        return super().forward(tgt, memory, *args, **kwargs | {"memory_mask": hidden_TS})

    def probe(self) -> TorchLayersProbe:
        return TorchLayersProbe(self)


BROKEN_MODELS = (
    BrokenModel(SeesOneAhead, "future"),
    BrokenModel(WindowOneTooWide, "window"),
    BrokenModel(MeanOverPads, "padding"),
    BrokenModel(NoIsolation, "packing"),
    BrokenModel(SharedCounter, "cache"),
    BrokenModel(DropsOutInEval, "dropout"),
    BrokenModel(WindowLostByOneKernel, "kernels"),
    BrokenModel(ShiftedTwice, "loss"),
    BrokenModel(InvertedMask, "polarity"),
    BrokenModel(CrossIsCausal, "cross"),
)
"""The broken models of the package, each with the check that has to catch it."""
