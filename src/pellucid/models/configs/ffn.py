"""Words for the feed-forward half of a layer: one network, or many experts of which a token uses a few."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pellucid.configfile import Config
from pellucid.models.configs.numbers import Count, Positive, Whole

Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "relu_squared", "sigmoid", "silu"]


class DenseFFNConfig(Config):
    """Two matrices with an activation between."""

    kind: Literal["dense"] = "dense"
    intermediate_size: Count
    activation: Activation = "gelu"
    bias: bool = False


class GatedFFNConfig(Config):
    """Three matrices: GLU (``sigmoid``), SwiGLU (``silu``), GEGLU (``gelu``)."""

    kind: Literal["gated"] = "gated"
    intermediate_size: Count
    activation: Activation = "silu"
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
                f"{groups.topk_group} of {groups.n_group} groups of {size} experts cannot give {chosen} experts a token by "
                f"score {groups.score!r}; keep more groups, or make them larger"
            )
        return self


FFNConfig = Annotated[DenseFFNConfig | GatedFFNConfig | ClampedGatedFFNConfig | MoEConfig, Field(discriminator="kind")]
