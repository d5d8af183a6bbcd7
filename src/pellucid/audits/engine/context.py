"""The workbench of the checks: runs a target in its own dtype and in float64, and makes the inputs."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor, nn

from pellucid.audits.engine.target_run import (
    Deviation,
    TargetRun,
    logit_scale,
    max_abs_diff,
    rounding_noise,
    with_tables_rerounded,
)
from pellucid.batch import Batch, Side
from pellucid.errors import PellucidError, one_line
from pellucid.probe import Capability, Probe
from pellucid.records import Status

Measure = Callable[[TargetRun], Deviation]
Made = TypeVar("Made")

LENGTHS = (3, 5, 1)
"""Of rows in one batch, unless a check says otherwise."""
_ROW_LENGTHS = (24, 16, 12, 9, 8, 6, 5, 4, 3)
_MOST_TOKENS = 640
_AT_ONCE = 192
_AFFORDABLE = 8 * 10**8  # weights times tokens
_MOST_AFFORDABLE = 2**14
_SMALL = 1e-5  # relative to the outputs: larger is no rounding of a table in float32
_ENDS = 4  # so many end tokens of one target are looked at


class AuditContext:
    """What a check works with: the target (``native``), its float64 copy (``exact``), a supply of inputs."""

    def __init__(self, probe: Probe, *, length: int = 24, seed: int = 0, budget: float | None = None) -> None:
        self.probe, self.wanted_length, self.budget, self.seed = probe, length, budget, seed
        self.started = time.perf_counter()
        self._generator = torch.Generator().manual_seed(seed)
        free = sorted(set(range(probe.vocab_size)) - set(getattr(probe, "forbidden_tokens", ())))
        self._free = torch.tensor(free if len(free) > 1 else range(probe.vocab_size))
        self.native = TargetRun(probe, Batch.from_rows([self._drawn(5)]) if "source" in probe.capabilities else None)
        self.exact_reason = ""
        self._made: dict[str, object] = {}
        self.untouched: nn.Module | None = None
        """The target's module as it was before its first call, its weights shared."""

    @cached_property
    def row(self) -> list[int]:
        """A long sequence: as long as wanted, or the longest of a few that the target can take."""
        wanted = min(self.wanted_length, self.probe.max_length or self.wanted_length)
        first: Exception | None = None
        halves = [wanted >> times for times in range(1, 12) if wanted >> times > _ROW_LENGTHS[0]]
        known = getattr(self.probe, "known_length", 0)
        shorter = [length for length in (known, *_ROW_LENGTHS) if 2 < length < wanted]
        lengths = [wanted, *halves, *shorter, *([known] if known > wanted else [])]
        refused = wanted
        for length in lengths:
            row = self._drawn(length)
            try:
                self.native.plain(Batch.from_rows([row]))
            except (IndexError, RuntimeError, ValueError, AssertionError, PellucidError) as error:
                first, refused = first or error, length
                continue
            return row if first is None else self._longest_row(row, refused)
        assert first is not None
        raise first

    def _longest_row(self, row: list[int], refused: int) -> list[int]:
        """As many tokens as it takes, between what it took and what it ``refused``: found by halving."""
        low, high = len(row), refused
        row = [*row, *self._drawn(max(refused - len(row), 0))]
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.takes(Batch.from_rows([row[:middle]])) else (low, middle)
        return row[:low]

    @property
    def length(self) -> int:
        """Of the long sequences."""
        return len(self.row)

    @cached_property
    def step(self) -> int:
        """The number of which lengths have to be multiples: 1 for nearly all targets, the length for a fixed one."""
        try:
            rows = [self.row[:slots] for slots in (5, 3)]
        except Exception:  # noqa: BLE001 (it takes no row at all, which every check reports)
            return 1
        if any(self.takes(Batch.from_rows([row])) for row in rows) or not self.takes(Batch.from_rows([self.row])):
            return 1
        for step in (each for each in (2, 4, 8, 10, 12, 16, 32, 64) if self.length % each == 0 and each < self.length):
            if all(self.takes(Batch.from_rows([self.row[: step * n]])) for n in (1, 2)):
                return step
        return self.length

    def round(self, length: int) -> int:
        """``length``, or the next that the target takes."""
        return -(-length // self.step) * self.step

    def takes(self, batch: Batch) -> bool:
        """Whether it answers such a request at all."""
        try:
            self.native.logits(batch)
        except Exception:  # noqa: BLE001 (anybody's code)
            return False
        return True

    @property
    def taken(self) -> int | None:
        """The length that was found, None where none was (or none was looked for)."""
        row = vars(self).get("row")
        return None if row is None else len(row)

    @property
    def _affordable(self) -> int | None:
        """How many tokens cost next to nothing, by the number of weights; None for what is no module."""
        if self.probe.module is None:
            return None
        weights = sum(weight.numel() for weight in self.probe.module.parameters())
        return min(_AFFORDABLE // max(weights, 1), _MOST_AFFORDABLE)

    @cached_property
    def at_once(self) -> int:
        """How many tokens stand in one batch of changed copies: enough to keep a processor busy."""
        return max(_AT_ONCE, min(self._affordable or 0, 8 * _AT_ONCE))

    @cached_property
    def most_tokens(self) -> int:
        """How many tokens a batch of changed copies may hold in all, so that a budget is kept."""
        if self.budget is None:
            return _MOST_TOKENS if self._affordable is None else max(_MOST_TOKENS, self._affordable)
        row = Batch.from_rows([self.tokens(self.length)] * 4)
        self.native.logits(row)
        start = time.perf_counter()
        self.native.logits(row)
        each = max(time.perf_counter() - start, 1e-6) / (4 * self.length)
        return max(4 * self.length, min(int(self.budget / 8 / each / 4), 2**16))

    @property
    def one_sided(self) -> list[Side]:
        """The sides on which the target declares that it can be padded, both at once left out."""
        return [side for side in self.probe.sides if side != "both"]

    @property
    def hiding_sides(self) -> list[Side]:
        """Those, and the sides on which padding moves its positions: what is hidden is hidden there too."""
        shifted = getattr(self.probe, "position_shifting_sides", ())
        return [*self.one_sided, *(side for side in shifted if side != "both")]

    @property
    def spent(self) -> bool:
        """Whether the budget is used up."""
        return self.budget is not None and time.perf_counter() - self.started > self.budget

    def once(self, name: str, make: Callable[[], Made]) -> Made:
        """What several checks look at is measured once."""
        if name not in self._made:
            self._made[name] = make()
        made: Made = self._made[name]  # type: ignore[assignment]
        return made

    def measured(self, name: str) -> object:
        """What :meth:`once` made under this name; None where nothing was."""
        return self._made.get(name)

    @cached_property
    def _plain(self) -> Batch:
        """A row of 6 tokens, or a long one where the target takes no such row."""
        batch = Batch.from_rows([self._drawn(min(6, self.length))])
        return batch if self.takes(batch) else Batch.from_rows([self.row])

    @cached_property
    def not_finite(self) -> str:
        """What is wrong with the outputs of a plain row (empty: nothing)."""
        logits = self.native.plain(self._plain)
        bad = (logits.isnan() | logits.isposinf() | logits.isneginf().all(-1, keepdim=True)).any(-1).nonzero().tolist()
        return f"the outputs of {self.probe.name} are not finite from slot {bad[0][1]} on" if bad else ""

    def can(self, *capabilities: Capability) -> bool:
        return set(capabilities) <= self.probe.capabilities

    @cached_property
    def exact(self) -> TargetRun | None:
        """The target in float64, None (and a reason) where it has no such copy or is in float64 itself."""
        module = self.probe.module
        if module is None:
            self.exact_reason = "the target is not a module that could be copied"
            return None
        try:
            copied = copy.deepcopy(module).double()
            run = TargetRun(self.probe.with_module(copied), self.native.source)
            run.seed = 0 if self.unsteady else None
            run.noise = rounding_noise(copied, [lambda: run.logits(self._plain)])
        except (RuntimeError, TypeError, NotImplementedError, AttributeError, PellucidError) as error:
            self.exact_reason = f"no float64 copy: {one_line(error)}"
            return None
        run.seed = self.native.seed
        if run.dtype != torch.float64:
            self.exact_reason = f"its float64 copy answers in {run.name}"
            return None
        if not self._finite_beside_padding(run):
            self.exact_reason = "beside padding its float64 copy gives numbers that are not finite"
            return None
        self.native.plain(self._plain)
        if self.native.dtype == torch.float64:
            self.native.noise = run.noise
            return None
        return run

    def _finite_beside_padding(self, run: TargetRun) -> bool:
        """A mask made of float64's lowest number is minus infinity to a softmax that is taken in float32."""
        if not self.can("padding") or self.length < 5:
            return True
        side: Side = "left" if "left" in self.probe.sides else self.probe.sides[0]
        batch = Batch.from_rows([self._drawn(3), self._drawn(5)], side=side)
        try:
            finite = [bool(each.logits(batch)[batch.token_mask].isfinite().all()) for each in (run, self.native)]
        except Exception:  # noqa: BLE001 (anybody's code; the checks of padding report what it raises)
            return True
        return finite[0] or not finite[1]

    @property
    def runs(self) -> list[TargetRun]:
        """The target's own dtype first; float64, which decides, last."""
        return [self.native] if self.exact is None else [self.native, self.exact]

    @property
    def status_of_unseen(self) -> Status:
        """How bad it is that a token moved nothing: only float64 tells nothing from next to nothing."""
        return "leak" if self.probe.rules_declared and self.runs[-1].dtype == torch.float64 else "fragile"

    @cached_property
    def unsteady(self) -> float:
        """How far two equal runs differ beyond rounding (0 for a target that answers the same twice)."""
        first, _, second = (self.native.logits(r) for r in (self._plain, self.fresh(self._plain), self._plain))
        size = float(max_abs_diff(first, second).max())
        return size if size > self.native.rounding * logit_scale(first) else 0.0

    @cached_property
    def steady_when_seeded(self) -> bool:
        """Whether equal calls agree when each starts from the same random numbers."""
        self.native.seed = 0
        try:
            first, second = (self.native.logits(self._plain) for _ in range(2))
        finally:
            self.native.seed = None
        return float(max_abs_diff(first, second).max()) <= self.native.rounding * logit_scale(first)

    def use_seed(self, on: bool) -> None:
        """Whether every call starts from the same random numbers. Then only requests of one shape can be compared."""
        for run in [self.native, vars(self).get("exact")]:
            if run is not None:
                run.seed = 0 if on else None

    def variant(self, name: str, probe: Probe) -> AuditContext:
        """The same work on a variant of the target, within the same budget."""

        def make() -> AuditContext:
            other = AuditContext(probe, length=self.wanted_length, seed=self.seed, budget=self.budget)
            other.started = self.started
            return other

        return self.once(f"variant {name}", make)

    @property
    def draws(self) -> bool:
        """Whether the target draws random numbers, the same in every call of one shape."""
        return self.native.seed is not None

    def read(self, measure: Measure, *, of_loss: bool = False, shapes: bool = False) -> list[Deviation]:
        """The same measurement in every precision; ``of_loss``: in those in which the target's loss comes.

        ``shapes``: it compares requests of different shapes, which may read tables (buffers such as rotary angles) at
        other places. What a table's own rounding explains is no deviation: it varies when the table is rounded anew.
        """
        readings = [measure(run) for run in self.runs if not of_loss or run is self.native or run is self.loss_run]
        last = readings[-1]
        if shapes and last.run is self.exact and 0 < last.largest < _SMALL * last.scale and self.rerounded is not None:
            floor = float((measure(self.rerounded).sizes - last.sizes).abs().max())
            if math.isfinite(floor) and floor < _SMALL * last.scale:
                last.sizes = torch.where(last.sizes > 10 * floor, last.sizes, 0.0)
        return readings

    @cached_property
    def rerounded(self) -> TargetRun | None:
        """The float64 run with the tables in its buffers rounded in another way; None where it has none."""
        return None if self.exact is None else with_tables_rerounded(self.exact)

    def loss_is_coarse(self, run: TargetRun) -> bool:
        """Whether the loss of a target that answers in float64 comes in less."""

        def coarse() -> bool:
            with torch.no_grad():
                return run.probe.loss(run.placed(self._plain))[0].dtype != torch.float64

        return run.dtype == torch.float64 and self.once(f"coarse loss in {run.name}", coarse)

    @cached_property
    def loss_run(self) -> TargetRun:
        """The most exact run whose loss is as exact: some targets take theirs in float32 whatever they are in."""
        return self.native if self.exact is None or self.loss_is_coarse(self.exact) else self.exact

    def tokens(self, length: int) -> list[int]:
        """Random tokens, none of them forbidden; as many as the target takes where that is not so many."""
        return self._drawn(self.round(length))

    def _drawn(self, length: int) -> list[int]:
        return self._free[torch.randint(len(self._free), (length,), generator=self._generator)].tolist()

    def rows(self, lengths: Iterable[int] = LENGTHS) -> list[list[int]]:
        """Random rows; the longest ends with token 0 (where it may), which is also what stands in padded slots.

        Of a target that takes multiples of some number only, lengths are in that unit.
        """
        fixed = self.step > 1 and self.step == self.length
        rows = [self._drawn(self.length if fixed else length * self.step) for length in lengths]
        max(rows, key=len)[-1] = self.ends[0]
        return rows

    def with_sources(self, batch: Batch) -> Batch:
        """Another source for each row, where the target reads one: a source that strays is seen by its content."""
        if not self.can("source"):
            return batch
        return batch.replace(source=Batch.from_rows([self._drawn(5) for _ in range(batch.shape[0])]))

    @property
    def ends(self) -> tuple[int, int]:
        """The first and the last token that may be used: ids at the ends of a vocabulary are often special."""
        return int(self._free[0]), int(self._free[-1])

    @property
    def edges(self) -> list[int]:
        """The first eight and the last four tokens that may be used, among which ends and pads are mostly found."""
        return list(dict.fromkeys([*self._free[:8].tolist(), *self._free[-4:].tolist()]))

    @cached_property
    def end_tokens(self) -> tuple[int, ...]:
        """Ids that end a text, as the probe or the config names them: true tokens, also where pads have the same id."""
        config = getattr(self.probe.module, "config", None)
        named = [getattr(each, "eos_token_id", None) for each in (config, getattr(config, "text_config", None))]
        named.append(tuple(getattr(self.probe, "end_tokens", ())))
        ids = [i for value in named for i in (value if isinstance(value, list | tuple) else [value])]
        known = (i for i in ids if isinstance(i, int) and not isinstance(i, bool) and 0 <= i < self.probe.vocab_size)
        return tuple(dict.fromkeys(known))[:_ENDS]

    def other(self, token: int) -> int:
        """A random token that is not ``token``."""
        return int(self._others(torch.tensor([token]))[0])

    def fresh(self, batch: Batch, where_BT: Tensor | None = None) -> Batch:
        """The same request with every token (``where_BT``: only these) changed."""
        tokens_BT = self._others(batch.tokens)
        return batch.replace(tokens=tokens_BT if where_BT is None else torch.where(where_BT, tokens_BT, batch.tokens))

    def _others(self, tokens: Tensor) -> Tensor:
        """For each token a random one that is another."""
        step = torch.randint(1, len(self._free), tokens.shape, generator=self._generator)
        return self._free[(torch.searchsorted(self._free, tokens.cpu().contiguous()) + step) % len(self._free)].to(
            tokens.device
        )
