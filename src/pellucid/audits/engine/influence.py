"""Who may influence whom by the declared rules, and who does in one long sequence: measured once for several checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid.audits.engine.compare import Index, decide, judge, unless_it_raises
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.expected_flow import expected_flow
from pellucid.audits.engine.perturbation import Perturbations, informative_cuts, mixed_rows, sample
from pellucid.audits.engine.target_run import Deviation, TargetRun, directions
from pellucid.batch import Batch
from pellucid.records import LONGEST_VIEW, MOST_WEIGHTS, Finding, Flow, Location, TokenView


def later(may_TT: Tensor) -> Tensor:
    """``Bool[T, T]``: pairs whose key comes after the query."""
    return torch.ones_like(may_TT).triu(1)


def earlier(may_TT: Tensor) -> Tensor:
    """``Bool[T, T]``: pairs whose key comes before the query."""
    return torch.ones_like(may_TT).tril(-1)


def others(may_TT: Tensor) -> Tensor:
    """``Bool[T, T]``: pairs of two tokens."""
    return ~torch.eye(len(may_TT), dtype=torch.bool)


Explain = Callable[[AuditContext, Sequence[int], int, int], str]
"""More about a pair of a row that leaks: ``(context, row, query, key)``."""


@dataclass(frozen=True, eq=False)
class InfluenceMatrix:
    """What was measured. ``may_TT`` and the readings' sizes are ``[query, key]``."""

    row: list[int]
    may: Tensor
    direct: Tensor
    changes: Perturbations
    readings: list[Deviation]

    @property
    def moved(self) -> Tensor:
        """``Bool[T, T]``: pairs in which the key moved the query in any precision."""
        moved_TT = self.readings[0].sizes > 0
        for reading in self.readings[1:]:
            moved_TT = moved_TT | (reading.sizes > 1e-14 * reading.scale)
        return moved_TT

    @property
    def watched(self) -> Tensor:
        """``Bool[T, T]``: pairs whose key was changed."""
        return torch.zeros_like(self.may).index_fill_(1, torch.tensor(self.changes.keys), True)

    @property
    def unseen(self) -> Tensor:
        """``Bool[T, T]``: pairs that one layer alone lets through, but whose key moved nothing."""
        return self.watched & self.direct & ~self.moved

    def record(self, title: str) -> Flow:
        """The declared and the measured flow side by side, to be drawn; of a long sequence its beginning."""
        shown = min(len(self.row), LONGEST_VIEW)
        return Flow(title, self.may[:shown, :shown].tolist(), self._sizes(shown), note=self.changes.coverage)

    def view(self, context: AuditContext) -> TokenView:
        """The same token by token, with what each layer attends to where the target tells."""
        shown, probe = min(len(self.row), LONGEST_VIEW), context.probe
        tokens, may = tuple(map(str, self.row[:shown])), self.may[:shown, :shown].tolist()
        attention: list[list[list[list[float]]]] = []
        if context.can("attention"):
            with torch.no_grad():
                weights = probe.attention(context.native.placed(Batch.from_rows([self.row[:shown]])))
            fits = sum(w.shape[1] for w in weights) * shown**2 <= MOST_WEIGHTS
            attention = [w[0].float().tolist() for w in weights] if fits else []
        names = tuple(f"{number}: {rule.describe()}" for number, rule in enumerate(probe.rules))
        layers = names if len(names) == len(attention) else ()
        note = f"The tokens are random ids; {self.changes.coverage}."
        return TokenView(f"{shown} tokens of the audit", tokens, may, attention, self._sizes(shown), layers, note=note)

    def _sizes(self, shown: int) -> list[list[float | None]]:
        """``[query][key]``, relative to the outputs; None where the key was not changed."""
        sizes_TT = torch.where(self.moved, self.readings[-1].sizes / self.readings[-1].scale, 0.0)[:shown, :shown]
        watched = self.watched[0, :shown].tolist()
        return [[size if seen else None for size, seen in zip(row, watched, strict=True)] for row in sizes_TT.tolist()]


def flow_of(context: AuditContext) -> InfluenceMatrix:
    """The plain flow of the target."""

    def measure() -> InfluenceMatrix:
        suspects = _suspects(context, context.row)
        return measured(context, Perturbations(context, context.row, TargetRun.logits, first=suspects))

    return context.once("flow", measure)


def measured(context: AuditContext, changes: Perturbations) -> InfluenceMatrix:
    """The target's own dtype; float64 where something moved that must not, or did not that should.

    Where every token is changed, float64 is tried with other tokens too: over few numbers the bits of the target's
    own dtype may hide what is small.
    """
    batch = Batch.from_rows([changes.base])
    may_TT = expected_flow(context.probe.rules, batch)[0]
    direct_TT = torch.zeros_like(may_TT)
    for rule in context.probe.rules:
        direct_TT |= expected_flow([rule], batch)[0]
    native = changes.native()
    watched_TT = torch.zeros_like(may_TT).index_fill_(1, torch.tensor(changes.keys), True)
    still = bool((watched_TT & direct_TT & (native.sizes == 0)).any())
    exact = changes.exact(like_native=False) if changes.whole or still else None
    if context.exact is None:
        native.sizes = torch.maximum(native.sizes, changes.native(special=True).sizes)
    if bool(torch.where(may_TT, 0.0, native.sizes).any()):
        alike = changes.exact(like_native=True)
        if exact is not None and alike is not None:
            alike.sizes = torch.maximum(alike.sizes, exact.sizes)
        exact = alike
    readings = [native] if exact is None else [native, exact]
    return InfluenceMatrix(changes.base, may_TT, direct_TT, changes, readings)


def assert_no_influence(
    context: AuditContext, case: str, flow: InfluenceMatrix, among_TT: Tensor, explain: Explain | None = None
) -> Finding:
    """Whether no output moved by a token that it must not see, looking at the pairs ``among_TT`` only."""
    hidden = [Deviation(r.run, torch.where(among_TT & ~flow.may, r.sizes, 0.0), r.scale) for r in flow.readings]

    def place(run: TargetRun, index: Index) -> tuple[Location, str]:
        del run
        query, key = index
        side = f"{key - query} ahead" if key > query else f"{query - key} back, beyond the declared rules"
        message = f"the output at {query} moves when token {key} is changed, {side}"
        more = "" if explain is None else unless_it_raises(lambda: explain(context, flow.row, query, key), "")
        return Location(0, query, key), message + more

    good = f"no output moved by a token that it must not see ({flow.changes.coverage})"
    result = decide(context, case, hidden, good=good, place=place, bits=True)
    if result.status != "leak":
        return result
    verdict = judge(context, hidden, bits=True)
    pairs = (verdict.reading.sizes > verdict.limit).nonzero().tolist()[:4]
    run = verdict.reading.run
    by_itself = unless_it_raises(lambda: any(flow.changes.moves_alone(run, *pair) for pair in pairs), True)
    return result if by_itself else mixed_rows(result)


def _suspects(context: AuditContext, row: list[int]) -> list[int]:
    """Of a sequence too long to change every token: the keys into which a forbidden gradient flows."""
    if len(row) * len(row) <= context.most_tokens or not context.can("embeddings"):
        return []
    may_TT = expected_flow(context.probe.rules, Batch.from_rows([row]))[0]
    try:
        queries_RT, sizes_RT = gradients(context, row)
    except Exception:  # noqa: BLE001 (no gradient can be taken, which the gradient's own case reports)
        return []
    limit = 1e-3 * context.native.rounding * float(sizes_RT.max())
    found_RT = torch.where(reached(may_TT, queries_RT), 0.0, sizes_RT) > limit
    return found_RT.any(0).nonzero()[:, 0].tolist()[: context.most_tokens // len(row) // 2]


def reached(may_TT: Tensor, queries_RT: Tensor) -> Tensor:
    """``Bool[R, T]``: keys that at least one of a row's queries may see."""
    return (queries_RT.float() @ may_TT.float()) > 0


def gradients(context: AuditContext, row: list[int]) -> tuple[Tensor, Tensor]:
    """``Bool[R, T]`` queries, and ``[R, T]``: how large the gradient of their outputs is at each key.

    Half of the rows ask for one query each, half for all queries up to a cut: into what comes after a cut no
    gradient may flow from any of them, which looks at every pair across it at once. Of a long sequence one cut.
    """

    def measure() -> tuple[Tensor, Tensor]:
        run, count = context.native, min(4, context.most_tokens // len(row) // 4)
        places = torch.arange(len(row))
        queries_RT = places <= torch.tensor(informative_cuts(len(row), max(count, 1)))[:, None]
        if count > 1:
            queries_RT = torch.cat([torch.tensor(sample(len(row), count))[:, None] == places, queries_RT])
        batch = Batch.from_rows([row] * len(queries_RT))
        embeddings = run.embed(batch).requires_grad_()
        logits = run.differentiable(batch.replace(inputs_embeds=embeddings))
        weighted_RT = (logits * directions(logits)).sum(-1)
        weighted_RT[queries_RT.to(logits.device)].sum().backward(inputs=[embeddings])
        assert embeddings.grad is not None
        return queries_RT, embeddings.grad.abs().amax(-1).double().cpu()

    return context.once(f"gradients {row}", measure)
