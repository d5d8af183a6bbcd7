"""From the words of an objective to the parts of ``data``: what records hold, and what is asked of a batch."""

from __future__ import annotations

from collections.abc import Iterator

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
from pellucid.data.special_tokens import MASK, sentinels
from pellucid.data.tokenizer import Tokenizer
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
    probe = data.SpanCorruption((), -1, -1, share=word.noise_density, mean_span=word.mean_noise_span_length)
    return map(probe.counts, range(1, length + 1))


def objective_of(config: TrainConfig, tokenizer: Tokenizer, classes: tuple[str, ...]) -> data.Objective:
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
            if len(classes) != labels:
                named = ", ".join(map(repr, classes[:5])) + (", …" if len(classes) > 5 else "")
                raise ConfigError(
                    f"the examples have {len(classes)} classes ({named}), but model.head.num_labels is {labels}; "
                    f"set it to {len(classes)}, or name the classes in objective.classes"
                )
            return (data.Classification if isinstance(word, objectives.ClassificationConfig) else data.TokenLabelling)(
                labels
            )
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
        share=word.mlm_probability,
        keep=word.keep_original_prob,
        random=word.random_replace_prob,
        word_starts=tokenizer.word_starts if word.whole_word_mask else None,
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
    return data.SpanCorruption(
        have[:need], tokenizer.eos_id, tokenizer.bos_id, share=word.noise_density, mean_span=word.mean_noise_span_length
    )


def form_of(objective: objectives.AnyObjective, classes: tuple[str, ...] = ()) -> RecordSchema:
    """What the records of ``objective`` hold; ``classes`` where they are known from elsewhere."""
    match objective:
        case objectives.PrefixLMConfig(prompt=str() as prompt, completion=str() as completion):
            return PromptCompletionSchema(prompt, completion)
        case objectives.Seq2SeqConfig():
            return Seq2SeqSchema(objective.source, objective.target)
        case objectives.ClassificationConfig():
            return ClassificationSchema(
                objective.text, objective.label, objective.text_pair, objective.classes or classes
            )
        case objectives.RegressionConfig():
            return RegressionSchema(objective.text, objective.score, objective.text_pair)
        case objectives.TokenClassificationConfig():
            return TokenClassificationSchema(objective.words, objective.tags, objective.classes or classes)
        case objectives.QuestionAnsweringConfig():
            return QuestionAnsweringSchema(objective.question, objective.text, objective.start, objective.end)
        case objectives.ContrastiveConfig():
            return SimilarityPairSchema(objective.first, objective.second)
    raise AssertionError(f"{objective.kind} learns from text")


def text_fields(objective: objectives.AnyObjective) -> set[str | None]:
    """The fields of records that hold text."""
    names = ("prompt", "completion", "source", "target", "text", "second", "text_pair", "words", "question", "first")
    return {getattr(objective, name, None) for name in names}
