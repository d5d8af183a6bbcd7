"""Does answering leave a trace: in weights, buffers, random numbers, the caller's tensors, the next?"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.audits.bench import Bench, moved
from pellucid.audits.check import Check
from pellucid.audits.rows import rows_of
from pellucid.probe import Request
from pellucid.records import Finding, Where

NAME = "trace"


def run(bench: Bench) -> Iterator[Finding]:
    """Look at everything before and after, over every way in that the target has."""
    request = _request(bench)
    for case, ask in _ways_in(bench):
        left = list(_traces(bench, case, ask, request))
        good = "weights, buffers, flags, random numbers and the caller's tensors are what they were"
        yield from left or [Finding(NAME, "pass", good, case)]
    yield _same_answer(bench, request)


def _request(bench: Bench) -> Request:
    lengths = (3, 5, 1) if bench.can("padding") else (5, 5, 5)
    return Request.from_rows(rows_of(bench, lengths))


def _ways_in(bench: Bench) -> Iterator[tuple[str, Any]]:
    probe = bench.probe
    yield "logits", probe.logits
    if bench.can("loss"):
        yield "loss", probe.loss
    if bench.can("cache"):
        yield "cache", lambda request: probe.extend(request, probe.new_cache(*request.shape))


def _traces(bench: Bench, case: str, ask: Any, request: Request) -> Iterator[Finding]:
    module = bench.probe.module
    asked = request.to(bench.native.device)
    tensors, flags, state = _tensors(module), _flags(module), _random_state()
    with torch.no_grad():
        ask(asked)
    for name, before in tensors.items():
        after = _tensors(module, copy=False).get(name)
        if after is None or not torch.equal(before.nan_to_num(), after.nan_to_num()):
            yield Finding(
                NAME,
                "leak",
                f"answering changes {name}: one request leaves something for the next",
                case,
                size=_size(before, after),
            )
    if flags != _flags(module):
        yield Finding(NAME, "leak", "answering changes training or requires_grad flags", case)
    drawn = [name for name, before in state.items() if before != _random_state().get(name)]
    if drawn:
        yield Finding(NAME, "leak", f"answering in eval mode draws random numbers ({', '.join(drawn)})", case)
    for name in ("tokens", "positions", "segments"):
        before, after = getattr(request, name), getattr(asked, name).cpu()
        if not torch.equal(before, after):
            row, slot = (before != after).nonzero()[0].tolist()
            message = f"answering writes into the caller's {name.removesuffix('_BT')}"
            yield Finding(NAME, "leak", message, case, Where(row, slot))


def _same_answer(bench: Bench, request: Request) -> Finding:
    """The same request twice, another one between."""
    case, native = "same answer", bench.native
    first = native.logits(request)
    again = native.logits(request)
    native.logits(bench.fresh(request))
    later = native.logits(request)
    for answer, when in ((again, "at once"), (later, "after another request")):
        sizes_BT = torch.where(request.real, moved(first, answer), 0.0)
        if bool(sizes_BT.any()):
            row, query = sizes_BT.nonzero()[0].tolist()
            size = float(sizes_BT.max())
            rounding = size <= native.rounding * (1 + float(first.abs().max()))
            message = f"the same request asked again {when} is answered otherwise"
            note = "no more than rounding: a kernel whose order varies" if rounding else "more than rounding"
            return Finding(NAME, "fragile" if rounding else "leak", message, case, Where(row, query), size, note)
    return Finding(NAME, "pass", "the same request is answered the same, bit for bit", case, size=0.0)


def _tensors(module: nn.Module | None, copy: bool = True) -> dict[str, Tensor]:
    if module is None:
        return {}
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: t.detach().clone() if copy else t.detach() for name, t in named}


def _flags(module: nn.Module | None) -> list[tuple[str, bool]]:
    if module is None:
        return []
    flags = [(name, m.training) for name, m in module.named_modules()]
    return flags + [(name, p.requires_grad) for name, p in module.named_parameters()]


def _random_state() -> dict[str, Any]:
    """Comparable states of every generator that a model is likely to use."""
    states: dict[str, Any] = {"torch": torch.get_rng_state().tolist(), "Python's random": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["torch on cuda"] = [state.tolist() for state in torch.cuda.get_rng_state_all()]
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = (name, keys.tolist(), *rest)
    return states


def _size(before: Tensor, after: Tensor | None) -> float | None:
    if after is None or before.shape != after.shape or not before.numel():
        return None
    return float((before.double() - after.double()).abs().max())


CHECK = Check(NAME, "Does answering leave everything as it was?", run, length=5)
