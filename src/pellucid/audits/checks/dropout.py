"""Is dropout off in eval mode, whatever its probability, and on in train mode?"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pellucid.audits.checks.check import question
from pellucid.audits.engine.compare import deviation, fragile, judge, leak, not_applicable, passed, skip_if_unsupported
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.dropout_probabilities import probabilities, set_dropout
from pellucid.audits.engine.state import preserve_state, random_states, reseed
from pellucid.audits.engine.target_run import TargetRun, deep_copy, logit_scale, max_abs_diff, module_of
from pellucid.batch import Batch
from pellucid.errors import UnsupportedError
from pellucid.records import Finding, Location

_SEEDS = (1, 2, 3)
_MORE_SEEDS = tuple(range(1, 33))  # where numbers are drawn, and perhaps seldom used


@question("Is dropout off in eval mode, and on in train mode?", length=5, steady=False)
def check(context: AuditContext) -> Iterator[Finding]:
    """As it is, with every probability raised to a half, with every probability 0; then train mode."""
    batch = Batch.from_rows([context.tokens(5) for _ in range(4)])
    yield _random_in_eval(context.native, "eval mode", batch, "in eval mode")
    yield _raised(context, "raised to 0.5", batch)
    yield _set_to_zero(context, "set to 0", batch)
    yield _in_train(context, "train mode", batch)


def _under_seeds(run: TargetRun, batch: Batch) -> list[Tensor]:
    """The answers under other random numbers, and under the first ones once more."""
    answers: list[Tensor] = []
    with preserve_state(run.probe.module):
        before = random_states()
        run.logits(batch)
        seeds = _SEEDS if random_states() == before else _MORE_SEEDS
        for seed in (*seeds, seeds[0]):
            reseed(seed)
            answers.append(run.logits(batch))
            if len(answers) > 1 and _beyond(run, answers[0], answers[-1]):
                reseed(seeds[0])
                return [*answers, run.logits(batch)]
    return answers


def _random_in_eval(run: TargetRun, case: str, batch: Batch, how: str) -> Finding:
    """Answers that vary with the random numbers are a leak; that vary without them, a matter of determinism."""
    first, *others, again = _under_seeds(run, batch)
    if _beyond(run, first, again):
        message = "answers differ under the same random numbers too, so it is not dropout (see determinism)"
        return not_applicable(case, message)
    for other in others:
        if _beyond(run, first, other):
            sizes_BT = max_abs_diff(first, other)
            where = Location(*sizes_BT.nonzero()[0].tolist())
            message = f"{how} the answer at {where.query} varies with the random numbers: dropout, or noise is added"
            decided = "other seeds, other answers; the same seed, the same answer"
            return leak(case, message, where, float(sizes_BT.max()), decided)
    return passed(case, f"{how} no random number moves an answer", 0.0)


def _beyond(run: TargetRun, first: Tensor, second: Tensor) -> bool:
    return float(max_abs_diff(first, second).max()) > run.rounding * logit_scale(first)


@skip_if_unsupported
def _raised(context: AuditContext, case: str, batch: Batch) -> Finding:
    """A dropout that eval mode does not stop shows best when it drops half."""
    copied = deep_copy(context.native)
    count = set_dropout(module_of(copied), 0.5)
    if not count:
        return not_applicable(case, "no dropout probability was found in the target")
    try:
        copied.logits(batch)
    except Exception as error:
        raise UnsupportedError(f"with {count} numbers set to 0.5 it raises {type(error).__name__}") from error
    return _random_in_eval(copied, case, batch, f"with {count} probabilities at 0.5, in eval mode,")


@skip_if_unsupported
def _set_to_zero(context: AuditContext, case: str, batch: Batch) -> Finding:
    """In eval mode the probabilities do not matter."""
    copies = {id(run): deep_copy(run) for run in context.runs}
    count = sum(set_dropout(module_of(copied), 0.0) for copied in copies.values()) // len(copies)
    if not count:
        return not_applicable(case, "no dropout probability was found in the target")
    readings = context.read(lambda run: deviation(run, run.logits(batch), copies[id(run)].logits(batch)))
    verdict = judge(context, readings)
    if verdict.status == "pass":
        good = f"in eval mode it answers as with all {count} probabilities at 0"
        return passed(case, good, verdict.size, verdict.decided)
    where = Location(*verdict.first)
    message = f"with every probability at 0 the answer at {where.query} differs in eval mode: dropout is not off there"
    return fragile(case, message, where, verdict.size, verdict.decided)


@skip_if_unsupported
def _in_train(context: AuditContext, case: str, batch: Batch) -> Finding:
    """Where something is to be dropped, train mode has to drop it."""
    copied = deep_copy(context.native)
    module = module_of(copied)
    active = [place for place in probabilities(module, nested=False) if place.drops > 0]
    if not active:
        return not_applicable(case, "every dropout probability is 0")
    for place in active:
        place.set(max(place.drops, 0.5))
    good = "in train mode answers vary with the random numbers, as dropout makes them"
    if _varies(copied, batch):
        return passed(case, good)
    zeros = [name for name, weight in module.named_parameters() if weight.dim() > 1 and not bool(weight.any())]
    with torch.no_grad():
        for name in zeros:
            module.get_parameter(name).normal_(0, 0.1)
    if zeros and _varies(copied, batch):
        return passed(case, f"{good}, once {zeros[0]} is no longer all 0 and lets through what is dropped")
    return fragile(case, f"{active[0].path} is {active[0].drops:g}, but in train mode nothing is ever dropped")


def _varies(copied: TargetRun, batch: Batch) -> bool:
    """Whether a copy in train mode differs under other random numbers."""
    module, answers = module_of(copied), []
    with preserve_state(module, weights=False):
        module.train()
        for seed in _SEEDS:
            reseed(seed)
            answers.append(copied.differentiable(batch).detach().cpu().clone())
    return not all(torch.equal(answers[0], other) for other in answers[1:])
