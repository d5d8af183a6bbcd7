"""Each layer alone against its own rule: of a decoder, and of the encoder that it reads, with that encoder's output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from pellucid.audits.engine.capture import output_of
from pellucid.audits.engine.compare import Index, decide, leak, not_applicable, not_seen, passed
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.expected_flow import expected_flow
from pellucid.audits.engine.influence import others
from pellucid.audits.engine.layers import LayerFlow, LayerStack, decoder_stack, encoder_stack
from pellucid.audits.engine.target_run import Deviation, TargetRun, logit_scale, max_abs_diff
from pellucid.batch import Batch
from pellucid.errors import PellucidError, one_line
from pellucid.records import Finding, Location, Status

_SHORT = 12  # tokens in a row of which all are changed
_LONG = 64
_DRAWS = 12  # before a pair counts as unseen: sparse layers show a token to some others only
_VANISHING = 1e-10  # where moves get so small, one more that is nothing proves nothing
_PLAIN = 1e-3
_SOURCES = (16, 8, 6)  # tokens of a source
_SOURCE_DRAWS = 6


class IsolatedLayers:
    """The layers of a stack on one row of ``length`` tokens, of which ``keys`` are changed."""

    def __init__(self, context: AuditContext, stack: LayerStack, length: int, keys: Sequence[int]) -> None:
        self.context, self.stack, self.length = context, stack, length
        self.flows = self._ask(0, keys)

    def _ask(self, draw: int, keys: Sequence[int]) -> list[LayerFlow]:
        """Once more with other tokens and other changes."""
        return self.stack.flows(self.context.runs[-1], self.context.tokens(self.length), keys, draw)

    def unseen(self, flow: LayerFlow, among_TT: Tensor) -> list[list[int]]:
        """Pairs that the layer's rule shows and that moved nothing, whatever was drawn."""
        pairs = flow.unseen(among_TT) if self._mixes(flow) else []
        for draw in range(1, _DRAWS):
            if not pairs:
                break
            keys = sorted({key for _, key in pairs})[:_SHORT]
            again = {each.number: each for each in self._ask(draw, keys)}
            sizes_TT = again[flow.number].reading.sizes
            pairs = [[query, key] for query, key in pairs if key in keys and sizes_TT[query, key] == 0]
        return pairs

    def _mixes(self, flow: LayerFlow) -> bool:
        """Whether it carries anything from token to token, or one built like it does: a list may hold other parts."""
        module = self.context.probe.module
        assert module is not None
        parts = dict(module.named_modules())
        made = {each.number: [type(m) for m in parts[each.name].modules()] for each in self.flows}
        return any(bool((each.moves > 0).any()) for each in self.flows if made[each.number] == made[flow.number])


def isolated_layers(context: AuditContext) -> list[IsolatedLayers]:
    """All layers of the target on a short row, and on the audit's own where that is longer: measured once."""

    def measure() -> list[IsolatedLayers]:
        stack = decoder_stack(context)
        short, long = (context.round(min(most, context.length)) for most in (_SHORT, _LONG))
        rows = [IsolatedLayers(context, stack, short, range(short))]
        if long > short:
            rows.append(IsolatedLayers(context, stack, long, _informative_keys(context, long)))
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
    case: str,
    layers: Callable[[AuditContext], Sequence[IsolatedLayers]],
    among: Callable[[Tensor], Tensor],
    good: str,
    back: int | None = None,
) -> Finding:
    """Whether each layer shows what its rule shows, and hides what that hides, looking at pairs ``among`` only.

    ``back`` is how far back the layers may look, where that is to be named.
    """
    try:
        rows = layers(context)
    except Exception as error:  # noqa: BLE001 (anybody's code, called with streams that it did not make)
        return not_applicable(case, f"the layers cannot be watched: {one_line(error)}")
    found: list[Finding] = []
    for row in rows:
        for flow in row.flows:
            one = _fault(context, case, row, flow, among(flow.may), back)
            if one is not None and one.status == "leak":
                return one
            found += [one] if one is not None else []
    return found[0] if found else passed(case, good, 0.0)


def _fault(
    context: AuditContext, case: str, row: IsolatedLayers, flow: LayerFlow, among_TT: Tensor, back: int | None
) -> Finding | None:
    """What is wrong with one layer. Seeing less than a rule that is only assumed is no fault."""
    wide = flow.leaks(context, among_TT)
    if wide:
        query, key = wide[0]
        too_far = back is not None and query - key > back
        message = f"{flow.name} lets token {key} through to query {query}, {side_of(query, key)}, "
        message += f"but may look {back} back" if too_far else "which its rule hides"
        return leak(case, message, Location(0, query, key), float(flow.reading.sizes[query, key]))
    unseen = row.unseen(flow, among_TT) if row.stack.declared else []
    if not unseen:
        return None
    query, key = unseen[0]
    message = f"{flow.name} does not see token {key} from query {query}, {side_of(query, key)}, which its rule shows"
    status = status_of_unseen(context, flow.reading.run, flow.moves / flow.reading.scale)
    return not_seen(case, status, message, Location(0, query, key))


def side_of(query: int, key: int) -> str:
    """Where a key stands, in words."""
    return "its own" if query == key else f"{query - key} back" if key < query else f"{key - query} ahead"


def status_of_unseen(context: AuditContext, run: TargetRun, sizes: Tensor) -> Status:
    """How bad a pair is that moved nothing: a leak where the others move far above rounding, as in float64 all do.

    Where moves (``sizes``, relative) fade out by themselves, the last of them vanish in rounding: nobody's fault.
    """
    moves = sizes[sizes > 0]
    least = _VANISHING if run.dtype == torch.float64 else 10 * run.rounding
    if moves.numel() and float(moves.min()) < least:
        return "fragile"
    return "leak" if is_plain(context, moves) else context.status_of_unseen


def is_plain(context: AuditContext, moves: Tensor) -> bool:
    """Whether relative moves are so large that one which is nothing cannot be rounding."""
    return context.probe.rules_declared and bool(moves.numel()) and float(moves.median()) > _PLAIN


# ------------------------------------------------------------------------------------------------ the encoder of a pair


def check_encoder(context: AuditContext) -> Iterator[Finding]:
    """Whether the encoder's output, and each of its layers, is moved by what the source's rules show and no more."""
    case = "encoder"
    if not getattr(context.probe, "source_rules", ()):
        return
    stack = encoder_stack(context)
    name = context.probe.memory_name or (stack.names[-1] if stack.names else None)
    if name is None:
        message = "where the encoder's output is cannot be seen from outside: give the probe a memory_name"
        yield not_applicable(case, message)
        return
    length = _source_length(context, stack, name)
    if length is None:
        yield not_applicable(case, f"{name} gives no output with one slot for each token of the source")
        return
    yield _encoder_output(context, case, stack, name, length)
    if stack.names:
        good = "each layer of the encoder, tested alone, sees what its rule shows and nothing else"

        def layers(context: AuditContext) -> list[IsolatedLayers]:
            return [IsolatedLayers(context, stack, length, range(length))]

        yield assert_isolated(context, "encoder, each layer", layers, others, good)


def _source_length(context: AuditContext, stack: LayerStack, name: str) -> int | None:
    """The longest source that it takes and answers slot by slot."""
    for length in _SOURCES:
        try:
            found = output_of(context.native, name, stack.request([context.tokens(length)]))
        except (IndexError, RuntimeError, ValueError, AssertionError, PellucidError):
            continue
        if found is not None and found.dim() == 3 and {1, length} <= {*found.shape[:2]}:
            return length
    return None


class _EncoderOutput:
    """One source beside copies in which one token each is another."""

    def __init__(self, context: AuditContext, stack: LayerStack, name: str, length: int) -> None:
        self.name, self.length = name, length
        source = context.tokens(length)
        changed = [[*source[:j], context.other(source[j]), *source[j + 1 :]] for j in range(length)]
        # one row more than slots: the shape says which is which
        self.before, self.after = stack.request([source] * (length + 1)), stack.request([*changed, source])

    def read(self, run: TargetRun) -> Deviation:
        """``sizes[slot, token]``."""
        before_BSD, after_BSD = (self._rows_first(run, batch) for batch in (self.before, self.after))
        return Deviation(run, max_abs_diff(before_BSD, after_BSD)[:-1].T, logit_scale(before_BSD))

    def _rows_first(self, run: TargetRun, batch: Batch) -> Tensor:
        found = output_of(run, self.name, batch)
        assert found is not None
        return found if found.shape[0] == self.length + 1 else found.transpose(0, 1)


def _encoder_output(context: AuditContext, case: str, stack: LayerStack, name: str, length: int) -> Finding:
    """The whole encoder."""
    may_SS = expected_flow(stack.rules, Batch.from_rows([context.tokens(length)]))[0]
    readings = context.read(_EncoderOutput(context, stack, name, length).read)
    hidden = [Deviation(r.run, torch.where(may_SS, 0.0, r.sizes), r.scale) for r in readings]

    def place(run: TargetRun, index: Index) -> tuple[Location, str]:
        del run
        query, key = index
        message = f"slot {query} of the encoder's output moves with token {key} of the source, {side_of(query, key)}"
        return Location(0, query, key), f"{message}, which the encoder's rules hide"

    good = (
        f"a token of the source moves the {int(may_SS.sum())} slots of the encoder's output that it may, and no other"
    )
    result = decide(context, case, hidden, good=good, place=place, bits=True)
    if result.status != "pass" or not stack.declared:
        return result
    last = readings[-1]
    unseen_SS = may_SS & (last.sizes == 0)
    for _ in range(1, _SOURCE_DRAWS):
        if not bool(unseen_SS.any()):
            return result
        unseen_SS &= _EncoderOutput(context, stack, name, length).read(context.runs[-1]).sizes == 0
    unseen = unseen_SS.nonzero().tolist()
    if not unseen:
        return result
    query, key = unseen[0]
    message = f"slot {query} of the encoder's output does not move with token {key} of the source, "
    message += f"{side_of(query, key)}, which the encoder's rules show ({len(unseen)} such pairs)"
    status = status_of_unseen(context, last.run, last.sizes / last.scale)
    return Finding("", status, message, case, Location(0, query, key), 0.0, "no bit of it moved")
