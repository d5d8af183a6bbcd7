"""The rate of a step, as a multiple of its peak. What is returned is what is used and logged."""

from __future__ import annotations

import math

from pellucid.training.config import Minutes, Schedule, Steps

_LOWEST_WARMUP = 0.01


def progress(budget: Steps | Minutes, step: int, minutes: float) -> float:
    """How much of the budget is used before ``step`` (the first is 0): 0 at the start, 1 when it is spent."""
    by_steps = step / budget.steps if budget.steps else 0.0
    by_time = minutes / budget.minutes if isinstance(budget, Minutes) else 0.0
    return min(max(by_steps, by_time), 1.0)


def multiplier(schedule: Schedule, budget: Steps | Minutes, step: int, minutes: float) -> float:
    """The multiple of the peak rate that ``step`` uses.

    A warm-up of 4 steps uses ¼, ½, ¾ and 1; then the shape starts from 1 and would reach ``floor`` at the
    step after the last, so that no step is wasted on a rate of 0. A warm-up by share of a run measured in
    minutes goes with the clock, and starts above 0.
    """
    done = progress(budget, step, minutes)
    warm, start = _warmup(schedule, budget, step, done)
    if warm is not None:
        return warm
    if schedule.shape == "inverse_sqrt":
        return max(schedule.floor, _inverse_sqrt(schedule, budget, step, done))
    past = 1.0 if start >= 1 else min(max((done - start) / (1 - start), 0.0), 1.0)
    return schedule.floor + (1 - schedule.floor) * _fall(schedule, past)


def _warmup(schedule: Schedule, budget: Steps | Minutes, step: int, done: float) -> tuple[float | None, float]:
    """The multiple while warming up (None afterwards), and the progress at which the warm-up ends."""
    steps = schedule.warmup_steps
    if schedule.warmup_share and isinstance(budget, Steps):
        steps = round(schedule.warmup_share * budget.steps)
    elif schedule.warmup_share:
        if done >= schedule.warmup_share:
            return None, schedule.warmup_share
        return max(done / schedule.warmup_share, _LOWEST_WARMUP), schedule.warmup_share
    if step < steps:
        return (step + 1) / steps, 0.0
    return None, steps / budget.steps if budget.steps else 0.0


def _inverse_sqrt(schedule: Schedule, budget: Steps | Minutes, step: int, done: float) -> float:
    """``sqrt(warm-up / step)``, 1 at the warm-up's last step (Vaswani et al. 2017 §5.3, as a multiple of the peak).

    Steps count from 1. Without a warm-up it falls from the first step on; a warm-up by the clock counts in time.
    """
    if schedule.warmup_share and isinstance(budget, Minutes):
        return math.sqrt(schedule.warmup_share / done)
    steps = schedule.warmup_steps
    if schedule.warmup_share and isinstance(budget, Steps):
        steps = round(schedule.warmup_share * budget.steps)
    return math.sqrt(max(steps, 1) / (step + 1))


def _fall(schedule: Schedule, past: float) -> float:
    """From 1 to 0 while ``past`` goes from 0 to 1."""
    if schedule.shape == "cosine":
        return (1 + math.cos(math.pi * past)) / 2
    if schedule.shape == "linear":
        return 1 - past
    share = schedule.decay_share
    return 1.0 if past < 1 - share or not share else (1 - past) / share
