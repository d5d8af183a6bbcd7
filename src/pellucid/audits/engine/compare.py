"""Two ways of asking a target for the same thing, and what follows where the answers differ.

What moved is a leak unless more precision makes it vanish. Findings are made without the name of their check, which
the audit fills in.
"""

from __future__ import annotations

import dis
import functools
import math
import re
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.expected_flow import expected_flow
from pellucid.audits.engine.target_run import Deviation, TargetRun, logit_scale, max_abs_diff
from pellucid.batch import Batch
from pellucid.errors import ShapeError, UnsupportedError, one_line
from pellucid.records import Finding, Location, Status

_CLEAR = 10.0  # so many times the rounding it must be where no float64 copy decides
_TORCH, _AUDITS = Path(torch.__file__).parent, Path(__file__).parents[1]
_GROSS = 50.0  # so many times the rounding of its dtype is a change that no rounding explains

_T = TypeVar("_T")
DRAWS = "the target draws random numbers, so only requests of one shape can be compared"
Index = tuple[int, ...]
Change = tuple[int, int]
"""Row and slot of a token to change."""
Answer = Batch | Tensor | Callable[[TargetRun], Tensor]
"""A request, its outputs ``[B, T, V]``, or how a run computes them."""
Suspects = Callable[[int, int], Iterable[Change]]
"""Tokens that may be what moved an output, by its row and query."""
Place = Callable[[TargetRun, Index], tuple[Location, str]]
"""The location and the message for the first entry that is wrong."""


def passed(case: str, message: str, size: float | None = None, decided: str = "") -> Finding:
    return Finding("", "pass", message, case, None, size, decided)


def leak(
    case: str, message: str, where: Location | None = None, size: float | None = None, decided: str = ""
) -> Finding:
    return Finding("", "leak", message, case, where, size, decided)


def fragile(
    case: str, message: str, where: Location | None = None, size: float | None = None, decided: str = ""
) -> Finding:
    return Finding("", "fragile", message, case, where, size, decided)


def not_applicable(case: str, message: str) -> Finding:
    return Finding("", "not_applicable", message, case)


def not_seen(case: str, status: Status, message: str, where: Location) -> Finding:
    """A key that must move a query does not."""
    return Finding("", status, message, case, where, 0.0, "no bit of its output moved")


def compare(
    context: AuditContext,
    case: str,
    want: Answer,
    got: Answer,
    *,
    good: str,
    wrong: str | Callable[[Location], str],
    watch: Tensor | None = None,
    bits: bool = False,
    suspects: Suspects | None = None,
) -> Finding:
    """Whether two answers agree, in the target's own dtype and in float64.

    Args:
        case: what was tried; it stands in the finding.
        want, got: requests of one shape, outputs, or functions of a run.
        good: the message where they agree.
        wrong: the message where they do not: of the location, or with ``{row}`` and ``{query}`` in it.
        watch: ``Bool[B, T]``, the outputs to compare; by default those of the real tokens of a request.
        bits: only hidden content differs, so nothing may move at all.
        suspects: are changed one after the other; the first that moves the output is the location's key.
    """
    request = got if isinstance(got, Batch) else want if isinstance(want, Batch) else None
    if watch is None and request is not None:
        watch = request.token_mask
    readings = context.read(lambda run: deviation(run, want, got, watch), shapes=not bits)
    if suspects is None:
        return decide(context, case, readings, good=good, place=at(wrong), bits=bits)
    base = want if isinstance(want, Batch) else request
    assert base is not None
    return decide(context, case, readings, good=good, place=caused(context, base, suspects, wrong), bits=bits)


def compare_with_alone(
    context: AuditContext,
    case: str,
    batch: Batch,
    rows: Iterable[list[int]],
    *,
    good: str,
    wrong: str,
    advice: str = "",
) -> Finding:
    """Whether each document of a batch (``rows``: their tokens) has the outputs that it has by itself."""

    def described(where: Location) -> str:
        return f"{wrong.format(row=where.row, query=where.query)}; {_cause(batch, where)}{advice}"

    suspects = hidden_tokens(context, batch)
    return compare(context, case, alone(batch, rows), batch, good=good, wrong=described, suspects=suspects)


def hidden_tokens(context: AuditContext, batch: Batch) -> Suspects:
    """Whatever must not move an output: its row's padding, what rules hide, other documents, then the other rows."""

    def suspects(row: int, query: int) -> list[Change]:
        hidden = (~expected_flow(context.probe.rules, batch)[row, query]).nonzero()[:, 0].tolist()
        hidden.sort(key=lambda slot: (bool(batch.segments[row, slot]), slot))
        others = [(r, slot) for r in range(batch.shape[0]) if r != row for slot in range(batch.shape[1])]
        return [*((row, slot) for slot in hidden), *others]

    return suspects


def _cause(batch: Batch, where: Location) -> str:
    """What the key of a location is."""
    if where.key is None:
        return "no hidden token moves it, so its position, or the number of slots or rows, does"
    segment = int(batch.segments[where.row if where.key_row is None else where.key_row, where.key])
    what = f"token {where.key}" if segment else f"the pad in slot {where.key}"
    if where.key_row is not None:
        what += f" of row {where.key_row}"
    elif where.query is not None and segment and segment != int(batch.segments[where.row, where.query]):
        what += f" of document {segment}"
    elif segment:
        what += " of its own document, which its rule hides,"
    return f"{what} moves it"


def deviation(run: TargetRun, want: Answer, got: Answer, watch_BT: Tensor | None = None) -> Deviation:
    """``sizes[row, slot]``: how far the watched outputs of two answers are apart."""
    want_BTV = run.plain(want) if isinstance(want, Batch) else want if isinstance(want, Tensor) else want(run)
    got_BTV = run.logits(got) if isinstance(got, Batch) else got if isinstance(got, Tensor) else got(run)
    sizes_BT = max_abs_diff(want_BTV, got_BTV)
    if watch_BT is None:
        return Deviation(run, sizes_BT, logit_scale(want_BTV))
    return Deviation(run, torch.where(watch_BT, sizes_BT, 0.0), logit_scale(want_BTV[watch_BT]))


def alone(batch: Batch, rows: Iterable[list[int]]) -> Callable[[TargetRun], Tensor]:
    """The outputs of each document run by itself, in its slots of the batch; ``rows`` are the documents' tokens."""

    def ask(run: TargetRun) -> Tensor:
        owners = [row for row, _ in documents(batch)]
        documents_alone = zip(owners, [tokens for tokens in rows if tokens], strict=True)
        outputs = [run.alone(tokens, batch.source, row) for row, tokens in documents_alone]
        want_BTV = outputs[0].new_zeros(*batch.shape, outputs[0].shape[-1])
        for (row, slots), output_TV in zip(documents(batch), outputs, strict=True):
            want_BTV[row, slots] = output_TV
        return want_BTV

    return ask


def documents(batch: Batch) -> list[tuple[int, Tensor]]:
    """``(row, slots)`` of each document, row by row."""
    return [
        (row, batch.slots(row, segment))
        for row in range(batch.shape[0])
        for segment in range(1, int(batch.segments[row].max()) + 1)
    ]


def at(wrong: str | Callable[[Location], str]) -> Place:
    """The place by row and query."""

    def place(run: TargetRun, index: Index) -> tuple[Location, str]:
        del run
        return _described(Location(*index), wrong)

    return place


def caused(context: AuditContext, batch: Batch, suspects: Suspects, wrong: str | Callable[[Location], str]) -> Place:
    """The place by row and query, and as its key the first suspect whose own change moves the output."""

    def place(run: TargetRun, index: Index) -> tuple[Location, str]:
        row, query = index
        found = unless_it_raises(lambda: find_cause(context, run, batch, row, query, suspects(row, query)), None)
        if found is None:
            return _described(Location(row, query), wrong)
        return _described(Location(row, query, found[1], None if found[0] == row else found[0]), wrong)

    return place


def _described(where: Location, wrong: str | Callable[[Location], str]) -> tuple[Location, str]:
    return where, wrong(where) if callable(wrong) else wrong.format(row=where.row, query=where.query)


def find_cause(
    context: AuditContext, run: TargetRun, batch: Batch, row: int, query: int, suspects: Iterable[Change]
) -> Change | None:
    """The first suspect whose own change moves the output at (row, query); None when none does alone."""
    before = run.logits(batch)
    limit = 1e-12 * logit_scale(before) if run.dtype == torch.float64 else 0.0
    for suspect in suspects:
        after = batch.with_token(*suspect, context.other(int(batch.tokens[suspect])))
        if float(max_abs_diff(before[row, query], run.logits(after)[row, query])) > limit:
            return suspect
    return None


def unless_it_raises(explain: Callable[[], _T], default: _T) -> _T:
    """An explanation; ``default`` where it raises, for a verdict that is reached does not depend on its explanation."""
    try:
        return explain()
    except Exception:  # noqa: BLE001 (the target is anybody's code)
        return default


# ----------------------------------------------------------------------------------------------- from sizes to verdicts


@dataclass(frozen=True)
class Verdict:
    """A status, the size that decided, how, and the deviation whose first wrong entry is to be named."""

    status: Status
    size: float
    decided: str
    reading: Deviation
    limit: float

    @property
    def first(self) -> Index:
        """The first entry beyond the limit, in row-major order."""
        beyond = (self.reading.sizes > self.limit).nonzero()
        return tuple(int(i) for i in beyond[0])


def decide(
    context: AuditContext, case: str, readings: list[Deviation], *, good: str, place: Place, bits: bool = False
) -> Finding:
    """The finding of one measurement: ``good`` is its message where it holds, ``place`` names what is wrong."""
    if context.draws and not bits:
        return not_applicable(case, DRAWS)
    verdict = judge(context, readings, bits=bits)
    if verdict.status == "pass":
        return passed(case, good, verdict.size, verdict.decided)
    unplaced = Location(0), "outputs differ, but looking for the place raised an error"
    where, message = unless_it_raises(lambda: place(verdict.reading.run, verdict.first), unplaced)
    if verdict.size == math.inf:
        message += " (it becomes NaN or infinite)"
    return Finding("", verdict.status, message, case, where, verdict.size, verdict.decided)


def judge(context: AuditContext, readings: list[Deviation], *, bits: bool = False) -> Verdict:
    """Decide over the same measurement in one or two precisions.

    ``bits``: the two runs had the same shapes and differed in hidden content only, so nothing but a kernel
    that chooses its order of summation by content may move anything at all.
    """
    native, last = readings[0], readings[-1]
    if math.isinf(last.largest) and math.isfinite(native.largest):
        last = native  # only the copy has numbers that are not finite: code that float64 does not suit
    if last.run.dtype == torch.float64:
        limit = max((1e-12 if bits else 1e-10) * last.scale, 20 * last.run.noise)
        if last.largest > limit:
            return Verdict("leak", last.largest, _seen(readings) + f", beyond rounding ({limit:.0e})", last, limit)
    if native is last:
        return _by_one(context, native, bits)
    tolerance = native.run.rounding * native.scale
    if native.largest > _GROSS * tolerance:
        how = _seen(readings) + ": too much for rounding, so the two precisions run different code"
        return Verdict("leak", native.largest, how, native, tolerance)
    if native.largest > tolerance:
        how = _seen(readings) + f": rounding, but more than the {tolerance:.0e} that {native.run.name} should need"
        return Verdict("fragile", native.largest, how, native, tolerance)
    return _no_influence(readings)


def _by_one(context: AuditContext, native: Deviation, bits: bool) -> Verdict:
    if native.run.dtype == torch.float64:
        return _no_influence([native])
    tolerance, seen = native.run.rounding * native.scale, _seen([native])
    why = f" ({context.exact_reason})" if context.exact_reason else ""
    if native.largest > _CLEAR * tolerance or (bits and native.largest > tolerance):
        return Verdict("leak", native.largest, f"{seen}, beyond rounding ({tolerance:.0e}){why}", native, tolerance)
    if native.largest > tolerance:
        how = f"{seen}, a little beyond rounding ({tolerance:.0e}): only float64 could tell{why}"
        return Verdict("fragile", native.largest, how, native, tolerance)
    if bits and native.largest:
        return Verdict(
            "fragile", native.largest, f"{seen}: only float64 could tell this from rounding{why}", native, 0.0
        )
    return _no_influence([native])


def _no_influence(readings: list[Deviation]) -> Verdict:
    native = readings[0]
    how = f"{_seen(readings)}: rounding" if native.largest else f"equal bit for bit in {native.run.name}"
    return Verdict("pass", native.largest, how, native, native.largest)


def _seen(readings: list[Deviation]) -> str:
    return ", ".join(f"{reading.run.name} moves by {reading.largest:.1e}" for reading in readings)


# ---------------------------------------------------------------------------------------- what is not supported

_NO_GRADIENT = re.compile("grad|backward|derivative|inplace", re.IGNORECASE)
_P = ParamSpec("_P")
_Case = Callable[Concatenate[AuditContext, str, _P], Finding]


def _skipping(case_of: _Case[_P], reason: Callable[[Exception], str]) -> _Case[_P]:
    @functools.wraps(case_of)
    def tried(context: AuditContext, case: str, /, *args: _P.args, **kwargs: _P.kwargs) -> Finding:
        try:
            return case_of(context, case, *args, **kwargs)
        except Exception as error:
            why = reason(error)
            if not why:
                raise
            return not_applicable(case, f"{why}: {one_line(error)}")

    return cast(_Case[_P], tried)


def skip_if_unsupported(case_of: _Case[_P]) -> _Case[_P]:
    """A case of a check is *not applicable* where the target refuses it: a refusal is no fault."""
    refusals = (UnsupportedError, NotImplementedError)
    return _skipping(case_of, lambda error: "the target refuses" if isinstance(error, refusals) else "")


def skip_if_no_gradient(case_of: _Case[_P]) -> _Case[_P]:
    """A case of a check is *not applicable* where no gradient can be taken, as of a target that works in place."""

    def reason(error: Exception) -> str:
        frames = traceback.extract_tb(error.__traceback__)
        backwards = any("autograd" in Path(frame.filename).parts for frame in frames)
        takes_none = isinstance(error, ShapeError) or _NO_GRADIENT.search(one_line(error)) is not None
        return f"no gradient can be taken: {type(error).__name__}" if backwards or takes_none else ""

    return _skipping(case_of, reason)


def is_refusal(error: Exception) -> bool:
    """Whether it was raised by a ``raise`` or an ``assert`` of the target, unlike tensors whose shapes do not fit."""
    if isinstance(error, NotImplementedError | UnsupportedError):
        return True
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or any(Path(last.tb_frame.f_code.co_filename).is_relative_to(each) for each in (_TORCH, _AUDITS)):
        return False
    return dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]] == "RAISE_VARARGS"
