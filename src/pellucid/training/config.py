"""``TrainConfig``: everything a run is made from. The resolved copy is stored with the run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pellucid.configfile import Config
from pellucid.data.text import HELDOUT_SHARE
from pellucid.models.config import ModelConfig
from pellucid.training.precision import Precision
from pellucid.visibility import causal

Rate = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Source = str | tuple[str, ...]
Momentum = Annotated[float, Field(ge=0, lt=1)]


class DataConfig(Config):
    """What is learnt, and how it is cut into rows."""

    source: Source = "python-source"
    """``python-source`` (the running Python's standard library), a file, a glob, or a list of these."""
    text_field: str = "text"
    """The field of JSONL and Parquet records that holds the text."""
    heldout_share: Annotated[float, Field(gt=0, lt=1)] = HELDOUT_SHARE
    """The share of documents kept for validation, chosen by a stable hash of their names."""
    heldout_source: Source | None = None
    """Validation documents of their own; ``source`` is then used for training as a whole."""
    tokenizer: str | None = None
    """A ``tokenizer.json`` to use; left out, one is trained on the training documents."""
    vocab_size: Annotated[int, Field(ge=259)] | None = None
    """Tokens of a tokenizer that is trained; left out, the model's vocabulary."""
    length: Annotated[int, Field(ge=2)] = 256
    """Tokens in a row."""


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

    shape: Literal["cosine", "linear", "stable"] = "cosine"
    """``stable`` stays at the peak and falls in a straight line over the last ``decay_share`` of the run."""
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


class ValidationConfig(Config):
    """Bits per byte of the held-out documents."""

    every: Count = 0
    """Steps between validations; 0: only at the end."""
    documents: Positive | None = 32
    """Held-out documents of a validation on the way, drawn by a hash of their names; at the end: all."""
    length: Annotated[int, Field(ge=2)] | None = None
    """Tokens of a window; left out, ``data.length``."""
    stride: Positive | None = None
    """New tokens in each window of a long document; left out, half of ``length``."""
    batch_tokens: Positive = 16384
    """Tokens that go through the model at once."""


class TrainConfig(Config):
    """A whole run: ``pellucid train CONFIG`` reads it, ``config.yaml`` in the run folder keeps it."""

    model: ModelConfig
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
    checkpoint_activations: bool = False
    """Recompute activations in the backward pass: less memory, a third more work."""
    validation: ValidationConfig = ValidationConfig()
    save_every: Count = 0
    """Steps between checkpoints; 0: only at the end."""
    keep: Positive = 2
    """How many of the newest checkpoints stay; the best one stays besides."""
    seed: Count = 0
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Threads of torch; left out, torch decides."""
    device: str = "cpu"

    @model_validator(mode="after")
    def _labels_are_hidden(self) -> TrainConfig:
        # The objective is the next token: a layer that looks ahead would read its own label, and learn to copy it.
        seeing = next((rule for rule in self.model.rules if rule.ahead != 0), None)
        if seeing is not None:
            raise ValueError(
                f"the rule {seeing} in model.layers lets a token see the next one, which it has to predict; "
                f"add causal: {(causal() & seeing).describe()!r}"
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
