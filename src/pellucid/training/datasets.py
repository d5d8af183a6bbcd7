"""The data of a run: text or examples, cut into batches for its objective, for training and for evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from pellucid.configfile import Config
from pellucid.data import objectives as data
from pellucid.data.corpus import Corpus, open_corpus, split_of
from pellucid.data.examples import Examples, TokenStore
from pellucid.data.loader import Loader
from pellucid.data.packing import concat_ranges
from pellucid.data.records import holds_records, read_records
from pellucid.data.schemas import (
    ClassificationSchema,
    PromptCompletionSchema,
    QuestionAnsweringSchema,
    RecordSchema,
    RegressionSchema,
    Seq2SeqSchema,
    SimilarityPairSchema,
    TokenClassificationSchema,
    open_examples,
)
from pellucid.data.tokenizer import Tokenizer
from pellucid.data.vocabulary import MASK, sentinels
from pellucid.errors import ConfigError
from pellucid.messages import join_some
from pellucid.training import objectives
from pellucid.training.config import TrainConfig
from pellucid.training.objectives import reads_text

Sides = tuple[Corpus, Corpus]
Warn = Callable[[str], None]


def training_texts(config: TrainConfig, train: Corpus) -> Iterator[str]:
    """The texts that a tokenizer is trained on: all of the training side."""
    if reads_text(config.objective):
        yield from (document.text for document in train.documents("train"))
        return
    objective = config.objective
    fields = [f for f in schema_of(objective).fields if f in {getattr(objective, name, None) for name in _TEXT_FIELDS}]

    def wanted(name: str) -> bool:
        return config.data.heldout_source is not None or split_of(name, config.data.heldout_fraction) == "train"

    for file in train.files:
        for record in read_records(file, fields, wanted) if holds_records(file) else ():
            for field in fields:
                is_list = isinstance(record.values[field], list | tuple)
                yield from record.texts(field) if is_list else [record.text(field)]


@dataclass(frozen=True)
class RunDatasets:
    """Both sides of a run's data behind one tokenizer."""

    config: TrainConfig
    sides: Sides
    tokenizer: Tokenizer
    warn: Warn

    @cached_property
    def train(self) -> Examples:
        """The examples that are trained on; only for objectives that do not read text."""
        split = "train" if self.config.data.heldout_source is None else "all"
        return self._examples(self.config.data.source, split, schema_of(self.config.objective))

    @cached_property
    def heldout(self) -> TokenStore | Examples:
        """The held-out documents."""
        settings = self.config.data
        if reads_text(self.config.objective):
            return TokenStore.from_corpus(self.sides[1], self.tokenizer, "heldout", ends=self._ends)
        schema = schema_of(self.config.objective, self.train.label_names)
        if settings.heldout_source is None:
            return self._examples(settings.source, "heldout", schema)
        return self._examples(settings.heldout_source, "all", schema)

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of the classes, in order; empty where there are none."""
        return () if reads_text(self.config.objective) else self.train.label_names

    @cached_property
    def objective(self) -> data.Objective:
        """The objective, which makes labels and targets."""
        return objective_of(self.config, self.tokenizer, self.label_names)

    def loader(self) -> Loader:
        """The endless stream of training batches."""
        settings = self._settings | {"batch_size": self.config.batch_size}
        if reads_text(self.config.objective):
            return Loader.from_corpus(self.sides[0], self.tokenizer, "train", ends=self._ends, **settings)
        return Loader(self.train, **settings)

    def heldout_loader(self, most: int | None) -> Loader:
        """Held-out rows of ``most`` documents (None: all) for one pass: always the same, with the same random draws."""
        rows = max(self.config.evaluation.batch_tokens // self.config.data.max_length, 1)
        if isinstance(self.config.objective, objectives.ContrastiveConfig):
            rows = self.config.batch_size  # the negatives are the rest of the batch: as many as in training
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

    def _examples(self, source: Any, split: str, schema: RecordSchema) -> Examples:
        settings = self.config.data
        found = open_examples(source, schema, self.tokenizer, split=split, heldout_fraction=settings.heldout_fraction)
        if not found.whole:
            return found
        lengths = [("data.max_length", settings.max_length // found.together, found.store)]
        if found.source is not None:
            lengths.append(("data.max_source_length", settings.max_source_length or settings.max_length, found.source))
        for name, length, store in lengths:
            if longer := int((store.lengths > length).sum()):
                self.warn(f"{longer} of {len(store)} examples ({split}) are cut to the {length} tokens of {name}")
        return found.cut(settings.max_length, settings.max_source_length or settings.max_length)


# ---- the documents of an evaluation


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
    slots, _ = concat_ranges(store.bounds[numbers], store.lengths[numbers])
    return replace(
        kept,
        store=_some(store, numbers),
        columns={name: column[slots] for name, column in kept.columns.items()},
        targets=None if kept.targets is None else kept.targets[numbers],
        source=None if kept.source is None else _some(kept.source, numbers),
    )


def _some(store: TokenStore, numbers: np.ndarray) -> TokenStore:
    documents = [store.document(number).tolist() for number in numbers]
    return TokenStore.of(documents, [store.name(number) for number in numbers])


def open_data(config: TrainConfig) -> Sides:
    """The corpora whose ``train`` and ``heldout`` sides are used."""
    settings = config.data
    share = settings.heldout_fraction if settings.heldout_source is None else 0.0
    corpus = open_corpus(settings.source, text_field=settings.text_field, heldout_fraction=share)
    if settings.heldout_source is None:
        return corpus, corpus
    return corpus, open_corpus(settings.heldout_source, text_field=settings.text_field, heldout_fraction=1.0)


# ---- the objective

_TEXT_FIELDS = "prompt", "completion", "source", "target", "text", "second", "text_pair", "words", "question", "first"
"""The fields of configs of objectives that name texts."""


def special_tokens(config: TrainConfig) -> tuple[str, ...]:
    """The special tokens that the objective needs, besides begin, end and padding."""
    match config.objective:
        case objectives.MaskedLMConfig():
            return (MASK,)
        case objectives.SpanCorruptionConfig():
            return sentinels(sentinel_count(config))
    return ()


def sentinel_count(config: TrainConfig) -> int:
    """The sentinels of span corruption: ``num_sentinels``, or as many as the longest row can need."""
    objective = config.objective
    assert isinstance(objective, objectives.SpanCorruptionConfig)
    if objective.num_sentinels is not None:
        return objective.num_sentinels
    return max(spans for _, spans in _counts(objective, config.data.max_length))


def corrupted_lengths(objective: objectives.SpanCorruptionConfig, length: int) -> tuple[int, int]:
    """The longest source and the longest target of documents of up to ``length`` tokens."""
    found = list(_counts(objective, length))
    source = max(tokens - cut + spans + 1 for tokens, (cut, spans) in enumerate(found, 1))
    return source, max(cut + spans + 2 for cut, spans in found)


def _counts(objective: objectives.SpanCorruptionConfig, length: int) -> Iterator[tuple[int, int]]:
    """For documents of 1 … ``length`` tokens, how many tokens are cut out, and in how many spans."""
    probe = data.SpanCorruption((), -1, -1, **_arguments(objective))
    return map(probe.counts, range(1, length + 1))


def _arguments(objective: Config) -> dict[str, Any]:
    """The arguments that a config shares with the part of ``data`` that it describes."""
    return objective.model_dump(exclude={"kind", "num_sentinels", "whole_word_mask", "prefix_fraction"})


def objective_of(config: TrainConfig, tokenizer: Tokenizer, label_names: tuple[str, ...]) -> data.Objective:
    """The objective that ``config`` names, for the ids of ``tokenizer``."""
    objective = config.objective
    match objective:
        case objectives.PrefixLMConfig():
            return data.PrefixLM(objective.prefix_fraction)
        case objectives.MaskedLMConfig():
            return _masked(objective, tokenizer)
        case objectives.SpanCorruptionConfig():
            return _corrupted(config, objective, tokenizer)
        case objectives.Seq2SeqConfig():
            assert tokenizer.bos_id is not None
            return data.SequenceToSequence(tokenizer.bos_id)
        case objectives.ClassificationConfig() | objectives.TokenClassificationConfig():
            labels = config.model.head.num_labels  # type: ignore[union-attr]
            if len(label_names) != labels:
                named = join_some([repr(name) for name in label_names], 5)
                raise ConfigError(
                    f"the examples have {len(label_names)} classes ({named}), but model.head.num_labels is {labels}; "
                    f"set it to {len(label_names)}, or name the classes in objective.label_names"
                )
            by_token = isinstance(objective, objectives.TokenClassificationConfig)
            return (data.TokenClassification if by_token else data.Classification)(labels)
        case objectives.RegressionConfig():
            return data.Regression(config.model.head.num_outputs)  # type: ignore[union-attr]
        case objectives.QuestionAnsweringConfig():
            return data.Span()
        case objectives.ContrastiveConfig():
            return data.Contrastive()
    return data.causal


def _masked(objective: objectives.MaskedLMConfig, tokenizer: Tokenizer) -> data.Objective:
    if tokenizer.mask_id is None:
        raise ConfigError(
            f"objective 'masked_lm' hides tokens behind {MASK}, which the tokenizer lacks; use one that has it"
        )
    return data.MaskedLM(
        mask_id=tokenizer.mask_id,
        vocab_size=tokenizer.vocab_size,
        special_ids=tuple(tokenizer.special_ids.values()),
        word_starts=tokenizer.word_starts if objective.whole_word_mask else None,
        **_arguments(objective),
    )


def _corrupted(config: TrainConfig, objective: objectives.SpanCorruptionConfig, tokenizer: Tokenizer) -> data.Objective:
    have, need = tokenizer.sentinel_ids, sentinel_count(config)
    if len(have) < need:
        raise ConfigError(
            f"objective 'span_corruption' needs {need} sentinels, but the tokenizer has {len(have)}; use one that has "
            "as many, shorten data.max_length, or set objective.num_sentinels"
        )
    if tokenizer.eos_id is None or tokenizer.bos_id is None:
        raise ConfigError("objective 'span_corruption' needs begin and end tokens, which the tokenizer lacks")
    return data.SpanCorruption(have[:need], tokenizer.eos_id, tokenizer.bos_id, **_arguments(objective))


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
    """The schema of an objective's records; ``label_names`` are used where the config names none."""
    arguments = _arguments(objective)
    if not arguments.get("label_names", True):
        arguments["label_names"] = label_names
    return _SCHEMAS[type(objective)](**arguments)
