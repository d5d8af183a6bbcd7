"""The workbench of the checks: runs a target in its own dtype and in float64, and makes the inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from pellucid.errors import PellucidError, ShapeError
from pellucid.probe import Capability, Probe, Request

ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""How far two right ways of computing the same numbers may lie apart, relative to 1 + max|logit|."""

Measure = Callable[["Run"], "Reading"]


class Reading:
    """How far each watched output moved in one run, on a scale of ``1 + max|logit|``."""

    def __init__(self, run: Run, sizes: Tensor, scale: float) -> None:
        self.run, self.sizes, self.scale = run, sizes, scale

    @property
    def largest(self) -> float:
        return float(self.sizes.max()) if self.sizes.numel() else 0.0


class Run:
    """The target in one precision."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
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
        return self._checked(self.probe.logits(request.to(self.device)), request)

    def embed(self, request: Request) -> Tensor:
        """``[B, T, D]`` embeddings of the request's tokens, free to be changed."""
        with torch.no_grad():
            return self.probe.embed(request.to(self.device)).clone()

    def loss(self, request: Request) -> tuple[float, int]:
        """The sum and the count of the target's own loss."""
        with torch.no_grad():
            total, count = self.probe.loss(request.to(self.device))
        return float(total), int(count)

    def differentiable_loss(self, request: Request) -> Tensor:
        """The sum alone, with a graph."""
        return self.probe.loss(request.to(self.device))[0]

    def extend(self, request: Request, cache: object) -> Tensor:
        """The next slots through a cache."""
        with torch.no_grad():
            return self._checked(self.probe.extend(request.to(self.device), cache), request).cpu()

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

    def __init__(self, probe: Probe, *, length: int = 24, seed: int = 0) -> None:
        self.probe, self.wanted_length = probe, length
        self._generator = torch.Generator().manual_seed(seed)
        self.native = Run(probe)
        self.exact_reason = ""
        self._plain = Request.from_rows([self.tokens(min(6, probe.max_length or 6))])

    @property
    def length(self) -> int:
        """The length of the long sequences."""
        return min(self.wanted_length, self.probe.max_length or self.wanted_length)

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
            run = Run(self.probe.over(twin))
            run.logits(self._plain)
            run.noise = _kept_noise(run, twin, self._plain)
        except (RuntimeError, TypeError, NotImplementedError, AttributeError, PellucidError) as error:
            said = str(error).partition("\n")[0] or type(error).__name__
            self.exact_reason = f"no float64 copy: {said}"
            return None
        if run.dtype != torch.float64:
            self.exact_reason = f"its float64 copy answers in {run.name}"
            return None
        self.native.logits(self._plain)
        if self.native.dtype == torch.float64:
            self.native.noise = run.noise
            return None
        return run

    @property
    def runs(self) -> list[Run]:
        """The target's own dtype first; float64, which decides, last."""
        return [self.native] if self.exact is None else [self.native, self.exact]

    @cached_property
    def unsteady(self) -> float:
        """How far two equal runs differ beyond rounding (0 for a target that answers the same twice)."""
        first, between, second = (self.native.logits(r) for r in (self._plain, self.fresh(self._plain), self._plain))
        del between
        size = float(moved(first, second).max())
        return size if size > self.native.rounding * scale_of(first) else 0.0

    def read(self, measure: Measure) -> list[Reading]:
        """The same measurement in every precision."""
        return [measure(run) for run in self.runs]

    def tokens(self, length: int) -> list[int]:
        """Random tokens."""
        return torch.randint(self.probe.vocab_size, (length,), generator=self._generator).tolist()

    def other(self, token: int) -> int:
        """A random token that is not ``token``."""
        step = 1 + int(torch.randint(self.probe.vocab_size - 1, (1,), generator=self._generator))
        return (token + step) % self.probe.vocab_size

    def fresh(self, request: Request, where_BT: Tensor | None = None) -> Request:
        """The same request with every token (``where_BT``: only these) changed."""
        step_BT = torch.randint(1, self.probe.vocab_size, request.tokens.shape, generator=self._generator)
        tokens_BT = (request.tokens + step_BT) % self.probe.vocab_size
        return request.with_tokens(tokens_BT if where_BT is None else torch.where(where_BT, tokens_BT, request.tokens))

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


def _kept_noise(run: Run, module: nn.Module, request: Request) -> float:
    """The rounding a float64 copy still shows: large when the module casts to less precision inside.

    Three runs with weights scaled by 1, 1 + e and 1 + 2e: for e = 2⁻²⁶ a smooth function's second difference
    is about e² = 2e-16, while inner roundings to float32 do not cancel and show up at their own size.
    """
    weights = [p for p in module.parameters() if p.is_floating_point()]
    kept = [p.detach().clone() for p in weights]
    outputs = []
    for step in range(3):
        with torch.no_grad():
            for weight, value in zip(weights, kept, strict=True):
                weight.copy_(value * (1 + step * 2.0**-26))
        outputs.append(run.logits(request))
    with torch.no_grad():
        for weight, value in zip(weights, kept, strict=True):
            weight.copy_(value)
    noise = (outputs[2] - 2 * outputs[1] + outputs[0]).abs().nan_to_num(0.0, 0.0, 0.0)
    return float(noise.max())
