"""``RUN/best``, ``RUN/last`` and a run's folder stand for a checkpoint; a pointer leads nowhere else."""

import os
from pathlib import Path

import pytest

from pellucid.checkpoints.files import read_pointer, resolve_checkpoint_path
from pellucid.errors import CheckpointError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2):
        (tmp_path / "run" / "checkpoints" / f"step-0000000{step}").mkdir(parents=True)
    (tmp_path / "run" / "best").write_text("step-00000001\n")
    (tmp_path / "run" / "last").write_text("step-00000002\n")
    return tmp_path / "run"


def test_names_of_a_run_are_its_checkpoints(run: Path) -> None:
    first, second = (run / "checkpoints" / f"step-0000000{step}" for step in (1, 2))
    assert (
        resolve_checkpoint_path(run / "best"),
        resolve_checkpoint_path(run / "last"),
        resolve_checkpoint_path(run),
    ) == (first, second, first)
    assert resolve_checkpoint_path(str(run)) == first
    (run / "best").unlink()
    assert (read_pointer(run / "best"), resolve_checkpoint_path(run), resolve_checkpoint_path(run / "best")) == (
        None,
        second,
        run / "best",
    )
    (run / "last").unlink()
    assert resolve_checkpoint_path(run) == run


def test_everything_else_is_what_it_says(run: Path, tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    (run / "checkpoints" / "step-00000002" / "pellucid.json").touch()
    for path in (tmp_path / "best", tmp_path / "nowhere", run / "checkpoints" / "step-00000002", run / "config.yaml"):
        assert resolve_checkpoint_path(path) == path
    (run / "pellucid.json").touch()  # a checkpoint that happens to have a folder of that name inside
    assert resolve_checkpoint_path(run) == run


@pytest.mark.parametrize("text", ["", "..", "../../etc", "/etc", "step-1", "step-00000001/..", "step-00000001 x", "\0"])
def test_a_pointer_leads_to_a_step_of_its_run_or_nowhere(run: Path, text: str) -> None:
    (run / "best").write_text(text)
    for asked in (run, run / "best"):
        with pytest.raises(CheckpointError, match="which is not the name of a step such as step-00000200"):
            resolve_checkpoint_path(asked)
    assert resolve_checkpoint_path(run / "last").name == "step-00000002"


def test_a_pointer_that_is_no_file_is_not_waited_for(run: Path) -> None:
    (run / "best").unlink()
    os.mkfifo(run / "best")
    with pytest.raises(CheckpointError, match="best"):
        resolve_checkpoint_path(run)
