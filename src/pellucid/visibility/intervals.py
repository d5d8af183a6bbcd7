"""Visible keys of every query as sorted, disjoint half-open intervals ``[start, stop)``.

An ``Intervals`` is a list of ``(start_T, stop_T)`` array pairs; a pair with ``stop <= start`` is empty. With
them a million tokens are counted in well under a second, where a mask would need a terabyte.
"""

import numpy as np
from numpy.typing import NDArray

Intervals = list[tuple[NDArray[np.int64], NDArray[np.int64]]]


def single(start: NDArray[np.int64], stop: NDArray[np.int64]) -> Intervals:
    """One interval a query."""
    return [(start, stop)]


def intersect(left: Intervals, right: Intervals) -> Intervals:
    """Keys in both; disjoint because each side is."""
    pairs = [(np.maximum(a, c), np.minimum(b, d)) for a, b in left for c, d in right]
    return _without_empty(pairs)


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


def count(intervals: Intervals) -> int:
    """Visible pairs in all."""
    return int(sum(np.maximum(stop - start, 0).sum() for start, stop in intervals))


def _without_empty(intervals: Intervals) -> Intervals:
    return [(start, stop) for start, stop in intervals if (stop > start).any()]
