"""What a target gives for a whole row beside its scores (``pooler_output``, a sentence's embedding): are pads in it?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from pellucid.audits.engine.capture import outputs_of
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.decision import Verdict, judge
from pellucid.audits.engine.deviation import Deviation, TargetRun, logit_scale
from pellucid.audits.engine.row_layouts import rows_of
from pellucid.batch import Batch, Side
from pellucid.records import Finding, Location

Pooled = dict[str, Tensor]


def pooled(context: AuditContext, check: str) -> Iterator[Finding]:
    """Each row's own answer for the whole of it must be what it is alone: beside a longer row and much padding.

    A class that takes the first slot for the whole can be padded on the right only, one that takes the last on the
    left only: what holds on one side is no leak on the other.
    """
    rows = rows_of(context, (3, 5))
    for name in _names(context, rows):
        verdicts = {side: _judged(context, name, rows, side) for side in context.one_sided}
        sound = [side for side, verdict in verdicts.items() if verdict.status != "leak"]
        for side, verdict in verdicts.items():
            yield _told(check, name, side, verdict, sound)


def _names(context: AuditContext, rows: list[list[int]]) -> list[str]:
    """Those that keep their width in longer rows: the others are of single slots."""
    if context.probe.module is None:
        return []
    side = context.probe.sides[0]
    shorter, longer = (_pooled_of(context.native, Batch.from_rows(rows, side=side, length=n)) for n in (5, 8))
    return [name for name, value in shorter.items() if name in longer and longer[name].shape == value.shape]


def _told(check: str, name: str, side: Side, verdict: Verdict, sound: list[Side]) -> Finding:
    case, size = f"{name}, {side} padding", verdict.size
    if verdict.status == "pass":
        return Finding(check, "pass", f"{name} is of real tokens only", case, size=size, decided=verdict.decided)
    message = f"{name} of a row is another beside padding than alone, although it stands for the row's own tokens"
    if verdict.status == "leak" and sound:
        message = f"{name} is taken from a slot that padding on the {side} moves; pad on the {sound[0]}"
        return Finding(check, "not_applicable", message, case, Location(*verdict.first[:1]), size, verdict.decided)
    return Finding(check, verdict.status, message, case, Location(*verdict.first[:1]), size, verdict.decided)


def _judged(context: AuditContext, name: str, rows: list[list[int]], side: Side) -> Verdict:
    readings = context.read(lambda run: _moved(run, name, rows, side))
    return judge(context, readings, bits=False)


def _moved(run: TargetRun, name: str, rows: list[list[int]], side: Side) -> Deviation:
    """``[rows]``: how far the value of each is from that alone, in company and with more padding."""
    alone = [_pooled_of(run, Batch.from_rows([row]))[name] for row in rows]
    sizes = torch.zeros(len(rows), dtype=torch.float64)
    run.dtype = alone[0].dtype
    for length in (max(map(len, rows)), max(map(len, rows)) + 3):
        together = _pooled_of(run, Batch.from_rows(rows, side=side, length=length))[name]
        for number, want in enumerate(alone):
            size = (together[number] - want[0]).abs().double().max()
            sizes[number] = torch.maximum(sizes[number], size.nan_to_num(nan=torch.inf))
    return Deviation(run, sizes, max(map(logit_scale, alone)))


def _pooled_of(run: TargetRun, batch: Batch) -> Pooled:
    """Float tensors ``[B, D]`` of the module's answer, by name."""
    outputs = outputs_of(run, "", batch, _named)
    found = outputs[-1] if outputs else {}
    return {
        name: value.detach().cpu()
        for name, value in found.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 2
        and value.shape[0] == batch.shape[0] and value.shape[1] > 1
    }  # fmt: skip


def _named(output: object) -> dict[str, Any]:
    if isinstance(output, Mapping):
        return {str(key): value for key, value in output.items()}
    if is_dataclass(output):
        return {field.name: getattr(output, field.name) for field in fields(output)}
    return {f"output {number}": value for number, value in enumerate(output)} if isinstance(output, tuple) else {}
