"""torch's own attention and Transformer layers as parts of ours, with the same weights and the same outputs.

=================================  =======================================================================
``nn.MultiheadAttention``          :class:`GroupedQueryAttention`; ``cross=True``: :class:`CrossAttention`
``nn.TransformerEncoderLayer``     :class:`PreNormBlock` or :class:`PostNormBlock`
``nn.TransformerDecoderLayer``     the same with cross-attention
``nn.TransformerEncoder``          :class:`Layers`
``nn.TransformerDecoder``          :class:`Layers`
``nn.Transformer``                 :class:`EncoderDecoderLayers`
=================================  =======================================================================

Their masks become rules by the named converters of :mod:`pellucid.visibility`: ``from_hidden`` for boolean
``attn_mask``, ``src_mask``, ``tgt_mask`` and key padding masks (``padding=True``), ``from_additive`` for those in
floating point; two at once are joined by ``&``. Padding may be marked in coordinates as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from pellucid.errors import ArgumentError, UnsupportedError
from pellucid.nn.attend import AttentionOptions
from pellucid.nn.attention import CrossAttention, EncoderOutput, GroupedQueryAttention, LayerContext
from pellucid.nn.block import PostNormBlock, PreNormBlock
from pellucid.nn.ffn import DenseFFN
from pellucid.nn.norms import LayerNorm
from pellucid.shapes import Float, Tensor
from pellucid.visibility import Coordinates, Rule, causal, full


class Layers(nn.Module):
    """Blocks one after the other, and a norm behind them."""

    def __init__(self, blocks: list[nn.Module], norm: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)
        self.norm = norm

    def forward(
        self, x_BTD: Float[Tensor, "B T D"], coords: Coordinates, encoder_output: EncoderOutput | None = None
    ) -> Float[Tensor, "B T D"]:
        ctx = LayerContext.of(coords, encoder_output=encoder_output)
        for block in self.layers:
            x_BTD = block(x_BTD, ctx)
        normed: Tensor = self.norm(x_BTD)
        return normed


class EncoderDecoderLayers(nn.Module):
    """Two stacks of blocks, the second of which reads what the first made."""

    def __init__(self, encoder: Layers, decoder: Layers) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(
        self,
        source_BSD: Float[Tensor, "B S D"],
        source: Coordinates,
        x_BTD: Float[Tensor, "B T D"],
        coords: Coordinates,
    ) -> Float[Tensor, "B T D"]:
        out_BTD: Tensor = self.decoder(x_BTD, coords, EncoderOutput(self.encoder(source_BSD, source), source))
        return out_BTD


def from_torch(module: nn.Module, *, rule: Rule | None = None, cross: bool = False) -> nn.Module:
    """A part of ours with copies of ``module``'s weights, in its type, on its device and in its mode.

    ``rule`` is that of self-attention; left out, everybody in an encoder and in bare attention, the past
    in a decoder. (For ``nn.Transformer`` it is the decoder's; its encoder sees everything that is no padding.)
    ``cross=True`` makes cross-attention of ``nn.MultiheadAttention``. Ours take ``[B, T, D]`` in any case.

    Raises:
        UnsupportedError: what has no counterpart here, named.
        ArgumentError: ``cross`` or ``rule`` where they mean nothing.
    """
    if cross and not isinstance(module, nn.MultiheadAttention):
        raise ArgumentError(
            f"cross=True belongs to nn.MultiheadAttention, not to {type(module).__name__}; leave it out"
        )
    if cross and rule is not None:
        raise ArgumentError(
            "cross-attention sees the whole encoder output and takes no rule; mark padding in its coordinates"
        )
    if type(module) not in _KINDS:
        known = ", ".join(f"nn.{kind.__name__}" for kind in _KINDS)
        raise UnsupportedError(f"from_torch takes {known}, not {type(module).__name__}")
    weight = next(module.parameters())
    with torch.device("meta"):  # no first weights, which would draw random numbers
        made = _cross(module) if cross else _KINDS[type(module)](module, rule)
    made.to_empty(device=weight.device).to(weight.dtype)
    state = _state(module)
    made.load_state_dict(state)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(state[name].requires_grad)
    return made.train(module.training)


def _attention(theirs: nn.MultiheadAttention, rule: Rule | None) -> GroupedQueryAttention:
    if not theirs._qkv_same_embed_dim:
        raise UnsupportedError(
            f"this attention reads keys of {theirs.kdim} and values of {theirs.vdim} features beside queries of "
            f"{theirs.embed_dim}, so it is cross-attention; give cross=True"
        )
    return GroupedQueryAttention(theirs.embed_dim, rule=full() if rule is None else rule, **_heads(theirs))


def _cross(theirs: Any) -> CrossAttention:
    if theirs.kdim != theirs.vdim:
        raise UnsupportedError(
            f"keys come from {theirs.kdim} features and values from {theirs.vdim}, but an encoder's output has "
            "one width"
        )
    return CrossAttention(theirs.embed_dim, encoder_hidden_size=theirs.kdim, **_heads(theirs))


def _heads(theirs: nn.MultiheadAttention) -> dict[str, Any]:
    for name, given in (("add_bias_kv", theirs.bias_k is not None), ("add_zero_attn", theirs.add_zero_attn)):
        if given:
            raise UnsupportedError(f"{name} adds a key that is no token, which has no counterpart here")
    return {
        "num_heads": theirs.num_heads,
        "num_kv_heads": theirs.num_heads,
        "head_dim": theirs.head_dim,
        **dict.fromkeys(("q_bias", "k_bias", "v_bias", "o_bias"), theirs.in_proj_bias is not None),
        "options": AttentionOptions(dropout=theirs.dropout),
    }


def _encoder_block(theirs: nn.TransformerEncoderLayer, rule: Rule | None) -> nn.Module:
    return _block(theirs, full() if rule is None else rule, {"attn_norm": theirs.norm1, "ffn_norm": theirs.norm2})


def _decoder_block(theirs: nn.TransformerDecoderLayer, rule: Rule | None) -> nn.Module:
    norms = {"attn_norm": theirs.norm1, "cross_norm": theirs.norm2, "ffn_norm": theirs.norm3}
    return _block(theirs, causal() if rule is None else rule, norms, cross_attention=_cross(theirs.multihead_attn))


def _block(theirs: Any, rule: Rule, norms: Mapping[str, nn.Module | None], **cross: Any) -> nn.Module:
    drops = {getattr(theirs, name).p for name in ("dropout1", "dropout2", "dropout3") if hasattr(theirs, name)}
    if len(drops) > 1:
        raise UnsupportedError(f"the layer drops its branches with {sorted(drops)}; one probability serves all here")
    first = theirs.linear1
    kind = PreNormBlock if theirs.norm_first else PostNormBlock
    return kind(
        attention=_attention(theirs.self_attn, rule),
        ffn=DenseFFN(
            first.in_features,
            first.out_features,
            activation=_activation(theirs.activation),
            bias=first.bias is not None,
            dropout=theirs.dropout.p,
        ),
        dropout=drops.pop(),
        **cross | {name: _norm(norm) for name, norm in norms.items()},
    )


def _norm(theirs: nn.Module | None) -> nn.Module:
    if theirs is None:
        return nn.Identity()
    if type(theirs) is not nn.LayerNorm or not theirs.elementwise_affine or len(theirs.normalized_shape) != 1:
        raise UnsupportedError(f"the norm is {theirs}, but only nn.LayerNorm of one axis with weights is taken over")
    return LayerNorm(theirs.normalized_shape[0], eps=theirs.eps, bias=theirs.bias is not None)


def _activation(theirs: Any) -> str:
    if isinstance(theirs, nn.GELU):
        return "gelu" if theirs.approximate == "none" else "gelu_tanh"
    for name, functions in (("relu", (F.relu, torch.relu)), ("gelu", (F.gelu,)), ("silu", (F.silu,))):
        if theirs in functions:
            return name
    if type(theirs) in (nn.ReLU, nn.SiLU):
        return type(theirs).__name__.lower()
    raise UnsupportedError(f"the activation {theirs!r} has no name here; relu, gelu and silu have")


def _encoder_layers(theirs: nn.TransformerEncoder, rule: Rule | None) -> Layers:
    return Layers([_encoder_block(_layer(layer), rule) for layer in theirs.layers], _norm(theirs.norm))


def _decoder_layers(theirs: nn.TransformerDecoder, rule: Rule | None) -> Layers:
    return Layers([_decoder_block(_layer(layer), rule) for layer in theirs.layers], _norm(theirs.norm))


def _both(theirs: nn.Transformer, rule: Rule | None) -> EncoderDecoderLayers:
    if type(theirs.encoder) is not nn.TransformerEncoder or type(theirs.decoder) is not nn.TransformerDecoder:
        raise UnsupportedError(
            "this nn.Transformer has an encoder or a decoder of its own kind; only torch's are known"
        )
    return EncoderDecoderLayers(_encoder_layers(theirs.encoder, None), _decoder_layers(theirs.decoder, rule))


def _layer(theirs: nn.Module) -> Any:
    if type(theirs) not in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        raise UnsupportedError(f"a layer is {type(theirs).__name__}; only torch's own are known")
    return theirs


def _state(theirs: Any) -> dict[str, Tensor]:
    """The parameters of ``theirs`` by the names that ours have."""
    match theirs:
        case None:
            return {}
        case nn.MultiheadAttention():
            separate = (theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight)
            weights = separate if theirs.in_proj_weight is None else theirs.in_proj_weight.chunk(3)
            state = {f"{name}_proj.weight": weight for name, weight in zip("qkv", weights, strict=True)}
            state["o_proj.weight"] = theirs.out_proj.weight
            if theirs.in_proj_bias is None:
                return state
            biases = (*theirs.in_proj_bias.chunk(3), theirs.out_proj.bias)
            return state | {f"{name}_proj.bias": bias for name, bias in zip("qkvo", biases, strict=True)}
        case nn.TransformerEncoderLayer():
            parts = {"attention": theirs.self_attn, "attn_norm": theirs.norm1, "ffn_norm": theirs.norm2}
        case nn.TransformerDecoderLayer():
            parts = {"attention": theirs.self_attn, "attn_norm": theirs.norm1, "ffn_norm": theirs.norm3}
            parts |= {"cross_attention": theirs.multihead_attn, "cross_norm": theirs.norm2}
        case nn.TransformerEncoder() | nn.TransformerDecoder():
            parts = {f"layers.{number}": layer for number, layer in enumerate(theirs.layers)} | {"norm": theirs.norm}
        case nn.Transformer():
            parts = {"encoder": theirs.encoder, "decoder": theirs.decoder}
        case _:  # a linear map or a norm: names are alike
            return dict(theirs.named_parameters())
    if hasattr(theirs, "linear1"):
        parts |= {"ffn.up_proj": theirs.linear1, "ffn.down_proj": theirs.linear2}
    return {f"{part}.{name}": tensor for part, own in parts.items() for name, tensor in _state(own).items()}


_KINDS: dict[type, Callable[[Any, Rule | None], nn.Module]] = {
    nn.MultiheadAttention: _attention,
    nn.TransformerEncoderLayer: _encoder_block,
    nn.TransformerDecoderLayer: _decoder_block,
    nn.TransformerEncoder: _encoder_layers,
    nn.TransformerDecoder: _decoder_layers,
    nn.Transformer: _both,
}
