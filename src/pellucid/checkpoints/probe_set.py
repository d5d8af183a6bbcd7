"""The probes of a witness: inputs that follow from the model's config alone.

``plain``      one document (and what an encoder reads for it)
``padded``     three of different lengths, padded on the left
``packed``     four in one row
``continued``  two rows that continue from a cache, chunk by chunk; in one chunk where a rule does not allow more
``lengths``    documents of exactly the length from which a RoPE scaling changes its angles, and of one token more
``crowded``    so many equal tokens that an expert of finite capacity must drop exactly the last
``strong``     one document in a few rows, whose inputs of branches and head are scaled up
``far``        positions far apart: beyond every window, bucket and trained length, so that each bound is met exactly
``training``   one document in training mode, with a deterministic dropout

Positions need not be contiguous, so that ``far`` reaches past a window of a hundred thousand tokens with a few dozen.
Probes that a config cannot run (encoders have no cache) or does not need are left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from pellucid.batch import Batch
from pellucid.checkpoints.contract import WitnessProbe
from pellucid.models import builders, configs
from pellucid.models.config import ModelConfig, TransformerConfig
from pellucid.nn.positions import RelativeBias
from pellucid.visibility import Rule

FARTHEST = 1 << 20
"""The last position of ``far`` where nothing else bounds it."""

MOST_BOUNDS = 32
"""So many different bounds of rules are met exactly; of more, as many evenly from the smallest to the largest."""

LARGEST_BOUND = 1 << 38
CONTIGUOUS = 32
"""Bounds of rules up to here are also met without gaps."""

GAINS = (4.0, 64.0, 1024.0)
"""Factors of the rows of ``strong``: limits of any size in between are met."""

LARGEST_CAPACITY = 1024
"""The largest capacity of an expert that is met exactly."""

_MOST_SEEN = 64
_MAX_CAPACITIES = 4
_LONGEST_CHUNK = 256
_DOCUMENT_HEADS = (
    configs.SequenceClassificationHeadConfig,
    configs.RegressionHeadConfig,
    configs.SentenceEmbeddingHeadConfig,
)


def probes_of(config: ModelConfig) -> dict[str, WitnessProbe]:
    """Every probe that ``config`` can run, in the order in which they are compared."""
    builder = ProbeBuilder(config)
    plain = builder.at_document_ends(builder.rows((8,), (6,)))
    probes = {
        "plain": plain,
        "padded": builder.at_document_ends(builder.rows((7, 4, 1), (3, 6, 2), side="left", typed=False)),
        "packed": builder.at_document_ends(builder.packed((5, 3, 4, 2), (2, 4, 3, 5))),
    }
    if config.family != "encoder":
        probes["continued"] = builder.continued()
    if any(stack.scaling_lengths for stack in builder.stacks):
        probes["lengths"] = builder.at_document_ends(builder.joined([stack.lengths() for stack in builder.stacks]))
    for number, capacity in enumerate(builder.capacities, 1):
        probes["crowded" if number == 1 else f"crowded {number}"] = builder.crowded(capacity)
    if any(stack.has_limits for stack in builder.stacks) or config.final_logit_softcapping is not None:
        probes["strong"] = builder.strong()
    return probes | {"far": builder.far(), "training": plain.model_copy(update={"training": True})}


class ProbeBuilder:
    """Inputs for all stacks of one config."""

    def __init__(self, config: ModelConfig) -> None:
        self.stacks = [StackProbeInputs(config, config.vocab_size)]
        if config.encoder is not None:
            self.stacks.append(StackProbeInputs(config.encoder, config.source_vocab_size or config.vocab_size))
        self.by_document = isinstance(config.head, _DOCUMENT_HEADS)
        found = sorted({capacity for stack in self.stacks for capacity in stack.capacities})
        self.capacities = [capacity for capacity in found if capacity <= LARGEST_CAPACITY][:_MAX_CAPACITIES]

    def joined(self, batches: Sequence[Batch]) -> Batch:
        """A target and its source, or the one input that there is."""
        return batches[0] if len(batches) == 1 else replace(batches[0], source=batches[1])

    def rows(self, *lengths: Sequence[int], side: str = "right", typed: bool = True) -> Batch:
        """One document a row, of these lengths; those of the source come second."""
        return self.joined([s.rows(wanted, side, typed) for s, wanted in zip(self.stacks, lengths, strict=False)])

    def packed(self, *lengths: Sequence[int]) -> Batch:
        """All documents in one row, with a slot of padding at its end."""
        return self.joined([s.packed(wanted) for s, wanted in zip(self.stacks, lengths, strict=False)])

    def at_document_ends(self, batch: Batch, **more: object) -> WitnessProbe:
        """``batch``, compared in the first, the middle and the last slot of each document."""
        assert batch.layout is not None
        at: list[list[int]] = [[] for _ in range(batch.layout.rows)]
        for run in batch.layout.runs:
            at[run.row] += dict.fromkeys([run.start, (run.start + run.stop - 1) // 2, run.stop - 1])
        return self.at(batch, at, **more)

    def at(self, batch: Batch, at: Sequence[Sequence[int]], **more: object) -> WitnessProbe:
        """``batch``, compared in these slots, or in each document where the head has outputs for documents."""
        return WitnessProbe.from_mapping({"batch": batch, "at": None if self.by_document else at, **more})

    def continued(self) -> WitnessProbe:
        """Two rows of different lengths; the first chunk holds whatever no rule lets a cache split."""
        own = self.stacks[0]
        length, first = min(8, own.max_contiguous), own.first_chunk()
        if first is not None:
            near = max((bound for bound in own.bounds if bound <= CONTIGUOUS), default=0)
            wanted = min(max(first + 4, near + 6), own.max_contiguous)
            length = wanted if first < wanted <= _LONGEST_CHUNK else length
        chunks = [length if first is None or first >= length else first]
        for size in (1, 2, length):
            if left := length - sum(chunks):
                chunks.append(min(size, left))
        batch = self.rows((length, max(length - 2, 1)), (5, 3), side="left")
        if batch.groups is not None:
            batch = replace(batch, groups=((batch.positions < 2) & (batch.segments != 0)).long())
        ends = [sum(chunks[: index + 1]) - 1 for index in range(len(chunks))]
        return self.at(batch, [ends, ends], chunks=chunks)

    def crowded(self, capacity: int) -> WitnessProbe:
        """One token more than ``capacity``, each a document of its own and all equal: all go to the same experts."""
        slots = sorted({0, max(capacity - 1, 0), capacity})
        return self.at(self.joined([stack.identical(capacity + 1) for stack in self.stacks]), [slots])

    def strong(self) -> WitnessProbe:
        """The same document in each row."""
        batches = [stack.repeated(length, len(GAINS)) for stack, length in zip(self.stacks, (5, 4), strict=False)]
        return self.at_document_ends(self.joined(batches), gains=GAINS)

    def far(self) -> WitnessProbe:
        """One document with gaps."""
        batch = self.joined([stack.far() for stack in self.stacks])
        return self.at(batch, [self.stacks[0].watched_slots(batch.positions[0].tolist())])


class StackProbeInputs:
    """Documents of ids from all over the vocabulary, no longer than one stack has positions for."""

    def __init__(self, stack: TransformerConfig, vocab_size: int) -> None:
        self.stack, self.vocab_size, self._used = stack, vocab_size, 0
        self.longest = stack.max_length
        self.feed_forwards = [layer.ffn or stack.ffn for layer in stack.each_layer]
        schemes = dict.fromkeys(layer.position or stack.position for layer in stack.each_layer)
        scalings = [scheme.scaling for scheme in schemes if isinstance(scheme, configs.RopeConfig)]
        by_length = (configs.DynamicNTKScalingConfig, configs.LongRopeScalingConfig)
        trained = {scaling: getattr(scaling, "original_max_position_embeddings", None) for scaling in scalings}
        self.trained_lengths = sorted({length for length in trained.values() if length is not None})
        """The lengths that RoPE scalings start from."""
        lengths = {length for scaling, length in trained.items() if isinstance(scaling, by_length)}
        self.scaling_lengths = sorted(n for n in lengths if n and (self.longest is None or n <= self.longest))[:4]
        """Those up to which the angles of documents stay the same."""
        numbers = {int(number) for layer in stack.each_layer for number in re.findall(r"\d+", layer.rule)}
        self.bounds = _thin_out(sorted(number for number in numbers if number <= LARGEST_BOUND))
        """The numbers in the rules."""
        biases = [builders.bias(stack.attention, scheme) for scheme in schemes]
        buckets = {bound for bias in biases if isinstance(bias, RelativeBias) for bound in bias.bounds}
        self.buckets = _thin_out(sorted(buckets))
        """The distances at which learned biases change to another bucket."""

    @property
    def max_contiguous(self) -> int:
        """How long a document may become that is read token by token."""
        return min([_MOST_SEEN, *self.scaling_lengths, *([] if self.longest is None else [self.longest])])

    @property
    def capacities(self) -> list[int]:
        """How many tokens the experts of each layer take, where that is bounded."""
        found = [ffn.expert_capacity for ffn in self.feed_forwards if isinstance(ffn, configs.MoEConfig)]
        return [capacity for capacity in found if capacity is not None]

    @property
    def has_limits(self) -> bool:
        """Whether anything is clipped or capped at a number."""
        experts = [ffn.expert if isinstance(ffn, configs.MoEConfig) else ffn for ffn in self.feed_forwards]
        attentions = (self.stack.attention, getattr(self.stack, "cross_attention", None))
        limits = [getattr(part, name, None) for part in attentions for name in ("attn_logit_softcapping", "clip_qkv")]
        return any(isinstance(ffn, configs.ClampedGatedFFNConfig) for ffn in experts) or any(
            limit is not None for limit in limits
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
        last = ends if self.longest is None else [min(end, self.longest - 1) for end in ends]
        return self._at_positions([sorted({0, min(1, end), end // 2, end}) for end in last])

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


def _prefix_first_chunk(rule: Rule) -> int | None:
    """2 if a cache may continue after a first chunk with the first two tokens, a group; None if it may not."""
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
