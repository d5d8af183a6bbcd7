"""From the words of an objective to the parts of ``data``: what records hold, and what is asked of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pellucid.configfile import Config
from pellucid.data import objectives as data
from pellucid.data.schemas import (
    ClassificationSchema,
    PromptCompletionSchema,
    QuestionAnsweringSchema,
    RecordSchema,
    RegressionSchema,
    Seq2SeqSchema,
    SimilarityPairSchema,
    TokenClassificationSchema,
)
from pellucid.data.tokenizer import Tokenizer
from pellucid.data.vocabulary import MASK, sentinels
from pellucid.errors import ConfigError
from pellucid.training import objectives
from pellucid.training.config import TrainConfig


def special_tokens(config: TrainConfig) -> tuple[str, ...]:
    """The special tokens that the objective needs, besides begin, end and padding."""
    match config.objective:
        case objectives.MaskedLMConfig():
            return (MASK,)
        case objectives.SpanCorruptionConfig():
            return sentinels(sentinel_count(config))
    return ()


def sentinel_count(config: TrainConfig) -> int:
    """Sentinels of span corruption: those that are asked for, or as many as the longest row can need."""
    word = config.objective
    assert isinstance(word, objectives.SpanCorruptionConfig)
    if word.num_sentinels is not None:
        return word.num_sentinels
    return max(spans for _, spans in _counts(word, config.data.max_length))


def corrupted_lengths(word: objectives.SpanCorruptionConfig, length: int) -> tuple[int, int]:
    """The longest source and the longest target that come of documents of up to ``length`` tokens."""
    found = list(_counts(word, length))
    source = max(tokens - cut + spans + 1 for tokens, (cut, spans) in enumerate(found, 1))
    return source, max(cut + spans + 2 for cut, spans in found)


def _counts(word: objectives.SpanCorruptionConfig, length: int) -> Iterator[tuple[int, int]]:
    """For documents of 1 … ``length`` tokens, how many are cut out and in how many spans."""
    probe = data.SpanCorruption((), -1, -1, **_arguments(word))
    return map(probe.counts, range(1, length + 1))


def _arguments(word: Config) -> dict[str, Any]:
    """What a config and the part of ``data`` that it describes have in common, under the same names."""
    return word.model_dump(exclude={"kind", "num_sentinels", "whole_word_mask", "prefix_fraction"})


def objective_of(config: TrainConfig, tokenizer: Tokenizer, label_names: tuple[str, ...]) -> data.Objective:
    """The objective that ``config`` names, for the ids of ``tokenizer``."""
    word = config.objective
    match word:
        case objectives.PrefixLMConfig():
            return data.PrefixLM(word.prefix_fraction)
        case objectives.MaskedLMConfig():
            return _masked(word, tokenizer)
        case objectives.SpanCorruptionConfig():
            return _corrupted(config, word, tokenizer)
        case objectives.Seq2SeqConfig():
            assert tokenizer.bos_id is not None
            return data.SequenceToSequence(tokenizer.bos_id)
        case objectives.ClassificationConfig() | objectives.TokenClassificationConfig():
            labels = config.model.head.num_labels  # type: ignore[union-attr]
            if len(label_names) != labels:
                named = ", ".join(map(repr, label_names[:5])) + (", …" if len(label_names) > 5 else "")
                raise ConfigError(
                    f"the examples have {len(label_names)} classes ({named}), but model.head.num_labels is {labels}; "
                    f"set it to {len(label_names)}, or name the classes in objective.label_names"
                )
            by_token = isinstance(word, objectives.TokenClassificationConfig)
            return (data.TokenClassification if by_token else data.Classification)(labels)
        case objectives.RegressionConfig():
            return data.Regression(config.model.head.num_outputs)  # type: ignore[union-attr]
        case objectives.QuestionAnsweringConfig():
            return data.Span()
        case objectives.ContrastiveConfig():
            return data.Contrastive()
    return data.causal


def _masked(word: objectives.MaskedLMConfig, tokenizer: Tokenizer) -> data.Objective:
    if tokenizer.mask_id is None:
        raise ConfigError(
            f"objective 'masked_lm' hides tokens behind {MASK}, which the tokenizer lacks; use one that has it"
        )
    return data.MaskedLM(
        mask_id=tokenizer.mask_id,
        vocab_size=tokenizer.vocab_size,
        special_ids=tuple(tokenizer.special_ids.values()),
        word_starts=tokenizer.word_starts if word.whole_word_mask else None,
        **_arguments(word),
    )


def _corrupted(config: TrainConfig, word: objectives.SpanCorruptionConfig, tokenizer: Tokenizer) -> data.Objective:
    have, need = tokenizer.sentinel_ids, sentinel_count(config)
    if len(have) < need:
        raise ConfigError(
            f"objective 'span_corruption' needs {need} sentinels, but the tokenizer has {len(have)}; use one that has "
            "as many, shorten data.max_length, or set objective.num_sentinels"
        )
    if tokenizer.eos_id is None or tokenizer.bos_id is None:
        raise ConfigError("objective 'span_corruption' needs begin and end tokens, which the tokenizer lacks")
    return data.SpanCorruption(have[:need], tokenizer.eos_id, tokenizer.bos_id, **_arguments(word))


_SCHEMAS: dict[type[Config], type[RecordSchema]] = {
    objectives.PrefixLMConfig: PromptCompletionSchema,
    objectives.Seq2SeqConfig: Seq2SeqSchema,
    objectives.ClassificationConfig: ClassificationSchema,
    objectives.RegressionConfig: RegressionSchema,
    objectives.TokenClassificationConfig: TokenClassificationSchema,
    objectives.QuestionAnsweringConfig: QuestionAnsweringSchema,
    objectives.ContrastiveConfig: SimilarityPairSchema,
}


def schema_of(objective: objectives.AnyObjective, label_names: tuple[str, ...] = ()) -> RecordSchema:
    """What the records of ``objective`` hold; ``label_names`` where they are known from elsewhere."""
    arguments = _arguments(objective)
    if not arguments.get("label_names", True):
        arguments["label_names"] = label_names
    return _SCHEMAS[type(objective)](**arguments)


def text_fields(objective: objectives.AnyObjective) -> set[str | None]:
    """The fields of records that hold text."""
    names = ("prompt", "completion", "source", "target", "text", "second", "text_pair", "words", "question", "first")
    return {getattr(objective, name, None) for name in names}
