"""The rate of every step, written out."""

import math

import pytest

from pellucid.training.config import LRSchedulerConfig, TrainConfig
from pellucid.training.step import lr_multiplier, progress


def of(scheduler: LRSchedulerConfig | None = None, **length: float) -> TrainConfig:
    model = {"vocab_size": 300, "hidden_size": 8, "num_hidden_layers": 1, "attention": {"num_attention_heads": 1}}
    model |= {"ffn": {"kind": "dense", "intermediate_size": 8}}
    return TrainConfig(model=model, lr_scheduler=scheduler or LRSchedulerConfig(), **length)


def rates(scheduler: LRSchedulerConfig, steps: int) -> list[float]:
    return [round(lr_multiplier(of(scheduler, max_steps=steps), step, 0.0), 6) for step in range(steps)]


def test_a_warm_up_of_four_uses_quarters_and_reaches_the_peak() -> None:
    """B116: used rates .25, .5, .75, 1.0, then the decay to 0 over 4, none of them wasted on 0."""
    schedule = LRSchedulerConfig(type="linear", warmup_steps=4)
    assert rates(schedule, 8) == [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_cosine_and_stable_written_out() -> None:
    assert rates(LRSchedulerConfig(type="cosine", min_lr_ratio=0.1), 4) == [1.0, 0.868198, 0.55, 0.231802]
    assert rates(LRSchedulerConfig(type="warmup_stable_decay", decay_ratio=0.5), 8) == [1, 1, 1, 1, 1, 0.75, 0.5, 0.25]


def test_no_warm_up_no_decay_and_all_warm_up_are_finite() -> None:
    """B116: nothing is divided by 0."""
    assert rates(LRSchedulerConfig(type="linear"), 2) == [1.0, 0.5]
    assert rates(LRSchedulerConfig(type="warmup_stable_decay", decay_ratio=0.0), 3) == [1.0, 1.0, 1.0]
    assert rates(LRSchedulerConfig(warmup_steps=3), 3) == [round(1 / 3, 6), round(2 / 3, 6), 1.0]
    assert rates(LRSchedulerConfig(warmup_steps=5), 3) == [0.2, 0.4, 0.6]
    assert rates(LRSchedulerConfig(), 1) == [1.0]
    past_the_end = lr_multiplier(of(LRSchedulerConfig(min_lr_ratio=0.25, warmup_steps=9), max_steps=3), 20, 0.0)
    assert past_the_end == 0.25


def test_a_share_of_the_steps_is_a_number_of_steps() -> None:
    assert rates(LRSchedulerConfig(type="linear", warmup_ratio=0.5), 8) == rates(
        LRSchedulerConfig(type="linear", warmup_steps=4), 8
    )


def test_minutes_warm_up_and_end_on_the_clock() -> None:
    config = of(LRSchedulerConfig(type="linear", warmup_ratio=0.1), max_minutes=10)
    at = [
        round(lr_multiplier(config, step, minutes), 6) for step, minutes in enumerate([0.0, 0.5, 1.0, 5.5, 10.0, 11.0])
    ]
    assert at == [0.01, 0.5, 1.0, 0.5, 0.0, 0.0]


def test_minutes_warm_up_by_steps_too() -> None:
    config = of(LRSchedulerConfig(type="linear", warmup_steps=2), max_minutes=10)
    assert [lr_multiplier(config, step, step * 0.1) for step in range(3)] == [0.5, 1.0, 0.98]


@pytest.mark.parametrize(
    ("step", "minutes", "expected"),
    [(0, 0.0, 0.0), (50, 1.0, 0.5), (10, 9.0, 0.9), (200, 0.0, 1.0), (0, 99.0, 1.0)],
)
def test_progress_is_the_further_of_clock_and_steps(step: int, minutes: float, expected: float) -> None:
    assert progress(of(max_minutes=10, max_steps=100), step, minutes) == expected


def test_every_rate_is_positive_and_none_above_the_peak() -> None:
    for shape in ("cosine", "linear", "warmup_stable_decay"):
        for warmup in (0, 1, 7, 20):
            found = [
                lr_multiplier(of(LRSchedulerConfig(type=shape, warmup_steps=warmup), max_steps=20), s, 0.0)
                for s in range(20)
            ]
            assert all(0 < rate <= 1 and math.isfinite(rate) for rate in found)
            assert max(found) == 1


def test_inverse_square_root_peaks_at_the_end_of_the_warm_up() -> None:
    """Vaswani et al. 2017 §5.3: min(step^-½, step · warm-up^-1.5), as a multiple of its highest value."""
    found = rates(LRSchedulerConfig(type="inverse_sqrt", warmup_steps=4), 100)
    formula = [min(n**-0.5, n * 4**-1.5) / 4**-0.5 for n in range(1, 101)]
    assert found == [round(value, 6) for value in formula]
    assert found[3] == max(found) == 1.0
    assert found[15] == 0.5
    assert rates(LRSchedulerConfig(type="inverse_sqrt", warmup_ratio=0.04), 100) == found
    assert lr_multiplier(of(LRSchedulerConfig(type="inverse_sqrt", warmup_steps=4), max_minutes=9), 15, 1.0) == 0.5


def test_inverse_square_root_by_the_clock_without_a_warm_up_and_with_a_floor() -> None:
    by_clock = LRSchedulerConfig(type="inverse_sqrt", warmup_ratio=0.1)
    at = [lr_multiplier(of(by_clock, max_minutes=10), step, minutes) for step, minutes in enumerate([0.5, 1.0, 4.0])]
    assert at == pytest.approx([0.5, 1.0, 0.5])
    assert rates(LRSchedulerConfig(type="inverse_sqrt"), 4) == [1.0, round(2**-0.5, 6), round(3**-0.5, 6), 0.5]
    assert rates(LRSchedulerConfig(type="inverse_sqrt", min_lr_ratio=0.6), 5)[3:] == [0.6, 0.6]
