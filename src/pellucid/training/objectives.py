"""Words for what a run learns, one class an objective, and which models each fits.

Next token, prefix, masked tokens and corrupted spans are learnt from plain text; the others from examples, records of
JSON lines or Parquet whose fields are named here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pellucid.configfile import Config
from pellucid.models import configs
from pellucid.models.config import ModelConfig
from pellucid.visibility import causal

Share = Annotated[float, Field(gt=0, le=1)]
Part = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1, max_length=1000)]
Names = Annotated[tuple[Name, ...], Field(max_length=100_000)]


class NextToken(Config):
    """Every token from those before it."""

    kind: Literal["next_token"] = "next_token"


class PrefixLM(Config):
    """What follows a prefix that is seen whole (``prefix()`` in the rules); of text, or of prompts with completions."""

    kind: Literal["prefix_lm"] = "prefix_lm"
    share: Share | None = None
    """The prefix's share of each piece of text; left out, it ends at a random place."""
    prompt: Name | None = None
    """The field of examples that is the prefix; with ``completion``, instead of plain text."""
    completion: Name | None = None

    @model_validator(mode="after")
    def _both_or_none(self) -> PrefixLM:
        if (self.prompt is None) != (self.completion is None):
            raise ValueError(f"prompt is {self.prompt!r} and completion {self.completion!r}; give both, or neither")
        if self.prompt is not None and self.share is not None:
            raise ValueError(f"share is {self.share}, but prompt {self.prompt!r} ends the prefix; choose one")
        return self


class MaskedLM(Config):
    """Hidden tokens, from both sides (BERT)."""

    kind: Literal["masked_lm"] = "masked_lm"
    share: Share = 0.15
    """Of each document's tokens, those that are predicted."""
    keep: Part = 0.1
    """Of these, the part that stays as it is,"""
    random: Part = 0.1
    """and the part that becomes another token; the others are hidden."""
    whole_words: bool = False

    @model_validator(mode="after")
    def _parts_add_up(self) -> MaskedLM:
        if self.keep + self.random > 1:
            raise ValueError(f"keep is {self.keep} and random {self.random}; together they can be at most 1")
        return self


class SpanCorruption(Config):
    """Spans that were cut out, written down one after the other (T5)."""

    kind: Literal["span_corruption"] = "span_corruption"
    share: Share = 0.15
    mean_span: Annotated[float, Field(ge=1)] = 3.0
    sentinels: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Special tokens that stand for spans; left out, as many as a row of ``data.length`` can need."""


class SequenceToSequence(Config):
    """A text from another one."""

    kind: Literal["sequence_to_sequence"] = "sequence_to_sequence"
    source: Name = "source"
    target: Name = "target"


class Classification(Config):
    """The class of a text, or of two."""

    kind: Literal["classification"] = "classification"
    text: Name = "text"
    label: Name = "label"
    second: Name | None = None
    classes: Names = ()
    """Their names in order; left out, all that are met."""


class Regression(Config):
    """A number of a text, or several."""

    kind: Literal["regression"] = "regression"
    text: Name = "text"
    score: Name = "score"
    second: Name | None = None


class TokenLabelling(Config):
    """The class of each word."""

    kind: Literal["token_labelling"] = "token_labelling"
    words: Name = "words"
    tags: Name = "tags"
    classes: Names = ()


class Span(Config):
    """Where in a text a question is answered."""

    kind: Literal["span"] = "span"
    question: Name = "question"
    text: Name = "text"
    start: Name = "start"
    """The answer's first character,"""
    end: Name = "end"
    """and the one behind its last; both null where there is no answer."""


class Contrastive(Config):
    """Which of all other texts belongs to a text."""

    kind: Literal["contrastive"] = "contrastive"
    first: Name = "first"
    second: Name = "second"


AnyObjective = (
    NextToken
    | PrefixLM
    | MaskedLM
    | SpanCorruption
    | SequenceToSequence
    | Classification
    | Regression
    | TokenLabelling
    | Span
    | Contrastive
)
Objective = Annotated[AnyObjective, Field(discriminator="kind")]

_OF_HEAD: dict[type[Any], type[Any]] = {
    configs.SequenceClassificationHeadConfig: Classification,
    configs.RegressionHeadConfig: Regression,
    configs.TokenClassificationHeadConfig: TokenLabelling,
    configs.SpanHeadConfig: Span,
    configs.SentenceEmbeddingHeadConfig: Contrastive,
}
_OF_FAMILY: dict[str, tuple[type[Any], ...]] = {
    "decoder": (NextToken, PrefixLM),
    "encoder": (MaskedLM,),
    "encoder_decoder": (SequenceToSequence, SpanCorruption),
}
"""What heads with logits for tokens can learn in each family, the usual first."""
SMOOTHED = (
    NextToken,
    PrefixLM,
    MaskedLM,
    SpanCorruption,
    SequenceToSequence,
    Classification,
    TokenLabelling,
)
"""Objectives that choose one of several: their labels can be smoothed."""


def usual(model: ModelConfig) -> AnyObjective:
    """What ``model`` learns unless something else is said."""
    chosen: AnyObjective = _of(model)[0]()
    return chosen


def reads_text(objective: AnyObjective) -> bool:
    """Whether it learns from plain text, and not from examples."""
    if isinstance(objective, PrefixLM):
        return objective.prompt is None
    return isinstance(objective, NextToken | MaskedLM | SpanCorruption)


def check(objective: AnyObjective, model: ModelConfig) -> None:
    """Raises ValueError where ``model`` cannot learn ``objective``, or would learn to copy."""
    possible = _of(model)
    if not isinstance(objective, possible):
        ways = " or ".join(kind().kind for kind in possible)
        raise ValueError(
            f"objective is {objective.kind!r}, but model.family is {model.family!r} with head {model.head.kind!r}, "
            f"which learns {ways}; change one of them"
        )
    if isinstance(objective, Classification | TokenLabelling) and objective.classes:
        _check_classes(objective.classes, model)
    if isinstance(objective, NextToken | PrefixLM | SequenceToSequence | SpanCorruption):
        _check_hidden(objective, model)


def _of(model: ModelConfig) -> tuple[type[Any], ...]:
    found = _OF_HEAD.get(type(model.head))
    return _OF_FAMILY[model.family] if found is None else (found,)


def _check_classes(classes: tuple[str, ...], model: ModelConfig) -> None:
    labels = getattr(model.head, "num_labels", None)
    if len(set(classes)) != len(classes):
        twice = next(name for name in classes if classes.count(name) > 1)
        raise ValueError(f"objective.classes names {twice!r} twice; name each class once")
    if labels != len(classes):
        raise ValueError(
            f"objective.classes has {len(classes)} names, but model.head.num_labels is {labels}; make them agree"
        )


def _check_hidden(objective: AnyObjective, model: ModelConfig) -> None:
    """A layer that sees the token which has to be predicted learns to copy it."""
    uses_prefix_groups = isinstance(objective, PrefixLM)
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
