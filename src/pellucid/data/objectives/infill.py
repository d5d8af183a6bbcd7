"""Span corruption (T5): spans are cut out of each document, and a decoder writes them down one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from pellucid.data.batch import Batch
from pellucid.data.objectives.onward import causal
from pellucid.data.objectives.signature import needed, refuse_share
from pellucid.errors import ConfigError, DataError, InputError


@dataclass(frozen=True)
class SpanCorruption:
    """Each document becomes a pair: what is left of it for the encoder, what was cut out for the decoder.

    Of n tokens, ``round(share * n)`` are cut out (at least 1, at most n-1), in ``round(that / mean_span)`` spans
    (at least 1, at most n minus that) of random lengths, after a piece that stays; pieces alternate. In the source
    a sentinel stands for each span, the tokens are each sentinel followed by its span, both end with ``eos_id``
    and the tokens begin with ``start_id`` (T5, section 3.1.4 and its ``random_spans_noise_mask``). A document of one
    token stays whole, and only the end is predicted. Give documents without begin and end tokens: these would be
    cut out like any other.

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

    def __call__(self, batch: Batch, dice: torch.Generator | None = None) -> Batch:
        if batch.labels is not None:
            return batch
        for name in ("source", "types", "groups", "targets"):
            if getattr(batch, name) is not None:
                raise InputError(f"SpanCorruption makes both halves itself, but the batch has {name}; leave it out")
        dice = needed(dice, "SpanCorruption")
        rows = []
        for row, lengths in enumerate(batch.document_lengths):
            documents = [batch.tokens[row][batch.segments[row] == segment].tolist() for segment in lengths]
            rows.append([self._halves(document, dice) for document in documents])
        return causal(Batch.from_pair_rows(rows, source_length=self.source_length, length=self.length))

    def counts(self, tokens: int) -> tuple[int, int]:
        """How many of a document's ``tokens`` are cut out, and in how many spans."""
        if tokens < 2:
            return 0, 0
        noise = min(max(round(self.share * tokens), 1), tokens - 1)
        return noise, min(max(round(noise / self.mean_span), 1), tokens - noise)

    def _halves(self, document: list[int], dice: torch.Generator) -> tuple[list[int], list[int]]:
        """``(source, tokens)`` of one document."""
        noise, spans = self.counts(len(document))
        if spans > len(self.sentinel_ids):
            raise DataError(
                f"a document of {len(document)} tokens has {spans} spans to cut out, but there are "
                f"{len(self.sentinel_ids)} sentinels; shorten the rows, raise mean_span, or give more sentinel_ids"
            )
        kept, cut = (_lengths(total, spans, dice) for total in (len(document) - noise, noise))
        source: list[int] = []
        tokens, place = [self.start_id], 0
        for sentinel, stays, goes in zip(self.sentinel_ids, kept, cut, strict=False):
            source += [*document[place : place + stays], sentinel]
            tokens += [sentinel, *document[place + stays : place + stays + goes]]
            place += stays + goes
        return [*source, *document[place:], self.eos_id], [*tokens, self.eos_id]


def _lengths(total: int, parts: int, dice: torch.Generator) -> list[int]:
    """``parts`` lengths of 1 or more that add up to ``total``, all such lists equally likely."""
    if not parts:
        return []
    order = torch.rand(total - 1, generator=dice, dtype=torch.float64).argsort(stable=True)
    cuts = sorted(order[: parts - 1].tolist())
    edges = [0, *(cut + 1 for cut in cuts), total]
    return [stop - start for start, stop in pairwise(edges)]
