"""Configs of objectives, and which models each fits.

Causal LM, prefix LM, masked LM and span corruption learn from plain text; the others from examples: records of JSON
lines or Parquet whose fields are named here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pellucid.configfile import Config
from pellucid.models import configs
from pellucid.models.config import ModelConfig
from pellucid.visibility import causal

Fraction = Annotated[float, Field(gt=0, le=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
FieldName = Annotated[str, Field(min_length=1, max_length=1000)]
LabelNames = Annotated[tuple[FieldName, ...], Field(max_length=100_000)]


class CausalLMConfig(Config):
    """Predict every token from those before it."""

    kind: Literal["causal_lm"] = "causal_lm"


class PrefixLMConfig(Config):
    """Continue a prefix that is visible as a whole (``prefix()`` in the rules): of text, or of prompts."""

    kind: Literal["prefix_lm"] = "prefix_lm"
    prefix_fraction: Fraction | None = None
    """The length of the prefix as a fraction of each piece of text; by default it ends at a random token."""
    prompt: FieldName | None = None
    """The field of the records that is the prefix; with ``completion``, in place of plain text."""
    completion: FieldName | None = None

    @model_validator(mode="after")
    def _both_or_none(self) -> PrefixLMConfig:
        if (self.prompt is None) != (self.completion is None):
            raise ValueError(f"prompt is {self.prompt!r} and completion {self.completion!r}; give both, or neither")
        if self.prompt is not None and self.prefix_fraction is not None:
            raise ValueError(
                f"prefix_fraction is {self.prefix_fraction}, but prompt {self.prompt!r} ends the prefix; choose one"
            )
        return self


class MaskedLMConfig(Config):
    """Predict masked tokens from both sides (Devlin et al. 2018)."""

    kind: Literal["masked_lm"] = "masked_lm"
    mlm_probability: Fraction = 0.15
    """The fraction of each document's tokens that is predicted."""
    keep_original_prob: Probability = 0.1
    """The fraction of these that stays as it is."""
    random_replace_prob: Probability = 0.1
    """The fraction of these that becomes a random token; all others become the mask token."""
    whole_word_mask: bool = False

    @model_validator(mode="after")
    def _at_most_all(self) -> MaskedLMConfig:
        if self.keep_original_prob + self.random_replace_prob > 1:
            raise ValueError(
                f"keep_original_prob is {self.keep_original_prob} and random_replace_prob {self.random_replace_prob}; "
                "together they can be at most 1"
            )
        return self


class SpanCorruptionConfig(Config):
    """Write out the spans that were cut from a text (Raffel et al. 2020 §3.1.4)."""

    kind: Literal["span_corruption"] = "span_corruption"
    noise_density: Fraction = 0.15
    mean_noise_span_length: Annotated[float, Field(ge=1)] = 3.0
    num_sentinels: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Special tokens that stand for spans; by default as many as a row of ``data.max_length`` can need."""


class Seq2SeqConfig(Config):
    """Write a target text from a source text."""

    kind: Literal["seq2seq"] = "seq2seq"
    source: FieldName = "source"
    target: FieldName = "target"


class ClassificationConfig(Config):
    """Choose the class of a text, or of a pair of texts."""

    kind: Literal["classification"] = "classification"
    text: FieldName = "text"
    label: FieldName = "label"
    text_pair: FieldName | None = None
    label_names: LabelNames = ()
    """Their names in order; by default all that occur."""


class RegressionConfig(Config):
    """Predict one number or several of a text, or of a pair of texts."""

    kind: Literal["regression"] = "regression"
    text: FieldName = "text"
    score: FieldName = "score"
    text_pair: FieldName | None = None


class TokenClassificationConfig(Config):
    """Choose the class of each word."""

    kind: Literal["token_classification"] = "token_classification"
    words: FieldName = "words"
    tags: FieldName = "tags"
    label_names: LabelNames = ()


class QuestionAnsweringConfig(Config):
    """Find the span of a text that answers a question."""

    kind: Literal["question_answering"] = "question_answering"
    question: FieldName = "question"
    text: FieldName = "text"
    start: FieldName = "start"
    """The index of the answer's first character."""
    end: FieldName = "end"
    """One past the index of its last character; both are null where there is no answer."""


class ContrastiveConfig(Config):
    """Find the text that belongs to a text among all others of the batch."""

    kind: Literal["contrastive"] = "contrastive"
    first: FieldName = "first"
    second: FieldName = "second"


AnyObjective = (
    CausalLMConfig
    | PrefixLMConfig
    | MaskedLMConfig
    | SpanCorruptionConfig
    | Seq2SeqConfig
    | ClassificationConfig
    | RegressionConfig
    | TokenClassificationConfig
    | QuestionAnsweringConfig
    | ContrastiveConfig
)
Objective = Annotated[AnyObjective, Field(discriminator="kind")]

_OF_HEAD: dict[type[Any], type[Any]] = {
    configs.SequenceClassificationHeadConfig: ClassificationConfig,
    configs.RegressionHeadConfig: RegressionConfig,
    configs.TokenClassificationHeadConfig: TokenClassificationConfig,
    configs.SpanHeadConfig: QuestionAnsweringConfig,
    configs.SentenceEmbeddingHeadConfig: ContrastiveConfig,
}
_OF_FAMILY: dict[str, tuple[type[Any], ...]] = {
    "decoder": (CausalLMConfig, PrefixLMConfig),
    "encoder": (MaskedLMConfig,),
    "encoder_decoder": (Seq2SeqConfig, SpanCorruptionConfig),
}
"""The objectives of heads with logits for tokens, the default first."""
SMOOTHED = (
    CausalLMConfig,
    PrefixLMConfig,
    MaskedLMConfig,
    SpanCorruptionConfig,
    Seq2SeqConfig,
    ClassificationConfig,
    TokenClassificationConfig,
)
"""Objectives with classes, whose labels can be smoothed."""


def default_objective(model: ModelConfig) -> AnyObjective:
    """The objective of ``model`` by default."""
    chosen: AnyObjective = _of(model)[0]()
    return chosen


def reads_text(objective: AnyObjective) -> bool:
    """Whether ``objective`` learns from plain text rather than from examples."""
    if isinstance(objective, PrefixLMConfig):
        return objective.prompt is None
    return isinstance(objective, CausalLMConfig | MaskedLMConfig | SpanCorruptionConfig)


def check(objective: AnyObjective, model: ModelConfig) -> None:
    """Raises ValueError where ``model`` cannot learn ``objective``, or would learn to copy."""
    possible = _of(model)
    if not isinstance(objective, possible):
        ways = " or ".join(kind().kind for kind in possible)
        raise ValueError(
            f"objective is {objective.kind!r}, but model.family is {model.family!r} with head {model.head.kind!r}, "
            f"which learns {ways}; change one of them"
        )
    if isinstance(objective, ClassificationConfig | TokenClassificationConfig) and objective.label_names:
        _check_label_names(objective.label_names, model)
    if isinstance(objective, CausalLMConfig | PrefixLMConfig | Seq2SeqConfig | SpanCorruptionConfig):
        _check_hidden(objective, model)


def _of(model: ModelConfig) -> tuple[type[Any], ...]:
    found = _OF_HEAD.get(type(model.head))
    return _OF_FAMILY[model.family] if found is None else (found,)


def _check_label_names(label_names: tuple[str, ...], model: ModelConfig) -> None:
    labels = getattr(model.head, "num_labels", None)
    if len(set(label_names)) != len(label_names):
        twice = next(name for name in label_names if label_names.count(name) > 1)
        raise ValueError(f"objective.label_names names {twice!r} twice; name each class once")
    if labels != len(label_names):
        raise ValueError(
            f"objective.label_names has {len(label_names)} names, but model.head.num_labels is {labels}; "
            "make them agree"
        )


def _check_hidden(objective: AnyObjective, model: ModelConfig) -> None:
    """A layer that sees the token which has to be predicted learns to copy it."""
    uses_prefix_groups = isinstance(objective, PrefixLMConfig)
    seeing = next(
        (
            rule
            for rule in model.rules
            if (rule.lookahead_outside_groups if uses_prefix_groups else rule.lookahead) != 0
        ),
        None,
    )
    if seeing is not None:
        way = f"add causal: {(causal() & seeing).describe()!r}"
        if (
            not uses_prefix_groups
            and model.family == "decoder"
            and seeing.uses_prefix_groups
            and seeing.lookahead_outside_groups == 0
        ):
            way = "take objective {kind: prefix_lm}, which predicts nothing that a prefix shows, or " + way
        raise ValueError(
            f"the rule {seeing} in model.layers lets a token see the next one, which it has to predict; {way}"
        )
    if uses_prefix_groups and not any(rule.uses_prefix_groups for rule in model.rules):
        raise ValueError(
            f"objective is 'prefix_lm', but no rule in model.layers is by prefix() (the first is {model.rules[0]}); "
            "take 'causal | prefix()'"
        )
