"""A model with more or fewer tokens, made from one that is there."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

from pellucid.errors import ArgumentError
from pellucid.models.config import ModelConfig
from pellucid.models.heads import LanguageModelHead
from pellucid.models.model import Model

SPREAD = 0.01
"""How far new rows are from the mean of the old ones, in standard deviations of each feature."""


M = TypeVar("M", bound=Model)


@torch.no_grad()
def resize_token_embeddings(model: M, vocab_size: int, *, seed: int = 0) -> M:
    """A new model of ``vocab_size`` tokens, otherwise as ``model`` is; ``model`` stays as it is.

    Rows of ids that both have are the same bits, so that their logits are what they were; what is tied stays tied. A
    new row of the table or of a head of its own is the mean of the old rows, plus a hundredth of their spread drawn
    from ``seed``: a new id begins as an average one, and no two of them alike. Its bias is the mean of the old ones.
    A table that only an encoder reads (``source_vocab_size``) stays as it is.
    """
    if not isinstance(model, Model) or not isinstance(model.config, ModelConfig):
        raise ArgumentError(f"resize_token_embeddings takes a model, not a {type(model).__name__}; build or load one")
    size = model.config.model_copy(update={"vocab_size": vocab_size}).vocab_size
    generator = torch.Generator().manual_seed(seed)
    new = copy.deepcopy(model)
    new.config = model.config.model_copy(update={"vocab_size": size})
    new.embed_tokens.num_embeddings = size
    new.embed_tokens.weight = _parameter(model.embed_tokens.weight, size, generator)
    head, own = new.head, model.head
    if isinstance(head, LanguageModelHead) and isinstance(own, LanguageModelHead):
        tied = own.weight is model.embed_tokens.weight
        head.out_features = size
        head.weight = new.embed_tokens.weight if tied else _parameter(own.weight, size, generator)
        if own.bias is not None:
            head.bias = _parameter(own.bias, size, None)
    return new


def _parameter(old: Tensor, size: int, generator: torch.Generator | None) -> nn.Parameter:
    """The first ``size`` rows of ``old``, and new ones where it has fewer."""
    rows = old[:size].clone()
    if size > len(old):
        rows = torch.cat([rows, _new_rows(old, size - len(old), generator).to(old)])
    return nn.Parameter(rows, requires_grad=old.requires_grad)


def _new_rows(old: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """The mean of the rows of ``old``; with a ``generator`` each a little aside of it."""
    mean = old.mean(0, keepdim=True, dtype=torch.float64).expand(count, *old.shape[1:])
    if generator is None:
        return mean
    spread = old.double().std(0, correction=0)
    noise = torch.randn(mean.shape, generator=generator, dtype=torch.float64)
    return mean + SPREAD * spread * noise.to(old.device)
