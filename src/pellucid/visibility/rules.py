"""Rules: who may see whom, as immutable values that combine with ``&`` and ``|``.

A rule looks at two coordinates and answers ``True`` for *visible*. Being of the same document, and of a
document at all (segment ≠ 0), is part of every rule and cannot be left off. The single ones are in :mod:`primitives`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache

from pellucid.errors import ConfigError
from pellucid.shapes import Bool, Tensor
from pellucid.visibility import intervals as iv
from pellucid.visibility.coordinates import Coordinates

Lookback = tuple[int | None, int]


class Rule(ABC):
    """Who may see whom. Rules are made by the functions in :mod:`primitives` and combined with ``&`` and ``|``."""

    __slots__ = ()

    positional: bool = True
    """Whether positions alone decide (no groups, no given matrix)."""

    is_slot_mask: bool = False
    """Whether it says which slot sees which, so that no document can be looked at alone."""

    def mask(self, q_coords: Coordinates, k_coords: Coordinates) -> Bool[Tensor, "B 1 T S"]:
        """The readable truth: ``True`` where the query may see the key.

        Built once per pair of coordinates and shared by all who ask again.
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
        """From this position on no token is seen by an earlier one (None: never): from there a cache may go on
        token by token."""
        return 0 if self.lookahead == 0 else None

    @abstractmethod
    def intervals(self, length: int) -> iv.Intervals:
        """Visible keys of each query of one document, as disjoint half-open intervals."""

    def num_visible_pairs(self, length: int) -> int:
        """Visible (query, key) pairs in one document of ``length`` tokens, exactly and without a mask."""
        return iv.count(self.intervals(length))

    @abstractmethod
    def describe(self) -> str:
        """Stable text, read back by :func:`parse`; the checkpoint contract stores it."""

    def __and__(self, other: Rule) -> Rule:
        return And(_parts(And, self) + _parts(And, other))

    def __or__(self, other: Rule) -> Rule:
        return Or(_parts(Or, self) + _parts(Or, other))

    def __str__(self) -> str:
        return self.describe()


def _smallest(bounds: list[int | None]) -> int | None:
    return min((bound for bound in bounds if bound is not None), default=None)


def _largest(bounds: list[int | None]) -> int | None:
    bounded = [bound for bound in bounds if bound is not None]
    return max(bounded) if len(bounded) == len(bounds) else None


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


@dataclass(frozen=True)
class And(_Combined):
    """Visible when every part says so."""

    @property
    def lookback(self) -> Lookback:
        # Any part's reach bounds the intersection; the one that looks back least lets a cache forget most.
        return min((rule.lookback for rule in self.rules), key=lambda r: (r[0] is None, r[0] or 0, r[1]))

    @property
    def lookahead(self) -> int | None:
        return _smallest([rule.lookahead for rule in self.rules])

    @property
    def lookahead_outside_groups(self) -> int | None:
        return _smallest([rule.lookahead_outside_groups for rule in self.rules])

    @property
    def causal_from(self) -> int | None:
        return _smallest([rule.causal_from for rule in self.rules])

    def _visible(self, q_coords: Coordinates, k_coords: Coordinates) -> Tensor:
        visible = self.rules[0]._visible(q_coords, k_coords)
        for rule in self.rules[1:]:
            visible = visible & rule._visible(q_coords, k_coords)
        return visible

    def intervals(self, length: int) -> iv.Intervals:
        result = self.rules[0].intervals(length)
        for rule in self.rules[1:]:
            result = iv.intersect(result, rule.intervals(length))
        return result

    def describe(self) -> str:
        return " & ".join(f"({r})" if isinstance(r, Or) else str(r) for r in self.rules)


@dataclass(frozen=True)
class Or(_Combined):
    """Visible when at least one part says so."""

    @property
    def lookback(self) -> Lookback:
        back = _largest([rule.lookback[0] for rule in self.rules])
        return (None, 0) if back is None else (back, max(rule.lookback[1] for rule in self.rules))

    @property
    def lookahead(self) -> int | None:
        return _largest([rule.lookahead for rule in self.rules])

    @property
    def lookahead_outside_groups(self) -> int | None:
        return _largest([rule.lookahead_outside_groups for rule in self.rules])

    @property
    def causal_from(self) -> int | None:
        return _largest([rule.causal_from for rule in self.rules])

    def _visible(self, q_coords: Coordinates, k_coords: Coordinates) -> Tensor:
        visible = self.rules[0]._visible(q_coords, k_coords)
        for rule in self.rules[1:]:
            visible = visible | rule._visible(q_coords, k_coords)
        return visible

    def intervals(self, length: int) -> iv.Intervals:
        result = self.rules[0].intervals(length)
        for rule in self.rules[1:]:
            result = iv.union(result, rule.intervals(length))
        return result

    def describe(self) -> str:
        return " | ".join(f"({r})" if isinstance(r, And) else str(r) for r in self.rules)
