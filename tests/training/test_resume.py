"""A run that was stopped goes on by itself; one that is finished, another one, or one in use does not."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.small_run import small_words
from pellucid.checkpoints.loading import load
from pellucid.errors import ConfigError, RunError, StorageError
from pellucid.training import run_folder
from pellucid.training.config import TrainConfig
from pellucid.training.loop import train
from pellucid.training.results import Event, Finished, Prepared, Resumed, Saved, Stepped, Warned
from pellucid.training.run_folder import locked


class Enough(Exception):  # noqa: N818
    """Ends a run at once, as a kill would, but for what happens on the way out."""


@pytest.fixture
def words(tmp_path: Path) -> dict[str, Any]:
    return small_words(tmp_path) | {"max_steps": 4, "save_total_limit": 2}


def config(words: dict[str, Any], **changes: Any) -> TrainConfig:
    return TrainConfig.from_mapping(words | changes)


def until(step: int, kind: type[Event] = Stepped) -> Any:
    """A listener that ends the run with an event of this step."""

    def listen(event: Event) -> None:
        if isinstance(event, kind) and event.step == step:
            raise Enough

    return listen


def broken_off(words: dict[str, Any], run: Path, step: int, kind: type[Event] = Stepped) -> TrainConfig:
    wanted = config(words)
    with pytest.raises(Enough):
        train(wanted, run, on_event=until(step, kind))
    return wanted


def files(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_the_same_command_again_goes_on(tmp_path: Path, words: dict[str, Any]) -> None:
    wanted, events = broken_off(words, tmp_path / "run", 3), list[Event]()
    straight = train(wanted, tmp_path / "straight")
    result = train(wanted, tmp_path / "run", on_event=events.append)
    assert events[0] == Resumed(tmp_path / "run", 2)
    assert isinstance(events[1], Prepared)
    assert [e.step for e in events if isinstance(e, Stepped)] == [3, 4]
    assert result.validation == straight.validation
    a, b = (load(r.checkpoint).model.state_dict() for r in (straight, result))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_finished_run_says_so_and_nothing_is_done(tmp_path: Path, words: dict[str, Any]) -> None:
    wanted, run = config(words), tmp_path / "run"
    result, before = train(wanted, run), files(run)
    for resume in (None, True):
        events: list[Event] = []
        assert train(wanted, run, resume=resume, on_event=events.append) == result
        assert events == [Finished(run, 4)]
        assert files(run) == before
    longer = train(config(words, max_steps=5), run, resume=True)
    assert longer.steps == 5
    window = config(words, max_steps=5, evaluation={"max_length": 8})
    assert train(window, run, resume=True).validation != longer.validation


def test_killed_in_the_last_validation_only_that_is_left(tmp_path: Path, words: dict[str, Any]) -> None:
    wanted, events = broken_off(words, tmp_path / "run", 4, Saved), list[Event]()
    assert train(wanted, tmp_path / "run", on_event=events.append).validation is not None
    assert not any(isinstance(event, Stepped | Saved) for event in events)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"batch_size": 3}, r"not that of the run in .*: batch_size: was 2, is 3; resume with the same"),
        ({"max_steps": 9}, r": max_steps: was 4, is 9; --resume continues"),
        ({"save_total_limit": 5}, ": save_total_limit: was 2, is 5; --resume continues"),
        (
            {"save_total_limit": 5, "seed": 1},
            ": save_total_limit: was 2, is 5; seed: was 0, is 1; resume with the same",
        ),
        (
            {"optimizer": {"kind": "muon"}, "save_total_limit": 5},
            r": optimizer\.kind: was adamw, is muon; optimizer\.learning_rate: was 0\.001, is 0\.02; .*; and \d+ more",
        ),
    ],
)
def test_another_configuration_is_refused_by_name(
    tmp_path: Path, words: dict[str, Any], change: dict[str, Any], match: str
) -> None:
    broken_off(words, tmp_path / "run", 3)
    before = files(tmp_path / "run")
    with pytest.raises(ConfigError, match=match):
        train(config(words, **change), tmp_path / "run")
    assert files(tmp_path / "run") == before


def test_a_run_is_not_gone_on_with_if_that_is_not_wanted(tmp_path: Path, words: dict[str, Any]) -> None:
    wanted = broken_off(words, tmp_path / "run", 3)
    with pytest.raises(RunError, match="holds something already"):
        train(wanted, tmp_path / "run", resume=False)


def test_a_checkpoint_that_nothing_points_to_yet_is_the_last(tmp_path: Path, words: dict[str, Any]) -> None:
    """Killed between the folder's rename and the pointer's: once, the folder stood in the way of the next save."""
    wanted, run = broken_off(words, tmp_path / "run", 4, Saved), tmp_path / "run"
    for before in ("step-00000002\n", None):
        (run / "last").unlink()
        if before:
            (run / "last").write_text(before)
        events: list[Event] = []
        assert train(wanted, run, on_event=events.append).steps == 4
        assert not any(isinstance(event, Stepped | Warned) for event in events)
        assert (run / "last").read_text() == "step-00000004\n"


def test_the_best_is_pointed_to_again(tmp_path: Path, words: dict[str, Any]) -> None:
    """Killed between the two pointers."""
    wanted, run = broken_off(words, tmp_path / "run", 2, Saved), tmp_path / "run"
    assert (run / "best").read_text() == "step-00000002\n"
    (run / "best").unlink()
    with pytest.raises(Enough):
        train(wanted, run, on_event=until(3))
    assert (run / "best").read_text() == "step-00000002\n"


def test_a_folder_left_by_a_start_that_was_killed_is_used(tmp_path: Path, words: dict[str, Any]) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / ".config.yaml.unfinished-0123456789ab").write_text("mod")
    assert train(config(words), run).steps == 4
    assert not list(run.glob(".*"))


def test_what_goes_wrong_before_the_first_step_of_a_run_that_goes_on_takes_nothing_away(
    tmp_path: Path, words: dict[str, Any]
) -> None:
    wanted = broken_off(words, tmp_path / "run", 1)  # begun, without a checkpoint
    before = files(tmp_path / "run")
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    for path in tmp_path.glob("*.txt"):
        path.rename(hidden / path.name)
    with pytest.raises(Exception, match="no file matches"):
        train(wanted, tmp_path / "run")
    assert files(tmp_path / "run") == before


def test_other_held_out_documents_are_refused(tmp_path: Path, words: dict[str, Any]) -> None:
    apart = tmp_path / "apart.text"
    apart.write_text("to be or not")
    words["data"]["heldout_source"] = str(apart)
    wanted = broken_off(words, tmp_path / "run", 3)
    apart.write_text("not to be")
    with pytest.raises(RunError, match=r"the held-out data is not that of the run in .* \(changed: apart\.text\)"):
        train(wanted, tmp_path / "run")


def test_when_it_was_begun_and_taken_up_is_noted(tmp_path: Path, words: dict[str, Any]) -> None:
    wanted = broken_off(words, tmp_path / "run", 3)
    result = train(wanted, tmp_path / "run")
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert [session["step"] for session in environment["sessions"]] == [0, 2]
    assert all(session["at"].endswith("+00:00") for session in environment["sessions"])
    assert environment["parameters"] == sum(p.numel() for p in load(result.checkpoint).model.parameters())
    assert environment["seed"] == 0
    assert set(environment["data"]) == {"train", "heldout", "tokens", "files"}
    digest = hashlib.sha256((tmp_path / "3.txt").read_bytes()).hexdigest()[:16]
    assert f"{digest} 3.txt" in environment["data"]["files"].split("\n")
    assert {"pellucid", "torch", "numpy"} <= set(environment["versions"])


def test_a_log_that_cannot_be_synced_stops_the_run(tmp_path: Path, words: dict[str, Any]) -> None:
    def remove(event: Event) -> None:
        if isinstance(event, Stepped) and event.step == 2:
            (tmp_path / "run" / "metrics.jsonl").unlink()
            (tmp_path / "run" / "metrics.jsonl").mkdir()

    with pytest.raises(StorageError, match=r"cannot write .*metrics\.jsonl"):
        train(config(words, eval_steps=0, evaluation={}), tmp_path / "run", on_event=remove)


# ---- one process a run


def test_a_run_in_use_is_refused_and_free_again_afterwards(tmp_path: Path, words: dict[str, Any]) -> None:
    seen: list[str] = []

    def try_again(event: Event) -> None:
        if isinstance(event, Stepped):
            with pytest.raises(RunError, match="is being trained in by another process"):
                train(config(words), tmp_path / "run")
            seen.append("running" if locked(tmp_path / "run") else "free")

    train(config(words), tmp_path / "run", on_event=try_again)
    assert seen == ["running"] * 4
    assert not locked(tmp_path / "run")
    assert not locked(tmp_path / "nowhere")


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    code = "import os, pathlib, runpy, sys; lock = runpy.run_path(sys.argv[1]); folder = pathlib.Path(sys.argv[2]);"
    code += "held = lock['Lock'](folder); assert lock['locked'](folder); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code, run_folder.__file__, str(tmp_path)]).returncode == -9
    held = run_folder.Lock(tmp_path)
    assert locked(tmp_path)
    held.release()
    assert os.listdir(tmp_path) == []
