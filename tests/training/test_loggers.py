"""The log is whole lines; people see one line or one bar."""

import io
import json
import math
import resource
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pellucid.errors import StorageError
from pellucid.training.loggers import MetricsLog, clock, console_listener, describe
from pellucid.training.results import (
    Event,
    Finished,
    Interrupted,
    Prepared,
    Resumed,
    Saved,
    Stepped,
    Validated,
    Validation,
    Warned,
)

STEP = Stepped(
    step=3,
    tokens=300,
    num_targets=100,
    loss=5.5,
    learning_rate=1e-3,
    grad_norm=0.75,
    epoch=0.1,
    seconds=0.5,
    progress=0.25,
    minutes=2.0,
)
VALID = Validated(
    step=3,
    result=Validation(nats=500 * math.log(2), tokens=80, bytes=200, documents=4),
    final=False,
    best=True,
    seconds=0.1,
)
OTHERS: list[Event] = [
    Prepared(Path("run"), 1234567, 10, 20, 5),
    Saved(3, Path("run/x")),
    Interrupted("SIGINT"),
]


def test_steps_and_validations_are_lines_of_json(tmp_path: Path) -> None:
    metrics = MetricsLog(tmp_path / "metrics.jsonl")
    for event in (STEP, VALID, *OTHERS, replace(STEP, step=4, loss=float("inf"))):
        metrics(event)
    text = (tmp_path / "metrics.jsonl").read_text()
    first, second, third = (json.loads(line, parse_constant=pytest.fail) for line in text.splitlines())
    assert first["kind"], second["kind"] == ("step", "validation")
    assert (first["loss"], first["learning_rate"], first["grad_norm"], first["num_targets"]) == (5.5, 1e-3, 0.75, 100)
    assert second["bits_per_byte"] == VALID.result.bits_per_byte == pytest.approx(2.5)
    assert third["loss"] == "inf"


def test_each_line_is_on_the_disk_when_the_call_returns(tmp_path: Path) -> None:
    metrics = MetricsLog(tmp_path / "metrics.jsonl")
    for number in range(1, 4):
        metrics(STEP)
        assert (tmp_path / "metrics.jsonl").read_bytes().count(b"\n") == number


def test_truncating_keeps_the_lines_up_to_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsLog(path)
    metrics.truncate(3)
    assert not path.exists()
    for step in (1, 2, 3):
        metrics(replace(STEP, step=step))
    with open(path, "a") as file:
        file.write('{"kind": "step", "step": 3')
    metrics.truncate(3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
    metrics.truncate(1)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1]


@pytest.mark.parametrize("room", [0, 10])
def test_a_full_disk_is_said(tmp_path: Path, room: int) -> None:
    """Also when only a part of the line fits."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(StorageError, match=r"cannot write .*metrics\.jsonl"):
            MetricsLog(tmp_path / "metrics.jsonl")(STEP)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_lines_elsewhere_than_on_a_terminal() -> None:
    """At once the first, then one every few seconds, the last, and whatever is no step."""
    out = io.StringIO()
    with console_listener(Console(file=out, width=30)) as listener:
        for event in (
            OTHERS[0],
            STEP,
            replace(STEP, step=4),
            VALID,
            replace(STEP, step=5, progress=1.0),
            *OTHERS[1:],
        ):
            listener(event)
    lines = out.getvalue().splitlines()
    assert [line.split(",")[0].split("  ")[0] for line in lines] == [
        "1", "step 3", "step 3", "step 5", "step 3",
        "SIGINT: finishing the step and saving; send it again to stop at once",
    ]  # fmt: skip
    assert "\x1b" not in out.getvalue()
    assert lines[1] == "step 3  loss 5.5000  learning rate 1.00e-03  gradient 0.750  200 tokens/s  6:00 left"
    assert lines[2] == "step 3  2.5000 bits/byte on 4 held-out documents, the best so far"


def test_a_bar_on_a_terminal() -> None:
    out = io.StringIO()
    with console_listener(Console(file=out, force_terminal=True, width=140)) as listener:
        listener(STEP)
        listener(VALID)
    assert "25%" in out.getvalue()
    assert "loss 5.5000" in out.getvalue()
    assert "bits/byte" in out.getvalue()


def test_every_event_is_one_line() -> None:
    for event in (STEP, VALID, replace(VALID, final=True, best=False), *OTHERS):
        assert describe(event).strip()
        assert "\n" not in describe(event)


def test_the_speed_is_that_of_recent_steps() -> None:
    out = io.StringIO()
    with console_listener(Console(file=out, width=200)) as listener:
        for _ in range(300):
            listener(replace(STEP, seconds=1.0))
        for _ in range(300):
            listener(STEP)
        listener(replace(STEP, progress=1.0))
    assert "  200 tokens/s" in out.getvalue().splitlines()[-1]


def test_time_left() -> None:
    assert STEP.minutes_left == 6.0
    assert replace(STEP, progress=0.0).minutes_left == 0.0
    assert [clock(m) for m in (0.0, 1.5, 61.0, 600.25)] == ["0:00", "1:30", "1:01:00", "10:00:15"]


@pytest.mark.parametrize("end", [b'{"kind": "st', b"\0\0\0\n", b"[]\n", b'{"kind": "step"}\n', b"[" * 9999 + b"\n"])
def test_a_torn_end_is_forgotten_and_not_read(tmp_path: Path, end: bytes) -> None:
    metrics = MetricsLog(tmp_path / "metrics.jsonl")
    assert list(metrics.records()) == []
    for event in (STEP, VALID):
        metrics(event)
    whole = metrics.path.read_bytes()
    metrics.path.write_bytes(whole + end)
    assert [line["kind"] for line in metrics.records()] == ["step", "validation"]
    metrics.truncate(3)
    assert metrics.path.read_bytes() == whole
    metrics.truncate(2)
    assert metrics.path.read_bytes() == b""


def test_the_validation_at_the_end_is_read_back_exactly(tmp_path: Path) -> None:
    metrics = MetricsLog(tmp_path / "metrics.jsonl")
    metrics(VALID)
    assert metrics.final(3) is None
    metrics(replace(VALID, final=True, result=VALID.result._replace(nats=0.1 + 0.2)))
    assert metrics.final(3) == Validation(0.1 + 0.2, 80, 200, 4)
    assert metrics.final(4) is None


def test_what_goes_on_or_is_finished_is_told_in_a_line() -> None:
    assert describe(Resumed(Path("run"), 7)) == "the run in run continues after step 7"
    assert "from its start" in describe(Resumed(Path("run"), 0))
    assert describe(Warned("last is damaged")) == "warning: last is damaged"
    assert describe(Finished(Path("run"), 9)) == "the run in run is finished at step 9: nothing is left to do"
