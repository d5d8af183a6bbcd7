"""Is dropout off in eval mode, whatever its probability, and on in train mode?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from pellucid.audits.checks.check import Check
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.decision import judge, skip_if_unsupported
from pellucid.audits.engine.deviation import Deviation, TargetRun, logit_scale, max_abs_diff
from pellucid.audits.engine.module_copies import deep_copy, module_of, probabilities, reseeded, set_dropout
from pellucid.audits.engine.preserve_state import preserve_state, random_states
from pellucid.batch import Batch
from pellucid.errors import UnsupportedError
from pellucid.records import Finding, Location

NAME = "dropout"
_SEEDS = (1, 2, 3)
_MORE_SEEDS = tuple(range(1, 33))  # where numbers are drawn, and perhaps seldom used


def run(context: AuditContext) -> Iterator[Finding]:
    """As it is, with every probability raised to a half, with every probability 0; then train mode."""
    batch = Batch.from_rows([context.tokens(5) for _ in range(4)])
    yield _random_in_eval(context.native, "eval mode", batch, "in eval mode")
    for case, ask in (("raised to 0.5", _raised), ("set to 0", _set_to_zero), ("train mode", _in_train)):
        yield skip_if_unsupported(NAME, case, partial(ask, context, case, batch))


def _under_seeds(run: TargetRun, batch: Batch) -> list[Tensor]:
    """The answers under other random numbers, and under the first ones once more."""
    answers: list[Tensor] = []
    with preserve_state(run.probe.module):
        before = random_states()
        run.logits(batch)
        seeds = _SEEDS if random_states() == before else _MORE_SEEDS
        for seed in (*seeds, seeds[0]):
            reseeded(seed)
            answers.append(run.logits(batch))
            if len(answers) > 1 and _beyond(run, answers[0], answers[-1]):
                reseeded(seeds[0])
                return [*answers, run.logits(batch)]
    return answers


def _random_in_eval(run: TargetRun, case: str, batch: Batch, how: str) -> Finding:
    """Answers that vary with the random numbers are a leak; that vary without them, a matter of determinism."""
    first, *others, again = _under_seeds(run, batch)
    if _beyond(run, first, again):
        message = "answers differ under the same random numbers too, so it is not dropout (see determinism)"
        return Finding(NAME, "not_applicable", message, case)
    for other in others:
        if _beyond(run, first, other):
            sizes_BT = max_abs_diff(first, other)
            row, query = sizes_BT.nonzero()[0].tolist()
            message = (
                f"{how} the answer at {query} varies with the random numbers: something is dropped, or noise added"
            )
            decided = "other seeds, other answers; the same seed, the same answer"
            return Finding(NAME, "leak", message, case, Location(row, query), float(sizes_BT.max()), decided)
    return Finding(NAME, "pass", f"{how} no random number moves an answer", case, size=0.0)


def _beyond(run: TargetRun, first: Tensor, second: Tensor) -> bool:
    return float(max_abs_diff(first, second).max()) > run.rounding * logit_scale(first)


def _raised(context: AuditContext, case: str, batch: Batch) -> Finding:
    """A dropout that eval mode does not stop shows best when it drops half."""
    copied = deep_copy(context.native)
    count = set_dropout(module_of(copied), lambda _: 0.5)
    if not count:
        return Finding(NAME, "not_applicable", "no dropout probability was found in the target", case)
    try:
        copied.logits(batch)
    except Exception as error:
        raise UnsupportedError(f"with {count} numbers set to 0.5 it raises {type(error).__name__}") from error
    return _random_in_eval(copied, case, batch, f"with {count} probabilities at 0.5, in eval mode,")


def _set_to_zero(context: AuditContext, case: str, batch: Batch) -> Finding:
    """In eval mode the probabilities do not matter."""
    copies = {id(run): deep_copy(run) for run in context.runs}
    count = sum(set_dropout(module_of(copied), lambda _: 0.0) for copied in copies.values()) // len(copies)
    if not count:
        return Finding(NAME, "not_applicable", "no dropout probability was found in the target", case)

    def measure(run: TargetRun) -> Deviation:
        before = run.logits(batch)
        return Deviation(run, max_abs_diff(before, copies[id(run)].logits(batch)), logit_scale(before))

    readings = context.read(measure)
    verdict = judge(context, readings, bits=False)
    if verdict.status == "pass":
        good = f"in eval mode it answers as with all {count} probabilities at 0"
        return Finding(NAME, "pass", good, case, size=verdict.size, decided=verdict.decided)
    row, query = verdict.first
    message = f"with every probability at 0 the answer at {query} is another one in eval mode: dropout is not off there"
    return Finding(NAME, "fragile", message, case, Location(row, query), verdict.size, verdict.decided)


def _in_train(context: AuditContext, case: str, batch: Batch) -> Finding:
    """Where something is to be dropped, train mode has to drop it."""
    copied = deep_copy(context.native)
    module = module_of(copied)
    active = [place for place in probabilities(module, nested=False) if place.drops > 0]
    if not active:
        return Finding(NAME, "not_applicable", "every dropout probability is 0", case)
    for place in active:
        place.set(max(place.drops, 0.5))
    good = "in train mode answers vary with the random numbers, as dropout makes them"
    if _varies(copied, batch):
        return Finding(NAME, "pass", good, case)
    zeros = [name for name, weight in module.named_parameters() if weight.dim() > 1 and not bool(weight.any())]
    with torch.no_grad():
        for name in zeros:
            module.get_parameter(name).normal_(0, 0.1)
    if zeros and _varies(copied, batch):
        message = f"{good}, once {zeros[0]} is no longer all 0 and lets through what is dropped"
        return Finding(NAME, "pass", message, case)
    message = f"{active[0].path} is {active[0].drops:g}, but in train mode nothing is ever dropped"
    return Finding(NAME, "fragile", message, case)


def _varies(copied: TargetRun, batch: Batch) -> bool:
    """Whether a copy in train mode answers otherwise under other random numbers."""
    module, answers = module_of(copied), []
    with preserve_state(module, weights=False):
        module.train()
        for seed in _SEEDS:
            reseeded(seed)
            answers.append(copied.differentiable(batch).detach().cpu().clone())
    return not all(torch.equal(answers[0], other) for other in answers[1:])


CHECK = Check(NAME, "Is dropout off in eval mode, and on in train mode?", run, length=5, steady=False)
