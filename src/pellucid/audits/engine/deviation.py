"""One run of a target, and how far its outputs moved in it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pellucid.batch import Batch
from pellucid.errors import ShapeError
from pellucid.probe import Probe

ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""How far two right ways of computing the same numbers may lie apart, relative to 1 + max|logit|."""


_MOST_KEPT = 2**22  # numbers of one answer that is kept


class Deviation:
    """How far each watched output moved in one run, on a scale of ``1 + max|logit|``."""

    def __init__(self, run: TargetRun, sizes: Tensor, scale: float) -> None:
        self.run, self.sizes, self.scale = run, sizes, scale

    @property
    def largest(self) -> float:
        return float(self.sizes.max()) if self.sizes.numel() else 0.0


class TargetRun:
    """The target in one precision. A target that reads a source is given ``source`` where a request has none."""

    def __init__(self, probe: Probe, source: Batch | None = None) -> None:
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

    def logits(self, batch: Batch) -> Tensor:
        """``[B, T, V]`` on the host, without gradients."""
        with torch.no_grad():
            return self.differentiable(batch).cpu()

    def plain(self, batch: Batch) -> Tensor:
        """The same, and asked once only: what many others are compared with. Not to be written into.

        Never while another kernel, way or mode is in force.
        """
        key = _key(batch)
        if key is None:
            return self.logits(batch)
        if key not in self._plain:
            answer = self.logits(batch)
            if answer.numel() > _MOST_KEPT:
                return answer
            self._plain[key] = answer.clone()  # a target may write into what it handed out
        return self._plain[key]

    def alone(self, tokens: Sequence[int]) -> Tensor:
        """``[T, V]`` of one row without company, padding or a cache; run once."""
        return self.plain(Batch.from_rows([tokens]))[0]

    def differentiable(self, batch: Batch) -> Tensor:
        """``[B, T, V]``, with a graph where gradients are enabled."""
        return self._checked(self.probe.logits(self.placed(batch)), batch)

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
            total, count = self.probe.loss(self.placed(batch))
        return float(total), int(count)

    def differentiable_loss(self, batch: Batch) -> Tensor:
        """The sum alone, with a graph; a plain number, as some give for nothing to learn, has none."""
        total: object = self.probe.loss(self.placed(batch))[0]
        return total if isinstance(total, Tensor) else torch.as_tensor(total, device=self.device)

    def extend(self, batch: Batch, cache: object) -> Tensor:
        """The next slots through a cache."""
        with torch.no_grad():
            return self._checked(self.probe.extend(self.placed(batch), cache), batch).cpu()

    def chunked(self, batch: Batch, chunks: Sequence[int], cache: object | None = None) -> Tensor:
        """``[B, T, V]`` of a request that goes through a cache in chunks."""
        rows, slots = batch.shape
        cache = self.probe.new_cache(rows, slots) if cache is None else cache
        outputs, start = [], 0
        for size in chunks:
            outputs.append(self.extend(batch.part(start, start + size), cache))
            start += size
        return torch.cat(outputs, 1)

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
