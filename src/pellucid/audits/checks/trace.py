"""Does answering leave a trace: in weights, attributes, random numbers, torch's switches, the caller's tensors?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from pellucid.audits.checks.check import Check
from pellucid.audits.engine.argument_mutation import watched, ways_to_hand_over
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.decision import rows_of, skip_if_unsupported
from pellucid.audits.engine.deviation import max_abs_diff
from pellucid.audits.engine.module_copies import deep_copy, reseeded
from pellucid.audits.engine.preserve_state import preserve_state, put_back, random_states, switches
from pellucid.audits.engine.snapshot import Snapshot
from pellucid.batch import Batch
from pellucid.errors import one_line
from pellucid.records import Finding, Location

NAME = "trace"
_FIRST = "first request"
Ask = Callable[[Batch], Any]


def run(context: AuditContext) -> Iterator[Finding]:
    """Look at everything before and after, over every way in that the target has."""
    batch = _request(context)
    other = context.fresh(batch)
    if context.probe.module is not None:
        yield skip_if_unsupported(NAME, _FIRST, lambda: _first_request_decides(context))
    for case, ask in _ways_in(context):
        given = (each.replace(target_mask=each.token_mask) if case == "loss" else each for each in (batch, other))
        left = list(_traces(context, case, ask, *given))
        good = "weights, attributes, flags, switches, random numbers and the caller's tensors are what they were"
        yield from left or [Finding(NAME, "pass", good, case)]
    if context.probe.module is not None:
        yield _handed_over(context, batch)
    yield _with_gradients(context, batch)
    yield _kept_answer(context, batch, other)


def _request(context: AuditContext) -> Batch:
    lengths = (3, 5, 1) if context.can("padding") else (5, 5, 5)
    return Batch.from_rows(rows_of(context, lengths), side=context.probe.sides[0])


def _ways_in(context: AuditContext) -> Iterator[tuple[str, Ask]]:
    probe = context.probe
    yield "logits", probe.logits
    if context.can("loss"):
        yield "loss", probe.loss
    if context.can("cache"):
        yield "cache", lambda batch: probe.extend(batch, probe.new_cache(*batch.shape))


def _traces(context: AuditContext, case: str, ask: Ask, batch: Batch, other: Batch) -> Iterator[Finding]:
    """Ask for one thing, for another of its shape, for the first again: what stays may depend on the shape only."""
    module = context.probe.module
    if module is not None:
        module.eval()  # an earlier request may have woken a part
    original, request = (context.native.placed(batch) for _ in range(2))
    before, drawn = Snapshot.now(module), random_states()
    with torch.no_grad():
        kept = switches()
        with watched(module, containers=case != "cache") as written:
            ask(request)
        switched = put_back(kept)
        random_names = [name for name, state in random_states().items() if state != drawn.get(name)]
        moments = [Snapshot.now(module)]
        for again in (other, batch):
            ask(context.native.placed(again))
            put_back(kept)
            moments.append(Snapshot.now(module))
    yield from _of_tensors(case, before, moments)
    yield from _of_flags(case, before, moments)
    yield from _of_attributes(case, moments)
    for name in switched:
        yield Finding(NAME, "leak", f"answering changes {name} for everyone", case)
    if random_names:
        yield _drawn(context, case, batch, random_names)
    into_request = list(_writes(case, original, request))
    yield from into_request
    if written and not into_request:
        yield _written_into(case, written)


def _of_tensors(case: str, before: Snapshot, moments: list[Snapshot]) -> Iterator[Finding]:
    """Weights never change. Buffers may be built by the first request, from its shape and not from its content."""
    for name in before.diff(moments[0], "weights"):
        message = f"answering changes {name}: one request leaves something for the next"
        size = _size(before.weights[name], moments[0].weights.get(name))
        yield Finding(NAME, "leak", message, case, size=size)
    first = moments[0]
    moved = {name: later for later in moments[:0:-1] for name in first.diff(later, "buffers")}
    for name in (name for name in first.buffers if name in moved):
        message = f"every answer changes {name}: one request leaves something for the next"
        size = _size(first.buffers[name], moved[name].buffers.get(name))
        yield Finding(NAME, "leak", message, case, size=size)


def _of_flags(case: str, before: Snapshot, moments: list[Snapshot]) -> Iterator[Finding]:
    for kind in ("training", "requires_grad"):
        names = before.diff(moments[0], kind)
        if names:
            message = f"answering changes {kind} of {names[0] or 'the module itself'}{_and_more(names)}"
            yield Finding(NAME, "leak", message, case)
    more = moments[0].diff(moments[-1], "hooks")
    if more:
        yield Finding(NAME, "leak", f"every answer adds a hook to {more[0]}", case)


def _of_attributes(case: str, moments: list[Snapshot]) -> Iterator[Finding]:
    """Plain attributes: moved by other content and back by the first is memory, never back is growth or counting."""
    first, second, third = moments
    growing = first.diff(third, "attributes")
    forth = [name for name in first.diff(second, "attributes") if name not in set(growing)]
    if growing:
        message = f"{growing[0]} goes on changing with every request{_and_more(growing)}: it counts, grows or draws"
        yield Finding(NAME, "fragile", message, case)
    if forth:
        message = f"{forth[0]} keeps something of the last request{_and_more(forth)}"
        yield Finding(NAME, "fragile", message, case)


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _drawn(context: AuditContext, case: str, batch: Batch, names: list[str]) -> Finding:
    """Numbers that are drawn and not used move the caller's generator only."""
    answers = []
    with preserve_state(context.probe.module):
        for seed in (*range(1, 9), 1):
            reseeded(seed)
            answers.append(context.native.logits(batch).clone())
    first, *others, again = answers
    used = torch.equal(first, again) and not all(torch.equal(first, other) for other in others)
    message = f"answering in eval mode draws random numbers ({', '.join(names)})"
    message = "and the answer depends on them" if used else "and uses none: the caller's generator moves all the same"
    return Finding(NAME, "leak" if used else "fragile", f"{message}, {message}", case)


def _writes(case: str, kept: Batch, request: Batch) -> Iterator[Finding]:
    """Into the tensors that the caller handed over, those of a source too."""
    for name in (each.name for each in fields(Batch)):
        value, after = getattr(kept, name), getattr(request, name)
        if isinstance(value, Batch):
            yield from _writes(f"{case}, {name}", value, after)
        elif isinstance(value, Tensor) and not torch.equal(value, after):
            row, slot = (value != after).nonzero()[0].tolist()[:2]
            yield Finding(NAME, "leak", f"answering writes into the caller's {name}", case, Location(row, slot))


def _written_into(case: str, names: Iterable[str]) -> Finding:
    """Into what the probe makes of a request: a mask, labels, position ids."""
    first, *more = names
    return Finding(NAME, "leak", f"answering writes into the caller's {first}{_and_more([first, *more])}", case)


def _handed_over(context: AuditContext, batch: Batch) -> Finding:
    """The same once more for what is handed over in other ways only: another side, a pack, embeddings for tokens."""
    case, run = "other arguments", context.native
    written: dict[str, None] = {}
    for way, ask, request, change in ways_to_hand_over(context, batch):
        kept = None if request.inputs_embeds is None else request.inputs_embeds.clone()
        with suppress(Exception), way, watched(run.probe.module, change=change) as names:  # refusing is no writing
            with torch.no_grad():
                ask(run.placed(request))
            written.update(names)
        if kept is not None and request.inputs_embeds is not None and not torch.equal(kept, request.inputs_embeds):
            written["inputs_embeds"] = None
    if written:
        return _written_into(case, written)
    return Finding(NAME, "pass", "what is handed over stays as it was", case)


def _first_request_decides(context: AuditContext) -> Finding:
    """Two copies, asked for different things of a shape that no other check asks for, must be alike afterwards."""
    row = context.tokens(min(11, context.length))
    batch = Batch.from_rows([row, row, row])
    seen, answers = [], []
    for request in (batch, context.fresh(batch)):
        copied = deep_copy(context.native)
        with preserve_state(context.probe.module):
            reseeded(1)
            copied.logits(request)
            seen.append(Snapshot.now(copied.probe.module))
            answers.append(copied.logits(batch))
    sizes_BT = max_abs_diff(answers[0], answers[1])
    if bool(sizes_BT.any()):
        row_number, query = sizes_BT.nonzero()[0].tolist()
        message = "what was asked first decides what later requests of the same length are answered"
        return Finding(
            NAME, "leak", message, _FIRST, Location(row_number, query), float(sizes_BT.max()), "on two copies"
        )
    buffers = seen[0].diff(seen[1], "buffers")
    if buffers:
        message = f"{buffers[0]} holds something of the first request, for all that come after it"
        return Finding(NAME, "leak", message, _FIRST)
    names = seen[0].diff(seen[1], "attributes")
    if names:
        return Finding(NAME, "fragile", f"{names[0]} keeps something of the first request{_and_more(names)}", _FIRST)
    return Finding(NAME, "pass", "what is built by the first request depends on its shape only", _FIRST)


def _with_gradients(context: AuditContext, batch: Batch) -> Finding:
    """With gradients on: none is left on a weight, and they are still on."""
    case, module, kept = "with gradients", context.probe.module, switches()
    before = {} if module is None else {name: weight.grad for name, weight in module.named_parameters()}
    try:
        try:
            context.native.differentiable(batch)
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


def _kept_answer(context: AuditContext, batch: Batch, other: Batch) -> Finding:
    """An answer that was handed out belongs to the caller: the next request must not write into it."""
    case, run = "kept answer", context.native
    with torch.no_grad():
        answer = run.differentiable(batch)
        kept = answer.clone()
        run.differentiable(other)
    sizes_BT = torch.where(batch.token_mask, max_abs_diff(kept.cpu(), answer.cpu()), 0.0)
    if not bool(sizes_BT.any()):
        return Finding(NAME, "pass", "an answer stays what it was when the next is given", case, size=0.0)
    row, query = sizes_BT.nonzero()[0].tolist()
    message = "the next request writes into the answer that was handed out: both are one tensor"
    return Finding(
        NAME, "leak", message, case, Location(row, query), float(sizes_BT.max()), "the same tensor before and after"
    )


def _size(before: Tensor, after: Tensor | None) -> float | None:
    if after is None or before.shape != after.shape or not before.numel():
        return None
    return float((before.double() - after.double()).abs().max())


CHECK = Check(NAME, "Does answering leave everything as it was?", run, length=5, steady=False)
