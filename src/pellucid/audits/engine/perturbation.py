"""One sequence, and copies of it with other tokens: one changed at a time, or everything after a cut at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pellucid.audits.engine.compare import Index, decide, judge, unless_it_raises
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.target_run import Deviation, TargetRun, logit_scale, max_abs_diff
from pellucid.batch import Batch
from pellucid.records import Finding, Location

Forward = Callable[[TargetRun, Batch], Tensor]
Row = list[int]

_LONGEST = 512
_FEWEST = 3  # keys of a sequence too long to change them all


def sample(length: int, most: int) -> list[int]:
    """At most ``most`` of ``length`` places, evenly spread; the second place is always among them."""
    if length <= most:
        return list(range(length))
    return sorted({1, *(round(i * (length - 1) / max(most - 2, 1)) for i in range(most - 1))})


def even_cuts(length: int, count: int) -> list[int]:
    """At most ``count`` places before the last, evenly spread: a cut behind each leaves something behind it."""
    return sorted({(number + 1) * (length - 1) // (count + 1) for number in range(count)})


def informative_cuts(length: int, count: int) -> list[int]:
    """At most ``count`` places to cut behind: the borders of common blocks, and evenly spread ones between them.

    A block that sees a little too far is found behind its border, one that is open inside between borders.
    """
    if count >= length - 1:
        return list(range(length - 1))
    blocks = (block for block in (64, 32, 128, 16, 256, 8) if block < length)
    borders = dict.fromkeys(start - 1 for block in blocks for start in range(block, length, 2 * block))
    half = list(borders)[: count // 2]
    return sorted({*half, *even_cuts(length, count - len(half))})


def longer_lengths(context: AuditContext) -> list[int]:
    """Lengths beyond the audit's own at which something may begin: powers of two, and bounds that a config names."""
    config = getattr(context.probe.module, "config", None)
    bounds = (getattr(config, name, None) for name in ("sliding_window", "window_size", "attention_chunk_size"))
    named = {bound + 1 for bound in bounds if isinstance(bound, int) and not isinstance(bound, bool)}
    longest = min(context.probe.max_length or _LONGEST, _LONGEST, context.most_tokens // 4)
    lengths = sorted({context.round(n) for n in (33, 65, 129, *named)})
    lengths = [length for length in lengths if context.length < length <= longest]
    return [length for length in lengths if context.takes(Batch.from_rows([context.tokens(length)]))]


class Perturbations:
    """Change tokens of one sequence and watch every output, ``forward`` saying how it is run.

    In the target's own dtype each copy is compared with an unchanged row in the same place of the same shape, so
    that nothing but content differs; all batches have one shape, so the unchanged one is run once. In float64 one
    unchanged row serves for all.
    """

    def __init__(
        self, context: AuditContext, row: Row, forward: Forward, *, most: int | None = None, first: Sequence[int] = ()
    ) -> None:
        self.context, self.base, self.forward = context, row, forward
        if most is None:  # of a long row whole tails are changed besides
            every = context.most_tokens // len(row)
            most = every if every >= len(row) else every - 2
        self.keys = sorted({*first, *sample(len(row), max(most - len(first), _FEWEST))})
        ends = context.ends
        self.random = [context.other(token) for token in row]
        middle = sum(ends) / 2
        self.special = [ends[1] if token < middle else ends[0] for token in row]
        self._unchanged: dict[tuple[int, int], Tensor] = {}

    @property
    def whole(self) -> bool:
        """Whether every token is changed by itself."""
        return len(self.keys) == len(self.base)

    @property
    def coverage(self) -> str:
        return "every token changed" if self.whole else f"{len(self.keys)} of {len(self.base)} tokens changed"

    def native(self, special: bool = False) -> Deviation:
        """``sizes[query, key]`` in the target's own dtype; keys that were not changed stay 0."""
        return self._read(self.context.native, self.special if special else self.random)

    def exact(self, like_native: bool) -> Deviation | None:
        """The same in float64, with special tokens, or with those of the other run to have both alike."""
        if self.context.exact is None:
            return None
        return self._read(self.context.exact, self.random if like_native else self.special)

    def moves_alone(self, run: TargetRun, query: int, key: int) -> bool:
        """Whether the key still moves the query when nothing else is in the batch."""
        return bool((self._by_key(run, key)[:, query] > 0).any())

    def queries_moved_by(self, run: TargetRun, key: int) -> list[int]:
        """The queries that move beyond rounding when this key alone is changed, with nothing else in the batch."""
        before = self.unchanged(run, 1)
        limit = (1e-12 if run.dtype == torch.float64 else run.rounding) * logit_scale(before) + 20 * run.noise
        return (self._by_key(run, key).amax(0) > limit).nonzero()[:, 0].tolist()

    def _by_key(self, run: TargetRun, key: int) -> Tensor:
        """``[2, T]``: how far each output moves by two other tokens in place of one, each row run by itself."""
        before = self.unchanged(run, 1)
        afters = [self.forward(run, Batch.from_rows([self.with_key(key, new)])) for new in (self.random, self.special)]
        return torch.stack([max_abs_diff(before, after)[0] for after in afters])

    def with_key(self, key: int, new: Row) -> Row:
        """The row in which one token is another."""
        return [*self.base[:key], new[key], *self.base[key + 1 :]]

    def with_tail(self, cut: int, special: bool = False) -> Row:
        """The row in which everything behind ``cut`` is another."""
        return [*self.base[: cut + 1], *(self.special if special else self.random)[cut + 1 :]]

    def unchanged(self, run: TargetRun, rows: int) -> Tensor:
        """``[rows, T, V]`` of so many copies of the row as it is; run once."""
        key = (id(run), rows)
        if key not in self._unchanged:
            batch = Batch.from_rows([self.base] * rows)
            plain = run.plain(batch) if self.forward is TargetRun.logits else self.forward(run, batch)
            self._unchanged[key] = plain
        return self._unchanged[key]

    def moves(self, run: TargetRun, rows: Sequence[Row]) -> tuple[Tensor, float]:
        """``[R, T]``: how far each of these rows' outputs are from the unchanged row's, and their scale."""
        beside = run is not self.context.native and run.seed is None  # random numbers follow the shape
        each = self._at_once(len(rows))
        before = self.unchanged(run, 1 if beside else each)
        sizes = []
        for start in range(0, len(rows), each):
            block = list(rows[start : start + each])
            spare = 0 if beside else each - len(block)  # one shape for all
            after = self.forward(run, Batch.from_rows(block + block[-1:] * spare))
            sizes.append(max_abs_diff(before.expand_as(after), after)[: len(block)])
        return torch.cat(sizes), logit_scale(before)

    def _at_once(self, rows: int) -> int:
        """Rows a batch, such that the last is nearly as full as the others."""
        return -(-rows // -(-rows // max(1, self.context.at_once // len(self.base))))

    def _read(self, run: TargetRun, new: Row) -> Deviation:
        sizes_TT = torch.zeros(len(self.base), len(self.base), dtype=torch.float64)
        moves_KT, scale = self.moves(run, [self.with_key(key, new) for key in self.keys])
        sizes_TT[:, self.keys] = moves_KT.T
        return Deviation(run, sizes_TT, scale)


_NAMED = 8  # more cuts are counted


def perturb_suffixes(
    context: AuditContext, case: str, changes: Perturbations, cuts: Sequence[int], *, exact: bool = False
) -> Finding:
    """Whether an output up to a cut moves when all that comes behind it is changed.

    float64 is used where something moved; with ``exact`` at one cut, with other tokens, in any case.
    """
    length = len(changes.base)
    behind_CT = torch.arange(length)[None] > torch.tensor(cuts)[:, None]

    def read(run: TargetRun, numbers: Sequence[int], special: bool = False) -> Deviation:
        sizes_CT = torch.zeros(len(cuts), length, dtype=torch.float64)
        moves_CT, scale = changes.moves(run, [changes.with_tail(cuts[number], special) for number in numbers])
        sizes_CT[list(numbers)] = moves_CT
        return Deviation(run, sizes_CT.masked_fill(behind_CT, 0.0), scale)

    def place(run: TargetRun, index: Index) -> tuple[Location, str]:
        number, query = index
        key = _first_that_moves(changes, run, query, cuts[number])
        message = f"the output at {query} moves when all tokens after {cuts[number]} are changed"
        return Location(0, query, key), message + ("" if key is None else f", token {key} the first that does it")

    readings = [read(context.native, range(len(cuts)))]
    if context.exact is not None and readings[0].largest:
        readings.append(read(context.exact, range(len(cuts))))
    elif context.exact is not None and exact:
        readings.append(read(context.exact, [len(cuts) // 2], special=True))
    named = (
        f"behind {', '.join(map(str, cuts))}" if len(cuts) <= _NAMED else f"behind {len(cuts)} of {length - 1} tokens"
    )
    where = "behind every token" if len(cuts) >= length - 1 else named
    good = f"no output moved when all that comes after it was changed (cut {where})"
    result = decide(context, case, readings, good=good, place=place, bits=True)
    if result.status != "leak":
        return result
    verdict = judge(context, readings, bits=True)
    run, (number, query) = verdict.reading.run, verdict.first
    tails = [changes.with_tail(cuts[number], special) for special in (False, True)]
    by_itself = unless_it_raises(lambda: any(_moves(changes, run, tail, query) for tail in tails), True)
    return result if by_itself else mixed_rows(result)


def mixed_rows(result: Finding) -> Finding:
    """The finding where outputs moved beside other rows only."""
    message = "outputs moved only because other rows of the batch changed: the rows mix (see batch)"
    return replace(result, status="fragile", message=message)


def _moves(changes: Perturbations, run: TargetRun, row: Sequence[int], query: int) -> bool:
    """Whether a row's output differs from the unchanged row's, each run by itself."""
    after: Tensor = changes.forward(run, Batch.from_rows([row]))
    return float(max_abs_diff(changes.unchanged(run, 1), after)[0, query]) > 0


def _first_that_moves(changes: Perturbations, run: TargetRun, query: int, cut: int) -> int | None:
    """The first token behind the cut that, changed with those before it, moves the query: found by halving."""
    tail, low, high = changes.with_tail(cut), cut + 1, len(changes.base) - 1
    if not _moves(changes, run, tail, query):
        return None
    while low < high:
        middle = (low + high) // 2
        row = [*tail[: middle + 1], *changes.base[middle + 1 :]]
        low, high = (low, middle) if _moves(changes, run, row, query) else (middle + 1, high)
    return low
