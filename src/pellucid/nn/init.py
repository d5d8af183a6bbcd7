"""Initial weights, by where the norms sit.

A pre-norm stream adds up 2L branch outputs, so the last matrix of each branch starts smaller (or at zero); a post-norm
stream is normalised after every addition and takes Xavier's scale (Glorot & Bengio 2010), as the 2017 model did.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import nn

from pellucid.nn.positions import LearnedPositions

Residual = Literal["scaled", "zero", "plain"]

_BRANCH_ENDS = ("o_proj", "down_proj")


@torch.no_grad()
def init_pre_norm(
    model: nn.Module, *, layers: int, std: float | None, residual: Residual, generator: torch.Generator
) -> None:
    """Normal weights of ``std`` (None: ``1/sqrt(fan_in)``).

    Branch ends are divided by ``sqrt(2L)`` (Radford et al. 2019 §2.3), or 0.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            scale = module.in_features**-0.5 if std is None else std
            if name.endswith(_BRANCH_ENDS) and residual != "plain":
                scale *= 0.0 if residual == "zero" else 1 / math.sqrt(2 * layers)
            _normal(module.weight, scale, generator)
            _zero_bias(module)
        elif isinstance(module, nn.Embedding):
            _normal(module.weight, 0.02 if std is None else std, generator)


@torch.no_grad()
def init_post_norm(model: nn.Module, *, generator: torch.Generator) -> None:
    """Xavier-uniform matrices, embeddings of ``1/sqrt(D)``."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight, generator=generator)
            _zero_bias(module)
        elif isinstance(module, nn.Embedding):
            _normal(module.weight, module.embedding_dim**-0.5, generator)


@torch.no_grad()
def init_positions(model: nn.Module, *, std: float, generator: torch.Generator) -> None:
    """Learned position tables, the same for every placement."""
    for module in model.modules():
        if isinstance(module, LearnedPositions):
            _normal(module.weight, std, generator)


def _normal(weight: torch.Tensor, std: float, generator: torch.Generator) -> None:
    nn.init.normal_(weight, std=std, generator=generator) if std else nn.init.zeros_(weight)


def _zero_bias(module: nn.Linear) -> None:
    if module.bias is not None:
        nn.init.zeros_(module.bias)
