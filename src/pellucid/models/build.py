"""From a config to parts: the only place where the two meet."""

from __future__ import annotations

import torch
from torch import nn

from pellucid.errors import ConfigError
from pellucid.models import config as words
from pellucid.models.config import ModelConfig
from pellucid.models.decoder import Decoder
from pellucid.nn.attend import Backend
from pellucid.nn.attention import GroupedAttention
from pellucid.nn.block import PostNormBlock, PreNormBlock
from pellucid.nn.embed import TokenEmbedding
from pellucid.nn.ffn import DenseFFN, GatedFFN
from pellucid.nn.init import init_positions, init_post_norm, init_pre_norm
from pellucid.nn.norms import LayerNorm, RMSNorm
from pellucid.nn.positions import LearnedPositions, NoPositions, Rotary, SinusoidalPositions
from pellucid.visibility import Rule


def build(
    config: ModelConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    backend: Backend = "auto",
) -> Decoder:
    """A new model in eval mode, its weights drawn from ``seed``; the global random state is not touched.

    ``backend`` names the attention kernel for every layer; it changes speed, never results. On the ``meta`` device
    no memory is used and no weights are drawn.
    """
    if not isinstance(config, ModelConfig):
        raise ConfigError(
            f"build takes a ModelConfig, not {type(config).__name__}; make one with ModelConfig(**mapping)"
        )
    with torch.device("meta"):
        model = _assemble(config, backend)
    if torch.device(device).type != "meta":
        model.to_empty(device=device)
        _fill(model, config, seed)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    return model.to(dtype).eval()


def _assemble(config: ModelConfig, backend: Backend) -> Decoder:
    size = config.hidden_size
    return Decoder(
        config,
        embed_tokens=TokenEmbedding(config.vocab_size, size),
        positions=_positions(config),
        layers=[_block(config, rule, backend) for rule in config.rules],
        norm=_norm(config) if config.norm_placement == "pre" else nn.Identity(),
        lm_head=nn.Linear(size, config.vocab_size, bias=config.head_bias),
    )


def _block(config: ModelConfig, rule: Rule, backend: Backend) -> nn.Module:
    kind = {"pre": PreNormBlock, "post": PostNormBlock}[config.norm_placement]
    return kind(
        attention=_attention(config, rule, backend),
        ffn=_ffn(config),
        attn_norm=_norm(config),
        ffn_norm=_norm(config),
        dropout=config.dropout.residual,
    )


def _attention(config: ModelConfig, rule: Rule, backend: Backend) -> nn.Module:
    part, position = config.attention, config.position
    rotary = None
    if isinstance(position, words.Rope):
        rotary = Rotary(part.head_dim, base=position.theta, pairing=position.pairing)
    return GroupedAttention(
        config.hidden_size,
        heads=part.num_attention_heads,
        kv_heads=part.num_key_value_heads,
        head_size=part.head_dim,
        rule=rule,
        rotary=rotary,
        bias=part.qkv_bias,
        out_bias=part.out_bias,
        qk_norm=part.qk_norm,
        norm_eps=config.norm.eps,
        scale=part.scale,
        dropout=config.dropout.attention,
        backend=backend,
    )


def _ffn(config: ModelConfig) -> nn.Module:
    part = config.ffn
    kind = GatedFFN if isinstance(part, words.Gated) else DenseFFN
    return kind(
        config.hidden_size,
        part.intermediate_size,
        activation=part.activation,
        bias=part.bias,
        dropout=config.dropout.ffn,
    )


def _norm(config: ModelConfig) -> nn.Module:
    part = config.norm
    if isinstance(part, words.RMSNorm):
        return RMSNorm(config.hidden_size, eps=part.eps)
    return LayerNorm(config.hidden_size, eps=part.eps, bias=part.bias)


def _positions(config: ModelConfig) -> nn.Module:
    match config.position:
        case words.Learned(max_positions=length):
            return LearnedPositions(length, config.hidden_size)
        case words.Sinusoidal(base=base, layout=layout):
            return SinusoidalPositions(config.hidden_size, base=base, layout=layout)
        case words.Rope() | words.NoPosition():
            return NoPositions()


def _fill(model: Decoder, config: ModelConfig, seed: int) -> None:
    """Initial values for every parameter, drawn on the parameter's device from ``seed``."""
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(seed)
    for module in model.modules():
        if isinstance(module, RMSNorm | LayerNorm):
            nn.init.ones_(module.weight)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    if config.norm_placement == "pre":
        init_pre_norm(
            model,
            layers=len(config.layers),
            std=config.initializer_range,
            residual=config.residual_init,
            generator=generator,
        )
    else:
        init_post_norm(model, generator=generator)
    init_positions(model, std=config.initializer_range or 0.02, generator=generator)
