"""What happens one token past the longest document that a target declares positions for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from pellucid.audits.engine.compare import fragile, leak, not_applicable, passed
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.target_run import TargetRun, max_abs_diff
from pellucid.batch import Batch
from pellucid.errors import ShapeError, UnsupportedError
from pellucid.records import Finding, Location

_MOST_TOKENS = 4096
_MOST_NUMBERS = 2**25  # logits of one row


def past_the_end(context: AuditContext, limit: int) -> Iterator[Finding]:
    """One token more than ``limit`` must raise: never a position that another token has, never one token less."""
    run = _on_the_host(context.native)
    small = limit + 2 <= _MOST_TOKENS and limit * context.probe.vocab_size <= _MOST_NUMBERS
    if not small and not context.can("positions"):
        message = f"{limit} positions are too many to try out without explicit ones"
        yield not_applicable("past the end", message)
        return
    if context.can("positions"):
        batch = Batch.from_rows([context.tokens(1)])
        far = Batch(batch.tokens, torch.full_like(batch.positions, limit), batch.segments)
        yield _outcome(context, run, "a position past the end", limit, lambda: run.logits(far))
    if not small:
        return
    row = Batch.from_rows([context.tokens(limit + 1)])
    yield _outcome(context, run, "past the end", limit, lambda: run.logits(row))
    if context.can("cache"):
        yield _outcome(context, run, "past the end through a cache", limit, lambda: _cached(run, row, limit))


def _cached(run: TargetRun, row: Batch, limit: int) -> Tensor:
    cache = run.probe.new_cache(1, limit + 2)
    run.extend(row.part(0, limit), cache)
    return run.extend(row.part(limit, limit + 1), cache)


def _on_the_host(run: TargetRun) -> TargetRun:
    """On a GPU an index past a table ends the process, so a copy on the host is used."""
    module = run.probe.module
    if run.device.type == "cpu" or module is None:
        return run
    return TargetRun(run.probe.with_module(copy.deepcopy(module).cpu()), run.source)


def _outcome(context: AuditContext, run: TargetRun, case: str, limit: int, ask: Callable[[], Tensor]) -> Finding:
    try:
        ask()
    except UnsupportedError as error:
        return not_applicable(case, f"the target refuses: {error}")
    except ShapeError as error:
        if "an audit needs" in str(error):
            message = f"a row of {limit + 1} tokens is cut without an error: {error}"
            return leak(case, message, Location(0, limit))
        return _refused(case, limit, error)
    except Exception as error:  # noqa: BLE001 (any refusal is right)
        return _refused(case, limit, error)
    shared = context.can("positions")
    how = _shared_position(run, limit, context.tokens(2)) if shared else _table(run.probe.module, limit)
    if how:
        message = f"token {limit} is accepted without an error, but there are {limit} positions: {how}"
        return leak(case, message, Location(0, limit))
    message = f"token {limit} is accepted without an error, although the target declares {limit} positions"
    return fragile(case, message, Location(0, limit))


def _refused(case: str, limit: int, error: Exception) -> Finding:
    message = f"token {limit}, one more than there are positions, raises {type(error).__name__}"
    return passed(case, message)


def _shared_position(run: TargetRun, limit: int, tokens: list[int]) -> str:
    """Which position the one past the end is taken for, seen by equal answers; empty when for none of those tried.

    One token alone shows what is added to it; a second, after one at position 0, what turns by the distance.
    """
    tried = [limit - 1, *dict.fromkeys(p for p in (limit - 2, limit // 2, 2, 1, 0) if 0 <= p < limit - 1)]
    for before in ([], [0]):

        def at(position: int, before: list[int] = before) -> Tensor:
            batch = Batch.from_rows([tokens[: len(before) + 1]])
            places = torch.tensor([[*before, position]])
            return run.logits(Batch(batch.tokens, places, batch.segments))[:, -1:]

        answers = {position: at(position) for position in tried}
        if all(float(max_abs_diff(answers[tried[0]], answers[p]).max()) for p in tried[1:3]):  # neighbours differ
            beyond = at(limit)
            same = [position for position in tried if not float(max_abs_diff(beyond, answers[position]).max())]
            how = "clamped" if same[:1] == [limit - 1] else "wrapped"
            return f"it stands where position {same[0]} does: positions are {how}" if same else ""
    return ""


def _table(module: nn.Module | None, limit: int) -> str:
    """A table of exactly so many positions, which the one past the end cannot be in; empty when there is none."""
    if module is None:
        return ""
    for name, part in module.named_modules():
        called = f"{name}.{type(part).__name__}".lower()
        if isinstance(part, nn.Embedding) and limit <= part.num_embeddings <= limit + 2 and "pos" in called:
            return f"{name} has {part.num_embeddings} rows, so positions are clamped or wrapped"
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if "pos" in name.lower() and limit in tensor.shape[:-1]:
            return f"{name} has {limit} rows, so positions are clamped or wrapped"
    return ""
