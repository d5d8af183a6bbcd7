"""Masked language modelling: some tokens are hidden, and a model that sees both sides puts them back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from pellucid.batch import IGNORED, Batch
from pellucid.data.objectives.base import refuse_share, require_generator
from pellucid.errors import ConfigError, DataError

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class MaskedLM:
    """Choose ``share`` of each document's tokens; predict those, and only those, where they stand.

    Of the chosen, ``keep`` stay as they are, ``random`` become any token that is not special, and the others
    ``mask_id`` (BERT, section 3.1: 10, 10 and 80 per cent). Padding and ``special_ids`` are neither chosen nor
    drawn. A document with any token to choose has at least one chosen.

    ``word_starts[id]`` makes whole words stand or fall together: a token that does not begin a word goes with the
    token before it. Words are taken in random order as long as they fit into the share; if none fits, the shortest.
    """

    mask_id: int
    vocab_size: int
    special_ids: tuple[int, ...]
    share: float = 0.15
    keep: float = 0.1
    random: float = 0.1
    word_starts: tuple[bool, ...] | None = None
    overlap = 0

    def __post_init__(self) -> None:
        refuse_share("share", self.share)
        if not (self.keep >= 0 and self.random >= 0 and self.keep + self.random <= 1):
            raise ConfigError(f"keep is {self.keep} and random {self.random}; give shares that add up to at most 1")
        outside = [id_ for id_ in (self.mask_id, *self.special_ids) if not 0 <= id_ < self.vocab_size]
        if outside:
            raise ConfigError(f"special id {outside[0]} is not one of the {self.vocab_size} ids; name ids below that")
        if self.word_starts is not None and len(self.word_starts) != self.vocab_size:
            raise ConfigError(
                f"word_starts has {len(self.word_starts)} entries, but vocab_size is {self.vocab_size}; give one an id"
            )
        if not len(self._ordinary):
            raise ConfigError(
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
        """``[V]``: ids at which a word begins; all of them where words are not asked for."""
        return np.array([True] * self.vocab_size if self.word_starts is None else self.word_starts)

    def __call__(self, batch: Batch, generator: torch.Generator | None = None) -> Batch:
        if batch.labels is not None:
            return batch
        generator = require_generator(generator, "MaskedLM")
        tokens = batch.tokens.clone().numpy()
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            odd = tokens.min() if tokens.min() < 0 else tokens.max()
            raise DataError(f"token id {odd} was met, but ids are 0 to {self.vocab_size - 1}; use the text's tokenizer")
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
            taken[_fitting(words.tolist(), sizes[words].tolist(), self.share)] = True
        chosen = np.zeros(len(tokens), dtype=bool)
        chosen[free] = taken[word]
        return chosen

    def _noise(self, chosen: Ids, generator: torch.Generator) -> Ids:
        """What stands in place of the chosen tokens."""
        fate = torch.rand(len(chosen), generator=generator, dtype=torch.float64).numpy()
        drawn = torch.randint(len(self._ordinary), (len(chosen),), generator=generator).numpy()
        noisy = np.where(fate < self.keep, chosen, self.mask_id)
        return np.where(fate >= 1 - self.random, self._ordinary[drawn], noisy)


def _fitting(words: list[int], sizes: list[int], share: float) -> list[int]:
    """The words, in this order, that fit into their document's share; the shortest where none does."""
    left = max(1, round(share * sum(sizes)))
    taken = []
    for word, size in zip(words, sizes, strict=True):
        if size <= left:
            taken.append(word)
            left -= size
    return taken or [words[sizes.index(min(sizes))]]
