"""Span corruption (T5): spans are cut out of each document, and a decoder writes them down one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from pellucid.batch import Batch
from pellucid.data.objectives.base import refuse_share, require_generator
from pellucid.data.objectives.causal_lm import causal
from pellucid.errors import ConfigError, DataError, InputError


@dataclass(frozen=True)
class SpanCorruption:
    """Each document becomes a pair: what is left of it for the encoder, what was cut out for the decoder.

    Of n tokens, ``round(share * n)`` are cut out (at least 1, at most n-1), in ``round(that / mean_span)`` spans
    (at least 1, at most n minus that), as in T5 (section 3.1.4 and its ``random_spans_noise_mask``); all ways to place
    such spans with a token between them are equally likely. (T5 always ends with a span, so that of short documents
    only the end would ever be cut out.) In the source a sentinel stands for each span, the tokens are each sentinel
    followed by its span, both end with ``eos_id`` and the tokens begin with ``start_id``. A document of one token
    stays whole, and only the end is predicted. Give documents without begin and end tokens (``ends=False``):
    these would be cut out like any other.

    Rows are padded to the longest, or to ``source_length`` and ``length`` where given.
    """

    sentinel_ids: tuple[int, ...]
    eos_id: int
    start_id: int
    share: float = 0.15
    mean_span: float = 3.0
    source_length: int | None = None
    length: int | None = None
    overlap = 0

    def __post_init__(self) -> None:
        refuse_share("share", self.share)
        if not self.mean_span >= 1:
            raise ConfigError(f"mean_span is {self.mean_span}; a span has 1 token or more")
        if len({*self.sentinel_ids, self.eos_id}) != len(self.sentinel_ids) + 1:
            raise ConfigError(f"eos_id {self.eos_id} and sentinel_ids name an id twice; give each its own")

    def __call__(self, batch: Batch, generator: torch.Generator | None = None) -> Batch:
        if batch.labels is not None:
            return batch
        for name in ("source", "types", "groups", "targets"):
            if getattr(batch, name) is not None:
                raise InputError(f"SpanCorruption makes both halves itself, but the batch has {name}; leave it out")
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
        noise = min(max(round(self.share * tokens), 1), tokens - 1)
        return noise, min(max(round(noise / self.mean_span), 1), tokens - noise)

    def _halves(self, document: list[int], drawn: list[float]) -> tuple[list[int], list[int]]:
        """``(source, tokens)`` of one document; ``drawn`` has a random number a token."""
        noise, spans = self.counts(len(document))
        if spans > len(self.sentinel_ids):
            raise DataError(
                f"a document of {len(document)} tokens has {spans} spans to cut out, but there are "
                f"{len(self.sentinel_ids)} sentinels; shorten the rows, raise mean_span, or give more sentinel_ids"
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
