"""What a checkpoint's witness is asked: inputs that follow from the model's config alone.

``plain``      one document (and what an encoder reads for it)
``padded``     three of different lengths, padded on the left
``packed``     four in one row
``continued``  two rows that go on from a cache, chunk by chunk; in one chunk where a rule does not let them
``lengths``    documents of exactly the length from which a scaling of positions turns them otherwise, and one more
``crowded``    so many tokens alike that an expert of finite capacity must leave out exactly the last
``strong``     one document in a few rows, in which branches and head are given numbers many times as large
``far``        positions far apart: beyond every window, bucket and trained length, so that each bound is met exactly
``training``   one document in training mode, with a portable dropout

A slot is not a position, so that ``far`` reaches past a window of a hundred thousand tokens with a few dozen.
Probes that a config cannot be asked (encoders have no cache) or has no need of are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pellucid.batch import Batch
from pellucid.checkpoints import sides
from pellucid.checkpoints.inputs import Probe
from pellucid.checkpoints.sides import Side
from pellucid.models.config import ModelConfig
from pellucid.models.configs import RegressionHeadConfig, SentenceEmbeddingHeadConfig, SequenceClassificationHeadConfig

GAINS = (4.0, 64.0, 1024.0)
"""What branches are given in the rows of ``strong``: limits are met by numbers of any size in between."""

MOST_CROWDED = 1024
"""The largest capacity of an expert that is met exactly."""

_MOST_CAPACITIES = 4
_LONGEST_CHUNK = 256
_ABOUT_DOCUMENTS = (SequenceClassificationHeadConfig, RegressionHeadConfig, SentenceEmbeddingHeadConfig)


def probes_of(config: ModelConfig) -> dict[str, Probe]:
    """Every probe that ``config`` can be asked, in the order in which they are compared."""
    asking = _Asking(config)
    plain = asking.looked_at(asking.rows((8,), (6,)))
    asked = {
        "plain": plain,
        "padded": asking.looked_at(asking.rows((7, 4, 1), (3, 6, 2), side="left", typed=False)),
        "packed": asking.looked_at(asking.packed((5, 3, 4, 2), (2, 4, 3, 5))),
    }
    if config.family != "encoder":
        asked["continued"] = asking.continued()
    if any(side.turning for side in asking.sides):
        asked["lengths"] = asking.looked_at(asking.joined([side.lengths() for side in asking.sides]))
    for number, capacity in enumerate(asking.capacities, 1):
        asked["crowded" if number == 1 else f"crowded {number}"] = asking.crowded(capacity)
    if any(side.limited for side in asking.sides) or config.final_logit_softcapping is not None:
        asked["strong"] = asking.strong()
    return asked | {"far": asking.far(), "training": plain.model_copy(update={"training": True})}


class _Asking:
    """What the stacks of one config are given to read."""

    def __init__(self, config: ModelConfig) -> None:
        self.sides = [Side(config, config.vocab_size)]
        if config.encoder is not None:
            self.sides.append(Side(config.encoder, config.source_vocab_size or config.vocab_size))
        self.by_document = isinstance(config.head, _ABOUT_DOCUMENTS)
        found = sorted({capacity for side in self.sides for capacity in side.capacities})
        self.capacities = [capacity for capacity in found if capacity <= MOST_CROWDED][:_MOST_CAPACITIES]

    def joined(self, batches: Sequence[Batch]) -> Batch:
        """A target and its source, or the one input that there is."""
        return batches[0] if len(batches) == 1 else replace(batches[0], source=batches[1])

    def rows(self, *lengths: Sequence[int], side: str = "right", typed: bool = True) -> Batch:
        """One document a row, of these lengths; those of the source come second."""
        return self.joined([s.rows(wanted, side, typed) for s, wanted in zip(self.sides, lengths, strict=False)])

    def packed(self, *lengths: Sequence[int]) -> Batch:
        """All documents in one row, with a slot of padding at its end."""
        return self.joined([s.packed(wanted) for s, wanted in zip(self.sides, lengths, strict=False)])

    def looked_at(self, batch: Batch, **more: object) -> Probe:
        """``batch``, looked at in the first, the middle and the last slot of each document."""
        assert batch.layout is not None
        at: list[list[int]] = [[] for _ in range(batch.layout.rows)]
        for run in batch.layout.runs:
            at[run.row] += dict.fromkeys([run.start, (run.start + run.stop - 1) // 2, run.stop - 1])
        return self.at(batch, at, **more)

    def at(self, batch: Batch, at: Sequence[Sequence[int]], **more: object) -> Probe:
        """``batch``, looked at in these slots, or in each document where the head speaks of documents."""
        return Probe.of(batch, None if self.by_document else at, **more)

    def continued(self) -> Probe:
        """Two rows of different lengths; the first chunk holds what no rule lets a cache cut in two."""
        own = self.sides[0]
        length, first = min(8, own.most), own.settled()
        if first is not None:
            near = max((bound for bound in own.bounds if bound <= sides.CONTIGUOUS), default=0)
            wanted = min(max(first + 4, near + 6), own.most)
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

    def crowded(self, capacity: int) -> Probe:
        """One token more than ``capacity``, each a document of its own, all alike: all go to the same experts."""
        slots = sorted({0, max(capacity - 1, 0), capacity})
        return self.at(self.joined([side.alike(capacity + 1) for side in self.sides]), [slots])

    def strong(self) -> Probe:
        """The same document in each row."""
        batches = [side.repeated(length, len(GAINS)) for side, length in zip(self.sides, (5, 4), strict=False)]
        return self.looked_at(self.joined(batches), gains=GAINS)

    def far(self) -> Probe:
        """One document with gaps."""
        batch = self.joined([side.far() for side in self.sides])
        return self.at(batch, [self.sides[0].watched(batch.positions[0].tolist())])
