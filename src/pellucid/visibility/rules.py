"""Rules: who may see whom, as immutable values that combine with ``&`` and ``|``.

A rule looks at two coordinates and answers ``True`` for *visible*. Being of the same document, and of a
document at all (segment ≠ 0), is part of every rule and cannot be left off. The single ones are in :mod:`primitives`.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache, reduce

import numpy as np
from numpy.typing import NDArray

from pellucid.errors import ConfigError
from pellucid.shapes import Bool, Tensor
from pellucid.visibility.coordinates import Coordinates

Lookback = tuple[int | None, int]
Intervals = list[tuple[NDArray[np.int64], NDArray[np.int64]]]
"""Visible keys of every query as disjoint half-open intervals: ``(start_T, stop_T)`` pairs; ``stop <= start`` is empty.

With them a million tokens are counted in well under a second, where a mask would need a terabyte.
"""


class Rule(ABC):
    """Who may see whom. Rules are made by the functions in :mod:`primitives` and combined with ``&`` and ``|``."""

    __slots__ = ()

    positional: bool = True
    """Whether positions alone decide (no groups, no given matrix)."""

    is_slot_mask: bool = False
    """Whether it is a matrix over slots, so that no document can be treated alone."""

    def mask(self, q_coords: Coordinates, k_coords: Coordinates) -> Bool[Tensor, "B 1 T S"]:
        """The readable truth: ``True`` where the query may see the key.

        Built once per pair of coordinates.
        """
        if q_coords.shape[0] != k_coords.shape[0]:
            raise ConfigError(
                f"queries have {q_coords.shape[0]} rows but keys have {k_coords.shape[0]}; visibility is decided "
                "row by row"
            )
        _, mask = q_coords.cached((self, id(k_coords)), lambda: (k_coords, self._mask(q_coords, k_coords)))
        return mask

    def _mask(self, q_coords: Coordinates, k_coords: Coordinates) -> Tensor:
        same = q_coords.segments[:, :, None] == k_coords.segments[:, None, :]
        return (same & q_coords.real[:, :, None] & self._visible(q_coords, k_coords)).unsqueeze(1)

    @abstractmethod
    def _visible(self, q_coords: Coordinates, k_coords: Coordinates) -> Bool[Tensor, "..."]:
        """The rule alone, inside one document: broadcastable to ``[B, T, S]``."""

    @property
    @abstractmethod
    def lookback(self) -> Lookback:
        """``(back, first)``: a query sees at most ``back`` tokens before itself (None: all of them), and besides
        them only the first ``first`` tokens of its document. A cache may forget everything else."""

    @property
    @abstractmethod
    def lookahead(self) -> int | None:
        """How many tokens after itself a query may see (0: causal, None: unbounded)."""

    @property
    def lookahead_outside_groups(self) -> int | None:
        """``ahead`` of tokens that are in no group: what ``prefix()`` and ``same_group()`` show is not for them."""
        return self.lookahead

    @property
    def uses_prefix_groups(self) -> bool:
        """Whether ``prefix()`` is in it, which shows tokens with a group to all of their document."""
        return False

    @property
    def causal_from(self) -> int | None:
        """From this position on no token is seen by an earlier one (None: never): from there a cache may grow
        token by token."""
        return 0 if self.lookahead == 0 else None

    @abstractmethod
    def intervals(self, length: int) -> Intervals:
        """Visible keys of each query of one document, as disjoint half-open intervals."""

    def num_visible_pairs(self, length: int) -> int:
        """Visible (query, key) pairs in one document of ``length`` tokens, exactly and without a mask."""
        return count(self.intervals(length))

    @abstractmethod
    def describe(self) -> str:
        """Stable text, read back by :func:`parse`; the checkpoint contract stores it."""

    def __and__(self, other: Rule) -> Rule:
        return And(_parts(And, self) + _parts(And, other))

    def __or__(self, other: Rule) -> Rule:
        return Or(_parts(Or, self) + _parts(Or, other))

    def __str__(self) -> str:
        return self.describe()


@lru_cache(maxsize=1024)
def is_plain_causal(rule: Rule, length: int) -> bool:
    """Whether the rule is just ``causal()`` for documents of up to ``length`` tokens (as a wide window is)."""
    return rule.positional and rule.lookahead == 0 and rule.num_visible_pairs(length) == length * (length + 1) // 2


@lru_cache(maxsize=1024)
def is_full(rule: Rule, length: int) -> bool:
    """Whether the rule hides nothing in documents of up to ``length`` tokens."""
    return rule.positional and rule.num_visible_pairs(length) == length * length


def _parts(kind: type[_Combined], rule: Rule) -> tuple[Rule, ...]:
    if not isinstance(rule, Rule):
        raise ConfigError(f"a rule combines only with a rule, not with {type(rule).__name__} ({rule!r})")
    return rule.rules if isinstance(rule, kind) else (rule,)


@dataclass(frozen=True)
class _Combined(Rule):
    rules: tuple[Rule, ...]

    @property
    def positional(self) -> bool:  # type: ignore[override]
        return all(rule.positional for rule in self.rules)

    @property
    def is_slot_mask(self) -> bool:  # type: ignore[override]
        return any(rule.is_slot_mask for rule in self.rules)

    @property
    def uses_prefix_groups(self) -> bool:
        return any(rule.uses_prefix_groups for rule in self.rules)

    @property
    def lookahead(self) -> int | None:
        return self._bound([rule.lookahead for rule in self.rules])

    @property
    def lookahead_outside_groups(self) -> int | None:
        return self._bound([rule.lookahead_outside_groups for rule in self.rules])

    @property
    def causal_from(self) -> int | None:
        return self._bound([rule.causal_from for rule in self.rules])

    @abstractmethod
    def _bound(self, bounds: list[int | None]) -> int | None:
        """The bound of all parts together (None: unbounded)."""

    def _texts(self) -> list[str]:
        return [f"({rule})" if isinstance(rule, _Combined) else str(rule) for rule in self.rules]


@dataclass(frozen=True)
class And(_Combined):
    """Visible by all parts."""

    @property
    def lookback(self) -> Lookback:
        # Any part's reach bounds the intersection; the one that looks back least lets a cache forget most.
        return min((rule.lookback for rule in self.rules), key=lambda r: (r[0] is None, r[0] or 0, r[1]))

    def _bound(self, bounds: list[int | None]) -> int | None:
        return min((bound for bound in bounds if bound is not None), default=None)

    def _visible(self, q_coords: Coordinates, k_coords: Coordinates) -> Tensor:
        return reduce(operator.and_, [rule._visible(q_coords, k_coords) for rule in self.rules])

    def intervals(self, length: int) -> Intervals:
        return reduce(_intersection, [rule.intervals(length) for rule in self.rules])

    def describe(self) -> str:
        return " & ".join(self._texts())


@dataclass(frozen=True)
class Or(_Combined):
    """Visible by at least one part."""

    @property
    def lookback(self) -> Lookback:
        back = self._bound([rule.lookback[0] for rule in self.rules])
        return (None, 0) if back is None else (back, max(rule.lookback[1] for rule in self.rules))

    def _bound(self, bounds: list[int | None]) -> int | None:
        bounded = [bound for bound in bounds if bound is not None]
        return max(bounded) if len(bounded) == len(bounds) else None

    def _visible(self, q_coords: Coordinates, k_coords: Coordinates) -> Tensor:
        return reduce(operator.or_, [rule._visible(q_coords, k_coords) for rule in self.rules])

    def intervals(self, length: int) -> Intervals:
        return reduce(union, [rule.intervals(length) for rule in self.rules])

    def describe(self) -> str:
        return " | ".join(self._texts())


def _intersection(left: Intervals, right: Intervals) -> Intervals:
    """Keys in both; disjoint because each side is."""
    return _without_empty([(np.maximum(a, c), np.minimum(b, d)) for a, b in left for c, d in right])


def union(left: Intervals, right: Intervals) -> Intervals:
    """Keys in either: ``left`` and what of ``right`` lies outside it."""
    rest = right
    for start, stop in left:
        stop = np.maximum(start, stop)
        # an interval minus [start, stop) is what lies before it and what lies after it
        before = [(a, np.where(stop > start, np.minimum(b, start), b)) for a, b in rest]
        after = [(np.maximum(a, stop), np.where(stop > start, b, a)) for a, b in rest]
        rest = _without_empty(before + after)
    return left + rest


def _without_empty(intervals: Intervals) -> Intervals:
    return [(start, stop) for start, stop in intervals if (stop > start).any()]


def count(intervals: Intervals) -> int:
    """Visible pairs in all."""
    return int(sum(np.maximum(stop - start, 0).sum() for start, stop in intervals))
