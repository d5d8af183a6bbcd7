"""What concerns the whole process: the allocator, signals, the number format."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

from pellucid.training import environment
from pellucid.training.environment import InterruptedBySignal, SignalHandler, fastest_precision
from pellucid.training.step import autocast

_FAULTS = """
import resource, runpy, sys
keep_freed_memory = runpy.run_path(sys.argv[1])["keep_freed_memory"]
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        b"x" * (40 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
plain = faults()
assert keep_freed_memory()
faults()
print(plain, faults())
"""

needs_glibc = pytest.mark.skipif(environment.platform.libc_ver()[0] != "glibc", reason="another C library")


@needs_glibc
def test_freed_pages_are_not_faulted_in_again() -> None:
    """By what the kernel counts, before and after."""
    clean = {k: v for k, v in os.environ.items() if k not in environment._OWN_SETTINGS}
    command = [sys.executable, "-c", _FAULTS, environment.__file__]
    plain, kept = subprocess.check_output(command, env=clean).split()
    assert int(kept) < 100 < 1000 < int(plain)


@needs_glibc
def test_the_users_own_setting_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "100000")
    assert not environment.keep_freed_memory()


def test_nothing_is_done_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.sys, "platform", "darwin")
    assert not environment.keep_freed_memory()
    monkeypatch.setattr(environment.sys, "platform", "linux")
    monkeypatch.setattr(environment.platform, "libc_ver", lambda: ("musl", "1.2"))
    assert not environment.keep_freed_memory()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_once_and_stops_at_once_the_second_time(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with SignalHandler() as handler:
        handler.begin()
        assert handler.requested is None
        os.kill(os.getpid(), number)
        assert handler.requested == number
        with pytest.raises(InterruptedBySignal, match=number.name) as caught:
            os.kill(os.getpid(), number)
        assert caught.value.signal == number
        os.kill(os.getpid(), number)  # what is taken back meanwhile is not disturbed
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_there_is_anything_to_finish_stops_at_once(number: signal.Signals) -> None:
    with SignalHandler() as handler:
        with pytest.raises(InterruptedBySignal):
            os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert handler.requested is None
        with pytest.raises(InterruptedBySignal, match=number.name):  # if it was swallowed on its way
            handler.begin()


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    found = []

    def work() -> None:
        with SignalHandler() as handler:
            found.append((handler.requested, signal.getsignal(signal.SIGINT)))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(None, before)]


def test_autocast_is_bfloat16_or_nothing() -> None:
    a = torch.ones(2, 2)
    with autocast("bfloat16", "cpu"):
        assert (a @ a).dtype == torch.bfloat16
    with autocast("float32", torch.device("cpu")):
        assert (a @ a).dtype == torch.float32


@pytest.mark.parametrize(("seconds", "expected"), [((1.0, 0.5), "bfloat16"), ((1.0, 8.0), "float32")])
def test_the_faster_format_is_found_by_measuring(
    monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, float], expected: str
) -> None:
    by_format = dict(zip(("float32", "bfloat16"), seconds, strict=True))
    monkeypatch.setattr(environment, "operations_per_second", lambda name, device: 1 / by_format[name])
    assert fastest_precision() == expected


def test_a_measured_speed_is_one_that_a_machine_can_have() -> None:
    assert 1e6 < environment.operations_per_second("float32") < 1e16
