"""The encoder of an encoder–decoder alone: what a token of the source moves in the memory that the decoder reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pellucid.audits.engine.capture import output_of
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.decision import Index, finding
from pellucid.audits.engine.deviation import Deviation, TargetRun, logit_scale, max_abs_diff
from pellucid.audits.engine.expected import expected_flow
from pellucid.audits.engine.layer_isolation import IsolatedLayers, held_alone, side_of, status_of_unseen
from pellucid.audits.engine.layers import LayerFlow, source_flows, source_layers
from pellucid.batch import Batch
from pellucid.errors import PellucidError
from pellucid.records import Finding, Location

CASE = "encoder"
_LENGTHS = (16, 8, 6)
_TARGET = 3  # tokens: another number than any source has
_DRAWS = 6


def encoder_held(context: AuditContext, check: str) -> Iterator[Finding]:
    """Whether the memory, and each layer of the encoder, is moved by what the source's rules show and no more."""
    if not getattr(context.probe, "source_rules", ()):
        return
    names, _ = source_layers(context)
    memory = context.probe.memory_name or (names[-1] if names else None)
    if memory is None:
        message = "where the encoder's memory is cannot be told from outside: give the probe a memory_name"
        yield Finding(check, "not_applicable", message, CASE)
        return
    length = _length(context, memory)
    if length is None:
        message = f"{memory} gives no memory with one slot for each token of the source"
        yield Finding(check, "not_applicable", message, CASE)
        return
    yield _memory(context, check, memory, length)
    if names:
        yield _layers(context, check, length)


def _length(context: AuditContext, memory: str) -> int | None:
    """The longest source that it takes and answers slot by slot."""
    for length in _LENGTHS:
        batch = Batch.from_pairs([context.tokens(length)], [context.tokens(_TARGET)])
        try:
            found = output_of(context.native, memory, batch)
        except (IndexError, RuntimeError, ValueError, AssertionError, PellucidError):
            continue
        if found is not None and found.dim() == 3 and {1, length} <= {*found.shape[:2]}:
            return length
    return None


class _Memory:
    """One source beside copies in which one token each is another."""

    def __init__(self, context: AuditContext, name: str, length: int) -> None:
        self.name, self.length = name, length
        source, target = context.tokens(length), context.tokens(_TARGET)
        changed = [[*source[:j], context.other(source[j]), *source[j + 1 :]] for j in range(length)]
        # one row more than slots: who is who is told by the shape
        self.before = Batch.from_pairs([source] * (length + 1), [target] * (length + 1))
        self.after = Batch.from_pairs([*changed, source], [target] * (length + 1))

    def read(self, run: TargetRun) -> Deviation:
        """``sizes[slot, token]``."""
        before_BSD, after_BSD = (self._rows_first(run, batch) for batch in (self.before, self.after))
        return Deviation(run, max_abs_diff(before_BSD, after_BSD)[:-1].T, logit_scale(before_BSD))

    def _rows_first(self, run: TargetRun, batch: Batch) -> Tensor:
        found = output_of(run, self.name, batch)
        assert found is not None
        return found if found.shape[0] == self.length + 1 else found.transpose(0, 1)


def _memory(context: AuditContext, check: str, name: str, length: int) -> Finding:
    """The whole encoder."""
    measure = _Memory(context, name, length)
    may_SS = _composed(context, length)
    readings = context.read(measure.read)
    hidden = [Deviation(r.run, torch.where(may_SS, 0.0, r.sizes), r.scale) for r in readings]

    def place(run: TargetRun, index: Index) -> tuple[Location, str]:
        del run
        query, key = index
        return Location(0, query, key), f"slot {query} of the memory moves with token {key} of the source, " + (
            f"{side_of(query, key)}, which the encoder's rules hide"
        )

    shown = int(may_SS.sum())
    good = f"a token of the source moves the {shown} slots of the memory that it may, and no other"
    result = finding(context, check, CASE, hidden, bits=True, good=good, place=place)
    if result.status != "pass" or not _declared(context):
        return result
    unseen = _unseen(context, name, length, readings, may_SS)
    if not unseen:
        return result
    query, key = unseen[0]
    message = f"slot {query} of the memory does not move with token {key} of the source, {side_of(query, key)}, "
    message += f"which the encoder's rules show ({len(unseen)} such pairs)"
    status = status_of_unseen(context, readings[-1])
    return Finding(check, status, message, CASE, Location(0, query, key), 0.0, "no bit of it moved")


def _unseen(
    context: AuditContext, name: str, length: int, readings: Sequence[Deviation], may_SS: Tensor
) -> list[list[int]]:
    """Pairs that the rules show and in which nothing moved, whatever was drawn."""
    unseen_SS = may_SS & (readings[-1].sizes == 0)
    for _ in range(1, _DRAWS):
        if not bool(unseen_SS.any()):
            break
        unseen_SS &= _Memory(context, name, length).read(context.runs[-1]).sizes == 0
    return unseen_SS.nonzero().tolist()


def _composed(context: AuditContext, length: int) -> Tensor:
    """``Bool[S, S]``: what the rules of all the encoder's layers show together."""
    return expected_flow(source_layers(context)[1], Batch.from_rows([context.tokens(length)]))[0]


def _layers(context: AuditContext, check: str, length: int) -> Finding:
    """Each layer of the encoder."""
    target = context.tokens(_TARGET)

    def watch() -> list[IsolatedLayers]:
        def ask(draw: int, keys: Sequence[int]) -> list[LayerFlow]:
            return source_flows(context, target, context.tokens(length), keys, draw)

        return [IsolatedLayers(context, ask, range(length))]

    good = "each layer of the encoder, looked at alone, sees what its rule shows and nothing else"
    return held_alone(context, watch, _others, check, "encoder, each layer", good, _declared(context))


def _others(may_SS: Tensor) -> Tensor:
    return ~torch.eye(len(may_SS), dtype=torch.bool)


def _declared(context: AuditContext) -> bool:
    """Whether the encoder's rules are stated; where they are assumed, seeing less is no fault."""
    return context.probe.rules_declared and getattr(context.probe, "source_rules_declared", True)
