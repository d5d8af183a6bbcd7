"""Does answering leave a trace: in weights, attributes, random numbers, torch's switches, the caller's tensors?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.audits.checks.check import Check
from pellucid.audits.method.arguments import watched, ways_to_hand_over
from pellucid.audits.method.bench import Bench
from pellucid.audits.method.care import left_as_found
from pellucid.audits.method.copies import copied, reseeded
from pellucid.audits.method.held import Leaves, changed, held_by, hooks_of
from pellucid.audits.method.judge import unless_refused
from pellucid.audits.method.measure import moved
from pellucid.audits.method.rows import rows_of
from pellucid.audits.method.world import put_back, random_states, switches
from pellucid.errors import one_line
from pellucid.probe import Request
from pellucid.records import Finding, Where

NAME = "trace"
_FIRST = "first request"
Ask = Callable[[Request], Any]


def run(bench: Bench) -> Iterator[Finding]:
    """Look at everything before and after, over every way in that the target has."""
    request = _request(bench)
    other = bench.fresh(request)
    if bench.probe.module is not None:
        yield unless_refused(NAME, _FIRST, lambda: _first_request_decides(bench))
    for case, ask in _ways_in(bench):
        given = (each.with_targets(each.real) if case == "loss" else each for each in (request, other))
        left = list(_traces(bench, case, ask, *given))
        good = "weights, attributes, flags, switches, random numbers and the caller's tensors are what they were"
        yield from left or [Finding(NAME, "pass", good, case)]
    if bench.probe.module is not None:
        yield _handed_over(bench, request)
    yield _with_gradients(bench, request)
    yield _kept_answer(bench, request, other)


def _request(bench: Bench) -> Request:
    lengths = (3, 5, 1) if bench.can("padding") else (5, 5, 5)
    return Request.from_rows(rows_of(bench, lengths), side=bench.probe.sides[0])


def _ways_in(bench: Bench) -> Iterator[tuple[str, Ask]]:
    probe = bench.probe
    yield "logits", probe.logits
    if bench.can("loss"):
        yield "loss", probe.loss
    if bench.can("cache"):
        yield "cache", lambda request: probe.extend(request, probe.new_cache(*request.shape))


@dataclass
class _Seen:
    """What a module is and holds at one moment."""

    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    training: list[tuple[str, bool]]
    learning: list[tuple[str, bool]]
    hooks: dict[str, int]
    held: Leaves = field(default_factory=dict)

    @classmethod
    def now(cls, module: nn.Module | None) -> _Seen:
        if module is None:
            return cls({}, {}, [], [], {})
        return cls(
            {name: weight.detach().clone() for name, weight in module.named_parameters()},
            {name: buffer.detach().clone() for name, buffer in module.named_buffers()},
            [(name, part.training) for name, part in module.named_modules()],
            [(name, weight.requires_grad) for name, weight in module.named_parameters()],
            hooks_of(module),
            held_by(module),
        )


def _traces(bench: Bench, case: str, ask: Ask, request: Request, other: Request) -> Iterator[Finding]:
    """Ask for one thing, for another of its shape, for the first again: what stays may depend on the shape only."""
    module = bench.probe.module
    if module is not None:
        module.eval()  # an earlier request may have woken a part
    kept_request, asked = (bench.native.placed(request) for _ in range(2))
    before, drawn = _Seen.now(module), random_states()
    with torch.no_grad():
        kept = switches()
        with watched(module, containers=case != "cache") as written:
            ask(asked)
        switched = put_back(kept)
        random_names = [name for name, state in random_states().items() if state != drawn.get(name)]
        moments = [_Seen.now(module)]
        for again in (other, request):
            ask(bench.native.placed(again))
            put_back(kept)
            moments.append(_Seen.now(module))
    yield from _of_tensors(case, before, moments)
    yield from _of_flags(case, before, moments)
    yield from _of_attributes(case, moments)
    for name in switched:
        yield Finding(NAME, "leak", f"answering changes {name} for everyone", case)
    if random_names:
        yield _drawn(bench, case, request, random_names)
    into_request = list(_writes(case, kept_request, asked))
    yield from into_request
    if written and not into_request:
        yield _written_into(case, written)


def _of_tensors(case: str, before: _Seen, moments: list[_Seen]) -> Iterator[Finding]:
    """Weights never change. Buffers may be built by the first request, from its shape and not from its content."""
    for name, weight in before.weights.items():
        after = moments[0].weights.get(name)
        if not _equal(weight, after):
            message = f"answering changes {name}: one request leaves something for the next"
            yield Finding(NAME, "leak", message, case, size=_size(weight, after))
    first = moments[0].buffers
    for name, buffer in first.items():
        later = next((m.buffers.get(name) for m in moments[1:] if not _equal(buffer, m.buffers.get(name))), buffer)
        if later is not buffer:
            message = f"every answer changes {name}: one request leaves something for the next"
            yield Finding(NAME, "leak", message, case, size=_size(buffer, later))


def _of_flags(case: str, before: _Seen, moments: list[_Seen]) -> Iterator[Finding]:
    for kind, was, now in (
        ("training", dict(before.training), dict(moments[0].training)),
        ("requires_grad", dict(before.learning), dict(moments[0].learning)),
    ):
        names = [name for name in was if now.get(name, was[name]) != was[name]]
        if names:
            message = f"answering changes {kind} of {names[0] or 'the module itself'}{_and_more(names)}"
            yield Finding(NAME, "leak", message, case)
    more = [name for name, count in moments[-1].hooks.items() if count > moments[0].hooks.get(name, 0)]
    if more:
        yield Finding(NAME, "leak", f"every answer adds a hook to {more[0]}", case)


def _of_attributes(case: str, moments: list[_Seen]) -> Iterator[Finding]:
    """Plain attributes: moved by other content and back by the first is memory, never back is growth or counting."""
    first, second, third = (moment.held for moment in moments)
    moving = changed(first, second)
    forth = [name for name in moving if name not in set(changed(first, third))]
    growing = changed(first, third)
    if growing:
        message = f"{growing[0]} goes on changing with every request{_and_more(growing)}: it counts, grows or draws"
        yield Finding(NAME, "fragile", message, case)
    if forth:
        message = f"{forth[0]} keeps something of the last request{_and_more(forth)}"
        yield Finding(NAME, "fragile", message, case)


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _drawn(bench: Bench, case: str, request: Request, names: list[str]) -> Finding:
    """Numbers that are drawn and not used move the caller's generator only."""
    answers = []
    with left_as_found(bench.probe.module):
        for seed in (*range(1, 9), 1):
            reseeded(seed)
            answers.append(bench.native.logits(request).clone())
    first, *others, again = answers
    used = torch.equal(first, again) and not all(torch.equal(first, other) for other in others)
    message = f"answering in eval mode draws random numbers ({', '.join(names)})"
    said = "and the answer depends on them" if used else "and uses none: the caller's generator moves all the same"
    return Finding(NAME, "leak" if used else "fragile", f"{message}, {said}", case)


def _writes(case: str, kept: Request, asked: Request) -> Iterator[Finding]:
    """Into the tensors that the caller handed over, those of a source too."""
    for name, value in vars(kept).items():
        after = getattr(asked, name)
        if isinstance(value, Request):
            yield from _writes(f"{case}, {name}", value, after)
        elif isinstance(value, Tensor) and not torch.equal(value, after):
            row, slot = (value != after).nonzero()[0].tolist()[:2]
            yield Finding(NAME, "leak", f"answering writes into the caller's {name}", case, Where(row, slot))


def _written_into(case: str, names: Iterable[str]) -> Finding:
    """Into what the probe makes of a request: a mask, labels, position ids."""
    first, *more = names
    return Finding(NAME, "leak", f"answering writes into the caller's {first}{_and_more([first, *more])}", case)


def _handed_over(bench: Bench, request: Request) -> Finding:
    """The same once more for what is handed over in other ways only: another side, a pack, embeddings for tokens."""
    case, run = "other arguments", bench.native
    written: dict[str, None] = {}
    for way, ask, asked, change in ways_to_hand_over(bench, request):
        kept = None if asked.embeddings is None else asked.embeddings.clone()
        with suppress(Exception), way, watched(run.probe.module, change=change) as names:  # refusing is no writing
            with torch.no_grad():
                ask(run.placed(asked))
            written.update(names)
        if kept is not None and asked.embeddings is not None and not torch.equal(kept, asked.embeddings):
            written["embeddings"] = None
    if written:
        return _written_into(case, written)
    return Finding(NAME, "pass", "what is handed over stays as it was", case)


def _first_request_decides(bench: Bench) -> Finding:
    """Two copies, asked for different things of a shape that no other check asks for, must be alike afterwards."""
    row = bench.tokens(min(11, bench.length))
    request = Request.from_rows([row, row, row])
    seen, answers = [], []
    for asked in (request, bench.fresh(request)):
        twin = copied(bench.native)
        with left_as_found(bench.probe.module):
            reseeded(1)
            twin.logits(asked)
            seen.append(_Seen.now(twin.probe.module))
            answers.append(twin.logits(request))
    sizes_BT = moved(answers[0], answers[1])
    if bool(sizes_BT.any()):
        row_number, query = sizes_BT.nonzero()[0].tolist()
        message = "what was asked first decides what later requests of the same length are answered"
        return Finding(NAME, "leak", message, _FIRST, Where(row_number, query), float(sizes_BT.max()), "on two copies")
    buffers = [n for n, value in seen[0].buffers.items() if not _equal(value, seen[1].buffers.get(n))]
    if buffers:
        message = f"{buffers[0]} holds something of the first request, for all that come after it"
        return Finding(NAME, "leak", message, _FIRST)
    names = changed(seen[0].held, seen[1].held)
    if names:
        return Finding(NAME, "fragile", f"{names[0]} keeps something of the first request{_and_more(names)}", _FIRST)
    return Finding(NAME, "pass", "what is built by the first request depends on its shape only", _FIRST)


def _with_gradients(bench: Bench, request: Request) -> Finding:
    """With gradients on: none is left on a weight, and they are still on."""
    case, module, kept = "with gradients", bench.probe.module, switches()
    before = {} if module is None else {name: weight.grad for name, weight in module.named_parameters()}
    try:
        try:
            bench.native.differentiable(request)
        except RuntimeError as error:
            message = f"it cannot be asked with gradients on: {one_line(error)}"
            return Finding(NAME, "not_applicable", message, case)
        switched = put_back(kept)
        after = {} if module is None else {name: weight.grad for name, weight in module.named_parameters()}
        left = [name for name, grad in before.items() if after.get(name) is not grad]
    finally:
        for name, weight in () if module is None else module.named_parameters():
            weight.grad = before.get(name)
    if left:
        message = f"answering leaves a gradient on {left[0]}{_and_more(left)}: the next step would take it along"
        return Finding(NAME, "leak", message, case)
    if switched:
        return Finding(NAME, "leak", f"answering changes {switched[0]} for everyone", case)
    return Finding(NAME, "pass", "no gradient is left on a weight and no switch is moved", case)


def _kept_answer(bench: Bench, request: Request, other: Request) -> Finding:
    """An answer that was handed out belongs to the caller: the next request must not write into it."""
    case, run = "kept answer", bench.native
    with torch.no_grad():
        answer = run.differentiable(request)
        kept = answer.clone()
        run.differentiable(other)
    sizes_BT = torch.where(request.real, moved(kept.cpu(), answer.cpu()), 0.0)
    if not bool(sizes_BT.any()):
        return Finding(NAME, "pass", "an answer stays what it was when the next is given", case, size=0.0)
    row, query = sizes_BT.nonzero()[0].tolist()
    message = "the next request writes into the answer that was handed out: both are one tensor"
    return Finding(
        NAME, "leak", message, case, Where(row, query), float(sizes_BT.max()), "the same tensor before and after"
    )


def _equal(before: Tensor, after: Tensor | None) -> bool:
    if after is None or before.shape != after.shape or before.dtype != after.dtype:
        return False
    return (
        torch.equal(before.nan_to_num(), after.nan_to_num())
        if before.is_floating_point()
        else torch.equal(before, after)
    )


def _size(before: Tensor, after: Tensor | None) -> float | None:
    if after is None or before.shape != after.shape or not before.numel():
        return None
    return float((before.double() - after.double()).abs().max())


CHECK = Check(NAME, "Does answering leave everything as it was?", run, length=5, steady=False)
