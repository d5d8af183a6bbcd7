"""What a run learns from and is measured on: text or examples, cut into batches for its objective."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from pellucid.data import objectives as data
from pellucid.data.corpus import Corpus, open_corpus, split_of
from pellucid.data.examples import Examples
from pellucid.data.load_examples import open_examples
from pellucid.data.loader import Loader
from pellucid.data.packing import concat_ranges
from pellucid.data.records import Record, holds_records, read_records
from pellucid.data.schemas import (
    ClassificationSchema,
    PromptCompletionSchema,
    QuestionAnsweringSchema,
    RecordSchema,
    RegressionSchema,
    Seq2SeqSchema,
    SimilarityPairSchema,
    TokenClassificationSchema,
    texts_in,
)
from pellucid.data.special_tokens import MASK, sentinels
from pellucid.data.token_store import TokenStore
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import ConfigError
from pellucid.training import objectives
from pellucid.training.config import TrainConfig
from pellucid.training.objectives import reads_text

Sides = tuple[Corpus, Corpus]
Warn = Callable[[str], None]


def training_texts(config: TrainConfig, train: Corpus) -> Iterator[str]:
    """What a tokenizer is trained on: all texts of the training side."""
    if reads_text(config.objective):
        yield from (document.text for document in train.documents("train"))
        return
    form = form_of(config.objective)
    fields = [field for field in form.fields if field in text_fields(config.objective)]

    def wanted(name: str) -> bool:
        return config.data.heldout_source is not None or split_of(name, config.data.heldout_fraction) == "train"

    for file in train.files:
        for record in read_records(file, fields, wanted) if holds_records(file) else ():
            yield from (text for field in fields for text in _texts(record, field))


@dataclass(frozen=True)
class RunDatasets:
    """Both sides of a run's data behind one tokenizer."""

    config: TrainConfig
    sides: Sides
    tokenizer: Tokenizer
    warn: Warn

    @cached_property
    def train(self) -> Examples:
        """The examples that are learnt; there are none where the objective learns from text."""
        split = "train" if self.config.data.heldout_source is None else "all"
        return self._examples(self.config.data.source, split, form_of(self.config.objective))

    @cached_property
    def heldout(self) -> TokenStore | Examples:
        """What is kept for validation."""
        settings = self.config.data
        if reads_text(self.config.objective):
            return TokenStore.from_corpus(self.sides[1], self.tokenizer, "heldout", ends=self._ends)
        form = form_of(self.config.objective, self.train.classes)
        if settings.heldout_source is None:
            return self._examples(settings.source, "heldout", form)
        return self._examples(settings.heldout_source, "all", form)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in order; nothing where there are none."""
        return () if reads_text(self.config.objective) else self.train.classes

    @cached_property
    def objective(self) -> data.Objective:
        """What turns rows into questions."""
        return objective_of(self.config, self.tokenizer, self.classes)

    def loader(self) -> Loader:
        """The endless stream of training batches."""
        settings = self._settings | {"batch_size": self.config.batch_size}
        if reads_text(self.config.objective):
            return Loader.from_corpus(self.sides[0], self.tokenizer, "train", ends=self._ends, **settings)
        return Loader(self.train, **settings)

    def heldout_loader(self, most: int | None) -> Loader:
        """Held-out rows to go through once: of ``most`` documents (None: all), always the same, with the same dice."""
        rows = max(self.config.evaluation.batch_tokens // self.config.data.max_length, 1)
        if isinstance(self.config.objective, objectives.ContrastiveConfig):
            rows = self.config.batch_size  # a text is told from those of its batch: as many as in training
        return Loader(sample(self.heldout, most), **self._settings | {"batch_size": rows})

    def digests(self, loader: Loader) -> dict[str, str]:
        """SHA-256 of both sides, and of the ids that ``loader`` gives."""
        if reads_text(self.config.objective):
            train, heldout = self.sides
            return {"train": train.digest(), "heldout": heldout.digest(), "tokens": loader.store.digest()}
        train_digest = loader.examples.digest()
        kept = self.heldout.digest()
        return {"train": train_digest, "heldout": kept, "tokens": train_digest}

    @property
    def _ends(self) -> bool:
        return not isinstance(self.config.objective, objectives.SpanCorruptionConfig)

    @property
    def _settings(self) -> dict[str, Any]:
        settings = self.config.data
        return {
            "length": settings.max_length,
            "source_length": settings.max_source_length,
            "seed": self.config.seed,
            "objective": self.objective,
        }

    def _examples(self, source: Any, split: str, form: RecordSchema) -> Examples:
        settings = self.config.data
        found = open_examples(source, form, self.tokenizer, split=split, heldout_share=settings.heldout_fraction)
        if not found.whole:
            return found
        lengths = [("data.max_length", settings.max_length // found.together, found.store)]
        if found.source is not None:
            lengths.append(("data.max_source_length", settings.max_source_length or settings.max_length, found.source))
        for name, length, store in lengths:
            if longer := int((store.lengths > length).sum()):
                self.warn(f"{longer} of {len(store)} examples ({split}) are cut to the {length} tokens of {name}")
        return found.cut(settings.max_length, settings.max_source_length or settings.max_length)


def _texts(record: Record, field: str) -> list[str]:
    value = record.values[field]
    return texts_in(record, field) if isinstance(value, list | tuple) else [record.text(field)]


# ---- the same few documents, whenever they are asked for


def sample(kept: TokenStore | Examples, most: int | None) -> TokenStore | Examples:
    """Up to ``most`` documents by a hash of their names; documents that belong together stay together."""
    store = kept.store if isinstance(kept, Examples) else kept
    together = kept.together if isinstance(kept, Examples) else 1
    if most is None or len(store) <= most * together:
        return kept
    groups = range(len(store) // together)
    first = sorted(groups, key=lambda n: hashlib.sha256(store.name(n * together).encode()).digest())[:most]
    numbers = np.array([n * together + k for n in sorted(first) for k in range(together)])
    if not isinstance(kept, Examples):
        return _some(store, numbers)
    return replace(
        kept,
        store=_some(store, numbers),
        columns={name: column[_places(store, numbers)] for name, column in kept.columns.items()},
        targets=None if kept.targets is None else kept.targets[numbers],
        source=None if kept.source is None else _some(kept.source, numbers),
    )


def _some(store: TokenStore, numbers: np.ndarray) -> TokenStore:
    documents = [store.document(number).tolist() for number in numbers]
    return TokenStore.of(documents, [store.name(number) for number in numbers])


def _places(store: TokenStore, numbers: np.ndarray) -> np.ndarray:
    taken, _ = concat_ranges(store.bounds[numbers], store.lengths[numbers])
    return taken


def open_data(config: TrainConfig) -> Sides:
    """The corpora whose ``train`` and ``heldout`` sides are used."""
    settings = config.data
    if settings.heldout_source is None:
        corpus = open_corpus(settings.source, text_field=settings.text_field, heldout_share=settings.heldout_fraction)
        return corpus, corpus
    return (
        open_corpus(settings.source, text_field=settings.text_field, heldout_share=0.0),
        open_corpus(settings.heldout_source, text_field=settings.text_field, heldout_share=1.0),
    )


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
