"""The learning rate of a step, as a multiple of its peak."""

from __future__ import annotations

import math

from pellucid.training.config import LRSchedulerConfig, TrainConfig

_LOWEST_WARMUP = 0.01


def progress(config: TrainConfig, step: int, minutes: float) -> float:
    """The fraction of the run that is over before ``step`` (the first is 0): the further of steps and minutes."""
    by_steps = step / config.max_steps if config.max_steps else 0.0
    by_time = minutes / config.max_minutes if config.max_minutes else 0.0
    return min(max(by_steps, by_time), 1.0)


def lr_multiplier(config: TrainConfig, step: int, minutes: float) -> float:
    """The multiple of the peak learning rate that ``step`` uses, ``minutes`` into the run.

    A warm-up of 4 steps uses ¼, ½, ¾ and 1; then the decay starts from 1 and would reach ``min_lr_ratio`` at the
    step after the last, so that no step is wasted on a rate of 0. A warm-up by ratio of a run with ``max_minutes``
    follows the clock, and starts above 0.
    """
    scheduler, done = config.lr_scheduler, progress(config, step, minutes)
    by_clock = bool(scheduler.warmup_ratio) and config.max_minutes is not None
    warmup_steps = scheduler.warmup_steps
    if scheduler.warmup_ratio and not by_clock:
        warmup_steps = round(scheduler.warmup_ratio * (config.max_steps or 0))
    warmup_end = warmup_steps / config.max_steps if config.max_steps and warmup_steps else 0.0
    if by_clock:
        warmup_end = scheduler.warmup_ratio
        if done < warmup_end:
            return max(done / warmup_end, _LOWEST_WARMUP)
    elif step < warmup_steps:
        return (step + 1) / warmup_steps
    if scheduler.type == "inverse_sqrt":
        peak = warmup_end / done if by_clock else max(warmup_steps, 1) / (step + 1)
        return max(scheduler.min_lr_ratio, math.sqrt(peak))
    past = 1.0 if warmup_end >= 1 else min(max((done - warmup_end) / (1 - warmup_end), 0.0), 1.0)
    return scheduler.min_lr_ratio + (1 - scheduler.min_lr_ratio) * _decay(scheduler, past)


def _decay(scheduler: LRSchedulerConfig, past: float) -> float:
    """From 1 to 0 while ``past`` goes from 0 to 1."""
    if scheduler.type == "cosine":
        return (1 + math.cos(math.pi * past)) / 2
    if scheduler.type == "linear":
        return 1 - past
    ratio = scheduler.decay_ratio
    return 1.0 if past < 1 - ratio or not ratio else (1 - past) / ratio
