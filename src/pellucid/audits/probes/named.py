"""Targets that are no transformers models but are called like them: ids, ``attention_mask``, ``position_ids``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn

from pellucid.audits.engine.preserve_state import preserve_state
from pellucid.audits.probes.hf_found import close, described, replaced, sides_taken
from pellucid.audits.probes.labels import NAMES
from pellucid.audits.probes.tokens import TokensProbe
from pellucid.batch import Batch
from pellucid.errors import InputError
from pellucid.probe import Capability, Visibility

ALL_ONES = "with an all-ones mask"
MASK, POSITIONS = "attention_mask", "position_ids"


def named_arguments(target: object) -> frozenset[str]:
    """Which of the two arguments of transformers' models a target takes by name besides its tokens."""
    called = target.forward if isinstance(target, nn.Module) else target
    try:
        parameters = inspect.signature(cast(Callable[..., object], called)).parameters
    except (TypeError, ValueError):
        return frozenset()
    return frozenset(_optional(parameters))


def _optional(parameters: Mapping[str, inspect.Parameter]) -> Iterator[str]:
    required = [p for p in parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if len({p.name for p in required} - {MASK, POSITIONS, *NAMES}) > 1:
        return  # it needs more than we know of
    yield from (name for name in (MASK, POSITIONS) if name in parameters)


class NamedProbe(TokensProbe):
    """``forward(ids, attention_mask=…, position_ids=…) -> logits``, or an object whose ``.logits`` are these.

    As for transformers' own models the mask is 1 for real tokens, and is given where something is padded; position
    ids, where slots do not say them. What is not taken is not asked about. A side on which padding raises is refused;
    so is one that ``padding_side`` on the target leaves out. Caches and packs have no common way of being asked: for
    these write a probe.
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
        self.takes = named_arguments(target)
        if not self.takes:
            raise InputError(f"{type(target).__name__} takes neither {MASK} nor {POSITIONS} by name; use TokensProbe")
        self._way = ""
        super().__init__(target, vocab_size=vocab_size, rules=rules, max_length=max_length, name=name)
        offered: set[Capability] = set(self.capabilities)
        with preserve_state(self.module), torch.no_grad():
            if POSITIONS in self.takes and self._works(Batch.from_rows([[1, 0]]), moved=True):
                offered.add("positions")
            if MASK in self.takes and self._padded():
                offered.add("padding")
                self.call_modes = (ALL_ONES,)
        self.shift_allowed = not all(rule.lookahead == 0 for rule in self.rules)
        self.capabilities = frozenset(offered)

    def call_mode(self, name: str) -> AbstractContextManager[None]:
        return replaced(self, "_way", name)

    def _given(self, batch: Batch) -> dict[str, Any]:
        given: dict[str, Any] = {}
        if MASK in self.takes and (self._way == ALL_ONES or not bool(batch.token_mask.all()) or self._needs(MASK)):
            given[MASK] = batch.token_mask.long()
        slots_T = torch.arange(batch.shape[1], device=batch.positions.device)
        told = bool((batch.token_mask & (batch.positions != slots_T)).any())
        if POSITIONS in self.takes and (told or self._needs(POSITIONS)):
            given[POSITIONS] = batch.positions
        return given

    def _needs(self, name: str) -> bool:
        """Whether the argument has no default, so that it must always be given."""
        called = self.target.forward if isinstance(self.target, nn.Module) else self.target
        parameter = inspect.signature(called).parameters[name]
        return parameter.default is parameter.empty

    def _try_arguments(self, tokens_BT: Tensor) -> dict[str, Any]:
        ones_BT = torch.ones_like(tokens_BT)
        every = {MASK: ones_BT, POSITIONS: ones_BT.cumsum(1) - 1}
        return {name: value for name, value in every.items() if name in self.takes and self._needs(name)}

    def _works(self, batch: Batch, moved: bool = False) -> bool:
        batch = batch.to(self._device)
        if moved:
            batch = batch.replace(positions=batch.positions + 1)
        return self._raised(batch) is None

    def _raised(self, batch: Batch) -> str | None:
        try:
            if self.logits(batch.to(self._device)).shape[:2] == batch.tokens.shape:
                return None
        except (Exception, SystemExit) as error:  # noqa: BLE001 (anybody's code)
            return described(error)
        return "nothing, and answers in another shape"

    def _padded(self) -> bool:
        """Whether it takes padding, and on which sides: not where it raises, nor where it says so itself."""
        slots = next((n for n in (5, 3) if self._works(Batch.from_rows([[1, 0, 1, 0, 1][:n]]))), 2)
        rows = [[1, 0, 1, 0][: slots - 1], [1]]
        sides, self.refused = sides_taken(
            getattr(self.module, "padding_side", None),
            lambda side: self._raised(Batch.from_rows(rows, side=side, length=slots)),
        )
        if "right" in sides and "left" in sides and self._counts_slots(rows[0], slots):
            self.position_shifting_sides = tuple(side for side in sides if side != "right")
            sides = ("right",)
        self.sides = sides or ("right",)
        return bool(sides)

    def _counts_slots(self, row: list[int], slots: int) -> bool:
        """Whether left padding moves a row's positions, no pad's content moving anything, and they cannot be told."""
        if POSITIONS in self.takes:
            return False
        alone, padded = Batch.from_rows([row]), Batch.from_rows([row], side="left", length=slots)
        other = padded.replace(tokens=torch.where(padded.token_mask, padded.tokens, 1))
        want, got, moved = (self.logits(each.to(self._device))[:, -len(row) :] for each in (alone, padded, other))
        return close(got, moved) and not close(got, want)
