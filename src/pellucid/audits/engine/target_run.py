"""One run of a target, how far its outputs and gradients deviate, and the rounding that a float64 copy still shows."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from pellucid.audits.engine.state import reseed
from pellucid.batch import Batch
from pellucid.errors import ShapeError, UnsupportedError, one_line
from pellucid.probe import Probe

Made = TypeVar("Made")

ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""How far two right ways of computing the same numbers may lie apart, relative to 1 + max|logit|."""


_MOST_STORED = 2**22  # numbers of one output that is stored


class Deviation:
    """How far each watched output moved in one run, on a scale of ``1 + max|logit|``."""

    def __init__(self, run: TargetRun, sizes: Tensor, scale: float) -> None:
        self.run, self.sizes, self.scale = run, sizes, scale

    @property
    def largest(self) -> float:
        return float(self.sizes.max()) if self.sizes.numel() else 0.0


class TargetRun:
    """The target in one precision. A target that reads a source is given ``source`` where a request has none.

    With a ``seed`` every call starts from the same random numbers.
    """

    def __init__(self, probe: Probe, source: Batch | None = None) -> None:
        self.probe, self.source = probe, source
        first = next(iter(probe.module.parameters()), None) if probe.module is not None else None
        self.device = torch.device("cpu") if first is None else first.device
        self.dtype: torch.dtype | None = None
        self.noise = 0.0
        self.seed: int | None = None
        self._plain: dict[tuple[object, ...], Tensor] = {}

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def rounding(self) -> float:
        """What may be rounding, relative to ``1 + max|logit|``."""
        return ROUNDING.get(self.dtype or torch.float32, 1e-5)

    def logits(self, batch: Batch) -> Tensor:
        """``[B, T, V]`` on the host, without gradients."""
        with torch.no_grad():
            return self.differentiable(batch).cpu()

    def plain(self, batch: Batch) -> Tensor:
        """The same, computed once for equal requests: what many others are compared with. Not to be written into.

        Never while another kernel, way or mode is in force.
        """
        key = _key(batch)
        if key is None:
            return self.logits(batch)
        key = (self.seed, *key)
        if key not in self._plain:
            answer = self.logits(batch)
            if answer.numel() > _MOST_STORED:
                return answer
            self._plain[key] = answer.clone()  # a target may write into what it handed out
        return self._plain[key]

    def alone(self, tokens: Sequence[int], sources: Batch | None = None, row: int = 0) -> Tensor:
        """``[T, V]`` of one row without company, padding or a cache; run once. Its source is that of a ``row``."""
        batch = Batch.from_rows([tokens])
        return self.plain(batch if sources is None else batch.replace(source=sources.row(row)))[0]

    def differentiable(self, batch: Batch) -> Tensor:
        """``[B, T, V]``, with a graph where gradients are enabled."""
        return self._checked(self._call(self.probe.logits, batch), batch)

    def placed(self, batch: Batch) -> Batch:
        """A copy on the target's device, with a source where the target reads one."""
        if self.source is not None and batch.source is None:
            rows, slots = batch.shape[0], self.source.shape[1]
            fields = (getattr(self.source, name).expand(rows, slots) for name in ("tokens", "positions", "segments"))
            batch = batch.replace(source=Batch(*fields))
        return batch.to(self.device, copy=True)

    def embed(self, batch: Batch) -> Tensor:
        """``[B, T, D]`` embeddings of the request's tokens, free to be changed."""
        with torch.no_grad():
            return self.probe.embed(self.placed(batch)).clone()

    def loss(self, batch: Batch) -> tuple[float, int]:
        """The sum and the count of the target's own loss."""
        with torch.no_grad():
            total, count = self._call(self.probe.loss, batch)
        return float(total), int(count)

    def differentiable_loss(self, batch: Batch) -> Tensor:
        """The sum alone, with a graph; a plain number, as some give for nothing to learn, has none."""
        total: object = self._call(self.probe.loss, batch)[0]
        return total if isinstance(total, Tensor) else torch.as_tensor(total, device=self.device)

    def extend(self, batch: Batch, cache: object) -> Tensor:
        """The next slots through a cache."""
        with torch.no_grad():
            return self._checked(self._call(self.probe.extend, batch, cache), batch).cpu()

    def chunked(self, batch: Batch, chunks: Sequence[int], cache: object | None = None) -> Tensor:
        """``[B, T, V]`` of a request that goes through a cache in chunks."""
        rows, slots = batch.shape
        cache = self.probe.new_cache(rows, slots) if cache is None else cache
        outputs, start = [], 0
        for size in chunks:
            outputs.append(self.extend(batch.part(start, start + size), cache))
            start += size
        return torch.cat(outputs, 1)

    def _call(self, method: Callable[..., Made], batch: Batch, *arguments: object) -> Made:
        if self.seed is not None:
            reseed(self.seed)
        return method(self.placed(batch), *arguments)

    def _checked(self, logits: object, batch: Batch) -> Tensor:
        if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != batch.tokens.shape:
            got = f"{tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
            rows, slots = batch.shape
            raise ShapeError(
                f"the target gave {got} for {rows} rows of {slots} tokens, but an audit needs "
                f"[{rows}, {slots}, vocabulary]"
            )
        self.dtype = logits.dtype
        return logits


def deep_copy(run: TargetRun) -> TargetRun:
    """The same target over a deep copy of its module.

    Raises:
        UnsupportedError: it has no module, cannot be copied, or cannot be called over a copy.
    """
    module = run.probe.module
    if module is None:
        raise UnsupportedError("it is not a module that could be copied")
    try:
        copied = TargetRun(run.probe.with_module(copy.deepcopy(module)), run.source)
    except Exception as error:  # anybody's code
        raise UnsupportedError(f"it cannot be copied: {one_line(error)}") from error
    copied.dtype, copied.noise, copied.seed = run.dtype, run.noise, run.seed
    return copied


def run_on(run: TargetRun, module: nn.Module) -> TargetRun:
    """The same target over ``module``, which making a probe must not have called yet.

    Raises:
        UnsupportedError: it cannot be called over another module.
    """
    own = vars(run.probe) if hasattr(run.probe, "__dict__") else {}
    attributes = [name for name, value in own.items() if value is run.probe.module]
    probe = copy.copy(run.probe) if attributes else run.probe.with_module(module)
    for name in attributes:
        setattr(probe, name, module)
    copied = TargetRun(probe, run.source)
    copied.dtype, copied.noise, copied.seed = run.dtype, run.noise, run.seed
    return copied


def with_tables_rerounded(run: TargetRun) -> TargetRun | None:
    """The same over a copy in which float buffers are rounded to float32 another way; None where it has none.

    Masks and counts are exact, and stay.
    """
    module, generator = copy.deepcopy(module_of(run)), torch.Generator().manual_seed(0)
    tables = [
        buffer for buffer in module.buffers()
        if buffer.is_floating_point() and bool(buffer.isfinite().all()) and not torch.equal(buffer, buffer.round())
    ]  # fmt: skip
    for table in tables:
        step = 2 * torch.rand(table.shape, generator=generator, dtype=torch.float64) - 1
        table.mul_(1 + 2.0**-24 * step.to(table))
    return run_on(run, module) if tables else None


def module_of(run: TargetRun) -> nn.Module:
    """The module of a run that has one."""
    module = run.probe.module
    assert module is not None
    return module


def _key(batch: Batch) -> tuple[object, ...] | None:
    """What makes two requests the same; None where embeddings or targets are part of it."""
    if batch.inputs_embeds is not None or batch.target_mask is not None:
        return None
    fields = (batch.tokens, batch.positions, batch.segments)
    source = None if batch.source is None else _key(batch.source)
    if batch.source is not None and source is None:
        return None
    return (*batch.shape, *(field.cpu().numpy().tobytes() for field in fields), source)


def max_abs_diff(before_BTV: Tensor, after_BTV: Tensor) -> Tensor:
    """``[B, T]``: the largest change over the vocabulary; infinite where a number became NaN or infinite."""
    change = (before_BTV - after_BTV).abs().double()
    change = torch.where(before_BTV == after_BTV, 0.0, change)
    both = before_BTV.isnan() & after_BTV.isnan()
    return torch.where(both, 0.0, change.nan_to_num(nan=torch.inf)).amax(-1)


def logit_scale(logits: Tensor) -> float:
    """``1 + max|logit|`` over what is finite."""
    if not logits.numel():
        return 1.0
    low, high = (float(end) for end in logits.detach().aminmax())
    if math.isfinite(low) and math.isfinite(high):
        return 1.0 + max(-low, high)
    return 1.0 + float(logits.detach().abs().nan_to_num(0.0, 0.0, 0.0).max())


STEP = 2.0**-22
"""Some of float32's own steps, so that a cast to it inside cannot hide."""

Ask = Callable[[], Tensor]


def rounding_noise(module: nn.Module, asks: Sequence[Ask]) -> float:
    """The rounding a float64 copy still shows: large when the module casts to less precision inside.

    ``asks`` are ways to ask it the same; the largest counts. Three runs each, with weights scaled by 1, 1 + e and
    1 + 2e: for e = 2⁻²² a smooth function's second difference is about e² = 6e-14, while inner roundings to
    float32 do not cancel and show up at their own size.
    """
    weights = [p for p in module.parameters() if p.is_floating_point()]
    kept = [p.detach().clone() for p in weights]
    answers = [[ask() for ask in asks]]
    try:
        for number in (1, 2):
            _scale(weights, kept, 1 + number * STEP)
            answers.append([ask() for ask in asks])
    finally:
        _scale(weights, kept, 1.0)
    bends = ((third - 2 * second + first).abs() for first, second, third in zip(*answers, strict=True))
    return max((float(bend.nan_to_num(0.0, 0.0, 0.0).max()) for bend in bends), default=0.0)


def _scale(weights: Sequence[Tensor], kept: Sequence[Tensor], factor: float) -> None:
    with torch.no_grad():
        for weight, value in zip(weights, kept, strict=True):
            torch.mul(value, factor, out=weight)  # by 1: bit for bit what it was


Gradients = dict[str, Tensor]


def gradients(run: TargetRun, batch: Batch) -> tuple[Tensor, Gradients]:
    """``[B, T, V]`` logits, and what a fixed weighted sum over the real tokens gives each weight."""
    named, logits = weights_of(run), run.differentiable(batch)
    total = weighted_sum(logits, batch)
    if not named or not total.requires_grad:
        return logits.detach().cpu(), {}
    return logits.detach().cpu(), gradients_of(total, named)


def gradients_of(total: Tensor, named: dict[str, Tensor]) -> Gradients:
    """What ``total`` gives each weight: 0 to those that have no part in it."""
    taken = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    pairs = zip(named.items(), taken, strict=True)
    return {name: torch.zeros_like(weight) if grad is None else grad for (name, weight), grad in pairs}


def embedding_gradient(run: TargetRun, batch: Batch) -> Tensor | None:
    """``[B, T, D]``: what the same weighted sum over the real tokens gives their embeddings."""
    embeddings_BTD = run.embed(batch).requires_grad_()
    logits = run.differentiable(batch.replace(inputs_embeds=embeddings_BTD))
    weighted_sum(logits, batch).backward(inputs=[embeddings_BTD])
    return embeddings_BTD.grad


def weights_of(run: TargetRun) -> dict[str, Tensor]:
    """The parameters that take gradients, by name."""
    module = run.probe.module
    return {} if module is None else {name: p for name, p in module.named_parameters() if p.requires_grad}


def tolerance_of(run: TargetRun) -> float:
    """How far, relative to their scale, two right sums of gradients may lie apart."""
    return (1e-10 if run.dtype == torch.float64 else 10 * run.rounding) + 20 * run.noise


def first_difference(run: TargetRun, want: Gradients, got: Gradients) -> tuple[str, float] | None:
    """The first weight whose two gradients differ beyond rounding, and by how much.

    A gradient that is 0 by its definition, such as that of a bias of all keys, is nothing but the rounding of others.
    """
    tolerance = tolerance_of(run)
    noise = (run.rounding + run.noise) * max((logit_scale(expected) for expected in want.values()), default=0.0)
    for name, expected in want.items():
        size = float(torch.dist(got[name], expected, float("inf"))) if expected.numel() else 0.0
        if not size <= max(tolerance * logit_scale(expected), noise):
            return name, size
    return None


def first_not_finite(found: Gradients) -> str | None:
    """The first weight whose gradient is not finite."""
    return next((name for name, grad in found.items() if not bool(grad.isfinite().all())), None)


def weighted_sum(logits: Tensor, batch: Batch) -> Tensor:
    """A fixed weighted sum over the real tokens."""
    return (logits * directions(logits))[batch.token_mask.to(logits.device)].sum()


def directions(logits_BTV: Tensor) -> Tensor:
    """Fixed random weights to sum outputs with, so that one gradient covers all of them."""
    generator = torch.Generator().manual_seed(1)
    weights_V = torch.randn(logits_BTV.shape[-1], generator=generator, dtype=torch.float64)
    return weights_V.to(logits_BTV)
