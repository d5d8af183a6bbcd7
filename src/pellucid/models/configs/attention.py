"""Words for attention: how many heads, of which size, and what happens to queries, keys and scores."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from pellucid.configfile import Config
from pellucid.models.configs.numbers import Count, Heads, Positive


class QKNormConfig(Config):
    """A norm on queries and keys before they meet (Henry et al. 2020; Qwen 3, OLMo 2, Cohere, Llama 4)."""

    kind: Literal["rms_norm", "layer_norm", "head_layer_norm", "bare_rms_norm", "l2_norm"] = "rms_norm"
    """``head_layer_norm`` has weights of its own for each head; ``bare_rms_norm`` and ``l2_norm`` have none."""
    over: Literal["head", "projection"] = "head"
    """One norm for each head's features, or one over all heads together."""
    eps: Positive = 1e-6
    offset: Literal[0, 1] = 0
    """1: weights are stored as w - 1 (``rms_norm``)."""
    after_positions: bool = False
    """Behind the rotary turn instead of before it."""

    @model_validator(mode="after")
    def _kind_fits(self) -> QKNormConfig:
        if self.offset and self.kind != "rms_norm":
            raise ValueError(f"offset 1 belongs to rms_norm, but kind is {self.kind!r}; leave offset out")
        if self.kind == "head_layer_norm" and self.over != "head":
            raise ValueError("head_layer_norm is a norm for each head; set over to 'head'")
        return self


class GroupedQueryAttentionConfig(Config):
    """Multi-head, grouped-query or multi-query attention."""

    kind: Literal["grouped"] = "grouped"
    num_attention_heads: Heads
    num_key_value_heads: Heads
    """Defaults to ``num_attention_heads`` (multi-head attention)."""
    head_dim: Count
    """Defaults to ``hidden_size / num_attention_heads``."""
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    """``qkv_bias`` is short for the three."""
    o_bias: bool = False
    qk_norm: QKNormConfig | None = None
    """``true`` is short for an RMSNorm on each head's queries and keys with the model's own eps."""
    clip_qkv: Positive | None = None
    """Queries, keys and values are cut off at ± this."""
    scale: Positive | None = None
    """What scores are multiplied by; None is ``head_dim ** -0.5``."""
    attn_logit_softcapping: Positive | None = None
    """Bends scores to ``c · tanh(score / c)``."""
    attention_sinks: bool = False
    """A learned logit a head that joins each softmax as a key without a value (gpt-oss)."""

    @model_validator(mode="after")
    def _heads_fit(self) -> GroupedQueryAttentionConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} query heads cannot share {self.num_key_value_heads} key/value heads "
                "evenly; make num_attention_heads a multiple of num_key_value_heads"
            )
        return self

    @property
    def biases(self) -> tuple[Literal["q", "k", "v", "o"], ...]:
        """The projections that have one."""
        given = {"q": self.q_bias, "k": self.k_bias, "v": self.v_bias, "o": self.o_bias}
        return tuple(name for name, has in given.items() if has)  # type: ignore[misc]


class MLAConfig(Config):
    """Multi-head latent attention: keys and values from a narrow latent, one rotary key for all heads (DeepSeek)."""

    kind: Literal["latent"] = "latent"
    num_attention_heads: Heads
    q_lora_rank: Count | None = None
    """Size of the queries' latent; None: queries straight from the stream."""
    kv_lora_rank: Count
    qk_nope_head_dim: Count
    """Features of a head that carry no position."""
    qk_rope_head_dim: Count
    """Features of a head that are turned."""
    v_head_dim: Count
    scale: Positive | None = None
    """None is ``(qk_nope_head_dim + qk_rope_head_dim) ** -0.5``, times what the scaling of positions adds."""
    attn_logit_softcapping: Positive | None = None
    """Bends scores to ``c · tanh(score / c)``."""
