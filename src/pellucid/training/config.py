"""``TrainConfig``: everything a run is made from. The resolved copy is stored with the run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pellucid.configfile import Config
from pellucid.data.corpus import HELDOUT_FRACTION
from pellucid.data.records import BUILT_IN
from pellucid.models.config import ModelConfig
from pellucid.models.configs import MoEConfig, SigmoidRouterConfig
from pellucid.training import objectives
from pellucid.training.environment import Precision
from pellucid.training.objectives import Objective, reads_text

NonNegative = Annotated[float, Field(ge=0)]
Ratio = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, le=1 << 40)]
Positive = Annotated[int, Field(ge=1, le=1 << 40)]
Length = Annotated[int, Field(ge=2, le=1 << 24)]
Seed = Annotated[int, Field(ge=0, lt=1 << 63)]
Source = str | tuple[str, ...]
Momentum = Annotated[float, Field(ge=0, lt=1)]
_NUM_BYTES = 259


class DataConfig(Config):
    """The data, and how it is cut into rows."""

    source: Source = "python-source"
    """``python-source`` (the running Python's standard library), a file, a glob, or a list of these. Objectives that
    learn from examples need JSON lines or Parquet."""
    text_field: str = "text"
    """The field of JSONL and Parquet records that holds plain text; the objective names those of examples."""
    heldout_fraction: Annotated[float, Field(gt=0, lt=1)] = HELDOUT_FRACTION
    """The fraction of documents that is held out for evaluation, chosen by a stable hash of their names."""
    heldout_source: Source | None = None
    """Separate documents for evaluation; all of ``source`` is then used for training."""
    tokenizer: str | None = None
    """A ``tokenizer.json`` to use; by default one is trained on the training documents."""
    vocab_size: Annotated[int, Field(ge=3, le=1 << 24)] | None = None
    """Tokens of a tokenizer that is trained; by default the model's vocabulary."""
    tokenizer_kind: Literal["bpe", "wordpiece", "unigram"] = "bpe"
    """What is trained without a ``tokenizer``. It gets the special tokens that the objective needs."""
    max_length: Length = 256
    """Tokens in a row. Text is packed into rows of this length; examples are truncated to it."""
    max_source_length: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    """Tokens in a row of what an encoder reads; by default ``max_length``."""

    @model_validator(mode="after")
    def _bytes_fit(self) -> DataConfig:
        if self.vocab_size is not None and self.vocab_size < _NUM_BYTES and self.tokenizer_kind != "wordpiece":
            raise ValueError(
                f"vocab_size is {self.vocab_size}, but tokenizer_kind {self.tokenizer_kind!r} needs {_NUM_BYTES} or "
                "more: 256 bytes and three special tokens"
            )
        return self


class AdamWConfig(Config):
    """AdamW for all parameters. Norms, biases and embeddings do not decay."""

    kind: Literal["adamw"] = "adamw"
    learning_rate: NonNegative = 1e-3
    betas: tuple[Momentum, Momentum] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: NonNegative = 0.1


class MuonConfig(Config):
    """Muon for the matrices inside the blocks, AdamW for embeddings, head, norms and biases."""

    kind: Literal["muon"] = "muon"
    learning_rate: NonNegative = 0.02
    """The peak learning rate of the matrices; all other parameters use ``adamw.learning_rate``."""
    momentum: Momentum = 0.95
    weight_decay: NonNegative = 0.0
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original"
    """How a matrix's shape changes its learning rate (``match_rms_adamw`` takes rates tuned for AdamW)."""
    precision: Literal["auto", "float32", "bfloat16"] = "float32"
    """The dtype of the orthogonalization; ``auto`` as for the run's own ``precision``."""
    adamw: AdamWConfig = AdamWConfig(learning_rate=3e-3, weight_decay=0.0)


OptimizerConfig = Annotated[AdamWConfig | MuonConfig, Field(discriminator="kind")]


class LRSchedulerConfig(Config):
    """The learning rate over a run, as a multiple of its peak: a warm-up, then a decay to ``min_lr_ratio``."""

    type: Literal["cosine", "linear", "warmup_stable_decay", "inverse_sqrt"] = "cosine"
    """``warmup_stable_decay`` stays at the peak and decays linearly over the last ``decay_ratio`` of the run.
    ``inverse_sqrt`` decays as ``sqrt(warm-up / step)`` (Vaswani et al. 2017 §5.3), whatever the length of the run, and
    never below ``min_lr_ratio``."""
    warmup_steps: Count = 0
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The warm-up as a fraction of the run, in place of ``warmup_steps``."""
    decay_ratio: Ratio = 0.2
    min_lr_ratio: Ratio = 0.0

    @model_validator(mode="after")
    def _one_warmup(self) -> LRSchedulerConfig:
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps} and warmup_ratio {self.warmup_ratio}; give one of them"
            )
        return self


class LoadBalancingConfig(Config):
    """What keeps the experts of a mixture equally used."""

    router_aux_loss_coef: NonNegative = 0.01
    """The weight of each routing layer's load-balancing loss (Fedus et al. 2021 eq. 4)."""
    router_bias_update_rate: NonNegative = 0.0
    """How far a step moves the expert biases of sigmoid routers (Wang et al. 2024)."""


class EvaluationConfig(Config):
    """How held-out documents are evaluated: bits per byte of text, otherwise the loss and a metric."""

    num_documents: Positive | None = 32
    """Held-out documents of an evaluation during the run, chosen by a hash of their names; at the end: all."""
    max_length: Length | None = None
    """Tokens of a window; by default ``data.max_length``."""
    stride: Positive | None = None
    """New tokens in each window of a long document; by default half of ``max_length``."""
    batch_tokens: Positive = 16384
    """Tokens in a batch."""
    num_generated_samples: Count = 64
    """Targets of held-out examples that are generated greedily and compared at the end; 0: none."""


class TrainConfig(Config):
    """A whole run: ``pellucid train CONFIG`` reads it, ``config.yaml`` in the run folder stores it.

    ``max_steps`` or ``max_minutes`` is required; with both, the run ends at whichever is reached first.
    """

    model: ModelConfig
    objective: Objective = objectives.CausalLMConfig()
    """By default, the usual one for the model's family and head."""
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = AdamWConfig()
    lr_scheduler: LRSchedulerConfig = LRSchedulerConfig()
    max_steps: Positive | None = None
    max_minutes: Annotated[float, Field(gt=0)] | None = None
    """Counted from the first step on; evaluation and saving during the run are included."""
    batch_size: Positive = 16
    """Rows of a micro-batch."""
    gradient_accumulation_steps: Positive = 1
    """Micro-batches of a step; their losses are summed before they are divided."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradients are clipped to this norm; null: not at all."""
    precision: Literal["auto", "float32", "bfloat16"] = "float32"
    """The dtype of matrix products (weights stay float32); ``auto`` measures which is faster here, and the run folder
    stores the answer."""
    label_smoothing_factor: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The part of each label that is spread over all classes (Szegedy et al. 2016), in training only."""
    load_balancing: LoadBalancingConfig | None = None
    """For mixtures of experts; by default nothing keeps them equally used."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more work."""
    eval_steps: Count = 0
    """Steps between evaluations; 0: only at the end."""
    evaluation: EvaluationConfig = EvaluationConfig()
    save_steps: Count = 0
    """Steps between checkpoints; 0: only at the end."""
    save_total_limit: Positive = 2
    """How many of the newest checkpoints are kept, besides the best one."""
    seed: Seed = 0
    num_threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads of torch; by default torch decides."""
    device: str = "cpu"

    @model_validator(mode="after")
    def _ends(self) -> TrainConfig:
        if self.max_steps is None and self.max_minutes is None:
            raise ValueError("max_steps and max_minutes are both missing; give one of them, so that the run ends")
        return self

    @model_validator(mode="after")
    def _objective_fits(self) -> TrainConfig:
        if "objective" not in self.model_fields_set:
            object.__setattr__(self, "objective", objectives.default_objective(self.model))
        objectives.check(self.objective, self.model)
        data, objective = self.data, self.objective
        if self.label_smoothing_factor and not isinstance(objective, objectives.SMOOTHED):
            raise ValueError(
                f"label_smoothing_factor is {self.label_smoothing_factor}, but objective {objective.kind!r} has no "
                "labels to smooth; leave it out"
            )
        if data.max_source_length is not None and self.model.family != "encoder_decoder":
            raise ValueError(
                f"data.max_source_length is {data.max_source_length}, but model.family is {self.model.family!r}, which "
                "reads no source; leave it out"
            )
        if data.max_source_length is not None and isinstance(objective, objectives.SpanCorruptionConfig):
            raise ValueError(
                f"data.max_source_length is {data.max_source_length}, but objective 'span_corruption' makes the source "
                f"of rows of data.max_length {data.max_length}; leave it out"
            )
        if isinstance(objective, objectives.CausalLMConfig) and data.tokenizer_kind == "wordpiece":
            raise ValueError(
                "data.tokenizer_kind is 'wordpiece', which loses white space, but objective 'causal_lm' is measured "
                "in bits per byte; choose bpe or unigram"
            )
        if data.source == BUILT_IN and not reads_text(objective):
            raise ValueError(
                f"objective {objective.kind!r} learns from examples, but data.source is {BUILT_IN!r}; "
                "name a .jsonl or .parquet file"
            )
        return self

    @model_validator(mode="after")
    def _load_balancing_fits(self) -> TrainConfig:
        if self.load_balancing is None:
            return self
        parts = [layer.ffn or stack.ffn for stack in self.model.stacks for layer in stack.each_layer]
        routers = [part.router for part in parts if isinstance(part, MoEConfig)]
        if not routers:
            kinds = ", ".join(sorted({part.kind for part in parts}))
            raise ValueError(f"load_balancing is for experts, but model.ffn is {kinds}; leave it out, or choose 'moe'")
        rate = self.load_balancing.router_bias_update_rate
        if rate and not any(isinstance(router, SigmoidRouterConfig) for router in routers):
            raise ValueError(
                f"load_balancing.router_bias_update_rate is {rate}, but the routers are "
                f"{', '.join(sorted({router.kind for router in routers}))}; only sigmoid ones have an expert bias"
            )
        return self

    @model_validator(mode="after")
    def _windows_fit(self) -> TrainConfig:
        length, stride = self.window
        if stride >= length:
            raise ValueError(f"evaluation.stride is {stride} but a window has {length} tokens; stride must be smaller")
        vocab = self.data.vocab_size
        if vocab is not None and vocab > self.model.vocab_size:
            raise ValueError(
                f"data.vocab_size is {vocab} but model.vocab_size is {self.model.vocab_size}; "
                "the model needs a row for every token"
            )
        return self

    def resolve_auto(self, precision: Precision, of_optimizer: Precision | None = None) -> TrainConfig:
        """A copy with ``auto`` replaced by ``precision``, that of the optimizer by ``of_optimizer`` if given."""
        changes: dict[str, Any] = {}
        if self.precision == "auto":
            changes["precision"] = precision
        if isinstance(self.optimizer, MuonConfig) and self.optimizer.precision == "auto":
            changes["optimizer"] = self.optimizer.model_copy(update={"precision": of_optimizer or precision})
        return self.model_copy(update=changes)

    @property
    def resolved_precision(self) -> Precision:
        """The precision, once ``auto`` has been resolved (see ``setup.resolve_auto``)."""
        assert self.precision != "auto"
        return self.precision

    @property
    def window(self) -> tuple[int, int]:
        """Length and stride of evaluation windows, in tokens."""
        length = self.evaluation.max_length or self.data.max_length
        return length, self.evaluation.stride or max(length // 2, 1)
