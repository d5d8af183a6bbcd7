"""What a model is, in words: one frozen value that says everything its forward pass needs.

Parts are unions told apart by ``kind``, not flags; a key that is not known is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pellucid.configfile import Config
from pellucid.errors import ConfigError
from pellucid.visibility import Rule, parse

Count = Annotated[int, Field(ge=1, le=1 << 24)]
Probability = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Activation = Literal["gelu", "gelu_tanh", "relu", "relu_squared", "silu"]

_MOST_LAYERS = 4096


class Grouped(Config):
    """Multi-head, grouped-query or multi-query attention."""

    kind: Literal["grouped"] = "grouped"
    num_attention_heads: Count
    num_key_value_heads: Count
    """Defaults to ``num_attention_heads`` (multi-head attention)."""
    head_dim: Count
    """Defaults to ``hidden_size / num_attention_heads``."""
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    """RMSNorm on each head's queries and keys, before positions."""
    scale: Positive | None = None
    """What scores are multiplied by; None is ``head_dim ** -0.5``."""

    @model_validator(mode="after")
    def _heads_fit(self) -> Grouped:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} query heads cannot share {self.num_key_value_heads} key/value heads "
                "evenly; make num_attention_heads a multiple of num_key_value_heads"
            )
        return self


class Dense(Config):
    """Two matrices with an activation between."""

    kind: Literal["dense"] = "dense"
    intermediate_size: Count
    activation: Activation = "gelu"
    bias: bool = False


class Gated(Config):
    """Three matrices: SwiGLU (``silu``), GEGLU (``gelu``)."""

    kind: Literal["gated"] = "gated"
    intermediate_size: Count
    activation: Activation = "silu"
    bias: bool = False


class Rope(Config):
    """Rotary positions on queries and keys."""

    kind: Literal["rope"] = "rope"
    theta: Positive = 10000.0
    pairing: Literal["half", "interleaved"] = "half"


class Learned(Config):
    """A learned table; sequences longer than it are refused."""

    kind: Literal["learned"] = "learned"
    max_positions: Count


class Sinusoidal(Config):
    """Fixed sines and cosines, added on entry."""

    kind: Literal["sinusoidal"] = "sinusoidal"
    base: Positive = 10000.0
    layout: Literal["interleaved", "half"] = "interleaved"


class NoPosition(Config):
    """No position signal at all."""

    kind: Literal["none"] = "none"


class RMSNorm(Config):
    """Scales each token's features by their root mean square."""

    kind: Literal["rms_norm"] = "rms_norm"
    eps: Positive = 1e-6


class LayerNorm(Config):
    """Centres and scales each token's features."""

    kind: Literal["layer_norm"] = "layer_norm"
    eps: Positive = 1e-5
    bias: bool = True


class Dropout(Config):
    """The probability at each of the four places where something may be dropped in training."""

    embedding: Probability = 0.0
    attention: Probability = 0.0
    residual: Probability = 0.0
    ffn: Probability = 0.0


class ModelConfig(Config):
    """A decoder-only Transformer.

    ``layers`` lists one visibility rule a layer; ``num_hidden_layers: 6`` (with ``rule: causal``, if you like) is
    short for six equal entries.
    """

    family: Literal["decoder"] = "decoder"
    vocab_size: Count
    hidden_size: Count
    layers: tuple[str, ...] = Field(min_length=1, max_length=_MOST_LAYERS)
    attention: Grouped
    ffn: Annotated[Dense | Gated, Field(discriminator="kind")]
    position: Annotated[Rope | Learned | Sinusoidal | NoPosition, Field(discriminator="kind")] = Rope()
    norm: Annotated[RMSNorm | LayerNorm, Field(discriminator="kind")] = RMSNorm()
    norm_placement: Literal["pre", "post"] = "pre"
    dropout: Dropout = Dropout()
    tie_word_embeddings: bool = True
    head_bias: bool = False
    final_logit_softcapping: Positive | None = None
    """Bends logits to ``c · tanh(logit / c)``."""
    initializer_range: Positive | None = None
    """Standard deviation of first weights under pre-norm; None: ``1/sqrt(fan_in)`` for matrices, 0.02 for tables."""
    residual_init: Literal["scaled", "zero", "plain"] = "scaled"
    """How the last matrix of each pre-norm branch starts."""

    @model_validator(mode="before")
    @classmethod
    def _spell_out(cls, data: Any) -> Any:
        return _spelled_out(dict(data)) if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def _parts_fit(self) -> ModelConfig:
        if self.norm_placement == "post" and (self.residual_init != "scaled" or self.initializer_range is not None):
            raise ValueError(
                "norm_placement 'post' starts from Xavier's scale; residual_init and initializer_range belong to "
                "'pre': leave them out"
            )
        if isinstance(self.position, Rope) and self.attention.head_dim % 2:
            raise ValueError(
                f"position 'rope' turns pairs of features, but attention.head_dim is {self.attention.head_dim}; "
                "make it even"
            )
        return self

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The visibility rule of each layer."""
        return tuple(parse(text) for text in self.layers)


def _spelled_out(data: dict[str, Any]) -> dict[str, Any]:
    """Short forms written out, so that a stored config says everything."""
    count, rule = data.pop("num_hidden_layers", None), data.pop("rule", None)
    layers = data.get("layers")
    if layers is None and count is not None:
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _MOST_LAYERS:
            raise ValueError(f"num_hidden_layers is {count!r}, but a whole number from 1 to {_MOST_LAYERS} is needed")
        layers = data["layers"] = [rule if rule is not None else "causal()"] * count
    elif layers is not None:
        if rule is not None:
            raise ValueError("layers lists a rule for each layer already; leave rule out")
        if isinstance(layers, list | tuple) and count is not None and count != len(layers):
            raise ValueError(f"num_hidden_layers is {count}, but layers lists {len(layers)} rules; make them agree")
    if isinstance(layers, list | tuple) and all(isinstance(text, str) for text in layers):
        data["layers"] = tuple(_canonical(text) for text in layers)
    attention, size = data.get("attention"), data.get("hidden_size")
    if isinstance(attention, Mapping):
        data["attention"] = _spelled_out_heads(dict(attention), size)
    return data


def _canonical(text: str) -> str:
    try:
        return parse(text).describe()
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _spelled_out_heads(attention: dict[str, Any], size: Any) -> dict[str, Any]:
    heads = attention.get("num_attention_heads")
    if attention.get("num_key_value_heads") is None and heads is not None:
        attention["num_key_value_heads"] = heads
    whole = isinstance(heads, int) and isinstance(size, int) and not isinstance(heads, bool) and heads > 0
    if attention.get("head_dim") is None and whole:
        if size % heads:
            raise ValueError(
                f"hidden_size {size} does not divide by {heads} attention heads; choose a multiple, or give "
                "attention.head_dim"
            )
        attention["head_dim"] = size // heads
    return attention
