"""From the words of a config to parts of ``nn``, one function a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from pellucid.models import configs
from pellucid.nn import moe, positions
from pellucid.nn.attend import Backend
from pellucid.nn.attention import CrossAttention, GroupedAttention
from pellucid.nn.ffn import ClampedGatedFFN, DenseFFN, GatedFFN
from pellucid.nn.mla import LatentAttention
from pellucid.nn.norms import BareLayerNorm, BareRMSNorm, HeadLayerNorm, L2Norm, LayerNorm, RMSNorm
from pellucid.visibility import Rule

if TYPE_CHECKING:
    from pellucid.models.config import Stack

Attention = configs.Grouped | configs.Latent


def norm(word: configs.Norm, size: int) -> nn.Module:
    """A norm of a stream of ``size`` features."""
    match word:
        case configs.RMSNorm(eps=eps, offset=offset):
            return RMSNorm(size, eps=eps, offset=float(offset))
        case configs.LayerNorm(eps=eps, bias=bias):
            return LayerNorm(size, eps=eps, bias=bias)
        case configs.BareRMSNorm(eps=eps):
            return BareRMSNorm(eps=eps)
        case configs.BareLayerNorm(eps=eps):
            return BareLayerNorm(eps=eps)


def entry_positions(stack: Stack) -> nn.Module:
    """What is added to the stream on entry."""
    match stack.position:
        case configs.Learned(max_positions=length, offset=offset):
            return positions.LearnedPositions(length, stack.hidden_size, offset=offset)
        case configs.Sinusoidal(base=base, layout=layout, offset=offset):
            return positions.SinusoidalPositions(stack.hidden_size, base=base, layout=layout, offset=offset)
    return positions.NoPositions()


def rotary(attention: Attention, position: configs.Position) -> positions.Rotary | None:
    """What turns queries and keys in a layer."""
    if not isinstance(position, configs.Rope):
        return None
    size = attention.head_dim if isinstance(attention, configs.Grouped) else attention.qk_rope_head_dim
    return positions.Rotary(
        size,
        base=position.theta,
        pairing=position.pairing,
        rotated=position.rotary_dim,
        scaling=None if position.scaling is None else _scaling(position.scaling),
    )


def _scaling(word: configs.Scaling) -> positions.Scaling:
    said = {name: getattr(word, name) for name in type(word).model_fields if name != "kind"}
    if isinstance(word, configs.Llama3):
        said["low"], said["high"] = said.pop("low_freq_factor"), said.pop("high_freq_factor")
    made: positions.Scaling = getattr(positions, type(word).__name__)(**said)
    return made


def bias(attention: Attention, position: configs.Position) -> nn.Module | None:
    """What is added to the scores of a layer."""
    heads = attention.num_attention_heads
    match position:
        case configs.RelativeBias(num_buckets=buckets, max_distance=distance, bidirectional=two_way):
            return positions.RelativeBias(heads, causal=not two_way, buckets=buckets, max_distance=distance)
        case configs.Alibi(max_exponent=most):
            return positions.Alibi(heads, max_exponent=most)
    return None


def heads_in_words(attention: Attention) -> str:
    """The heads, as an error names them."""
    if isinstance(attention, configs.Grouped):
        return f"attention.head_dim {attention.head_dim}"
    return f"attention.qk_rope_head_dim {attention.qk_rope_head_dim}"


def attention(stack: Stack, rule: Rule, position: configs.Position, backend: Backend) -> nn.Module:
    """Attention of a layer to its own stack."""
    word, turn, dropout = stack.attention, rotary(stack.attention, position), stack.dropout.attention
    if isinstance(word, configs.Latent):
        assert turn is not None, "fit lets latent attention have rotary positions alone"
        return LatentAttention(
            stack.hidden_size,
            heads=word.num_attention_heads,
            q_rank=word.q_lora_rank,
            kv_rank=word.kv_lora_rank,
            nope_size=word.qk_nope_head_dim,
            rope_size=word.qk_rope_head_dim,
            value_size=word.v_head_dim,
            rule=rule,
            rotary=turn,
            norm=lambda size: norm(stack.norm, size),
            scale=word.scale,
            softcap=word.attn_logit_softcapping,
            dropout=dropout,
            backend=backend,
        )
    return GroupedAttention(
        stack.hidden_size,
        rule=rule,
        rotary=turn,
        sinks=word.attention_sinks,
        norm_after_rotary=word.qk_norm is not None and word.qk_norm.after_positions,
        dropout=dropout,
        backend=backend,
        **_grouped(word),
    )


def cross_attention(word: configs.Grouped, stack: Stack, memory_size: int, backend: Backend) -> CrossAttention:
    """Attention of a layer to what an encoder of ``memory_size`` features made."""
    return CrossAttention(
        stack.hidden_size,
        memory_size=memory_size,
        dropout=stack.dropout.attention,
        backend=backend,
        **_grouped(word),
    )


def _grouped(word: configs.Grouped) -> dict[str, Any]:
    heads, kv_heads = word.num_attention_heads, word.num_key_value_heads
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_size": word.head_dim,
        "biases": word.biases,
        "q_norm": _qk_norm(word.qk_norm, heads, word.head_dim),
        "k_norm": _qk_norm(word.qk_norm, kv_heads, word.head_dim),
        "norm_over": "head" if word.qk_norm is None else word.qk_norm.over,
        "clip": word.clip_qkv,
        "scale": word.scale,
        "softcap": word.attn_logit_softcapping,
    }


def _qk_norm(word: configs.QKNorm | None, heads: int, head_size: int) -> nn.Module | None:
    if word is None:
        return None
    size = head_size if word.over == "head" else heads * head_size
    made: dict[str, Callable[[], nn.Module]] = {
        "rms_norm": lambda: RMSNorm(size, eps=word.eps, offset=float(word.offset)),
        "layer_norm": lambda: LayerNorm(size, eps=word.eps),
        "head_layer_norm": lambda: HeadLayerNorm(heads, head_size, eps=word.eps),
        "bare_rms_norm": lambda: BareRMSNorm(eps=word.eps),
        "l2_norm": lambda: L2Norm(eps=word.eps),
    }
    return made[word.kind]()


def ffn(word: configs.FFN, size: int, dropout: float) -> nn.Module:
    """The feed-forward half of a layer."""
    if isinstance(word, configs.MoE):
        return _moe(word, size, dropout)
    return _single(word, size, word.intermediate_size, dropout)


def _single(
    word: configs.Dense | configs.Gated | configs.ClampedGated, size: int, inner: int, dropout: float
) -> nn.Module:
    if isinstance(word, configs.ClampedGated):
        return ClampedGatedFFN(size, inner, limit=word.limit, alpha=word.alpha, bias=word.bias, dropout=dropout)
    kind = GatedFFN if isinstance(word, configs.Gated) else DenseFFN
    return kind(size, inner, activation=word.activation, bias=word.bias, dropout=dropout)


def _moe(word: configs.MoE, size: int, dropout: float) -> nn.Module:
    router, experts = _router(word, size), _experts(word, size, dropout)
    if word.shared is None:
        return moe.MoE(router=router, experts=experts, capacity=word.capacity)
    shared = _single(word.expert, size, word.shared.intermediate_size, dropout)
    if word.shared.gated:
        shared = moe.GatedSharedExpert(size, shared)
    return moe.SharedMoE(router=router, experts=experts, shared=shared, capacity=word.capacity)


def _router(word: configs.MoE, size: int) -> moe.Router:
    said: dict[str, Any] = {"experts": word.num_experts, "top_k": word.num_experts_per_tok}
    said |= {"scale": word.router.scale, "bias": word.router.bias}
    if (groups := word.router.groups) is not None:
        said["groups"] = moe.ExpertGroups(groups.count, keep=groups.keep, score=groups.score)
    if isinstance(word.router, configs.TopKSoftmax):
        return moe.TopKSoftmaxRouter(size, **said)
    kind = moe.SigmoidRouter if isinstance(word.router, configs.Sigmoid) else moe.SoftmaxRouter
    return kind(size, renormalise=word.router.renormalise, **said)


def _experts(word: configs.MoE, size: int, dropout: float) -> moe.Experts:
    expert = word.expert
    said: dict[str, Any] = {"experts": word.num_experts, "bias": expert.bias, "dropout": dropout, "weigh": word.weigh}
    match expert:
        case configs.Dense():
            return moe.DenseExperts(size, expert.intermediate_size, activation=expert.activation, **said)
        case configs.Gated():
            return moe.GatedExperts(size, expert.intermediate_size, activation=expert.activation, **said)
        case configs.ClampedGated():
            return moe.ClampedGatedExperts(
                size, expert.intermediate_size, limit=expert.limit, alpha=expert.alpha, **said
            )


def stream_dtype(name: Literal["float32"] | None) -> torch.dtype | None:
    """The type of the stream, None for that of the weights."""
    return None if name is None else torch.float32
