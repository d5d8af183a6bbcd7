"""A checkpoint that cannot be used: an older one is, with a word about it, and nothing is removed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.small_run import assert_same, files, resigned, small_config, small_words, warned
from pellucid.checkpoints.contract import CONTRACT
from pellucid.checkpoints.loading import TOKENIZER, load
from pellucid.checkpoints.saving import save
from pellucid.checkpoints.weights import WEIGHTS
from pellucid.errors import CheckpointError
from pellucid.training.loop import train
from pellucid.training.results import Event, Finished, Resumed, Stepped

LAST = "checkpoints/step-00000006"


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The words of a run that came to its end at step 6, and its folder."""
    folder = tmp_path_factory.mktemp("straight")
    words = small_words(folder / "texts")
    train(small_config(words), folder / "run")
    return words, folder / "run"


@pytest.fixture
def run(straight: tuple[dict[str, Any], Path], tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(straight[1], tmp_path / "run")
    return tmp_path / "run"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def torn(name: str) -> Callable[[Path], None]:
    def tear(run: Path) -> None:
        path = run / LAST / name
        path.write_bytes(path.read_bytes()[:-9])

    return tear


def unreadable(run: Path) -> None:
    (run / LAST / WEIGHTS).unlink()
    (run / LAST / WEIGHTS).mkdir()


def of_step_4(run: Path) -> None:
    shutil.rmtree(run / LAST / "training")
    shutil.copytree(run / "checkpoints/step-00000004/training", run / LAST / "training")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped byte": (lambda run: flip(run / LAST / WEIGHTS), "was changed or damaged"),
    "a flipped byte of the state": (lambda run: flip(run / LAST / "training/state.safetensors"), "not what state.json"),
    "torn weights": (torn(WEIGHTS), WEIGHTS),
    "a torn contract": (torn(CONTRACT), "cannot be read as JSON"),
    "torn tensors": (torn("training/state.safetensors"), "not what state.json was written with"),
    "torn counters": (torn("training/state.json"), "cannot be read as JSON"),
    "another version": (lambda run: edit(run / LAST / CONTRACT, schema_version=9), "schema_version 9"),
    "another version of the state": (lambda run: edit(run / LAST / "training/state.json", schema_version=2), "reads 3"),
    "another best": (lambda run: edit(run / LAST / "training/state.json", best=0.5), "says something else than when"),
    "a read error": (unreadable, "cannot read"),
    "no state": (lambda run: shutil.rmtree(run / LAST / "training"), "state.json"),
    "no tokenizer": (lambda run: (run / LAST / TOKENIZER).unlink(), "tokenizer.json"),
    "two steps": (of_step_4, "holds the state of step 4; it was put together from two"),
}


@pytest.mark.parametrize(
    ("what", "resume"), [*((what, None) for what in DAMAGE), ("a flipped byte", True), ("another version", True)]
)
def test_a_damaged_last_is_passed_over_and_kept(
    run: Path, straight: tuple[dict[str, Any], Path], what: str, resume: bool | None
) -> None:
    """Also by the plain command of a finished run, which once said that nothing was left to do."""
    damage, reason = DAMAGE[what]
    damage(run)
    damaged, events = files(run / LAST), list[Event]()
    result = train(small_config(straight[0]), run, resume=resume, on_event=events.append)
    assert [event.step for event in events if isinstance(event, Resumed)] == [4]
    assert [event.step for event in events if isinstance(event, Stepped)] == [5, 6]
    (message,) = warned(events)
    assert message.startswith("step-00000006 cannot be used (")
    assert reason in message
    assert message.endswith(f"and is moved to step-00000006.damaged; the run in {run} continues from step-00000004")
    assert files(run / "checkpoints" / "step-00000006.damaged") == damaged
    assert result.checkpoint == run / LAST
    assert_same(run, straight[1])


def test_a_step_that_is_gone_is_passed_over(run: Path, straight: tuple[dict[str, Any], Path]) -> None:
    shutil.rmtree(run / LAST)
    events = list[Event]()
    train(small_config(straight[0]), run, on_event=events.append)
    (message,) = warned(events)
    assert "last points to step-00000006, which is not there" in message
    assert "continues from step-00000004" in message
    assert_same(run, straight[1])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "last holds ''"),
        (b"\xff\xfe\n", "last holds '\ufffd\ufffd'"),
        (b"../../elsewhere\n", "last holds '../../elsewhere'"),
        (b"step-00000099\n", "last points to step-00000099, which is not there"),
        (b"x" * 5000, "last is larger than 1000 bytes"),
    ],
)
def test_a_damaged_pointer_is_put_right(
    run: Path, straight: tuple[dict[str, Any], Path], content: bytes, said: str
) -> None:
    (run / "last").write_bytes(content)
    (run / "best").write_bytes(content)
    events = list[Event]()
    train(small_config(straight[0]), run, on_event=events.append)
    assert events[1:] == [Finished(run, 6)]
    (message,) = warned(events)
    assert said in message
    assert message.endswith("continues from step-00000006, the newest that is whole")
    assert files(run) == files(straight[1])


def test_last_turned_back_by_hand_is_turned_forward(run: Path, straight: tuple[dict[str, Any], Path]) -> None:
    (run / "last").write_text("step-00000002\n")
    events = list[Event]()
    train(small_config(straight[0]), run, on_event=events.append)
    assert events == [Finished(run, 6)]
    shutil.move(run / LAST, run / "mine")
    shutil.rmtree(run / "checkpoints/step-00000004")
    (run / "last").write_text("step-00000002\n")
    train(small_config(straight[0]), run, on_event=events.append)
    assert [event.step for event in events if isinstance(event, Resumed)] == [2]
    assert_same(run, straight[1])


def test_several_are_passed_over_and_no_name_is_taken_twice(run: Path, straight: tuple[dict[str, Any], Path]) -> None:
    (run / "checkpoints/step-00000006.damaged").mkdir()
    for step in (4, 6):
        flip(run / f"checkpoints/step-{step:08d}" / WEIGHTS)
    events = list[Event]()
    train(small_config(straight[0]), run, on_event=events.append)
    assert [event.step for event in events if isinstance(event, Resumed)] == [2]
    kept = ["step-00000006.damaged-2", "step-00000004.damaged"]
    assert [message.partition("moved to ")[2].partition(";")[0] for message in warned(events)] == kept
    assert all((run / "checkpoints" / name).is_dir() for name in kept)
    assert_same(run, straight[1])


def test_a_best_that_is_lost_is_said_so(run: Path, straight: tuple[dict[str, Any], Path]) -> None:
    """The older step was not the best itself, and what was is gone: until a better one comes nothing is pointed to."""
    shutil.rmtree(run / LAST)
    shutil.rmtree(run / "checkpoints/step-00000002")
    resigned(run / "checkpoints/step-00000004/training", best_step=2)
    (run / "last").write_text("step-00000004\n")
    events = list[Event]()

    def listen(event: Event) -> None:
        events.append(event)
        if isinstance(event, Stepped):
            assert (run / "best").exists() == (event.step > 6)

    train(small_config(straight[0]), run, on_event=listen)
    (message,) = warned(events)
    assert message.startswith("step-00000002, the best so far, is not there any more")
    assert_same(run, straight[1])


@pytest.mark.parametrize("resume", [None, True])
def test_none_that_can_be_used_is_refused_and_nothing_is_changed(
    run: Path, straight: tuple[dict[str, Any], Path], resume: bool | None
) -> None:
    """Once they were removed, and the run began again at step 0."""
    for path in (run / "checkpoints").iterdir():
        edit(path / CONTRACT, schema_version=9)
    before = files(run)
    with pytest.raises(
        CheckpointError, match=r"no checkpoint of the run in .* \(step-00000006: .*schema_version 9"
    ) as e:
        train(small_config(straight[0]), run, resume=resume)
    assert "\n" not in str(e.value)
    assert files(run) == before


def test_a_pointer_to_steps_that_are_all_gone_is_refused(run: Path, straight: tuple[dict[str, Any], Path]) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    before = files(run)
    with pytest.raises(CheckpointError, match=r"holds no step; put the step's folder back, or remove .*/last to begin"):
        train(small_config(straight[0]), run)
    assert files(run) == before


@pytest.fixture(scope="module")
def windowed(straight: tuple[dict[str, Any], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of the same run with another rule: every shape is the same."""
    words = straight[0]
    model = {**words["model"], "rule": "causal & window(16)"}
    result = train(
        small_config(words, model=model, eval_steps=0, evaluation={}), tmp_path_factory.mktemp("windowed") / "run"
    )
    return result.checkpoint


def test_a_checkpoint_of_another_model_is_refused(
    run: Path, straight: tuple[dict[str, Any], Path], windowed: Path
) -> None:
    shutil.rmtree(run / LAST)
    shutil.copytree(windowed, run / LAST)
    before = files(run)
    said = r"model\.layers\[0\]: the run has causal\(?\)?, the checkpoint .*window\(16\).*; put back the checkpoint"
    with pytest.raises(CheckpointError, match=said) as caught:
        train(small_config(straight[0]), run)
    assert "\n" not in str(caught.value)
    assert files(run) == before


def test_weights_of_another_type_are_refused(run: Path, straight: tuple[dict[str, Any], Path]) -> None:
    """Half of each number is lost."""
    result = load(run / LAST, dtype=torch.bfloat16)
    shutil.copytree(run / LAST / "training", run / "kept")
    shutil.rmtree(run / LAST)
    save(run / LAST, result.model, tokenizer=result.tokenizer)
    shutil.move(run / "kept", run / LAST / "training")
    (run / "metrics.jsonl").unlink()
    with pytest.raises(CheckpointError, match=r"as torch\.bfloat16 but a run's weights are torch\.float32"):
        train(small_config(straight[0]), run)


def test_a_state_of_other_parameters_is_one_line(run: Path, straight: tuple[dict[str, Any], Path]) -> None:
    """Digests that fit do not make it one."""
    path = run / LAST / "training/state.safetensors"
    tensors = load_file(path)
    name = next(key for key in tensors if key.endswith("exp_avg"))
    save_file({**tensors, name: tensors[name][:1].contiguous()}, path)
    resigned(run / LAST / "training")
    (run / "metrics.jsonl").unlink()
    before = files(run)
    with pytest.raises(CheckpointError, match="has shape") as caught:
        train(small_config(straight[0]), run)
    assert "\n" not in str(caught.value)
    assert files(run) == before


def test_without_a_listener_a_warning_is_pythons(run: Path, straight: tuple[dict[str, Any], Path]) -> None:
    (run / "last").write_bytes(b"")
    with pytest.warns(RuntimeWarning, match="continues from step-00000006"):
        train(small_config(straight[0]), run)
