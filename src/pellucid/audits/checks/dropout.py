"""Is dropout off in eval mode, whatever its probability, and on in train mode?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from pellucid.audits.checks.check import Check
from pellucid.audits.method.bench import Bench
from pellucid.audits.method.care import left_as_found
from pellucid.audits.method.copies import copied, module_of, probabilities, reseeded, set_dropout
from pellucid.audits.method.judge import judge, unless_refused
from pellucid.audits.method.measure import Reading, Run, moved, scale_of
from pellucid.audits.method.world import random_states
from pellucid.errors import UnsupportedError
from pellucid.probe import Request
from pellucid.records import Finding, Where

NAME = "dropout"
_SEEDS = (1, 2, 3)
_MORE_SEEDS = tuple(range(1, 33))  # where numbers are drawn, and perhaps seldom used


def run(bench: Bench) -> Iterator[Finding]:
    """As it is, with every probability raised to a half, with every probability 0; then train mode."""
    request = Request.from_rows([bench.tokens(5) for _ in range(4)])
    yield _random_in_eval(bench.native, "eval mode", request, "in eval mode")
    for case, ask in (("raised to 0.5", _raised), ("set to 0", _silenced), ("train mode", _in_train)):
        yield unless_refused(NAME, case, partial(ask, bench, case, request))


def _under_seeds(run: Run, request: Request) -> list[Tensor]:
    """The answers under other random numbers, and under the first ones once more."""
    answers: list[Tensor] = []
    with left_as_found(run.probe.module):
        before = random_states()
        run.logits(request)
        seeds = _SEEDS if random_states() == before else _MORE_SEEDS
        for seed in (*seeds, seeds[0]):
            reseeded(seed)
            answers.append(run.logits(request))
            if len(answers) > 1 and _beyond(run, answers[0], answers[-1]):
                reseeded(seeds[0])
                return [*answers, run.logits(request)]
    return answers


def _random_in_eval(run: Run, case: str, request: Request, how: str) -> Finding:
    """Answers that vary with the random numbers are a leak; that vary without them, a matter of determinism."""
    first, *others, again = _under_seeds(run, request)
    if _beyond(run, first, again):
        message = "answers differ under the same random numbers too, so it is not dropout (see determinism)"
        return Finding(NAME, "not_applicable", message, case)
    for other in others:
        if _beyond(run, first, other):
            sizes_BT = moved(first, other)
            row, query = sizes_BT.nonzero()[0].tolist()
            message = (
                f"{how} the answer at {query} varies with the random numbers: something is dropped, or noise added"
            )
            decided = "other seeds, other answers; the same seed, the same answer"
            return Finding(NAME, "leak", message, case, Where(row, query), float(sizes_BT.max()), decided)
    return Finding(NAME, "pass", f"{how} no random number moves an answer", case, size=0.0)


def _beyond(run: Run, first: Tensor, second: Tensor) -> bool:
    return float(moved(first, second).max()) > run.rounding * scale_of(first)


def _raised(bench: Bench, case: str, request: Request) -> Finding:
    """A dropout that eval mode does not stop shows best when it drops half."""
    twin = copied(bench.native)
    count = set_dropout(module_of(twin), lambda _: 0.5)
    if not count:
        return Finding(NAME, "not_applicable", "no dropout probability was found in the target", case)
    try:
        twin.logits(request)
    except Exception as error:
        raise UnsupportedError(f"with {count} numbers set to 0.5 it raises {type(error).__name__}") from error
    return _random_in_eval(twin, case, request, f"with {count} probabilities at 0.5, in eval mode,")


def _silenced(bench: Bench, case: str, request: Request) -> Finding:
    """In eval mode the probabilities do not matter."""
    twins = {id(run): copied(run) for run in bench.runs}
    count = sum(set_dropout(module_of(twin), lambda _: 0.0) for twin in twins.values()) // len(twins)
    if not count:
        return Finding(NAME, "not_applicable", "no dropout probability was found in the target", case)

    def measure(run: Run) -> Reading:
        before = run.logits(request)
        return Reading(run, moved(before, twins[id(run)].logits(request)), scale_of(before))

    readings = bench.read(measure)
    verdict = judge(bench, readings, bits=False)
    if verdict.status == "pass":
        good = f"in eval mode it answers as with all {count} probabilities at 0"
        return Finding(NAME, "pass", good, case, size=verdict.size, decided=verdict.decided)
    row, query = verdict.first
    message = f"with every probability at 0 the answer at {query} is another one in eval mode: dropout is not off there"
    return Finding(NAME, "fragile", message, case, Where(row, query), verdict.size, verdict.decided)


def _in_train(bench: Bench, case: str, request: Request) -> Finding:
    """Where something is to be dropped, train mode has to drop it."""
    twin = copied(bench.native)
    module = module_of(twin)
    active = [place for place in probabilities(module, nested=False) if place.drops > 0]
    if not active:
        return Finding(NAME, "not_applicable", "every dropout probability is 0", case)
    for place in active:
        place.set(max(place.drops, 0.5))
    good = "in train mode answers vary with the random numbers, as dropout makes them"
    if _varies(twin, request):
        return Finding(NAME, "pass", good, case)
    zeros = [name for name, weight in module.named_parameters() if weight.dim() > 1 and not bool(weight.any())]
    with torch.no_grad():
        for name in zeros:
            module.get_parameter(name).normal_(0, 0.1)
    if zeros and _varies(twin, request):
        message = f"{good}, once {zeros[0]} is no longer all 0 and lets through what is dropped"
        return Finding(NAME, "pass", message, case)
    message = f"{active[0].path} is {active[0].drops:g}, but in train mode nothing is ever dropped"
    return Finding(NAME, "fragile", message, case)


def _varies(twin: Run, request: Request) -> bool:
    """Whether a copy in train mode answers otherwise under other random numbers."""
    module, answers = module_of(twin), []
    with left_as_found(module, weights=False):
        module.train()
        for seed in _SEEDS:
            reseeded(seed)
            answers.append(twin.differentiable(request).detach().cpu().clone())
    return not all(torch.equal(answers[0], other) for other in answers[1:])


CHECK = Check(NAME, "Is dropout off in eval mode, and on in train mode?", run, length=5, steady=False)
