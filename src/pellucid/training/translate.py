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
from pellucid.training import objectives as words
from pellucid.training.config import TrainConfig


def special_tokens(config: TrainConfig) -> tuple[str, ...]:
    """The special tokens that the objective needs, besides begin, end and padding."""
    match config.objective:
        case words.MaskedLM():
            return (MASK,)
        case words.SpanCorruption():
            return sentinels(sentinel_count(config))
    return ()


def sentinel_count(config: TrainConfig) -> int:
    """Sentinels of span corruption: those that are asked for, or as many as the longest row can need."""
    word = config.objective
    assert isinstance(word, words.SpanCorruption)
    if word.sentinels is not None:
        return word.sentinels
    return max(spans for _, spans in _counts(word, config.data.length))


def corrupted_lengths(word: words.SpanCorruption, length: int) -> tuple[int, int]:
    """The longest source and the longest target that come of documents of up to ``length`` tokens."""
    found = list(_counts(word, length))
    source = max(tokens - cut + spans + 1 for tokens, (cut, spans) in enumerate(found, 1))
    return source, max(cut + spans + 2 for cut, spans in found)


def _counts(word: words.SpanCorruption, length: int) -> Iterator[tuple[int, int]]:
    """For documents of 1 … ``length`` tokens, how many are cut out and in how many spans."""
    probe = data.SpanCorruption((), -1, -1, share=word.share, mean_span=word.mean_span)
    return map(probe.counts, range(1, length + 1))


def objective_of(config: TrainConfig, tokenizer: Tokenizer, classes: tuple[str, ...]) -> data.Objective:
    """The objective that ``config`` names, for the ids of ``tokenizer``."""
    word = config.objective
    match word:
        case words.PrefixLM():
            return data.PrefixLM(word.share)
        case words.MaskedLM():
            return _masked(word, tokenizer)
        case words.SpanCorruption():
            return _corrupted(config, word, tokenizer)
        case words.SequenceToSequence():
            assert tokenizer.bos_id is not None
            return data.SequenceToSequence(tokenizer.bos_id)
        case words.Classification() | words.TokenLabelling():
            labels = config.model.head.num_labels  # type: ignore[union-attr]
            if len(classes) != labels:
                named = ", ".join(map(repr, classes[:5])) + (", …" if len(classes) > 5 else "")
                raise ConfigError(
                    f"the examples have {len(classes)} classes ({named}), but model.head.num_labels is {labels}; "
                    f"set it to {len(classes)}, or name the classes in objective.classes"
                )
            return (data.Classification if isinstance(word, words.Classification) else data.TokenLabelling)(labels)
        case words.Regression():
            return data.Regression(config.model.head.num_outputs)  # type: ignore[union-attr]
        case words.Span():
            return data.Span()
        case words.Contrastive():
            return data.Contrastive()
    return data.causal


def _masked(word: words.MaskedLM, tokenizer: Tokenizer) -> data.Objective:
    if tokenizer.mask_id is None:
        raise ConfigError(
            f"objective 'masked_lm' hides tokens behind {MASK}, which the tokenizer lacks; use one that has it"
        )
    return data.MaskedLM(
        mask_id=tokenizer.mask_id,
        vocab_size=tokenizer.vocab_size,
        special_ids=tuple(tokenizer.special_ids.values()),
        share=word.share,
        keep=word.keep,
        random=word.random,
        word_starts=tokenizer.word_starts if word.whole_words else None,
    )


def _corrupted(config: TrainConfig, word: words.SpanCorruption, tokenizer: Tokenizer) -> data.Objective:
    have, need = tokenizer.sentinel_ids, sentinel_count(config)
    if len(have) < need:
        raise ConfigError(
            f"objective 'span_corruption' needs {need} sentinels, but the tokenizer has {len(have)}; use one that has "
            "as many, shorten data.length, or set objective.sentinels"
        )
    if tokenizer.eos_id is None or tokenizer.bos_id is None:
        raise ConfigError("objective 'span_corruption' needs begin and end tokens, which the tokenizer lacks")
    return data.SpanCorruption(
        have[:need], tokenizer.eos_id, tokenizer.bos_id, share=word.share, mean_span=word.mean_span
    )


def form_of(objective: words.AnyObjective, classes: tuple[str, ...] = ()) -> RecordSchema:
    """What the records of ``objective`` hold; ``classes`` where they are known from elsewhere."""
    match objective:
        case words.PrefixLM(prompt=str() as prompt, completion=str() as completion):
            return PromptCompletionSchema(prompt, completion)
        case words.SequenceToSequence():
            return Seq2SeqSchema(objective.source, objective.target)
        case words.Classification():
            return ClassificationSchema(objective.text, objective.label, objective.second, objective.classes or classes)
        case words.Regression():
            return RegressionSchema(objective.text, objective.score, objective.second)
        case words.TokenLabelling():
            return TokenClassificationSchema(objective.words, objective.tags, objective.classes or classes)
        case words.Span():
            return QuestionAnsweringSchema(objective.question, objective.text, objective.start, objective.end)
        case words.Contrastive():
            return SimilarityPairSchema(objective.first, objective.second)
    raise AssertionError(f"{objective.kind} learns from text")


def text_fields(objective: words.AnyObjective) -> set[str | None]:
    """The fields of records that hold text."""
    names = ("prompt", "completion", "source", "target", "text", "second", "words", "question", "first")
    return {getattr(objective, name, None) for name in names}
