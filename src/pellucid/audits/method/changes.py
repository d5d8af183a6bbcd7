"""One sequence, and copies of it in each of which one token is another: who moves whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pellucid.audits.method.bench import Bench
from pellucid.audits.method.measure import Reading, Run, moved, scale_of
from pellucid.probe import Request

Forward = Callable[[Run, Request], torch.Tensor]

_MOST_NUMBERS = 2**25  # logits held at once


def sample(length: int, most: int) -> list[int]:
    """At most ``most`` of ``length`` places, evenly spread; the second place is always among them."""
    if length <= most:
        return list(range(length))
    return sorted({1, *(round(i * (length - 1) / max(most - 2, 1)) for i in range(most - 1))})


def inside(length: int, count: int) -> list[int]:
    """At most ``count`` places before the last, evenly spread: a cut behind each leaves something behind it."""
    return sorted({(number + 1) * (length - 1) // (count + 1) for number in range(count)})


class Changes:
    """Change single tokens of one sequence and watch every output, ``forward`` saying how it is run.

    In the target's own dtype each copy is compared with an unchanged row in the same place of the same shape,
    so that nothing but content differs. In float64 one unchanged row serves for all.
    """

    def __init__(
        self, bench: Bench, row: list[int], forward: Forward, *, most: int | None = None, first: Sequence[int] = ()
    ) -> None:
        self.bench, self.base, self.forward = bench, row, forward
        most = most or max(4, bench.most_tokens // len(row))
        self.keys = sorted({*first, *sample(len(row), max(most - len(first), 4))})
        ends = bench.ends
        self.random = [bench.other(token) for token in row]
        middle = sum(ends) / 2
        self.special = [ends[1] if token < middle else ends[0] for token in row]

    @property
    def coverage(self) -> str:
        whole = len(self.keys) == len(self.base)
        return "every token changed" if whole else f"{len(self.keys)} of {len(self.base)} tokens changed"

    def native(self, special: bool = False) -> Reading:
        """``sizes[query, key]`` in the target's own dtype; keys that were not changed stay 0."""
        return self._read(self.bench.native, self.special if special else self.random, beside=False)

    def exact(self, like_native: bool) -> Reading | None:
        """The same in float64, with special tokens, or with those of the other run to have both alike."""
        if self.bench.exact is None:
            return None
        return self._read(self.bench.exact, self.random if like_native else self.special, beside=True)

    def alone(self, run: Run, query: int, key: int) -> bool:
        """Whether the key still moves the query when nothing else is in the batch."""
        before = self.forward(run, self._request([key], None))
        afters = (self.forward(run, self._request([key], new)) for new in (self.random, self.special))
        return any(float(moved(before, after)[0, query]) > 0 for after in afters)

    def _request(self, keys: list[int], new: list[int] | None) -> Request:
        """One row a key, in which that key's token is replaced (None: all rows as they are)."""
        rows = [list(self.base) for _ in keys]
        for row, key in zip(rows, keys, strict=True):
            if new is not None:
                row[key] = new[key]
        return Request.from_rows(rows)

    def _read(self, run: Run, new: list[int], beside: bool) -> Reading:
        length = len(self.base)
        block = max(1, _MOST_NUMBERS // (length * self.bench.probe.vocab_size))
        sizes_TT, scale = torch.zeros(length, length, dtype=torch.float64), 1.0
        before = self.forward(run, self._request([0], None)) if beside else None
        for start in range(0, len(self.keys), block):
            keys = self.keys[start : start + block]
            unchanged = self.forward(run, self._request(keys, None)) if before is None else before
            after = self.forward(run, self._request(keys, new))
            sizes_TT[:, keys] = moved(unchanged.expand_as(after), after).T
            scale = max(scale, scale_of(unchanged))
        return Reading(run, sizes_TT, scale)
