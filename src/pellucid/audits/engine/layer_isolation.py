"""Each layer alone against its own rule, of a decoder and of the encoder that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from pellucid.audits.engine.capture import output_of
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.decision import Index, finding
from pellucid.audits.engine.deviation import Deviation, TargetRun, logit_scale, max_abs_diff
from pellucid.audits.engine.influence import expected_flow
from pellucid.audits.engine.layers import LayerFlow, layer_flows, source_flows, source_layers
from pellucid.batch import Batch
from pellucid.errors import PellucidError, one_line
from pellucid.records import Finding, Location, Status

Ask = Callable[[int, Sequence[int]], list[LayerFlow]]
"""The layers' flows by the number of the draw (of tokens and changes) and the keys that are changed."""

_SHORT = 12  # tokens in a row of which all are changed
_LONG = 64
_DRAWS = 12  # before a pair counts as unseen: sparse layers show a token to some others only
_VANISHING = 1e-10  # where moves get so small, one more that is nothing proves nothing
_PLAIN = 1e-3


class IsolatedLayers:
    """The layers on one row; ``ask`` runs them again with other tokens and other changes."""

    def __init__(self, context: AuditContext, ask: Ask, keys: Sequence[int]) -> None:
        self.context, self.ask = context, ask
        self.flows = ask(0, keys)

    def unseen(self, flow: LayerFlow, among_TT: Tensor) -> list[list[int]]:
        """Pairs that the layer's rule shows and that moved nothing, whatever was drawn."""
        pairs = flow.unseen(among_TT) if self._mixes(flow) else []
        for draw in range(1, _DRAWS):
            if not pairs:
                break
            keys = sorted({key for _, key in pairs})[:_SHORT]
            sizes_TT = self.ask(draw, keys)[flow.number].reading.sizes
            pairs = [[query, key] for query, key in pairs if key in keys and sizes_TT[query, key] == 0]
        return pairs

    def _mixes(self, flow: LayerFlow) -> bool:
        """Whether it carries anything from token to token, or one built like it does: a list may hold other parts."""
        module = self.context.probe.module
        assert module is not None
        made = {each.number: [type(m) for m in module.get_submodule(each.name).modules()] for each in self.flows}
        return any(_moves(each) for each in self.flows if made[each.number] == made[flow.number])


def _moves(flow: LayerFlow) -> bool:
    return bool((_largest_change(flow) > 0).any())


def _largest_change(flow: LayerFlow) -> Tensor:
    """The sizes of pairs of two tokens."""
    return flow.reading.sizes.masked_fill(torch.eye(len(flow.may), dtype=torch.bool), 0.0)


def back_of(may_TT: Tensor) -> Tensor:
    """``Bool[T, T]``: pairs whose key comes before the query."""
    return torch.ones_like(may_TT).tril(-1)


def isolated_layers(context: AuditContext) -> list[IsolatedLayers]:
    """All layers of the target on a short row, and on the audit's own where that is longer: measured once."""

    def measure() -> list[IsolatedLayers]:
        short = min(_SHORT, context.length)
        rows = [
            IsolatedLayers(
                context, lambda draw, keys: layer_flows(context, context.tokens(short), keys, draw), range(short)
            )
        ]
        slots = min(_LONG, context.length)
        if slots > short:
            keys = _informative_keys(context, slots)
            rows.append(
                IsolatedLayers(
                    context, lambda draw, keys: layer_flows(context, context.tokens(slots), keys, draw), keys
                )
            )
        return rows

    return context.once("layers alone", measure)


def _informative_keys(context: AuditContext, slots: int) -> list[int]:
    """The first and the last token, and those beside which the first or the last query's sight ends."""
    batch = Batch.from_rows([context.tokens(slots)])
    keys = {0, slots - 1}
    for rule in dict.fromkeys(context.probe.rules):
        may_TT = expected_flow([rule], batch)[0]
        for row_T in (may_TT[0], may_TT[-1]):
            ends = (row_T[1:] != row_T[:-1]).nonzero()[:, 0].tolist()
            keys |= {side for end in ends[:2] for side in (end, end + 1)}
    return sorted(keys)[:_SHORT]


def assert_isolated(
    context: AuditContext,
    watch: Callable[[], Sequence[IsolatedLayers]],
    among: Callable[[Tensor], Tensor],
    check: str,
    case: str,
    good: str,
    declared: bool = True,
) -> Finding:
    """Whether each layer shows what its rule shows, and hides what that hides, looking at pairs ``among`` only."""
    try:
        rows = watch()
    except Exception as error:  # noqa: BLE001 (anybody's code, called with streams that it did not make)
        return Finding(check, "not_applicable", f"the layers cannot be watched: {one_line(error)}", case)
    found: list[Finding] = []
    for row in rows:
        for flow in row.flows:
            one = layer_held(context, row, flow, among(flow.may), check, case, declared=declared)
            if one is not None and one.status == "leak":
                return one
            found += [one] if one is not None else []
    return found[0] if found else Finding(check, "pass", good, case, size=0.0)


def layer_held(
    context: AuditContext,
    row: IsolatedLayers,
    flow: LayerFlow,
    among_TT: Tensor,
    check: str,
    case: str,
    back: int | None = None,
    declared: bool = True,
) -> Finding | None:
    """What is wrong with one layer; ``back`` is how far back it may look, where that is to be said.

    Seeing less than a rule that is only assumed is no fault.
    """
    wide = flow.leaks(context, among_TT)
    if wide:
        query, key = wide[0]
        message = f"{flow.name} lets token {key} through to query {query}, {side_of(query, key)}, "
        far = back is not None and query - key > back
        message += f"but may look {back} back" if far else "which its rule hides"
        return Finding(check, "leak", message, case, Location(0, query, key), float(flow.reading.sizes[query, key]))
    unseen = row.unseen(flow, among_TT) if declared and context.probe.rules_declared else []
    if not unseen:
        return None
    query, key = unseen[0]
    message = f"{flow.name} does not see token {key} from query {query}, {side_of(query, key)}, which its rule shows"
    decided = "no bit of its output moved"
    status = status_of_unseen(context, Deviation(flow.reading.run, _largest_change(flow), flow.reading.scale))
    return Finding(check, status, message, case, Location(0, query, key), 0.0, decided)


def side_of(query: int, key: int) -> str:
    """Where a key stands, in words."""
    return "its own" if query == key else f"{query - key} back" if key < query else f"{key - query} ahead"


def status_of_unseen(context: AuditContext, reading: Deviation) -> Status:
    """How bad a pair is that moved nothing: plain where the others move far above rounding, as in float64 all do.

    Where moves fade out by themselves, the last of them vanish in rounding, which is nobody's fault.
    """
    moves = reading.sizes[reading.sizes > 0] / reading.scale
    least = _VANISHING if reading.run.dtype == torch.float64 else 10 * reading.run.rounding
    if moves.numel() and float(moves.min()) < least:
        return "fragile"
    plain = context.probe.rules_declared and bool(moves.numel()) and float(moves.median()) > _PLAIN
    return "leak" if plain else context.status_of_unseen


CASE = "encoder"
_LENGTHS = (16, 8, 6)
_TARGET = 3  # tokens: another number than any source has
_SOURCE_DRAWS = 6


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


class _EncoderOutput:
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
    measure = _EncoderOutput(context, name, length)
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
    for _ in range(1, _SOURCE_DRAWS):
        if not bool(unseen_SS.any()):
            break
        unseen_SS &= _EncoderOutput(context, name, length).read(context.runs[-1]).sizes == 0
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
    return assert_isolated(context, watch, _others, check, "encoder, each layer", good, _declared(context))


def _others(may_SS: Tensor) -> Tensor:
    return ~torch.eye(len(may_SS), dtype=torch.bool)


def _declared(context: AuditContext) -> bool:
    """Whether the encoder's rules are stated; where they are assumed, seeing less is no fault."""
    return context.probe.rules_declared and getattr(context.probe, "source_rules_declared", True)
