"""One run of a target, and how far its outputs moved in it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pellucid.errors import ShapeError
from pellucid.probe import Probe, Request

ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""How far two right ways of computing the same numbers may lie apart, relative to 1 + max|logit|."""


_MOST_KEPT = 2**22  # numbers of one answer that is kept


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
        self._plain: dict[tuple[object, ...], Tensor] = {}

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

    def plain(self, request: Request) -> Tensor:
        """The same, and asked once only: what many others are compared with. Not to be written into.

        Never while another kernel, way or mode is in force.
        """
        key = _key(request)
        if key is None:
            return self.logits(request)
        if key not in self._plain:
            answer = self.logits(request)
            if answer.numel() > _MOST_KEPT:
                return answer
            self._plain[key] = answer.clone()  # a target may write into what it handed out
        return self._plain[key]

    def alone(self, tokens: Sequence[int]) -> Tensor:
        """``[T, V]`` of one row without company, padding or a cache; run once."""
        return self.plain(Request.from_rows([tokens]))[0]

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
        """The sum alone, with a graph; a plain number, as some give for nothing to learn, has none."""
        total: object = self.probe.loss(self.placed(request))[0]
        return total if isinstance(total, Tensor) else torch.as_tensor(total, device=self.device)

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


def _key(request: Request) -> tuple[object, ...] | None:
    """What makes two requests the same; None where embeddings or targets are part of it."""
    if request.embeddings is not None or request.targets is not None:
        return None
    fields = (request.tokens, request.positions, request.segments)
    source = None if request.source is None else _key(request.source)
    if request.source is not None and source is None:
        return None
    return (*request.shape, *(field.cpu().numpy().tobytes() for field in fields), source)


def moved(before_BTV: Tensor, after_BTV: Tensor) -> Tensor:
    """``[B, T]``: the largest change over the vocabulary; infinite where a number became NaN or infinite."""
    change = (before_BTV - after_BTV).abs().double()
    change = torch.where(before_BTV == after_BTV, 0.0, change)
    both = before_BTV.isnan() & after_BTV.isnan()
    return torch.where(both, 0.0, change.nan_to_num(nan=torch.inf)).amax(-1)


def scale_of(logits: Tensor) -> float:
    """``1 + max|logit|`` over what is finite."""
    if not logits.numel():
        return 1.0
    low, high = (float(end) for end in logits.detach().aminmax())
    if math.isfinite(low) and math.isfinite(high):
        return 1.0 + max(-low, high)
    return 1.0 + float(logits.detach().abs().nan_to_num(0.0, 0.0, 0.0).max())
