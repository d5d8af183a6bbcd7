"""How a model is asked what comes next: the same for every family, with a cache or without.

Decoder-only, prefix-LM and encoder–decoder models differ in three places, all of them here: an encoder's source goes
with the first pass (every pass, where there is no cache), the tokens of a prefix-LM's prompt carry group 1, and a
cache keeps what it must know about both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pellucid.batch import Batch
from pellucid.generation.validate import Ids
from pellucid.shapes import Tensor
from pellucid.visibility import Rule


class ModelRunner:
    """Rows on their way through a model.

    ``new`` is the most tokens that a row gains. Padding goes to the left, so that all rows end at the last slot.
    """

    def __init__(
        self, model: nn.Module, prompts: Sequence[Ids], sources: Sequence[Ids] | None, *, new: int, use_cache: bool
    ) -> None:
        self.model = model
        self.sources = None if sources is None else list(sources)
        self.prefixes = [len(prompt) for prompt in prompts] if reads_prefix(model) else None
        # Room for the longest prompt and every new token but the last, which is never read.
        capacity = max(map(len, prompts)) + new - 1
        self.cache: Any = model.new_cache(len(prompts), capacity) if use_cache else None  # type: ignore[operator]
        self._first = True

    @torch.inference_mode()
    def next_logits(self, rows: Sequence[Ids]) -> Tensor:
        """``[B, V]`` on the CPU: what each row, given whole, expects next. An empty row is padding.

        With a cache only what it does not hold is run: all at first, then each row's last token.
        """
        whole = self._first or self.cache is None
        batch = Batch.from_rows([list(row) if whole else list(row[-1:]) for row in rows], side="left")
        if self.prefixes is not None:
            batch = replace(batch, groups=_groups(batch, self.prefixes, whole))
        if self.sources is not None and whole:
            batch = replace(batch, source=Batch.from_rows(self.sources))
        hidden_BTD = self.model(batch.to(_device(self.model)), cache=self.cache, want="hidden").hidden
        self._first = False
        logits_BTV: Tensor = self.model.head(hidden_BTD[:, -1:])  # type: ignore[operator]
        return logits_BTV[:, 0].cpu()

    @torch.inference_mode()
    def keep(self, index: Sequence[int]) -> None:
        """From now on row b is what row ``index[b]`` was: rows may be repeated, swapped and dropped.

        Everything that belongs to a row moves with it, the memory of its source too.
        """
        if self.cache is not None:
            self.cache.reorder(torch.tensor(index))
        if self.sources is not None:
            self.sources = [self.sources[row] for row in index]
        if self.prefixes is not None:
            self.prefixes = [self.prefixes[row] for row in index]


def reads_prefix(model: nn.Module) -> bool:
    """Whether a rule of the model lets tokens of a group be seen by all: a prefix-LM, whose prompt is the prefix."""
    rules: Sequence[Rule] = getattr(model, "rules", ())
    return any(rule.uses_prefix_groups for rule in rules)


def _groups(batch: Batch, prefixes: Sequence[int], whole: bool) -> Tensor:
    """Group 1 on the prompt of each row that is there whole, 0 elsewhere."""
    if not whole:
        return torch.zeros_like(batch.tokens)
    inside = batch.positions < torch.tensor(prefixes)[:, None]
    return (inside & (batch.segments != 0)).long()


def _device(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device
