"""Initial weights, by where the norms sit. A function for each placement, with the block and final norm it is for.

=============  ==========================================  ==========  =================================================
placement      block                                       final norm  first weights
=============  ==========================================  ==========  =================================================
pre            PreNormBlock                                one         :func:`init_pre_norm`: branch ends smaller, or 0
post           PostNormBlock                               none        :func:`init_post_norm`: Xavier's scale
deep           DeepNormBlock                               none        :func:`init_deep_norm`: Xavier's scale · β
sandwich       SandwichBlock                               one         :func:`init_sandwich`: all matrices alike
parallel       ParallelBlock, ParallelTwoNormBlock         one         :func:`init_pre_norm`
=============  ==========================================  ==========  =================================================

A pre-norm stream adds up 2L branch outputs (3L with cross-attention), so the last matrix of each branch starts smaller
(or at zero); a post-norm stream is normalised after every addition and takes Xavier's scale (Glorot & Bengio 2010), as
the 2017 model did. Norms (:func:`init_norms`) and position tables start the same everywhere. Stacked experts start as
that many single matrices, routers as any matrix that ends no branch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import nn

from pellucid.errors import ShapeError
from pellucid.nn.attention import GroupedQueryAttention
from pellucid.nn.mla import MLA
from pellucid.nn.moe.experts import Experts
from pellucid.nn.moe.router import Router, SigmoidRouter
from pellucid.nn.norms import HeadLayerNorm, LayerNorm, RMSNorm
from pellucid.nn.positions import LearnedPositions

ResidualInit = Literal["scaled", "zero", "plain"]

_BRANCH_ENDS = ("o_proj", "down_proj")
_VALUE_PATH = ("v_proj", "o_proj", "up_proj", "gate_proj", "down_proj")  # what β scales under DeepNorm


@torch.no_grad()
def init_pre_norm(
    model: nn.Module,
    *,
    num_layers: int,
    std: float | None,
    residual_init: ResidualInit,
    generator: torch.Generator,
    branches: int = 2,
) -> None:
    """Normal weights of ``std`` (None: ``1/sqrt(fan_in)``).

    Branch ends are divided by ``sqrt(branches · L)`` (Radford et al. 2019 §2.3), or 0. ``branches`` counts what a layer
    adds to the stream: 3 with cross-attention. Branches side by side add up the same 2L outputs.
    """
    for name, module in model.named_modules():
        for weight_name, weight in _matrices(module):
            scale = weight.shape[-1] ** -0.5 if std is None else std
            if f"{name}.{weight_name}".removesuffix(".weight").endswith(_BRANCH_ENDS) and residual_init != "plain":
                scale *= 0.0 if residual_init == "zero" else 1 / math.sqrt(branches * num_layers)
            _normal(weight, scale, generator)
        if isinstance(module, nn.Embedding):
            _normal(module.weight, 0.02 if std is None else std, generator)
        _zero_biases(module)


@torch.no_grad()
def init_sandwich(model: nn.Module, *, std: float | None, generator: torch.Generator) -> None:
    """Normal weights of ``std`` (None: ``1/sqrt(fan_in)``), branch ends like the rest.

    The norm behind a branch undoes any scale of its last matrix. From 0 it would multiply the first gradients by
    ``1/sqrt(eps)``, so nothing here starts at 0.
    """
    init_pre_norm(model, num_layers=1, std=std, residual_init="plain", generator=generator)


@torch.no_grad()
def init_post_norm(model: nn.Module, *, generator: torch.Generator) -> None:
    """Xavier-uniform matrices, embeddings of ``1/sqrt(D)``."""
    for module in model.modules():
        for _, weight in _matrices(module):
            bound = math.sqrt(3.0) * _xavier(weight)
            nn.init.uniform_(weight, -bound, bound, generator=generator)
        if isinstance(module, nn.Embedding):
            _normal(module.weight, module.embedding_dim**-0.5, generator)
        _zero_biases(module)


@torch.no_grad()
def init_deep_norm(model: nn.Module, *, beta: float, generator: torch.Generator) -> None:
    """Xavier-normal matrices, those on the path of the values times ``beta`` (Wang et al. 2022 fig. 2).

    That path is v and o of attention (cross-attention too) and the whole feed-forward part; all else has a gain of 1.
    In latent attention v is those rows of ``kv_b_proj`` that make values: the matrix before them ends in a
    norm, which would undo any scale.
    """
    for name, module in model.named_modules():
        for weight_name, weight in _matrices(module):
            on_value_path = f"{name}.{weight_name}".removesuffix(".weight").endswith(_VALUE_PATH)
            _normal(weight, _xavier(weight) * (beta if on_value_path else 1.0), generator)
        if isinstance(module, nn.Embedding):
            _normal(module.weight, module.embedding_dim**-0.5, generator)
        _zero_biases(module)
    for module in model.modules():
        if isinstance(module, MLA):
            module.up()[1].mul_(beta)


class DeepNormConstants(NamedTuple):
    """``alpha`` multiplies the stream in each block, ``beta`` the first weights."""

    alpha: float
    beta: float


def deep_norm_constants(
    num_layers: int,
    *,
    part: Literal["alone", "encoder", "decoder"] = "alone",
    num_decoder_layers: int | None = None,
) -> DeepNormConstants:
    """α and β for a stack of ``num_layers`` (Wang et al. 2022 fig. 2).

    ``alone`` is an encoder-only or decoder-only model. An ``encoder``'s depend on the depth of its decoder too.

    Raises:
        ShapeError: ``num_decoder_layers`` left out for an encoder, or given for anything else.
    """
    if (part == "encoder") != (num_decoder_layers is not None):
        raise ShapeError(
            f"part is {part!r} and num_decoder_layers {num_decoder_layers}; an encoder needs its decoder's depth, "
            "nothing else takes it"
        )
    if num_decoder_layers is not None:
        depth = (num_layers**4 * num_decoder_layers) ** (1 / 16)
        return DeepNormConstants(0.81 * depth, 0.87 / depth)
    if part == "decoder":
        return DeepNormConstants((3 * num_layers) ** 0.25, (12 * num_layers) ** -0.25)
    return DeepNormConstants((2 * num_layers) ** 0.25, (8 * num_layers) ** -0.25)


@torch.no_grad()
def init_norms(model: nn.Module) -> None:
    """Every norm scales by 1 and adds nothing, however it stores that."""
    for module in model.modules():
        if isinstance(module, RMSNorm | LayerNorm | HeadLayerNorm):
            module.reset_parameters()


@torch.no_grad()
def init_positions(model: nn.Module, *, std: float, generator: torch.Generator) -> None:
    """Learned position tables, the same for every placement."""
    for module in model.modules():
        if isinstance(module, LearnedPositions):
            _normal(module.weight, std, generator)


def _matrices(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The module's own matrices ``[…, out, in]``, children left out."""
    if isinstance(module, nn.Linear | Router):
        yield "weight", module.weight
    elif isinstance(module, Experts):
        yield from ((name, weight) for name, weight in module.named_parameters() if name.endswith("_proj"))


def _zero_biases(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | Router | Experts):
        for name, bias in module.named_parameters(recurse=False):
            if name.endswith("bias"):
                nn.init.zeros_(bias)
    if isinstance(module, SigmoidRouter):
        nn.init.zeros_(module.expert_bias)
    if isinstance(module, GroupedQueryAttention) and module.sinks is not None:
        nn.init.zeros_(module.sinks)


def _xavier(weight: torch.Tensor) -> float:
    """The standard deviation of Glorot & Bengio 2010 eq. 16, for each matrix of a stack."""
    return math.sqrt(2.0 / float(weight.shape[-1] + weight.shape[-2]))


def _normal(weight: torch.Tensor, std: float, generator: torch.Generator) -> None:
    nn.init.normal_(weight, std=std, generator=generator) if std else nn.init.zeros_(weight)
