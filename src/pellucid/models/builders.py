"""From the words of a config to parts of ``nn``, one function a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from pellucid.models import configs
from pellucid.nn import moe, positions
from pellucid.nn.attend import Backend
from pellucid.nn.attention import CrossAttention, GroupedQueryAttention
from pellucid.nn.ffn import ClampedGatedFFN, DenseFFN, GatedFFN
from pellucid.nn.mla import MLA
from pellucid.nn.norms import BareLayerNorm, BareRMSNorm, HeadLayerNorm, L2Norm, LayerNorm, RMSNorm
from pellucid.visibility import Rule

if TYPE_CHECKING:
    from pellucid.models.config import TransformerConfig

Attention = configs.GroupedQueryAttentionConfig | configs.MLAConfig


def norm(word: configs.NormConfig, size: int) -> nn.Module:
    """A norm of a stream of ``size`` features."""
    match word:
        case configs.RMSNormConfig(eps=eps, offset=offset):
            return RMSNorm(size, eps=eps, offset=float(offset))
        case configs.LayerNormConfig(eps=eps, bias=bias):
            return LayerNorm(size, eps=eps, bias=bias)
        case configs.BareRMSNormConfig(eps=eps):
            return BareRMSNorm(eps=eps)
        case configs.BareLayerNormConfig(eps=eps):
            return BareLayerNorm(eps=eps)


def entry_positions(stack: TransformerConfig) -> nn.Module:
    """What is added to the stream on entry."""
    match stack.position:
        case configs.LearnedPositionsConfig(max_position_embeddings=length, offset=offset):
            return positions.LearnedPositions(length, stack.hidden_size, offset=offset)
        case configs.SinusoidalPositionsConfig(base=base, layout=layout, offset=offset):
            return positions.SinusoidalPositions(stack.hidden_size, base=base, layout=layout, offset=offset)
    return positions.NoPositions()


def rotary(attention: Attention, position: configs.PositionConfig) -> positions.Rotary | None:
    """What turns queries and keys in a layer."""
    if not isinstance(position, configs.RopeConfig):
        return None
    size = (
        attention.head_dim if isinstance(attention, configs.GroupedQueryAttentionConfig) else attention.qk_rope_head_dim
    )
    return positions.Rotary(
        size,
        rope_theta=position.rope_theta,
        interleaved=position.interleaved,
        rotary_dim=position.rotary_dim,
        scaling=None if position.scaling is None else _scaling(position.scaling),
    )


def _scaling(word: configs.RopeScalingConfig) -> positions.RopeScaling:
    made: positions.RopeScaling = getattr(positions, type(word).__name__.removesuffix("Config"))(
        **word.model_dump(exclude={"kind"})
    )
    return made


def bias(attention: Attention, position: configs.PositionConfig) -> nn.Module | None:
    """What is added to the scores of a layer."""
    heads = attention.num_attention_heads
    match position:
        case configs.RelativeBiasConfig(num_buckets=buckets, max_distance=distance, bidirectional=two_way):
            return positions.RelativeBias(heads, bidirectional=two_way, num_buckets=buckets, max_distance=distance)
        case configs.AlibiConfig(alibi_bias_max=most):
            return positions.Alibi(heads, alibi_bias_max=most)
    return None


def heads_in_words(attention: Attention) -> str:
    """The heads, as an error names them."""
    if isinstance(attention, configs.GroupedQueryAttentionConfig):
        return f"attention.head_dim {attention.head_dim}"
    return f"attention.qk_rope_head_dim {attention.qk_rope_head_dim}"


def attention(stack: TransformerConfig, rule: Rule, position: configs.PositionConfig, backend: Backend) -> nn.Module:
    """Attention of a layer to its own stack."""
    word, turn, dropout = stack.attention, rotary(stack.attention, position), stack.dropout.attention
    if isinstance(word, configs.MLAConfig):
        assert turn is not None, "fit lets latent attention have rotary positions alone"
        return MLA(
            stack.hidden_size,
            num_heads=word.num_attention_heads,
            q_lora_rank=word.q_lora_rank,
            kv_lora_rank=word.kv_lora_rank,
            qk_nope_head_dim=word.qk_nope_head_dim,
            qk_rope_head_dim=word.qk_rope_head_dim,
            v_head_dim=word.v_head_dim,
            rule=rule,
            rotary=turn,
            norm=lambda size: norm(stack.norm, size),
            scale=word.scale,
            softcap=word.attn_logit_softcapping,
            dropout=dropout,
            backend=backend,
        )
    return GroupedQueryAttention(
        stack.hidden_size,
        rule=rule,
        rotary=turn,
        attention_sinks=word.attention_sinks,
        norm_after_rotary=word.qk_norm is not None and word.qk_norm.after_positions,
        dropout=dropout,
        backend=backend,
        **_grouped(word),
    )


def cross_attention(
    word: configs.GroupedQueryAttentionConfig, stack: TransformerConfig, encoder_hidden_size: int, backend: Backend
) -> CrossAttention:
    """Attention of a layer to what an encoder of ``encoder_hidden_size`` features made."""
    return CrossAttention(
        stack.hidden_size,
        encoder_hidden_size=encoder_hidden_size,
        dropout=stack.dropout.attention,
        backend=backend,
        **_grouped(word),
    )


def _grouped(word: configs.GroupedQueryAttentionConfig) -> dict[str, Any]:
    heads, num_kv_heads = word.num_attention_heads, word.num_key_value_heads
    return {
        "num_heads": heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": word.head_dim,
        "biases": word.biases,
        "q_norm": _qk_norm(word.qk_norm, heads, word.head_dim),
        "k_norm": _qk_norm(word.qk_norm, num_kv_heads, word.head_dim),
        "norm_over": "head" if word.qk_norm is None else word.qk_norm.over,
        "clip_qkv": word.clip_qkv,
        "scale": word.scale,
        "softcap": word.attn_logit_softcapping,
    }


def _qk_norm(word: configs.QKNormConfig | None, heads: int, head_dim: int) -> nn.Module | None:
    if word is None:
        return None
    size = head_dim if word.over == "head" else heads * head_dim
    made: dict[str, Callable[[], nn.Module]] = {
        "rms_norm": lambda: RMSNorm(size, eps=word.eps, offset=float(word.offset)),
        "layer_norm": lambda: LayerNorm(size, eps=word.eps),
        "head_layer_norm": lambda: HeadLayerNorm(heads, head_dim, eps=word.eps),
        "bare_rms_norm": lambda: BareRMSNorm(eps=word.eps),
        "l2_norm": lambda: L2Norm(eps=word.eps),
    }
    return made[word.kind]()


def ffn(word: configs.FFNConfig, size: int, dropout: float) -> nn.Module:
    """The feed-forward half of a layer."""
    if isinstance(word, configs.MoEConfig):
        return _moe(word, size, dropout)
    return _single(word, size, word.intermediate_size, dropout)


def _single(
    word: configs.DenseFFNConfig | configs.GatedFFNConfig | configs.ClampedGatedFFNConfig,
    size: int,
    inner: int,
    dropout: float,
) -> nn.Module:
    if isinstance(word, configs.ClampedGatedFFNConfig):
        return ClampedGatedFFN(size, inner, limit=word.limit, alpha=word.alpha, bias=word.bias, dropout=dropout)
    kind = GatedFFN if isinstance(word, configs.GatedFFNConfig) else DenseFFN
    return kind(size, inner, activation=word.activation, bias=word.bias, dropout=dropout)


def _moe(word: configs.MoEConfig, size: int, dropout: float) -> nn.Module:
    router, experts = _router(word, size), _experts(word, size, dropout)
    if word.shared is None:
        return moe.MoE(router=router, experts=experts, expert_capacity=word.expert_capacity)
    shared = _single(word.expert, size, word.shared.intermediate_size, dropout)
    if word.shared.gated:
        shared = moe.GatedSharedExpert(size, shared)
    return moe.SharedMoE(router=router, experts=experts, shared=shared, expert_capacity=word.expert_capacity)


def _router(word: configs.MoEConfig, size: int) -> moe.Router:
    said: dict[str, Any] = {"num_experts": word.num_experts, "num_experts_per_tok": word.num_experts_per_tok}
    said |= {"routed_scaling_factor": word.router.routed_scaling_factor, "bias": word.router.bias}
    if (groups := word.router.groups) is not None:
        said["groups"] = moe.ExpertGroups(groups.n_group, topk_group=groups.topk_group, score=groups.score)
    if isinstance(word.router, configs.TopKSoftmaxRouterConfig):
        return moe.TopKSoftmaxRouter(size, **said)
    kind = moe.SigmoidRouter if isinstance(word.router, configs.SigmoidRouterConfig) else moe.SoftmaxRouter
    return kind(size, norm_topk_prob=word.router.norm_topk_prob, **said)


def _experts(word: configs.MoEConfig, size: int, dropout: float) -> moe.Experts:
    expert = word.expert
    said: dict[str, Any] = {"num_experts": word.num_experts, "bias": expert.bias, "dropout": dropout}
    said["apply_weight_on_input"] = word.apply_weight_on_input
    match expert:
        case configs.DenseFFNConfig():
            return moe.DenseExperts(size, expert.intermediate_size, activation=expert.activation, **said)
        case configs.GatedFFNConfig():
            return moe.GatedExperts(size, expert.intermediate_size, activation=expert.activation, **said)
        case configs.ClampedGatedFFNConfig():
            return moe.ClampedGatedExperts(
                size, expert.intermediate_size, limit=expert.limit, alpha=expert.alpha, **said
            )


def residual_dtype(name: Literal["float32"] | None) -> torch.dtype | None:
    """The type of the stream, None for that of the weights."""
    return None if name is None else torch.float32
