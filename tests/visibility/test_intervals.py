"""Intervals of keys, as sets: each key counts once."""

import numpy as np

from pellucid.visibility.rules import count, union


def test_a_union_counts_each_key_once_where_one_side_is_empty():
    """Three queries whose first interval is empty: at the start of the other, inside it, and behind it."""
    empty = [(np.array([0, 2, 7]), np.array([0, 2, 7]))]
    keys = [(np.array([0, 0, 0]), np.array([5, 5, 5]))]
    assert count(union(empty, keys)) == count(union(keys, empty)) == 15
