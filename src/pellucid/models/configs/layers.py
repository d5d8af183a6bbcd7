"""The parts of a layer: norms, attention, and the feed-forward network or its many experts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pellucid.configfile import Config

Count = Annotated[int, Field(ge=1, le=1 << 24)]
Heads = Annotated[int, Field(ge=1, le=1 << 14)]
Whole = Annotated[int, Field(ge=0, le=1 << 24)]
Probability = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RMSNormConfig(Config):
    """Scales each token's features by their root mean square."""

    kind: Literal["rms_norm"] = "rms_norm"
    eps: Positive = 1e-6
    offset: Literal[0, 1] = 0
    """1: weights are stored as w - 1 (Gemma)."""


class LayerNormConfig(Config):
    """Centres and scales each token's features."""

    kind: Literal["layer_norm"] = "layer_norm"
    eps: Positive = 1e-5
    bias: bool = True


class BareRMSNormConfig(Config):
    """RMSNorm without weights."""

    kind: Literal["bare_rms_norm"] = "bare_rms_norm"
    eps: Positive = 1e-6


class BareLayerNormConfig(Config):
    """LayerNorm without weights (OLMo)."""

    kind: Literal["bare_layer_norm"] = "bare_layer_norm"
    eps: Positive = 1e-5


NormConfig = Annotated[
    RMSNormConfig | LayerNormConfig | BareRMSNormConfig | BareLayerNormConfig, Field(discriminator="kind")
]


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
    """After the rotation instead of before it."""

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
    def rotary_head_dim(self) -> int:
        """How many features of a head rotary positions are made for."""
        return self.head_dim

    @property
    def rotary_size_text(self) -> str:
        """The same, as an error names it."""
        return f"attention.head_dim {self.head_dim}"


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
    """Features of a head that are rotated."""
    v_head_dim: Count
    scale: Positive | None = None
    """None is ``(qk_nope_head_dim + qk_rope_head_dim) ** -0.5``, times what the scaling of positions adds."""
    attn_logit_softcapping: Positive | None = None
    """Bends scores to ``c · tanh(score / c)``."""

    @property
    def rotary_head_dim(self) -> int:
        """How many features of a head rotary positions are made for."""
        return self.qk_rope_head_dim

    @property
    def rotary_size_text(self) -> str:
        """The same, as an error names it."""
        return f"attention.qk_rope_head_dim {self.qk_rope_head_dim}"


AttentionConfig = Annotated[GroupedQueryAttentionConfig | MLAConfig, Field(discriminator="kind")]

ActivationName = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "relu_squared", "sigmoid", "silu"]


class DenseFFNConfig(Config):
    """Two matrices with an activation between."""

    kind: Literal["dense"] = "dense"
    intermediate_size: Count
    activation: ActivationName = "gelu"
    bias: bool = False


class GatedFFNConfig(Config):
    """Three matrices: GLU (``sigmoid``), SwiGLU (``silu``), GEGLU (``gelu``)."""

    kind: Literal["gated"] = "gated"
    intermediate_size: Count
    activation: ActivationName = "silu"
    bias: bool = False


class ClampedGatedFFNConfig(Config):
    """Three matrices whose gates cannot grow past ``limit``: ``(up + 1) · gate · σ(alpha · gate)`` (gpt-oss)."""

    kind: Literal["clamped_gated"] = "clamped_gated"
    intermediate_size: Count
    limit: Positive = 7.0
    alpha: Positive = 1.702
    bias: bool = False


class ExpertGroupsConfig(Config):
    """Each token chooses among the experts of its ``topk_group`` best groups of ``n_group``."""

    n_group: Count
    topk_group: Count
    score: Literal["max", "top2"]
    """What a group is worth: its best expert (DeepSeek-V2) or its best two (DeepSeek-V3)."""


class SoftmaxRouterConfig(Config):
    """Softmax over all experts, then the best ones (Mixtral, Qwen, DeepSeek-V2)."""

    kind: Literal["softmax"] = "softmax"
    norm_topk_prob: bool = True
    """The chosen weights are divided by their sum."""
    routed_scaling_factor: Positive = 1.0
    bias: bool = False
    groups: ExpertGroupsConfig | None = None


class TopKSoftmaxRouterConfig(Config):
    """The best logits, then softmax over those (gpt-oss)."""

    kind: Literal["top_k_softmax"] = "top_k_softmax"
    routed_scaling_factor: Positive = 1.0
    bias: bool = False
    groups: ExpertGroupsConfig | None = None


class SigmoidRouterConfig(Config):
    """Each expert scored by itself, chosen with a bias that training moves and weights do not feel (DeepSeek-V3)."""

    kind: Literal["sigmoid"] = "sigmoid"
    norm_topk_prob: bool = True
    routed_scaling_factor: Positive = 1.0
    bias: bool = False
    groups: ExpertGroupsConfig | None = None


class SharedExpertConfig(Config):
    """A network of the experts' kind that every token goes through as well."""

    intermediate_size: Count
    gated: bool = False
    """Opened by each token as far as it needs (Qwen2-MoE)."""


class MoEConfig(Config):
    """Experts of one kind, ``num_experts_per_tok`` of them for each token. Dropless unless a capacity is set."""

    kind: Literal["moe"] = "moe"
    num_experts: Count
    num_experts_per_tok: Count
    expert: Annotated[DenseFFNConfig | GatedFFNConfig | ClampedGatedFFNConfig, Field(discriminator="kind")]
    router: Annotated[
        SoftmaxRouterConfig | TopKSoftmaxRouterConfig | SigmoidRouterConfig, Field(discriminator="kind")
    ] = SoftmaxRouterConfig()
    shared: SharedExpertConfig | None = None
    apply_weight_on_input: bool = False
    """The router's weights multiply what goes into an expert instead of what comes out (Llama 4)."""
    expert_capacity: Whole | None = None
    """Tokens that an expert takes in one call; later ones get nothing from it, and batch mates matter."""

    @model_validator(mode="after")
    def _routes_fit(self) -> MoEConfig:
        groups, experts, chosen = self.router.groups, self.num_experts, self.num_experts_per_tok
        if chosen > experts:
            raise ValueError(f"num_experts_per_tok is {chosen}, but num_experts {experts}; choose at most all of them")
        if groups is None:
            return self
        if experts % groups.n_group:
            raise ValueError(
                f"{experts} experts do not make {groups.n_group} equal groups; make num_experts a multiple"
            )
        size = experts // groups.n_group
        if (
            groups.topk_group > groups.n_group
            or chosen > groups.topk_group * size
            or (groups.score == "top2" and size < 2)
        ):
            raise ValueError(
                f"{groups.topk_group} of {groups.n_group} groups of {size} experts cannot give {chosen} experts a "
                f"token by score {groups.score!r}; keep more groups, or make them larger"
            )
        return self


FFNConfig = Annotated[DenseFFNConfig | GatedFFNConfig | ClampedGatedFFNConfig | MoEConfig, Field(discriminator="kind")]
