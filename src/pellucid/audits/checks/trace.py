"""Does answering leave a trace: in weights, attributes, random numbers, torch's switches, the caller's tensors?"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from pellucid.audits.checks.check import question
from pellucid.audits.engine.argument_mutation import other_calls, watched
from pellucid.audits.engine.attributes import snapshot_attributes
from pellucid.audits.engine.compare import fragile, leak, not_applicable, passed, skip_if_unsupported
from pellucid.audits.engine.context import LENGTHS, AuditContext
from pellucid.audits.engine.state import (
    Snapshot,
    preserve_state,
    random_states,
    reseed,
    restore_switches,
    same_tensor,
    switches,
)
from pellucid.audits.engine.target_run import deep_copy, max_abs_diff, module_of
from pellucid.batch import Batch
from pellucid.errors import UnsupportedError, one_line
from pellucid.messages import join_some
from pellucid.records import Finding, Location

Ask = Callable[[Batch], Any]


@question("Does answering leave everything as it was?", length=5, steady=False)
def check(context: AuditContext) -> Iterator[Finding]:
    """Look at everything before and after, for every way in that the target has."""
    lengths = LENGTHS if context.can("padding") else (5, 5, 5)
    edges = itertools.cycle([*context.edges[:4], *context.edges[::-1]])  # ids that code may treat in a way of its own
    batch = Batch.from_rows(
        [[next(edges) for _ in range(n * context.step)] for n in lengths], side=context.probe.sides[0]
    )
    other, probe = context.fresh(batch), context.probe
    if probe.module is not None:
        yield _first_request_decides(context, "first request")
    ways: dict[str, Ask] = {"logits": probe.logits}
    if context.can("loss"):
        ways["loss"] = probe.loss
    if context.can("cache"):
        ways["cache"] = lambda batch: probe.extend(batch, probe.new_cache(*batch.shape))
    for case, ask in ways.items():
        given = (each.replace(target_mask=each.token_mask) if case == "loss" else each for each in (batch, other))
        good = "weights, attributes, flags, switches, random numbers and the caller's tensors are what they were"
        yield from list(_traces(context, case, ask, *given)) or [passed(case, good)]
    if probe.module is not None:
        yield _other_arguments(context, "other arguments", batch)
        yield _train_mode(context, "train mode", batch)
        yield from _state_dict(context, "state dict")
    yield _with_gradients(context, "with gradients", batch)
    yield _own_answer(context, "returned answer", batch, other)


def _snapshot(module: nn.Module | None) -> Snapshot:
    return Snapshot(module, attributes=snapshot_attributes(module))


def _traces(context: AuditContext, case: str, ask: Ask, batch: Batch, other: Batch) -> Iterator[Finding]:
    """One request, another of its shape, the first again: what stays may depend on the shape only."""
    module = context.probe.module
    if module is not None:
        module.eval()  # an earlier request may have left a part in train mode
    original, request = (context.native.placed(batch) for _ in range(2))
    before, drawn = _snapshot(module), random_states()
    with torch.no_grad():
        switched_before = switches()
        with watched(module, containers=case != "cache") as written:
            ask(request)
        switched = restore_switches(switched_before)
        random_names = [name for name, state in random_states().items() if state != drawn.get(name)]
        moments = [_snapshot(module)]
        for again in (other, batch):
            ask(context.native.placed(again))
            restore_switches(switched_before)
            moments.append(_snapshot(module))
    yield from _of_module(case, before, moments)
    for name in switched:
        yield leak(case, f"answering changes {name} for everyone")
    if random_names:
        yield _drawn(context, case, batch, random_names)
    into_request = list(_writes(case, original, request))
    yield from into_request
    if written and not into_request:
        yield _written_into(case, written)


def _of_module(case: str, before: Snapshot, moments: list[Snapshot]) -> Iterator[Finding]:
    """Weights and flags never change. Buffers may be built by the first request, from its shape, not its content.

    Plain attributes that other content moves and the first moves back are memory; those that never come back grow.
    """
    first, second, third = moments
    for name in before.diff(first, "weights"):
        size = _size(before.weights[name], first.weights.get(name))
        yield leak(case, f"answering changes {name}: one request leaves something for the next", size=size)
    moved = {name: later for later in (third, second) for name in first.diff(later, "buffers")}
    for name in (name for name in first.buffers if name in moved):
        size = _size(first.buffers[name], moved[name].buffers.get(name))
        yield leak(case, f"every answer changes {name}: one request leaves something for the next", size=size)
    for flag in ("training", "requires_grad"):
        names = before.diff(first, flag)
        if names:
            yield leak(case, f"answering changes {flag} of {join_some([n or 'the module itself' for n in names], 1)}")
    more = first.diff(third, "hooks")
    if more:
        yield leak(case, f"every answer adds a hook to {more[0]}")
    growing = first.diff(third, "attributes")
    if growing:
        yield fragile(case, f"every request changes {join_some(growing, 1)}: it counts, grows or draws")
    memory = [name for name in first.diff(second, "attributes") if name not in set(growing)]
    if memory:
        yield fragile(case, f"{join_some(memory, 1)} keeps something of the last request")


def _drawn(context: AuditContext, case: str, batch: Batch, names: list[str]) -> Finding:
    """Numbers that are drawn and not used move the caller's generator only."""
    answers = []
    with preserve_state(context.probe.module):
        for seed in (*range(1, 9), 1):
            reseed(seed)
            answers.append(context.native.logits(batch).clone())
    first, *others, again = answers
    message = f"answering in eval mode draws random numbers ({', '.join(names)})"
    if torch.equal(first, again) and not all(torch.equal(first, other) for other in others):
        return leak(case, f"{message}, and the answer depends on them")
    return fragile(case, f"{message}, and uses none: the caller's generator moves all the same")


def _writes(case: str, before: Batch, after: Batch) -> Iterator[Finding]:
    """Into the tensors that the caller handed over, those of a source too."""
    for name in (each.name for each in fields(Batch)):
        value, now = getattr(before, name), getattr(after, name)
        if isinstance(value, Batch):
            yield from _writes(f"{case}, {name}", value, now)
        elif isinstance(value, Tensor) and not torch.equal(value, now):
            where = Location(*(value != now).nonzero()[0].tolist()[:2])
            yield leak(case, f"answering writes into the caller's {name}", where)


def _written_into(case: str, names: Iterable[str]) -> Finding:
    """Into what the probe makes of a request: a mask, labels, position ids."""
    return leak(case, f"answering writes into the caller's {join_some(list(names), 1)}")


def _other_arguments(context: AuditContext, case: str, batch: Batch) -> Finding:
    """The same for what is handed over in other ways only: another side, a pack, embeddings for tokens."""
    run, written = context.native, dict[str, None]()
    for mode, ask, request, change in other_calls(context, batch):
        before = None if request.inputs_embeds is None else request.inputs_embeds.clone()
        with suppress(Exception), mode, watched(run.probe.module, change=change) as names:  # refusing is no writing
            with torch.no_grad():
                ask(run.placed(request))
            written.update(names)
        if before is not None and not same_tensor(before, request.inputs_embeds):
            written["inputs_embeds"] = None
    return _written_into(case, written) if written else passed(case, "what is handed over stays as it was")


@skip_if_unsupported
def _first_request_decides(context: AuditContext, case: str) -> Finding:
    """Two copies, given different requests of a shape that no other check uses, must be alike afterwards."""
    row = context.tokens(min(11, context.length))
    batch = Batch.from_rows([row, row, row])
    seen, answers = [], []
    for request in (batch, context.fresh(batch)):
        copied = deep_copy(context.native)
        with preserve_state(context.probe.module):
            reseed(1)
            copied.logits(request)
            seen.append(_snapshot(copied.probe.module))
            answers.append(copied.logits(batch))
    sizes_BT = max_abs_diff(answers[0], answers[1])
    if bool(sizes_BT.any()):
        message = "the first request decides what later requests of the same length are answered"
        where = Location(*sizes_BT.nonzero()[0].tolist())
        return leak(case, message, where, float(sizes_BT.max()), "on two copies")
    buffers = seen[0].diff(seen[1], "buffers")
    if buffers:
        return leak(case, f"{buffers[0]} holds something of the first request, for all that come after it")
    names = seen[0].diff(seen[1], "attributes")
    if names:
        return fragile(case, f"{join_some(names, 1)} keeps something of the first request")
    return passed(case, "what is built by the first request depends on its shape only")


@skip_if_unsupported
def _train_mode(context: AuditContext, case: str, batch: Batch) -> Finding:
    """On a copy: what is in train mode stays in it."""
    copied = deep_copy(context.native)
    module = module_of(copied)
    with preserve_state(module, weights=False):
        module.train()
        before = Snapshot(module, weights=False)
        try:
            copied.differentiable(batch)
        except Exception as error:
            raise UnsupportedError(f"in train mode it raises {type(error).__name__}: {one_line(error)}") from error
        woken = before.diff(Snapshot(module, weights=False), "training")
    if woken:
        parts = join_some([name or "the module itself" for name in woken], 1)
        return leak(case, f"in train mode a request switches {parts} to eval mode, and training continues without it")
    return passed(case, "what is in train mode stays in it")


def _state_dict(context: AuditContext, case: str) -> Iterator[Finding]:
    """What a checkpoint would hold now, against what the target had before its first call."""
    module, untouched = context.probe.module, context.untouched
    if module is None or untouched is None:
        return
    names = [name for name in module.state_dict() if name not in untouched.state_dict()]
    if names:
        message = f"the first request adds {join_some(names, 1)} to the state dict, which then fits no fresh copy"
        yield fragile(case, message)


def _with_gradients(context: AuditContext, case: str, batch: Batch) -> Finding:
    """With gradients on: none is left on a weight, and they are still on."""
    module, switched_before = context.probe.module, switches()
    before = Snapshot(module, weights=False)
    try:
        context.native.differentiable(batch)
        switched = restore_switches(switched_before)
        left = before.diff(Snapshot(module, weights=False), "gradients")
    except RuntimeError as error:
        return not_applicable(case, f"it cannot run with gradients on: {one_line(error)}")
    finally:
        before.restore()
    if left:
        message = f"answering leaves a gradient on {join_some(left, 1)}: the next step would take it along"
        return leak(case, message)
    if switched:
        return leak(case, f"answering changes {switched[0]} for everyone")
    return passed(case, "no gradient is left on a weight and no switch is moved")


def _own_answer(context: AuditContext, case: str, batch: Batch, other: Batch) -> Finding:
    """An answer that was returned belongs to the caller: the next request must not write into it."""
    run = context.native
    with torch.no_grad():
        answer = run.differentiable(batch)
        before = answer.clone()
        run.differentiable(other)
    sizes_BT = torch.where(batch.token_mask, max_abs_diff(before.cpu(), answer.cpu()), 0.0)
    if not bool(sizes_BT.any()):
        return passed(case, "an answer stays what it was when the next is given", 0.0)
    message = "the next request writes into the answer that was returned: both are one tensor"
    where = Location(*sizes_BT.nonzero()[0].tolist())
    return leak(case, message, where, float(sizes_BT.max()), "the same tensor before and after")


def _size(before: Tensor, after: Tensor | None) -> float | None:
    if after is None or before.shape != after.shape or not before.numel():
        return None
    return float((before.double() - after.double()).abs().max())
