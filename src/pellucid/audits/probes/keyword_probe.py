"""The probe of targets that are called like transformers models: ids, ``attention_mask``, ``position_ids``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from pellucid.audits.engine.state import preserve_state
from pellucid.audits.probes.outputs import LABEL_NAMES
from pellucid.audits.probes.tokens_probe import TokensProbe, parameters_of
from pellucid.audits.probes.trial import attribute_set, close, error_text, supported_sides
from pellucid.batch import Batch
from pellucid.errors import ArgumentError
from pellucid.probe import Capability, Visibility

ALL_ONES = "with an all-ones mask"
MASK, POSITIONS = "attention_mask", "position_ids"


def keyword_arguments(target: object) -> dict[str, bool]:
    """Which of the two keywords a target takes besides its tokens, and whether it must be given; none where it needs
    more than is known here."""
    parameters = parameters_of(target)
    required = {p.name for p in parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
    if len(required - {MASK, POSITIONS, *LABEL_NAMES}) > 1:
        return {}
    return {name: name in required for name in (MASK, POSITIONS) if name in parameters}


class KeywordProbe(TokensProbe):
    """``forward(ids, attention_mask=…, position_ids=…) -> logits``, or an object with ``.logits``.

    As with transformers' own models the mask is 1 for real tokens, and is passed where something is padded; position
    ids, where slots do not imply them. What a target does not take is not audited. A side on which padding raises is
    refused; so is one that ``padding_side`` on the target leaves out. There is no common way to call caches and packed
    rows: for these write a probe.
    """

    def __init__(
        self,
        target: Callable[..., object],
        *,
        vocab_size: int | None = None,
        rules: Sequence[Visibility] | None = None,
        max_length: int | None = None,
        name: str | None = None,
    ) -> None:
        self.takes = keyword_arguments(target)
        if not self.takes:
            raise ArgumentError(
                f"{type(target).__name__} takes neither {MASK} nor {POSITIONS} by name; use TokensProbe"
            )
        self._call_mode = ""
        super().__init__(target, vocab_size=vocab_size, rules=rules, max_length=max_length, name=name)
        found: set[Capability] = set(self.capabilities)
        with preserve_state(self.module), torch.no_grad():
            moved = Batch.from_rows([[1, 0]])
            moved = moved.replace(positions=moved.positions + 1)
            if POSITIONS in self.takes and self._raised(moved) is None:
                found.add("positions")
            if MASK in self.takes and self._find_sides():
                found.add("padding")
                self.call_modes = (ALL_ONES,)
        self.shift_allowed = not all(rule.lookahead == 0 for rule in self.rules)
        self.capabilities = frozenset(found)

    def call_mode(self, name: str) -> AbstractContextManager[None]:
        return attribute_set(self, "_call_mode", name)

    def _kwargs(self, batch: Batch) -> dict[str, Any]:
        kwargs: dict[str, Any] = {}
        padded = not bool(batch.token_mask.all())
        if MASK in self.takes and (padded or self.takes[MASK] or self._call_mode == ALL_ONES):
            kwargs[MASK] = batch.token_mask.long()
        slots_T = torch.arange(batch.shape[1], device=batch.positions.device)
        moved = bool((batch.token_mask & (batch.positions != slots_T)).any())
        if POSITIONS in self.takes and (moved or self.takes[POSITIONS]):
            kwargs[POSITIONS] = batch.positions
        return kwargs

    def _required_kwargs(self, tokens_BT: Tensor) -> dict[str, Any]:
        ones_BT = torch.ones_like(tokens_BT)
        every = {MASK: ones_BT, POSITIONS: ones_BT.cumsum(1) - 1}
        return {name: every[name] for name, required in self.takes.items() if required}

    def _raised(self, batch: Batch) -> str | None:
        """What goes wrong with a batch; None where nothing does."""
        try:
            if self.logits(batch.to(self._device)).shape[:2] == batch.tokens.shape:
                return None
        except (Exception, SystemExit) as error:  # noqa: BLE001 (anybody's code)
            return error_text(error)
        return "nothing, and returns another shape"

    def _find_sides(self) -> bool:
        """Whether it takes padding, and on which sides: not where it raises, nor where ``padding_side`` excludes it."""
        row = [1, 0] * 32
        lengths = (5, 3, *range(8, 65, 8), self.known_length)
        slots = next((n for n in lengths if self._raised(Batch.from_rows([row[:n]])) is None), 2)
        rows = [row[: slots - 1], [1]]
        sides, self.refused = supported_sides(
            getattr(self.module, "padding_side", None),
            lambda side: self._raised(Batch.from_rows(rows, side=side, length=slots)),
        )
        if "right" in sides and "left" in sides and self._counts_slots(rows[0], slots):
            self.position_shifting_sides = tuple(side for side in sides if side != "right")
            sides = ("right",)
        self.sides = sides or ("right",)
        return bool(sides)

    def _counts_slots(self, row: list[int], slots: int) -> bool:
        """Whether left padding moves positions, which it does not take, while the content of pads moves nothing."""
        if POSITIONS in self.takes:
            return False
        if self._raised(Batch.from_rows([row])) is not None:
            return False
        alone, padded = Batch.from_rows([row]), Batch.from_rows([row], side="left", length=slots)
        other = padded.replace(tokens=torch.where(padded.token_mask, padded.tokens, 1))
        want, got, moved = (self.logits(each.to(self._device))[:, -len(row) :] for each in (alone, padded, other))
        return close(got, moved) and not close(got, want)
