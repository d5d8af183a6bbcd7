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
from pellucid.generation.inputs import Ids
from pellucid.shapes import Int, Tensor
from pellucid.visibility import Layout, Rule, Run


class ModelRunner:
    """Runs the rows of a batch through a model, pass by pass.

    ``new`` is the most tokens that a row gains. Padding goes to the left, so that all rows end at the last slot.
    """

    def __init__(
        self, model: nn.Module, prompts: Sequence[Ids], sources: Sequence[Ids] | None, *, new: int, use_cache: bool
    ) -> None:
        self.model = model
        parameter = next(model.parameters(), None)
        self.device = torch.device("cpu") if parameter is None else parameter.device
        self.sources = None if sources is None else list(sources)
        self.prefixes = [len(prompt) for prompt in prompts] if reads_prefix(model) else None
        # Room for the longest prompt and every new token but the last, which is never read.
        capacity = max(map(len, prompts)) + new - 1
        self.cache: Any = model.new_cache(len(prompts), capacity) if use_cache else None  # type: ignore[operator]
        self._first = True
        self._live = [True] * len(prompts)
        self._zeros_B1 = torch.zeros(len(prompts), 1, dtype=torch.long, device=self.device)
        self._segments_B1 = torch.ones_like(self._zeros_B1)

    @torch.inference_mode()
    def next_logits(self, rows: Sequence[Ids], last_B: Int[Tensor, "B"] | None = None) -> Tensor:
        """``[B, V]`` on the model's device: what each row, given whole, expects next. An empty row is padding.

        With a cache only what it does not hold is run: all at first, then each row's last token, which may be given as
        ``last_B``, on the device already.
        """
        whole = self._first or self.cache is None
        batch = self._whole(rows) if whole else self._one_token(rows, last_B)
        hidden_BTD = self.model(batch, cache=self.cache, want="hidden").hidden
        self._first = False
        logits_BTV: Tensor = self.model.head(hidden_BTD[:, -1:])  # type: ignore[operator]
        return logits_BTV[:, 0]

    def _whole(self, rows: Sequence[Ids]) -> Batch:
        batch = Batch.from_rows([list(row) for row in rows], side="left")
        if self.prefixes is not None:  # group 1 on the prompt of each row
            inside = batch.positions < torch.tensor(self.prefixes)[:, None]
            batch = replace(batch, groups=(inside & (batch.segments != 0)).long())
        if self.sources is not None:
            batch = replace(batch, source=Batch.from_rows(self.sources))
        return batch.to(self.device)

    def _one_token(self, rows: Sequence[Ids], last_B: Tensor | None) -> Batch:
        live = [len(row) > 0 for row in rows]
        for row, (before, now) in enumerate(zip(self._live, live, strict=True)):
            if before != now:
                self._segments_B1[row] = int(now)
        self._live = live
        if last_B is None:
            last_B = torch.tensor([row[-1] if len(row) else 0 for row in rows], device=self.device)
        zeros_B1 = self._zeros_B1
        runs = tuple(Run(row, 0, 1, 1, 0) for row, alive in enumerate(live) if alive)
        tokens_B1 = torch.where(self._segments_B1 != 0, last_B[:, None], zeros_B1)
        groups_B1 = None if self.prefixes is None else zeros_B1
        return Batch(
            tokens_B1, zeros_B1, self._segments_B1.clone(), groups=groups_B1, layout=Layout(len(rows), 1, runs)
        )

    @torch.inference_mode()
    def keep(self, index: Sequence[int]) -> None:
        """Make row b what row ``index[b]`` was: rows may be repeated, swapped and dropped.

        Everything that belongs to a row moves with it, its encoder output too.
        """
        if self.cache is not None:
            self.cache.reorder(torch.tensor(index, device=self.device))
        if self.sources is not None:
            self.sources = [self.sources[row] for row in index]
        if self.prefixes is not None:
            self.prefixes = [self.prefixes[row] for row in index]
        self._live = [True] * len(index)
        self._zeros_B1 = torch.zeros(len(index), 1, dtype=torch.long, device=self.device)
        self._segments_B1 = torch.ones_like(self._zeros_B1)


def reads_prefix(model: nn.Module) -> bool:
    """Whether a rule of the model lets all tokens see those with a group: a prefix-LM, whose prompt is the prefix."""
    rules: Sequence[Rule] = getattr(model, "rules", ())
    return any(rule.uses_prefix_groups for rule in rules)
