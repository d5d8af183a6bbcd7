"""Objectives that take tokens away and have them put back: masked language modelling, and T5's span corruption."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from pellucid.batch import IGNORED, Batch
from pellucid.data.objectives.causal_lm import causal, check_fraction, require_generator
from pellucid.errors import ArgumentError, DataError

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class MaskedLM:
    """Choose a fraction of each document's tokens; predict those, and only those, where they stand.

    Of the chosen, ``keep_original_prob`` stay as they are, ``random_replace_prob`` become any token that is not
    special, and the others ``mask_id`` (BERT, section 3.1: 10, 10 and 80 per cent). Padding and ``special_ids`` are
    neither chosen nor drawn. A document with any token to choose has at least one chosen.

    ``word_starts[id]`` makes whole words stand or fall together: a token that does not begin a word goes with the
    token before it. Words are taken in random order as long as they fit into the fraction; if none fits, the shortest.
    """

    mask_id: int
    vocab_size: int
    special_ids: tuple[int, ...]
    mlm_probability: float = 0.15
    keep_original_prob: float = 0.1
    random_replace_prob: float = 0.1
    word_starts: tuple[bool, ...] | None = None
    overlap = 0

    def __post_init__(self) -> None:
        check_fraction("mlm_probability", self.mlm_probability)
        keep, random = self.keep_original_prob, self.random_replace_prob
        if not (keep >= 0 and random >= 0 and keep + random <= 1):
            raise ArgumentError(
                f"keep_original_prob is {keep} and random_replace_prob {random}; give fractions of at most 1 together"
            )
        outside = [id_ for id_ in (self.mask_id, *self.special_ids) if not 0 <= id_ < self.vocab_size]
        if outside:
            raise ArgumentError(f"special id {outside[0]} is not one of the {self.vocab_size} ids; name ids below that")
        if self.word_starts is not None and len(self.word_starts) != self.vocab_size:
            raise ArgumentError(
                f"word_starts has {len(self.word_starts)} entries, but vocab_size is {self.vocab_size}; give one an id"
            )
        if not len(self._ordinary):
            raise ArgumentError(
                f"all {self.vocab_size} ids are special, so nothing can be chosen; give fewer special_ids"
            )

    @cached_property
    def _is_special(self) -> NDArray[np.bool_]:
        special = np.zeros(self.vocab_size, dtype=bool)
        special[[self.mask_id, *self.special_ids]] = True
        return special

    @cached_property
    def _ordinary(self) -> NDArray[np.int64]:
        """The ids that a random token is drawn from."""
        return np.flatnonzero(~self._is_special)

    @cached_property
    def _begins(self) -> NDArray[np.bool_]:
        """``[V]``: ids at which a word begins; all of them without ``word_starts``."""
        return np.array([True] * self.vocab_size if self.word_starts is None else self.word_starts)

    def __call__(self, batch: Batch, generator: torch.Generator | None = None) -> Batch:
        if batch.labels is not None:
            return batch
        generator = require_generator(generator, "MaskedLM")
        tokens = batch.tokens.clone().numpy()
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            odd = tokens.min() if tokens.min() < 0 else tokens.max()
            raise DataError(
                f"token id {odd} was found, but ids are 0 to {self.vocab_size - 1}; use the text's tokenizer"
            )
        labels = np.full_like(tokens, IGNORED)
        slots, document = batch.document_slots
        old = tokens.reshape(-1)[slots]
        chosen = self._choose(old, document, generator)
        labels.reshape(-1)[slots[chosen]] = old[chosen]
        tokens.reshape(-1)[slots[chosen]] = self._noise(old[chosen], generator)
        return replace(batch, tokens=torch.from_numpy(tokens), labels=torch.from_numpy(labels))

    def _choose(self, tokens: Ids, document: Ids, generator: torch.Generator) -> NDArray[np.bool_]:
        """Which of all documents' tokens are to be predicted, in whole words."""
        special = self._is_special[tokens]
        begins = self._begins[tokens] | (np.diff(document, prepend=-1) != 0)
        begins[1:] |= special[:-1]
        free = np.flatnonzero(~special)
        _, word, sizes = np.unique(np.cumsum(begins)[free], return_inverse=True, return_counts=True)
        owner = document[free[np.cumsum(sizes) - sizes]]
        taken = np.zeros(len(sizes), dtype=bool)
        order = np.lexsort((torch.rand(len(sizes), generator=generator, dtype=torch.float64).numpy(), owner))
        ends = np.flatnonzero(np.diff(owner, append=-1)) + 1
        for first, stop in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=False):
            words = order[first:stop]
            taken[_fitting(words.tolist(), sizes[words].tolist(), self.mlm_probability)] = True
        chosen = np.zeros(len(tokens), dtype=bool)
        chosen[free] = taken[word]
        return chosen

    def _noise(self, chosen: Ids, generator: torch.Generator) -> Ids:
        """What stands in place of the chosen tokens."""
        fate = torch.rand(len(chosen), generator=generator, dtype=torch.float64).numpy()
        drawn = torch.randint(len(self._ordinary), (len(chosen),), generator=generator).numpy()
        noisy = np.where(fate < self.keep_original_prob, chosen, self.mask_id)
        return np.where(fate >= 1 - self.random_replace_prob, self._ordinary[drawn], noisy)


def _fitting(words: list[int], sizes: list[int], fraction: float) -> list[int]:
    """The words, in this order, that fit into their document's fraction; the shortest where none does."""
    left = max(1, round(fraction * sum(sizes)))
    taken = []
    for word, size in zip(words, sizes, strict=True):
        if size <= left:
            taken.append(word)
            left -= size
    return taken or [words[sizes.index(min(sizes))]]


@dataclass(frozen=True)
class SpanCorruption:
    """Each document becomes a pair: what is left of it for the encoder, what was cut out for the decoder.

    Of n tokens, ``round(noise_density * n)`` are cut out (at least 1, at most n-1), in
    ``round(that / mean_noise_span_length)`` spans (at least 1, at most n minus that), as in T5 (section 3.1.4 and its
    ``random_spans_noise_mask``); all ways to place such spans with a token between them are equally likely. (T5 always
    ends with a span, so that of short documents only the end would ever be cut out.) In the source a sentinel stands
    for each span, the tokens are each sentinel followed by its span, both end with ``eos_id`` and the tokens begin with
    ``start_id``. A document of one token stays whole, and only the end is predicted. Give documents without begin and
    end tokens (``ends=False``): these would be cut out like any other.

    Rows are padded to the longest, or to ``source_length`` and ``length`` where given.
    """

    sentinel_ids: tuple[int, ...]
    eos_id: int
    start_id: int
    noise_density: float = 0.15
    mean_noise_span_length: float = 3.0
    source_length: int | None = None
    length: int | None = None
    overlap = 0

    def __post_init__(self) -> None:
        check_fraction("noise_density", self.noise_density)
        if not self.mean_noise_span_length >= 1:
            raise ArgumentError(f"mean_noise_span_length is {self.mean_noise_span_length}; a span has 1 token or more")
        if len({*self.sentinel_ids, self.eos_id}) != len(self.sentinel_ids) + 1:
            raise ArgumentError(f"eos_id {self.eos_id} and sentinel_ids name an id twice; give each its own")

    def __call__(self, batch: Batch, generator: torch.Generator | None = None) -> Batch:
        if batch.labels is not None:
            return batch
        for name in ("source", "types", "groups", "targets"):
            if getattr(batch, name) is not None:
                raise ArgumentError(f"SpanCorruption makes both halves itself, but the batch has {name}; leave it out")
        generator = require_generator(generator, "SpanCorruption")
        slots, document = batch.document_slots
        drawn = torch.rand(len(slots), generator=generator, dtype=torch.float64).numpy()
        ends = np.cumsum(np.bincount(document))[:-1]
        parts = zip(np.split(batch.tokens.numpy().reshape(-1)[slots], ends), np.split(drawn, ends), strict=True)
        halves = (self._halves(document.tolist(), numbers.tolist()) for document, numbers in parts)
        rows = [[next(halves) for _ in lengths] for lengths in batch.document_lengths]
        return causal(Batch.from_pair_rows(rows, source_length=self.source_length, length=self.length))

    def counts(self, tokens: int) -> tuple[int, int]:
        """How many of a document's ``tokens`` are cut out, and in how many spans."""
        if tokens < 2:
            return 0, 0
        noise = min(max(round(self.noise_density * tokens), 1), tokens - 1)
        return noise, min(max(round(noise / self.mean_noise_span_length), 1), tokens - noise)

    def _halves(self, document: list[int], drawn: list[float]) -> tuple[list[int], list[int]]:
        """``(source, tokens)`` of one document; ``drawn`` has a random number a token."""
        noise, spans = self.counts(len(document))
        if spans > len(self.sentinel_ids):
            raise DataError(
                f"a document of {len(document)} tokens has {spans} spans to cut out, but there are "
                f"{len(self.sentinel_ids)} sentinels; shorten the rows, raise mean_noise_span_length, "
                "or give more sentinel_ids"
            )
        if not spans:
            return [*document, self.eos_id], [self.start_id, self.eos_id]
        kept = len(document) - noise
        stays, goes = _lengths(drawn[: kept + 1], spans + 1), _lengths(drawn[kept + 1 :], spans)
        stays[0], stays[-1] = stays[0] - 1, stays[-1] - 1  # of kept + 2 tokens: the first and the last may be empty
        source: list[int] = []
        tokens, place = [self.start_id], 0
        for sentinel, stay, go in zip(self.sentinel_ids, stays, goes, strict=False):
            source += [*document[place : place + stay], sentinel]
            tokens += [sentinel, *document[place + stay : place + stay + go]]
            place += stay + go
        return [*source, *document[place:], self.eos_id], [*tokens, self.eos_id]


def _lengths(drawn: list[float], parts: int) -> list[int]:
    """``parts`` lengths of 1 or more that add up to one more than the numbers ``drawn``, all lists equally likely."""
    smallest = sorted(range(len(drawn)), key=drawn.__getitem__)[: parts - 1]
    edges = [0, *sorted(place + 1 for place in smallest), len(drawn) + 1]
    return [stop - start for start, stop in pairwise(edges)]
