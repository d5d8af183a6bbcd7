"""Masked language modelling: some tokens are hidden, and a model that sees both sides puts them back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from pellucid.data.batch import IGNORED, Batch
from pellucid.data.objectives.signature import needed, refuse_share
from pellucid.errors import ConfigError, DataError
from pellucid.shapes import Tensor


@dataclass(frozen=True)
class MaskedLM:
    """Choose ``share`` of each document's tokens; predict those, and only those, where they stand.

    Of the chosen, ``keep`` stay as they are, ``random`` become any token that is not special, and the others
    ``mask_id`` (BERT, section 3.1: 10, 10 and 80 per cent). Padding and ``special_ids`` are neither chosen nor
    drawn. A document with any token to choose has at least one chosen.

    ``begins_word[id]`` makes whole words stand or fall together: a token that does not begin a word goes with the
    token before it. Words are taken in random order as long as they fit into the share; if none fits, the shortest.
    """

    mask_id: int
    vocab_size: int
    special_ids: tuple[int, ...]
    share: float = 0.15
    keep: float = 0.1
    random: float = 0.1
    begins_word: tuple[bool, ...] | None = None
    overlap = 0

    def __post_init__(self) -> None:
        refuse_share("share", self.share)
        if not (self.keep >= 0 and self.random >= 0 and self.keep + self.random <= 1):
            raise ConfigError(f"keep is {self.keep} and random {self.random}; give shares that add up to at most 1")
        outside = [id_ for id_ in (self.mask_id, *self.special_ids) if not 0 <= id_ < self.vocab_size]
        if outside:
            raise ConfigError(f"special id {outside[0]} is not one of the {self.vocab_size} ids; name ids below that")
        if self.begins_word is not None and len(self.begins_word) != self.vocab_size:
            raise ConfigError(
                f"begins_word has {len(self.begins_word)} entries, but vocab_size is {self.vocab_size}; give one an id"
            )
        if not len(self._ordinary):
            raise ConfigError(
                f"all {self.vocab_size} ids are special, so nothing can be chosen; give fewer special_ids"
            )

    @cached_property
    def _is_special(self) -> Tensor:
        special = torch.zeros(self.vocab_size, dtype=torch.bool)
        special[[self.mask_id, *self.special_ids]] = True
        return special

    @cached_property
    def _ordinary(self) -> Tensor:
        """The ids that a random token is drawn from."""
        return (~self._is_special).nonzero()[:, 0]

    @cached_property
    def _begins(self) -> Tensor:
        """``Bool[V]``: ids at which a word begins; all of them where words are not asked for."""
        return torch.tensor([True] * self.vocab_size if self.begins_word is None else self.begins_word)

    def __call__(self, batch: Batch, dice: torch.Generator | None = None) -> Batch:
        if batch.labels is not None:
            return batch
        dice = needed(dice, "MaskedLM")
        if batch.tokens.numel() and not int(batch.tokens.max()) < self.vocab_size:
            raise DataError(
                f"token id {int(batch.tokens.max())} was met, but vocab_size is {self.vocab_size}; raise it"
            )
        tokens, labels = batch.tokens.clone(), torch.full_like(batch.tokens, IGNORED)
        for row, lengths in enumerate(batch.document_lengths):
            for segment in lengths:
                slots = (batch.segments[row] == segment).nonzero()[:, 0]
                document = batch.tokens[row, slots]
                chosen = self._choose(document, dice)
                labels[row, slots[chosen]] = document[chosen]
                tokens[row, slots[chosen]] = self._noise(document[chosen], dice)
        return replace(batch, tokens=tokens, labels=labels)

    def _choose(self, document_T: Tensor, dice: torch.Generator) -> Tensor:
        """Places to predict, in whole words."""
        special = self._is_special[document_T]
        free = (~special).nonzero()[:, 0]
        if not len(free):
            return free
        begins = self._begins[document_T]
        begins[0] = True
        begins[1:] |= special[:-1]
        word = torch.cumsum(begins, 0)[free]
        _, word, sizes = word.unique(return_inverse=True, return_counts=True)
        budget = max(1, round(self.share * len(free)))
        taken = torch.zeros(len(sizes), dtype=torch.bool)
        order = torch.rand(len(sizes), generator=dice, dtype=torch.float64).argsort(stable=True)
        left = budget
        for number, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
            if size <= left:
                taken[number] = True
                left -= size
        if left == budget:
            taken[order[sizes[order].argmin()]] = True
        return free[taken[word]]

    def _noise(self, chosen_C: Tensor, dice: torch.Generator) -> Tensor:
        """What stands in place of the chosen tokens."""
        fate = torch.rand(len(chosen_C), generator=dice, dtype=torch.float64)
        drawn = torch.randint(len(self._ordinary), (len(chosen_C),), generator=dice)
        noisy = torch.where(fate < self.keep, chosen_C, self.mask_id)
        return torch.where(fate >= 1 - self.random, self._ordinary[drawn], noisy)
