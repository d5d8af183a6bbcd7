"""What one stack of a model is given to read by a witness, as its own words demand."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch

from pellucid.batch import Batch
from pellucid.models import builders
from pellucid.models.config import ModelConfig, TransformerConfig
from pellucid.models.configs import (
    ClampedGatedFFNConfig,
    DynamicNTKScalingConfig,
    GroupedQueryAttentionConfig,
    LongRopeScalingConfig,
    MoEConfig,
    PositionConfig,
    RopeConfig,
)
from pellucid.nn.positions import RelativeBias
from pellucid.visibility import Rule

FARTHEST = 1 << 20
"""The last position of ``far`` where nothing else bounds it."""

MOST_BOUNDS = 32
"""So many different bounds of rules are met exactly; of more, as many from the smallest to the largest."""

LARGEST_BOUND = 1 << 38
CONTIGUOUS = 32
"""Bounds of rules up to here are also met without gaps."""

_MOST_SEEN = 64


class StackProbeInputs:
    """Documents of ids from all over the vocabulary, no longer than the stack has positions for."""

    def __init__(self, stack: TransformerConfig, vocab_size: int) -> None:
        self.stack, self.vocab_size, self._used = stack, vocab_size, 0
        schemes = list(dict.fromkeys(layer.position or stack.position for layer in stack.each_layer))
        self.longest = stack.max_length
        self.scaling_lengths = _scaling_lengths(schemes, self.longest)
        self.bounds = _thin_out(sorted(_numbers(stack)))
        self.buckets = _thin_out(sorted(_bucket_bounds(stack, schemes)))
        self.trained_lengths = sorted(_trained_lengths(schemes))

    @property
    def max_contiguous(self) -> int:
        """How long a document may become that is read token by token."""
        return min([_MOST_SEEN, *self.scaling_lengths, *([] if self.longest is None else [self.longest])])

    @property
    def capacities(self) -> list[int]:
        """How many tokens the experts of each layer take, where that is bounded."""
        networks = [layer.ffn or self.stack.ffn for layer in self.stack.each_layer]
        return [
            word.expert_capacity
            for word in networks
            if isinstance(word, MoEConfig) and word.expert_capacity is not None
        ]

    @property
    def has_limits(self) -> bool:
        """Whether anything is cut off or bent at a number."""
        attentions = [self.stack.attention]
        if isinstance(self.stack, ModelConfig) and self.stack.cross_attention is not None:
            attentions.append(self.stack.cross_attention)
        networks = [layer.ffn or self.stack.ffn for layer in self.stack.each_layer]
        experts = [word.expert if isinstance(word, MoEConfig) else word for word in networks]
        return any(isinstance(word, ClampedGatedFFNConfig) for word in experts) or any(
            word.attn_logit_softcapping is not None
            or (isinstance(word, GroupedQueryAttentionConfig) and word.clip_qkv is not None)
            for word in attentions
        )

    def document(self, length: int) -> list[int]:
        """The next so many ids."""
        length = length if self.longest is None else min(length, self.longest)
        numbers = np.arange(self._used, self._used + length)
        self._used += length
        return [int(number) for number in splitmix64(numbers) % np.uint64(self.vocab_size)]

    def rows(self, lengths: Sequence[int], side: str, typed: bool) -> Batch:
        """One document a row."""
        batch = Batch.from_rows([self.document(length) for length in lengths], side=side)  # type: ignore[arg-type]
        return self._with_types_and_groups(batch, typed)

    def packed(self, lengths: Sequence[int]) -> Batch:
        """All in one row, with padding behind them."""
        documents = [self.document(length) for length in lengths]
        return self._with_types_and_groups(Batch.packed(documents, length=sum(map(len, documents)) + 1), typed=True)

    def repeated(self, length: int, rows: int) -> Batch:
        """The same document in each row."""
        return self._with_types_and_groups(Batch.from_rows([self.document(length)] * rows), typed=True)

    def identical(self, count: int) -> Batch:
        """So many documents of one and the same token, in one row."""
        return self._with_types_and_groups(Batch.packed([self.document(1)] * count), typed=False)

    def far(self) -> Batch:
        """One document with gaps: powers of two, and both sides of every bound."""
        last = max([FARTHEST, *(2 * bound for bound in self.bounds)]) if self.longest is None else self.longest - 1
        wanted = {0, 1, 2, 3, last, *(1 << power for power in range(2, 21))}
        wanted |= {place for bound in self.bounds for place in (bound - 1, bound, bound + 1, 2 * bound)}
        wanted |= {place for bound in (*self.buckets, *self.trained_lengths) for place in (bound - 1, bound)}
        return self._at_positions([sorted(place for place in wanted if 0 <= place <= last)])

    def watched_slots(self, places: Sequence[int]) -> list[int]:
        """The slots of ``far`` that are looked at: those at bounds, and some between."""
        exact = [places.index(bound) for bound in (*self.bounds, *self.buckets) if bound in places][:_MOST_SEEN]
        return sorted({*exact, *_evenly_spaced(len(places), min(max(_MOST_SEEN - len(exact), 2), len(places)))})

    def lengths(self) -> Batch:
        """Documents of each length from which positions are turned otherwise, and of one token more."""
        ends = [end for length in self.scaling_lengths for end in (length - 1, length)] or [3, 4]
        kept = ends if self.longest is None else [min(end, self.longest - 1) for end in ends]
        return self._at_positions([sorted({0, min(1, end), end // 2, end}) for end in kept])

    def first_chunk(self) -> int | None:
        """How many tokens the first chunk of a cache must hold; None: all."""
        found = [rule.causal_from if rule.positional else _prefix_first_chunk(rule) for rule in self.stack.rules]
        return None if None in found else max(place or 0 for place in found) + 3

    def _at_positions(self, documents: Sequence[Sequence[int]]) -> Batch:
        """One row of documents whose tokens are at these positions."""
        numbers = [number for number, places in enumerate(documents, 1) for _ in places]
        places = [place for document in documents for place in document]
        tokens = [self.document(1)[0] for _ in places]
        batch = Batch(torch.tensor([tokens]), torch.tensor([places]), torch.tensor([numbers]))
        return self._with_types_and_groups(batch, typed=False)

    def _with_types_and_groups(self, batch: Batch, typed: bool) -> Batch:
        """``batch`` with what else the stack reads: types of tokens, and groups where a rule goes by them.

        Groups are the first two tokens of a document, and its fifth and sixth.
        """
        types = groups = None
        place, real = batch.positions, batch.segments != 0
        if typed and (count := self.stack.type_vocab_size) is not None:
            types = torch.where(real, (place + batch.segments) % count, 0)
        if not all(rule.positional for rule in self.stack.rules):
            first, second = real & (place < 2), real & ((place == 4) | (place == 5))
            groups = first.long() + 2 * second.long()
        return Batch(batch.tokens, place, batch.segments, None, groups, types=types)


def _numbers(stack: TransformerConfig) -> set[int]:
    """The numbers in the rules, none beyond :data:`LARGEST_BOUND`."""
    rules = dict.fromkeys(layer.rule for layer in stack.each_layer)
    numbers = {int(number) for text in rules for number in re.findall(r"\d+", text)}
    return {number for number in numbers if number <= LARGEST_BOUND}


def _bucket_bounds(stack: TransformerConfig, schemes: Sequence[PositionConfig]) -> set[int]:
    """The distances at which learned biases go on to another bucket."""
    biases = [builders.bias(stack.attention, scheme) for scheme in schemes]
    return {bound for bias in biases if isinstance(bias, RelativeBias) for bound in bias.bounds}


def _scaling_lengths(schemes: Sequence[PositionConfig], longest: int | None) -> list[int]:
    """Up to which length documents are turned alike, by the scalings that look at it."""
    scalings = [scheme.scaling for scheme in schemes if isinstance(scheme, RopeConfig)]
    found = {
        scaling.original_max_position_embeddings
        for scaling in scalings
        if isinstance(scaling, DynamicNTKScalingConfig | LongRopeScalingConfig)
    }
    return sorted(length for length in found if longest is None or length <= longest)[:4]


def _trained_lengths(schemes: Sequence[PositionConfig]) -> set[int]:
    scalings = [scheme.scaling for scheme in schemes if isinstance(scheme, RopeConfig)]
    return {
        length
        for scaling in scalings
        if (length := getattr(scaling, "original_max_position_embeddings", None)) is not None
    }


def _prefix_first_chunk(rule: Rule) -> int | None:
    """2 if a cache may go on behind a first chunk that holds the first two tokens, a group; None: it may not."""
    batch = Batch.from_rows([[0] * 8])
    groups = (batch.positions < 2).long()
    whole = Batch(batch.tokens, batch.positions, batch.segments, None, groups).coordinates()
    return None if bool(rule.mask(whole, whole)[0, 0, :5, 5:].any()) else 2


def _thin_out(numbers: Sequence[int]) -> list[int]:
    if len(numbers) <= MOST_BOUNDS:
        return list(numbers)
    return [numbers[index] for index in _evenly_spaced(len(numbers), MOST_BOUNDS)]


def _evenly_spaced(length: int, count: int) -> list[int]:
    """``count`` indices of ``length``, evenly from the first to the last."""
    return [index * (length - 1) // max(count - 1, 1) for index in range(count)]


def splitmix64(numbers: np.ndarray) -> np.ndarray:
    """Each number as 64 well-mixed bits (splitmix64), the same on every machine."""
    with np.errstate(over="ignore"):
        x = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(x ^ (x >> np.uint64(31)))
