"""``TrainConfig``: everything a run is made from. The resolved copy is stored with the run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pellucid.configfile import Config
from pellucid.data.corpus import HELDOUT_SHARE
from pellucid.data.records import BUILT_IN
from pellucid.models.config import ModelConfig
from pellucid.models.configs import MoEConfig, SigmoidRouterConfig
from pellucid.training import objectives
from pellucid.training.objectives import Objective, reads_text
from pellucid.training.precision import Precision

Rate = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, le=1 << 40)]
Positive = Annotated[int, Field(ge=1, le=1 << 40)]
Length = Annotated[int, Field(ge=2, le=1 << 24)]
Seed = Annotated[int, Field(ge=0, lt=1 << 63)]
Source = str | tuple[str, ...]
Momentum = Annotated[float, Field(ge=0, lt=1)]
_BYTES = 259


class DataConfig(Config):
    """What is learnt, and how it is cut into rows."""

    source: Source = "python-source"
    """``python-source`` (the running Python's standard library), a file, a glob, or a list of these. Objectives that
    learn from examples want JSON lines or Parquet."""
    text_field: str = "text"
    """The field of JSONL and Parquet records that holds plain text; those of examples the objective names."""
    heldout_share: Annotated[float, Field(gt=0, lt=1)] = HELDOUT_SHARE
    """The share of documents kept for validation, chosen by a stable hash of their names."""
    heldout_source: Source | None = None
    """Validation documents of their own; ``source`` is then used for training as a whole."""
    tokenizer: str | None = None
    """A ``tokenizer.json`` to use; left out, one is trained on the training documents."""
    vocab_size: Annotated[int, Field(ge=3, le=1 << 24)] | None = None
    """Tokens of a tokenizer that is trained; left out, the model's vocabulary."""
    tokenizer_kind: Literal["bpe", "wordpiece", "unigram"] = "bpe"
    """What is trained where no ``tokenizer`` is named. It gets the special tokens that the objective needs."""
    length: Length = 256
    """Tokens in a row. Examples are cut to that."""
    source_length: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    """Tokens in a row of what an encoder reads; left out, ``length``."""

    @model_validator(mode="after")
    def _bytes_fit(self) -> DataConfig:
        if self.vocab_size is not None and self.vocab_size < _BYTES and self.tokenizer_kind != "wordpiece":
            raise ValueError(
                f"vocab_size is {self.vocab_size}, but tokenizer_kind {self.tokenizer_kind!r} needs {_BYTES} or more: "
                "256 bytes and three special tokens"
            )
        return self


class AdamW(Config):
    """AdamW for everything. Norms, biases and embeddings do not decay."""

    kind: Literal["adamw"] = "adamw"
    rate: Rate = 1e-3
    betas: tuple[Momentum, Momentum] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Rate = 0.1


class Muon(Config):
    """Muon for the matrices inside the blocks, AdamW for embeddings, head, norms and biases."""

    kind: Literal["muon"] = "muon"
    rate: Rate = 0.02
    """The peak rate of the matrices; the others follow ``adamw.rate``."""
    momentum: Momentum = 0.95
    weight_decay: Rate = 0.0
    adjust: Literal["original", "match_rms_adamw"] = "original"
    """How a matrix's shape changes its rate (``match_rms_adamw`` takes rates tuned for AdamW)."""
    precision: Literal["auto", "float32", "bfloat16"] = "float32"
    """The number format of the orthogonalisation; ``auto`` as for the run's own ``precision``."""
    adamw: AdamW = AdamW(rate=3e-3, weight_decay=0.0)


Optimizer = Annotated[AdamW | Muon, Field(discriminator="kind")]


class Schedule(Config):
    """The rate over a run, as a multiple of its peak: warm-up, then a shape that ends at ``floor``."""

    shape: Literal["cosine", "linear", "stable", "inverse_sqrt"] = "cosine"
    """``stable`` stays at the peak and falls in a straight line over the last ``decay_share`` of the run.
    ``inverse_sqrt`` falls as ``sqrt(warm-up / step)`` (Vaswani et al. 2017 §5.3), whatever the budget, and never below
    ``floor``."""
    warmup_steps: Count = 0
    warmup_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The warm-up as a share of the run, instead of as steps."""
    decay_share: Share = 0.2
    floor: Share = 0.0

    @model_validator(mode="after")
    def _one_warmup(self) -> Schedule:
        if self.warmup_steps and self.warmup_share:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps} and warmup_share {self.warmup_share}; give one of them"
            )
        return self


class Steps(Config):
    """A run of so many steps."""

    kind: Literal["steps"] = "steps"
    steps: Positive


class Minutes(Config):
    """A run of so many minutes, from the first step on; validation and saving on the way are included."""

    kind: Literal["minutes"] = "minutes"
    minutes: Annotated[float, Field(gt=0)]
    steps: Positive | None = None
    """Stop at this step even if there is time left."""


Budget = Annotated[Steps | Minutes, Field(discriminator="kind")]


class Balance(Config):
    """What keeps a mixture's experts equally used."""

    coefficient: Rate = 0.01
    """How much each routing layer's balance loss (Fedus et al. 2021 eq. 4) adds to the loss."""
    rebalance_rate: Rate = 0.0
    """How far a step moves the choice biases of sigmoid routers (Wang et al. 2024)."""


class ValidationConfig(Config):
    """What the model makes of held-out documents: bits per byte of text, otherwise the loss and a figure beside it."""

    every: Count = 0
    """Steps between validations; 0: only at the end."""
    documents: Positive | None = 32
    """Held-out documents of a validation on the way, drawn by a hash of their names; at the end: all."""
    length: Length | None = None
    """Tokens of a window; left out, ``data.length``."""
    stride: Positive | None = None
    """New tokens in each window of a long document; left out, half of ``length``."""
    batch_tokens: Positive = 16384
    """Tokens that go through the model at once."""
    written: Count = 64
    """At the end, targets of held-out examples that are written out greedily and compared; 0: none."""


class TrainConfig(Config):
    """A whole run: ``pellucid train CONFIG`` reads it, ``config.yaml`` in the run folder keeps it."""

    model: ModelConfig
    objective: Objective = objectives.NextToken()
    """Left out, what the model's family and head are for."""
    data: DataConfig = DataConfig()
    optimizer: Optimizer = AdamW()
    schedule: Schedule = Schedule()
    budget: Budget
    batch_size: Positive = 16
    """Rows of a micro-batch."""
    accumulation: Positive = 1
    """Micro-batches of a step; their losses are summed before they are divided."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    precision: Literal["auto", "float32", "bfloat16"] = "float32"
    """``auto`` measures once which is faster here; the run folder keeps what was chosen."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The part of each label that is spread over all choices (Szegedy et al. 2016), in training alone."""
    balance: Balance | None = None
    """For mixtures of experts; left out, nothing keeps them equally used."""
    checkpoint_activations: bool = False
    """Recompute activations in the backward pass: less memory, a third more work."""
    validation: ValidationConfig = ValidationConfig()
    save_every: Count = 0
    """Steps between checkpoints; 0: only at the end."""
    keep: Positive = 2
    """How many of the newest checkpoints stay; the best one stays besides."""
    seed: Seed = 0
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Threads of torch; left out, torch decides."""
    device: str = "cpu"

    @model_validator(mode="after")
    def _objective_fits(self) -> TrainConfig:
        if "objective" not in self.model_fields_set:
            object.__setattr__(self, "objective", objectives.usual(self.model))
        objectives.check(self.objective, self.model)
        if self.label_smoothing and not isinstance(self.objective, objectives.SMOOTHED):
            raise ValueError(
                f"label_smoothing is {self.label_smoothing}, but objective {self.objective.kind!r} has no labels to "
                "smooth; leave it out"
            )
        if self.data.source_length is not None and self.model.family != "encoder_decoder":
            raise ValueError(
                f"data.source_length is {self.data.source_length}, but model.family is {self.model.family!r}, which "
                "reads no source; leave it out"
            )
        if self.data.source_length is not None and isinstance(self.objective, objectives.SpanCorruption):
            raise ValueError(
                f"data.source_length is {self.data.source_length}, but objective 'span_corruption' makes the source of "
                f"rows of data.length {self.data.length}; leave it out"
            )
        if isinstance(self.objective, objectives.NextToken) and self.data.tokenizer_kind == "wordpiece":
            raise ValueError(
                "data.tokenizer_kind is 'wordpiece', which loses white space, but objective 'next_token' is measured "
                "in bits per byte; take bpe or unigram"
            )
        if self.data.source == BUILT_IN and not reads_text(self.objective):
            raise ValueError(
                f"objective {self.objective.kind!r} learns from examples, but data.source is {BUILT_IN!r}; "
                "name a .jsonl or .parquet file"
            )
        return self

    @model_validator(mode="after")
    def _balance_fits(self) -> TrainConfig:
        if self.balance is None:
            return self
        parts = [layer.ffn or stack.ffn for stack in self.model.stacks for layer in stack.each_layer]
        routers = [part.router for part in parts if isinstance(part, MoEConfig)]
        if not routers:
            kinds = ", ".join(sorted({part.kind for part in parts}))
            raise ValueError(f"balance is for experts, but model.ffn is {kinds}; leave it out, or take 'moe'")
        if self.balance.rebalance_rate and not any(isinstance(router, SigmoidRouterConfig) for router in routers):
            raise ValueError(
                f"balance.rebalance_rate is {self.balance.rebalance_rate}, but the routers are "
                f"{', '.join(sorted({router.kind for router in routers}))}; only sigmoid ones have a choice bias"
            )
        return self

    @model_validator(mode="after")
    def _windows_fit(self) -> TrainConfig:
        length, stride = self.window
        if stride >= length:
            raise ValueError(f"validation.stride is {stride} but a window has {length} tokens; stride must be smaller")
        vocab = self.data.vocab_size
        if vocab is not None and vocab > self.model.vocab_size:
            raise ValueError(
                f"data.vocab_size is {vocab} but model.vocab_size is {self.model.vocab_size}; "
                "the model needs a row for every token"
            )
        return self

    def settled(self, precision: Precision, of_optimizer: Precision | None = None) -> TrainConfig:
        """The same with ``auto`` replaced by what was measured, the optimizer's by ``of_optimizer``."""
        changes: dict[str, Any] = {}
        if self.precision == "auto":
            changes["precision"] = precision
        if isinstance(self.optimizer, Muon) and self.optimizer.precision == "auto":
            changes["optimizer"] = self.optimizer.model_copy(update={"precision": of_optimizer or precision})
        return self.model_copy(update=changes)

    @property
    def settled_precision(self) -> Precision:
        """The precision, once ``auto`` has been decided (see ``prepare.settled``)."""
        assert self.precision != "auto"
        return self.precision

    @property
    def window(self) -> tuple[int, int]:
        """Length and stride of validation windows."""
        length = self.validation.length or self.data.length
        return length, self.validation.stride or max(length // 2, 1)
