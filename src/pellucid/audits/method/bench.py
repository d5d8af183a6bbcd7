"""The workbench of the checks: runs a target in its own dtype and in float64, and makes the inputs."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor, nn

from pellucid.errors import PellucidError, ShapeError
from pellucid.probe import Capability, Probe, Request
from pellucid.records import Status

ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""How far two right ways of computing the same numbers may lie apart, relative to 1 + max|logit|."""

Measure = Callable[["Run"], "Reading"]
Made = TypeVar("Made")

_LENGTHS = (16, 12, 9, 8, 6)
_MOST_TOKENS = 640


class Reading:
    """How far each watched output moved in one run, on a scale of ``1 + max|logit|``."""

    def __init__(self, run: Run, sizes: Tensor, scale: float) -> None:
        self.run, self.sizes, self.scale = run, sizes, scale

    @property
    def largest(self) -> float:
        return float(self.sizes.max()) if self.sizes.numel() else 0.0


class Run:
    """The target in one precision. A target that reads a source is given ``source`` where a request has none."""

    def __init__(self, probe: Probe, source: Request | None = None) -> None:
        self.probe, self.source = probe, source
        first = next(iter(probe.module.parameters()), None) if probe.module is not None else None
        self.device = torch.device("cpu") if first is None else first.device
        self.dtype: torch.dtype | None = None
        self.noise = 0.0
        self._alone: dict[tuple[int, ...], Tensor] = {}

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def rounding(self) -> float:
        """What may be rounding, relative to ``1 + max|logit|``."""
        return ROUNDING.get(self.dtype or torch.float32, 1e-5)

    def logits(self, request: Request) -> Tensor:
        """``[B, T, V]`` on the host, without gradients."""
        with torch.no_grad():
            return self.differentiable(request).cpu()

    def alone(self, tokens: Sequence[int]) -> Tensor:
        """``[T, V]`` of one row without company, padding or a cache; run once."""
        key = tuple(tokens)
        if key not in self._alone:
            self._alone[key] = self.logits(Request.from_rows([tokens]))[0]
        return self._alone[key]

    def differentiable(self, request: Request) -> Tensor:
        """``[B, T, V]``, with a graph where gradients are enabled."""
        return self._checked(self.probe.logits(self.placed(request)), request)

    def placed(self, request: Request) -> Request:
        """A copy on the target's device, with a source where the target reads one."""
        if self.source is not None and request.source is None:
            rows, slots = request.shape[0], self.source.shape[1]
            fields = (getattr(self.source, name).expand(rows, slots) for name in ("tokens", "positions", "segments"))
            request = request.with_source(Request(*fields))
        return request.to(self.device)

    def embed(self, request: Request) -> Tensor:
        """``[B, T, D]`` embeddings of the request's tokens, free to be changed."""
        with torch.no_grad():
            return self.probe.embed(self.placed(request)).clone()

    def loss(self, request: Request) -> tuple[float, int]:
        """The sum and the count of the target's own loss."""
        with torch.no_grad():
            total, count = self.probe.loss(self.placed(request))
        return float(total), int(count)

    def differentiable_loss(self, request: Request) -> Tensor:
        """The sum alone, with a graph."""
        return self.probe.loss(self.placed(request))[0]

    def extend(self, request: Request, cache: object) -> Tensor:
        """The next slots through a cache."""
        with torch.no_grad():
            return self._checked(self.probe.extend(self.placed(request), cache), request).cpu()

    def chunked(self, request: Request, chunks: Sequence[int], cache: object | None = None) -> Tensor:
        """``[B, T, V]`` of a request that goes through a cache in chunks."""
        rows, slots = request.shape
        cache = self.probe.new_cache(rows, slots) if cache is None else cache
        outputs, start = [], 0
        for size in chunks:
            outputs.append(self.extend(request.part(start, start + size), cache))
            start += size
        return torch.cat(outputs, 1)

    def _checked(self, logits: object, request: Request) -> Tensor:
        if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != request.tokens.shape:
            got = f"{tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
            rows, slots = request.shape
            raise ShapeError(
                f"the target gave {got} for {rows} rows of {slots} tokens, but an audit needs "
                f"[{rows}, {slots}, vocabulary]"
            )
        self.dtype = logits.dtype
        return logits


class Bench:
    """What a check works with: the target (``native``), its float64 copy (``exact``), a supply of inputs."""

    def __init__(self, probe: Probe, *, length: int = 24, seed: int = 0, budget: float | None = None) -> None:
        self.probe, self.wanted_length, self.budget = probe, length, budget
        self.started = time.perf_counter()
        self._generator = torch.Generator().manual_seed(seed)
        free = sorted(set(range(probe.vocab_size)) - set(getattr(probe, "forbidden_tokens", ())))
        self._free = torch.tensor(free if len(free) > 1 else range(probe.vocab_size))
        self.native = Run(probe, Request.from_rows([self.tokens(5)]) if "source" in probe.capabilities else None)
        self.exact_reason = ""
        self._made: dict[str, object] = {}

    @cached_property
    def length(self) -> int:
        """The length of the long sequences: as wanted, or the longest of a few that the target can take."""
        wanted = min(self.wanted_length, self.probe.max_length or self.wanted_length)
        first: Exception | None = None
        for length in (wanted, *(shorter for shorter in _LENGTHS if shorter < wanted)):
            try:
                self.native.logits(Request.from_rows([self.tokens(length)]))
            except (IndexError, RuntimeError, ValueError, AssertionError, PellucidError) as error:
                first = first or error
                continue
            return length
        assert first is not None
        raise first

    @property
    def taken(self) -> int | None:
        """The length that was found, None where none was (or nobody asked)."""
        return vars(self).get("length")

    @cached_property
    def most_tokens(self) -> int:
        """How many tokens a batch of changed copies may hold in all, so that a budget is kept."""
        if self.budget is None:
            return _MOST_TOKENS
        row = Request.from_rows([self.tokens(self.length)] * 4)
        self.native.logits(row)
        start = time.perf_counter()
        self.native.logits(row)
        each = max(time.perf_counter() - start, 1e-6) / (4 * self.length)
        return max(4 * self.length, min(int(self.budget / 8 / each / 4), 2**16))

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
        """What :meth:`once` made under this name; None where nobody asked."""
        return self._made.get(name)

    @cached_property
    def _plain(self) -> Request:
        return Request.from_rows([self.tokens(min(6, self.length))])

    @cached_property
    def not_finite(self) -> str:
        """What is wrong with the outputs of a plain row (empty: nothing)."""
        logits = self.native.logits(self._plain)
        bad = (~logits.isfinite()).any(-1).nonzero().tolist()
        return f"the outputs of {self.probe.name} are not finite from slot {bad[0][1]} on" if bad else ""

    def can(self, *capabilities: Capability) -> bool:
        return set(capabilities) <= self.probe.capabilities

    @cached_property
    def exact(self) -> Run | None:
        """The target in float64, None (and a reason) where it has no such copy or is in float64 itself."""
        module = self.probe.module
        if module is None:
            self.exact_reason = "the target is not a module that could be copied"
            return None
        try:
            twin = copy.deepcopy(module).double()
            run = Run(self.probe.over(twin), self.native.source)
            run.logits(self._plain)
            run.noise = _kept_noise(run, twin, self._plain)
        except (RuntimeError, TypeError, NotImplementedError, AttributeError, PellucidError) as error:
            said = str(error).partition("\n")[0] or type(error).__name__
            self.exact_reason = f"no float64 copy: {said}"
            return None
        if run.dtype != torch.float64:
            self.exact_reason = f"its float64 copy answers in {run.name}"
            return None
        if not self._finite_beside_padding(run):
            self.exact_reason = "beside padding its float64 copy gives numbers that are not finite"
            return None
        self.native.logits(self._plain)
        if self.native.dtype == torch.float64:
            self.native.noise = run.noise
            return None
        return run

    def _finite_beside_padding(self, run: Run) -> bool:
        """A mask made of float64's lowest number is minus infinity to a softmax that is taken in float32."""
        if not self.can("padding") or "left" not in self.probe.sides or self.length < 5:
            return True
        request = Request.from_rows([self.tokens(3), self.tokens(5)], side="left")
        finite = [bool(each.logits(request)[request.real].isfinite().all()) for each in (run, self.native)]
        return finite[0] or not finite[1]

    @property
    def runs(self) -> list[Run]:
        """The target's own dtype first; float64, which decides, last."""
        return [self.native] if self.exact is None else [self.native, self.exact]

    @property
    def status_of_unseen(self) -> Status:
        """How bad it is that a token moved nothing: only float64 tells nothing from next to nothing."""
        return "leak" if self.probe.declared and self.runs[-1].dtype == torch.float64 else "fragile"

    @cached_property
    def unsteady(self) -> float:
        """How far two equal runs differ beyond rounding (0 for a target that answers the same twice)."""
        first, between, second = (self.native.logits(r) for r in (self._plain, self.fresh(self._plain), self._plain))
        del between
        size = float(moved(first, second).max())
        return size if size > self.native.rounding * scale_of(first) else 0.0

    def read(self, measure: Measure, *, of_loss: bool = False) -> list[Reading]:
        """The same measurement in every precision; ``of_loss``: in those in which the target's loss comes."""
        return [measure(run) for run in self.runs if not of_loss or run is self.native or run is self.loss_run]

    @cached_property
    def loss_run(self) -> Run:
        """The most exact run whose loss is as exact: some targets take theirs in float32 whatever they are in."""
        if self.exact is None:
            return self.native
        with torch.no_grad():
            total, _ = self.exact.probe.loss(self.exact.placed(self._plain))
        return self.exact if total.dtype == torch.float64 else self.native

    def tokens(self, length: int) -> list[int]:
        """Random tokens, none of them forbidden."""
        return self._free[torch.randint(len(self._free), (length,), generator=self._generator)].tolist()

    @property
    def ends(self) -> tuple[int, int]:
        """The first and the last token that may be used: ids at the ends of a vocabulary are often special."""
        return int(self._free[0]), int(self._free[-1])

    def other(self, token: int) -> int:
        """A random token that is not ``token``."""
        return int(self._others(torch.tensor([token]))[0])

    def fresh(self, request: Request, where_BT: Tensor | None = None) -> Request:
        """The same request with every token (``where_BT``: only these) changed."""
        tokens_BT = self._others(request.tokens)
        return request.with_tokens(tokens_BT if where_BT is None else torch.where(where_BT, tokens_BT, request.tokens))

    def _others(self, tokens: Tensor) -> Tensor:
        """For each token a random one that is another."""
        step = torch.randint(1, len(self._free), tokens.shape, generator=self._generator)
        return self._free[(torch.searchsorted(self._free, tokens.cpu().contiguous()) + step) % len(self._free)].to(
            tokens.device
        )

    def directions(self, logits_BTV: Tensor) -> Tensor:
        """Fixed random weights to sum outputs with, so that one gradient speaks for all of them."""
        generator = torch.Generator().manual_seed(1)
        weights_V = torch.randn(logits_BTV.shape[-1], generator=generator, dtype=torch.float64)
        return weights_V.to(logits_BTV)


def moved(before_BTV: Tensor, after_BTV: Tensor) -> Tensor:
    """``[B, T]``: the largest change over the vocabulary; infinite where a number became NaN or infinite."""
    change = (before_BTV - after_BTV).abs().double()
    change = torch.where(before_BTV == after_BTV, 0.0, change)
    both = before_BTV.isnan() & after_BTV.isnan()
    return torch.where(both, 0.0, change.nan_to_num(nan=torch.inf)).amax(-1)


def scale_of(logits: Tensor) -> float:
    """``1 + max|logit|`` over what is finite."""
    return 1.0 + float(logits.abs().nan_to_num(0.0, 0.0, 0.0).max()) if logits.numel() else 1.0


def _kept_noise(run: Run, module: nn.Module, request: Request, step: float = 2.0**-26) -> float:
    """The rounding a float64 copy still shows: large when the module casts to less precision inside.

    Three runs with weights scaled by 1, 1 + e and 1 + 2e: for e = 2⁻²⁶ a smooth function's second difference
    is about e² = 2e-16, while inner roundings to float32 do not cancel and show up at their own size.
    """
    weights = [p for p in module.parameters() if p.is_floating_point()]
    kept = [p.detach().clone() for p in weights]
    outputs = []
    for number in range(3):
        with torch.no_grad():
            for weight, value in zip(weights, kept, strict=True):
                weight.copy_(value * (1 + number * step))
        outputs.append(run.logits(request))
    with torch.no_grad():
        for weight, value in zip(weights, kept, strict=True):
            weight.copy_(value)
    noise = (outputs[2] - 2 * outputs[1] + outputs[0]).abs().nan_to_num(0.0, 0.0, 0.0)
    return float(noise.max())
