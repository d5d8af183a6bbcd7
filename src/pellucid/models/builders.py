"""From a part's config to the part: each class of ``configs`` to the module of ``nn`` that takes the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from pellucid.models import configs
from pellucid.nn import moe, positions
from pellucid.nn.attend import AttentionOptions, Backend
from pellucid.nn.attention import CrossAttention, GroupedQueryAttention
from pellucid.nn.ffn import ClampedGatedFFN, DenseFFN, GatedFFN
from pellucid.nn.mla import MLA
from pellucid.nn.norms import BareLayerNorm, BareRMSNorm, HeadLayerNorm, L2Norm, LayerNorm, RMSNorm
from pellucid.visibility import Rule

_PARTS: dict[str, Callable[..., Any]] = {
    "rms_norm": RMSNorm,
    "layer_norm": LayerNorm,
    "learned": positions.LearnedPositions,
    "sinusoidal": positions.SinusoidalPositions,
    "relative_bias": positions.RelativeBias,
    "alibi": positions.Alibi,
    "rope": positions.Rotary,
    "linear": positions.LinearScaling,
    "dynamic": positions.DynamicNTKScaling,
    "llama3": positions.Llama3Scaling,
    "yarn": positions.YarnScaling,
    "longrope": positions.LongRopeScaling,
    "proportional": positions.PartialScaling,
    "dense": DenseFFN,
    "gated": GatedFFN,
    "clamped_gated": ClampedGatedFFN,
    "softmax": moe.SoftmaxRouter,
    "top_k_softmax": moe.TopKSoftmaxRouter,
    "sigmoid": moe.SigmoidRouter,
}
_EXPERTS: dict[str, Callable[..., moe.Experts]] = {
    "dense": moe.DenseExperts,
    "gated": moe.GatedExperts,
    "clamped_gated": moe.ClampedGatedExperts,
}


def _fields(config: configs.Config, *without: str) -> dict[str, Any]:
    """A config's fields as keyword arguments of its part."""
    return config.model_dump(exclude={"kind", *without})


def norm(config: configs.NormConfig, size: int) -> nn.Module:
    """A norm of ``size`` features."""
    match config:
        case configs.BareRMSNormConfig(eps=eps):
            return BareRMSNorm(eps=eps)
        case configs.BareLayerNormConfig(eps=eps):
            return BareLayerNorm(eps=eps)
    part: nn.Module = _PARTS[config.kind](size, **_fields(config))
    return part


def entry_positions(config: configs.PositionConfig, hidden_size: int) -> nn.Module | None:
    """What is added to the residual stream on entry (None: nothing)."""
    if not isinstance(config, configs.LearnedPositionsConfig | configs.SinusoidalPositionsConfig):
        return None
    part: nn.Module = _PARTS[config.kind](hidden_size=hidden_size, **_fields(config))
    return part


def rotary(attention: configs.AttentionConfig, position: configs.PositionConfig) -> positions.Rotary | None:
    """What rotates queries and keys in a layer."""
    if not isinstance(position, configs.RopeConfig):
        return None
    scaling = None if position.scaling is None else _PARTS[position.scaling.kind](**_fields(position.scaling))
    return positions.Rotary(attention.rotary_head_dim, scaling=scaling, **_fields(position, "scaling"))


def bias(attention: configs.AttentionConfig, position: configs.PositionConfig) -> nn.Module | None:
    """What is added to the scores of a layer."""
    if not isinstance(position, configs.RelativeBiasConfig | configs.AlibiConfig):
        return None
    part: nn.Module = _PARTS[position.kind](attention.num_attention_heads, **_fields(position, "shared"))
    return part


def attention(
    config: configs.AttentionConfig,
    hidden_size: int,
    *,
    rule: Rule,
    position: configs.PositionConfig,
    stack_norm: configs.NormConfig,
    dropout: float,
    backend: Backend,
) -> nn.Module:
    """Self-attention of a layer; MLA's inner norms are of the kind of ``stack_norm``."""
    rotates = rotary(config, position)
    if isinstance(config, configs.MLAConfig):
        assert rotates is not None, "a config lets MLA have rotary positions alone"
        return MLA(
            hidden_size,
            num_heads=config.num_attention_heads,
            rule=rule,
            rotary=rotates,
            norm=lambda size: norm(stack_norm, size),
            options=_options(config, dropout, backend),
            **_fields(config, "num_attention_heads", "scale", "attn_logit_softcapping"),
        )
    return GroupedQueryAttention(
        hidden_size,
        rule=rule,
        rotary=rotates,
        attention_sinks=config.attention_sinks,
        norm_after_rotary=config.qk_norm is not None and config.qk_norm.after_positions,
        **_projections(config, dropout, backend),
    )


def cross_attention(
    config: configs.GroupedQueryAttentionConfig,
    hidden_size: int,
    *,
    encoder_hidden_size: int,
    dropout: float,
    backend: Backend,
) -> CrossAttention:
    """Attention of a layer to an encoder's output of ``encoder_hidden_size`` features."""
    return CrossAttention(
        hidden_size, encoder_hidden_size=encoder_hidden_size, **_projections(config, dropout, backend)
    )


def _options(config: configs.AttentionConfig, dropout: float, backend: Backend) -> AttentionOptions:
    softcap = config.attn_logit_softcapping
    return AttentionOptions(scale=config.scale, softcap=softcap, dropout=dropout, backend=backend)


def _projections(config: configs.GroupedQueryAttentionConfig, dropout: float, backend: Backend) -> dict[str, Any]:
    heads, kv_heads, qk_norm = config.num_attention_heads, config.num_key_value_heads, config.qk_norm
    same = ("head_dim", "q_bias", "k_bias", "v_bias", "o_bias", "clip_qkv")
    return {name: getattr(config, name) for name in same} | {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "q_norm": _qk_norm(qk_norm, heads, config.head_dim),
        "k_norm": _qk_norm(qk_norm, kv_heads, config.head_dim),
        "norm_over": "head" if qk_norm is None else qk_norm.over,
        "options": _options(config, dropout, backend),
    }


def _qk_norm(config: configs.QKNormConfig | None, num_heads: int, head_dim: int) -> nn.Module | None:
    if config is None:
        return None
    size = head_dim if config.over == "head" else num_heads * head_dim
    match config.kind:
        case "rms_norm":
            return RMSNorm(size, eps=config.eps, offset=config.offset)
        case "layer_norm":
            return LayerNorm(size, eps=config.eps)
        case "head_layer_norm":
            return HeadLayerNorm(num_heads, head_dim, eps=config.eps)
        case "bare_rms_norm":
            return BareRMSNorm(eps=config.eps)
    return L2Norm(eps=config.eps)


def ffn(config: configs.FFNConfig, hidden_size: int, dropout: float) -> nn.Module:
    """The feed-forward half of a layer."""
    if not isinstance(config, configs.MoEConfig):
        part: nn.Module = _PARTS[config.kind](hidden_size, **_fields(config), dropout=dropout)
        return part
    counts = {"num_experts": config.num_experts, "num_experts_per_tok": config.num_experts_per_tok}
    groups = config.router.groups
    router = _PARTS[config.router.kind](
        hidden_size,
        **counts,
        **_fields(config.router, "groups"),
        groups=None if groups is None else moe.ExpertGroups(**_fields(groups)),
    )
    experts = _EXPERTS[config.expert.kind](
        hidden_size,
        num_experts=config.num_experts,
        apply_weight_on_input=config.apply_weight_on_input,
        **_fields(config.expert),
        dropout=dropout,
    )
    parts: dict[str, Any] = {"router": router, "experts": experts, "expert_capacity": config.expert_capacity}
    if config.shared is None:
        return moe.MoE(**parts)
    width = {"intermediate_size": config.shared.intermediate_size}
    shared: nn.Module = _PARTS[config.expert.kind](hidden_size, **_fields(config.expert) | width, dropout=dropout)
    return moe.SharedMoE(**parts, shared=moe.GatedSharedExpert(hidden_size, shared) if config.shared.gated else shared)
