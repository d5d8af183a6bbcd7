"""Words for the feed-forward half of a layer: one network, or many experts of which a token uses a few."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pellucid.configfile import Config
from pellucid.models.configs.numbers import Count, Positive, Whole

Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "relu_squared", "sigmoid", "silu"]


class Dense(Config):
    """Two matrices with an activation between."""

    kind: Literal["dense"] = "dense"
    intermediate_size: Count
    activation: Activation = "gelu"
    bias: bool = False


class Gated(Config):
    """Three matrices: GLU (``sigmoid``), SwiGLU (``silu``), GEGLU (``gelu``)."""

    kind: Literal["gated"] = "gated"
    intermediate_size: Count
    activation: Activation = "silu"
    bias: bool = False


class ClampedGated(Config):
    """Three matrices whose gates cannot grow past ``limit``: ``(up + 1) · gate · σ(alpha · gate)`` (gpt-oss)."""

    kind: Literal["clamped_gated"] = "clamped_gated"
    intermediate_size: Count
    limit: Positive = 7.0
    alpha: Positive = 1.702
    bias: bool = False


class Groups(Config):
    """Each token chooses among the experts of its ``keep`` best groups of ``count``."""

    count: Count
    keep: Count
    score: Literal["max", "top2"]
    """What a group is worth: its best expert (DeepSeek-V2) or its best two (DeepSeek-V3)."""


class Softmax(Config):
    """Softmax over all experts, then the best ones (Mixtral, Qwen, DeepSeek-V2)."""

    kind: Literal["softmax"] = "softmax"
    renormalise: bool = True
    """The chosen weights are divided by their sum."""
    scale: Positive = 1.0
    bias: bool = False
    groups: Groups | None = None


class TopKSoftmax(Config):
    """The best logits, then softmax over those (gpt-oss)."""

    kind: Literal["top_k_softmax"] = "top_k_softmax"
    scale: Positive = 1.0
    bias: bool = False
    groups: Groups | None = None


class Sigmoid(Config):
    """Each expert scored by itself, chosen with a bias that training moves and weights do not feel (DeepSeek-V3)."""

    kind: Literal["sigmoid"] = "sigmoid"
    renormalise: bool = True
    scale: Positive = 1.0
    bias: bool = False
    groups: Groups | None = None


class Shared(Config):
    """A network of the experts' kind that every token goes through as well."""

    intermediate_size: Count
    gated: bool = False
    """Opened by each token as far as it needs (Qwen2-MoE)."""


class MoE(Config):
    """Experts of one kind, ``num_experts_per_tok`` of them for each token. Dropless unless a capacity is set."""

    kind: Literal["moe"] = "moe"
    num_experts: Count
    num_experts_per_tok: Count
    expert: Annotated[Dense | Gated | ClampedGated, Field(discriminator="kind")]
    router: Annotated[Softmax | TopKSoftmax | Sigmoid, Field(discriminator="kind")] = Softmax()
    shared: Shared | None = None
    weigh: Literal["output", "input"] = "output"
    """What the router's weights multiply (``input``: Llama 4)."""
    capacity: Whole | None = None
    """Tokens that an expert takes in one call; later ones get nothing from it, and batch mates matter."""

    @model_validator(mode="after")
    def _routes_fit(self) -> MoE:
        groups, experts, chosen = self.router.groups, self.num_experts, self.num_experts_per_tok
        if chosen > experts:
            raise ValueError(f"num_experts_per_tok is {chosen}, but num_experts {experts}; choose at most all of them")
        if groups is None:
            return self
        if experts % groups.count:
            raise ValueError(f"{experts} experts do not make {groups.count} equal groups; make num_experts a multiple")
        size = experts // groups.count
        if groups.keep > groups.count or chosen > groups.keep * size or (groups.score == "top2" and size < 2):
            raise ValueError(
                f"{groups.keep} of {groups.count} groups of {size} experts cannot give {chosen} experts a token by "
                f"score {groups.score!r}; keep more groups, or make them larger"
            )
        return self


FFN = Annotated[Dense | Gated | ClampedGated | MoE, Field(discriminator="kind")]
