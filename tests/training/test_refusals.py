"""A refusal is one line that names what is other than it was, and changes nothing in the folder."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pellucid as pl
from helpers.small_run import StopAt, files, small_config, small_words, warned
from pellucid.configfile.base_config import config_diff, format_differences
from pellucid.errors import ArgumentError, ConfigError, InputError, RunError
from pellucid.training.config import TrainConfig
from pellucid.training.environment import changes
from pellucid.training.loop import train
from pellucid.training.results import Event, Resumed


class Enough(Exception):  # noqa: N818
    """Ends a run at once."""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, and a run over them that was stopped after step 4."""
    folder = tmp_path_factory.mktemp("stopped")
    train(small_config(small_words(folder / "texts")), folder / "run", on_event=StopAt(4))
    return folder


@pytest.fixture
def folder(stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to change; the texts' place in the configuration goes with it."""
    shutil.copytree(stopped, tmp_path / "copy")
    config = tmp_path / "copy" / "run" / "config.yaml"
    config.write_text(config.read_text().replace(str(stopped), str(tmp_path / "copy")))
    return tmp_path / "copy"


def again(folder: Path, **changes: Any) -> TrainConfig:
    words = small_words(folder / "unused") | {"data": {**small_words(folder / "unused")["data"]}}
    words["data"]["source"] = str(folder / "texts" / "*.txt")
    return small_config(words, **changes)


def refused(folder: Path, config: TrainConfig, resume: bool | None = True, kind: type[InputError] = ConfigError) -> str:
    before = files(folder / "run")
    with pytest.raises(kind) as caught:
        train(config, folder / "run", resume=resume, on_event=lambda event: None)
    assert files(folder / "run") == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def went_on(folder: Path, config: TrainConfig, resume: bool | None = None) -> tuple[list[Event], list[str]]:
    events: list[Event] = []
    train(config, folder / "run", resume=resume, on_event=events.append)
    return events, warned(events)


# ---- a refusal changes nothing


def test_a_budget_shorter_than_the_run_is_refused(folder: Path) -> None:
    said = refused(folder, again(folder, max_steps=3))
    run = folder / "run"
    assert said == (
        f"max_steps is 3, but the run in {run} has reached 4 steps; give as many or more, or start a new run in "
        "another folder"
    )
    assert "max_steps is 2" in refused(folder, again(folder, max_minutes=9, max_steps=2))
    assert "max_minutes is 1e-09" in refused(folder, again(folder, max_minutes=1e-9))
    went_on(folder, again(folder, max_steps=4), resume=True)
    assert "step-00000004" in (run / "last").read_text()
    assert TrainConfig.from_file(run / "config.yaml").max_steps == 4


def test_a_log_that_cannot_be_written_is_refused(folder: Path) -> None:
    (folder / "run" / "metrics.jsonl").unlink()
    (folder / "run" / "metrics.jsonl").mkdir()
    assert "metrics.jsonl is not a file that can be written" in refused(
        folder, again(folder, save_total_limit=1), kind=InputError
    )


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "changed": (lambda texts: (texts / "3.txt").write_text("other\n" * 9), "changed: 3.txt"),
    "missing": (lambda texts: (texts / "4.txt").unlink(), "missing: 4.txt"),
    "new": (lambda texts: (texts / "a.txt").write_text("new\n" * 9), "new: a.txt"),
    "renamed": (lambda texts: (texts / "5.txt").rename(texts / "z.txt"), "missing: 5.txt; new: z.txt"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_other_data_is_refused_by_name(folder: Path, what: str) -> None:
    """With a free setting changed too, which once was written before the refusal."""
    change, named = CHANGES[what]
    change(folder / "texts")
    said = refused(folder, again(folder, save_total_limit=1), kind=RunError)
    assert said == (
        f"the data is not that of the run in {folder / 'run'} ({named}); put it back as it was, or start a new run in "
        "another folder"
    )


def test_what_the_record_does_not_say_is_not_made_up(folder: Path) -> None:
    (folder / "texts" / "3.txt").write_text("other\n" * 9)
    path = folder / "run" / "environment.json"
    said = json.loads(path.read_text())
    del said["data"]["files"]
    path.write_text(json.dumps(said))
    assert "(which files is not known)" in refused(folder, again(folder), kind=RunError)
    path.unlink()
    assert "resume with the same data and settings" in refused(folder, again(folder), kind=InputError)


def test_only_a_few_files_are_named() -> None:
    was = "\n".join(f"0123456789abcdef {n} x.txt" for n in range(9))
    assert changes(was, was) == changes("", was) == changes(was, "") == ""
    found = changes(was, was.replace("0123", "ffff"))
    assert found == "changed: 0 x.txt, 1 x.txt, 2 x.txt, 3 x.txt, 4 x.txt and 4 more"


def test_data_that_changed_before_anything_was_saved_is_said_so(tmp_path: Path) -> None:
    config = small_config(small_words(tmp_path / "texts"))

    def at_once(event: Event) -> None:
        if not isinstance(event, Resumed) and type(event).__name__ == "Stepped":
            raise Enough

    with pytest.raises(Enough):
        train(config, tmp_path / "run", on_event=at_once)
    (tmp_path / "texts" / "3.txt").write_text("other\n" * 9)
    events, (message,) = went_on(tmp_path, config)
    assert message == (
        f"the data changed since the run in {tmp_path / 'run'} began (changed: 3.txt); it had saved nothing yet, so it "
        "starts again with the data as it is"
    )
    assert Resumed(tmp_path / "run", 0) in events


def test_there_must_be_a_run_to_go_on_with(tmp_path: Path) -> None:
    config = small_config(small_words(tmp_path / "texts"))
    (tmp_path / "empty").mkdir()
    for run in (tmp_path / "nowhere", tmp_path / "empty"):
        with pytest.raises(RunError) as caught:
            train(config, run, resume=True)
        assert str(caught.value) == f"there is no run in {run}: leave --resume out (in Python: resume)"
    assert not (tmp_path / "nowhere").exists()


def test_a_file_is_no_run_folder(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("mine")
    with pytest.raises(pl.PellucidError, match="plain is a file; choose another name"):
        train(small_config(small_words(tmp_path / "texts")), tmp_path / "plain")
    assert (tmp_path / "plain").read_text() == "mine"


# ---- what is said, and goes on


def test_another_count_of_threads_is_said(folder: Path) -> None:
    path = folder / "run" / "environment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"threads": 7, "versions": {"torch": "0.1"}}))
    _, (message,) = went_on(folder, again(folder))
    assert message == (
        f"threads was 7, is 1, torch was 0.1, is {torch.__version__}: the numbers are exactly those of an "
        "uninterrupted run only where these are the same; stop and set them back if that matters"
    )


@pytest.mark.parametrize("content", [None, "", "[]", "[" * 100_000, "\ud800", '{"data": 1}', '{"sessions": {}}'])
def test_a_lost_environment_is_said(folder: Path, content: str | None) -> None:
    path = folder / "run" / "environment.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content.encode("utf-8", errors="surrogatepass"))
    _, (message,) = went_on(folder, again(folder))
    assert message.startswith(f"{path} is lost, so threads, versions and held-out data cannot be compared")
    assert [session["step"] for session in json.loads(path.read_text())["sessions"]] == [4]


def test_odd_types_in_the_environment_do_no_harm(folder: Path) -> None:
    path = folder / "run" / "environment.json"
    said = json.loads(path.read_text())
    odd = {"sessions": "x", "threads": None, "processor": None, "versions": [1], "parameters": "many"}
    path.write_text(json.dumps(said | odd | {"data": said["data"] | {"files": 3, "tokens": []}}))
    assert went_on(folder, again(folder))[1] == []


# ---- what is no config and no path


@pytest.mark.usefixtures("our_checks_only")
def test_what_is_no_config_is_refused(tmp_path: Path) -> None:
    for value in (None, {"max_steps": 1}, "small.yaml"):
        with pytest.raises(ArgumentError, match=r"^config is .*, but must be a TrainConfig; make one with"):
            pl.train(value, tmp_path / "run")  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("our_checks_only")
@pytest.mark.parametrize("path", ["a\0b", "a\ud800b", None, 3, b"a"])
@pytest.mark.parametrize("resume", [None, True, False])
def test_what_is_no_path_is_refused(tmp_path: Path, path: Any, resume: bool | None) -> None:
    config = small_config(small_words(tmp_path / "texts"))
    with pytest.raises(ArgumentError, match=r"cannot be a path|is a text or a Path, not") as caught:
        pl.train(config, path, resume=resume)
    str(caught.value).encode()
    assert "\n" not in str(caught.value)


def test_differences_have_a_path(tmp_path: Path) -> None:
    words = small_words(tmp_path)
    was = small_config(words)
    now = small_config(
        words, model={**words["model"], "num_hidden_layers": 2, "rule": "causal & window(4)"}, save_total_limit=9
    )
    found = config_diff(was, now)
    assert [(d.path, d.top) for d in found] == [
        ("model.layers[0]", "model"), ("model.layers[1]", "model"), ("save_total_limit", "save_total_limit"),
    ]  # fmt: skip
    assert format_differences(found[1:2]) == f"model.layers[1]: was null, is {now.model.layers[1]}"
    assert config_diff(was, was) == []
