"""A model asked a probe: folded logits, the mean loss of its own objective, and the types of its stream."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from pellucid.batch import IGNORED, Batch
from pellucid.checkpoints.exact import PortableDropout, amplified
from pellucid.checkpoints.inputs import Probe, spread
from pellucid.data.objectives import causal
from pellucid.models import configs
from pellucid.models.config import ModelConfig
from pellucid.models.model import Model

FOLDS = 4
"""Numbers kept of each output: Σ ±logit / sqrt(V), the signs being bits of ``spread(id)``; up to four logits whole."""


@torch.no_grad()
def answer(model: Model, probe: Probe) -> tuple[np.ndarray, float | None, int | None]:
    """Folded logits, mean loss, and how many labels it counts."""
    if probe.training:
        try:
            model.train()
            with PortableDropout():
                return folded(model, probe, hidden_states(model, probe)).numpy(), None, None
        finally:
            model.eval()
    found = hidden_states(model, probe)
    folds = folded(model, probe, found).numpy()
    batch = None if probe.chunks or probe.gains else labelled(model, probe.batch())
    if batch is None:
        return folds, None, None
    loss = model.head.loss(found[0][1], batch)  # type: ignore[operator]
    return folds, float(loss.mean()), int(loss.count)


def hidden_states(model: Model, probe: Probe) -> list[tuple[Batch, Tensor]]:
    """Each piece of the input, and what the layers make of it."""
    cache = model.new_cache(len(probe.tokens), sum(probe.chunks)) if probe.chunks else None  # type: ignore[operator]
    pieces = [piece.to(model.device) for piece in (probe.pieces() if probe.chunks else [probe.batch()])]
    with amplified(model, probe.gains):
        return [(piece, model(piece, cache=cache, want="hidden").hidden) for piece in pieces]


def folded(model: Model, probe: Probe, found: Sequence[tuple[Batch, Tensor]]) -> Tensor:
    """``[outputs, FOLDS]`` in float64: the logits at the probe's slots, or of its documents, folded."""
    if probe.at is None:
        return _fold(torch.cat([_said(model, hidden, piece, probe.gains) for piece, hidden in found]))
    hidden_BTD = _louder(torch.cat([hidden for _, hidden in found], 1), probe.gains)
    seen_SD = torch.cat([row_TD[list(slots)] for row_TD, slots in zip(hidden_BTD, probe.at, strict=True)])
    return _fold(model.head(seen_SD.unsqueeze(0))[0])


def _said(model: Model, hidden_BTD: Tensor, piece: Batch, gains: Sequence[float]) -> Tensor:
    """``[C, k]``: what a head says of each document."""
    said: Tensor = model.head(_louder(hidden_BTD, gains), piece.coordinates())
    return said


def _louder(hidden_BTD: Tensor, gains: Sequence[float]) -> Tensor:
    return hidden_BTD * torch.tensor(gains, dtype=hidden_BTD.dtype)[:, None, None] if gains else hidden_BTD


def _fold(logits_SV: Tensor) -> Tensor:
    exact_SV = logits_SV.to("cpu", torch.float64)
    size = exact_SV.shape[-1]
    if size <= FOLDS:
        return nn.functional.pad(exact_SV, (0, FOLDS - size))
    bits = spread(np.arange(size))[:, None] >> np.arange(FOLDS, dtype=np.uint64) & np.uint64(1)
    signs_VF = torch.from_numpy(1.0 - 2.0 * bits.astype(np.float64))
    return exact_SV @ signs_VF * size**-0.5


def labelled(model: Model, batch: Batch) -> Batch | None:
    """``batch`` with something to predict, in the way of the model's head; None where it cannot be asked a loss."""
    assert isinstance(model.config, ModelConfig)
    real, documents = batch.segments != 0, torch.arange(batch.documents)
    match model.config.head:
        case configs.LanguageModelHeadConfig():
            return causal(batch)
        case configs.MaskedLMHeadConfig():
            return batch.with_labels(torch.where(real, batch.tokens, IGNORED))
        case configs.TokenClassificationHeadConfig(num_labels=labels):
            return batch.with_labels(torch.where(real, batch.tokens % labels, IGNORED))
        case configs.SequenceClassificationHeadConfig(num_labels=labels):
            return replace(batch, targets=documents % labels)
        case configs.RegressionHeadConfig(num_outputs=outputs):
            numbers = torch.arange(batch.documents * outputs).view(-1, outputs)
            return replace(batch, targets=(numbers % 7 - 3) / 2)
        case configs.SpanHeadConfig():
            sizes = [size for row in batch.document_lengths for size in row.values()]
            return replace(batch, targets=torch.tensor([[0, size - 1] for size in sizes]))
    return batch if batch.documents % 2 == 0 else None


@torch.no_grad()
def stream_types(model: Model, probe: Probe) -> tuple[str, ...]:
    """The type of the stream behind each layer, an encoder's first; of a model in a narrow type."""
    found: list[str] = []

    def note(_: nn.Module, __: object, x_BTD: Tensor) -> None:
        found.append(str(x_BTD.dtype).removeprefix("torch."))

    with ExitStack() as hooks:
        for block in dict.fromkeys(block for stack in model.stacks for block in stack.layers):
            hooks.callback(block.register_forward_hook(note).remove)
        model(probe.batch(), want="hidden")
    return tuple(found)
