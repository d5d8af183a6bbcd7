"""The configs in examples/ are accepted, and the tiny one trains and speaks."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from pellucid.checkpoints import load
from pellucid.cli.main import main
from pellucid.errors import ConfigError
from pellucid.training import TrainConfig

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "examples").glob("*.yaml"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_example_is_accepted(file: Path) -> None:
    config = TrainConfig.from_file(file)
    assert len(config.model.rules) == len(config.model.layers) > 1
    with pytest.raises(ConfigError, match="did you mean 'batch_size'"):
        TrainConfig.from_file(file, ["batch_sise=3"])


def test_there_are_examples() -> None:
    assert {file.name for file in CONFIGS} >= {"small.yaml", "tiny.yaml"}


def test_the_tiny_example_trains_and_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    out = str(tmp_path / "run")
    settings = ["max_steps=3", "batch_size=2", "evaluation.batch_tokens=2048", "num_threads=1"]
    assert main(["train", "examples/tiny.yaml", *settings, "--out", out, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["steps"] == 3
    assert 0 < result["heldout_bits_per_byte"] < 10
    assert main(["generate", result["checkpoint"], "Who may", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("Who may")


def test_the_leaking_model_looks_better_and_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    monkeypatch.setattr(sys, "argv", ["leaking_model.py", "--steps", "90", "--out", str(page)])
    runpy.run_path(str(ROOT / "examples" / "leaking_model.py"), run_name="__main__")
    honest, leaking, *_ = capsys.readouterr().out.splitlines()
    assert honest.endswith("audit: pass")
    assert leaking.endswith("audit: leak")
    bits = [float(line.split(": ")[1].split(" bits")[0]) for line in (honest, leaking)]
    assert bits[1] < bits[0] - 0.3
    told = page.read_text(encoding="utf-8")
    assert "The lower curve is the cheat." in told
    assert "the output at 0 moves when token 1 is changed" in told


SMALL_JOBS = {"masked-lm": "docstrings", "classifier": "docstrings", "tagger": "tokens", "names": "names"}


def made_of(files: int, folder: Path) -> Path:
    """The records that ``stdlib_jobs.py`` makes of a part of the standard library."""
    patch = pytest.MonkeyPatch()
    patch.setattr(sys, "argv", ["stdlib_jobs.py", str(folder), "--files", str(files)])
    runpy.run_path(str(ROOT / "examples" / "stdlib_jobs.py"), run_name="__main__")
    patch.undo()
    return folder


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_of(15, tmp_path_factory.mktemp("jobs"))


@pytest.fixture(scope="module")
def more_jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_of(400, tmp_path_factory.mktemp("more_jobs"))


SMALL = (
    "model.hidden_size=32", "model.num_hidden_layers=1", "model.vocab_size=400", "max_steps=4",
    "evaluation={num_documents: 8, num_generated_samples: 2}", "batch_size=4", "num_threads=1",
)  # fmt: skip


@pytest.mark.parametrize("name", SMALL_JOBS)
def test_small_jobs_of_every_family_run(
    name: str, jobs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """End to end in small: data, training, held-out figures beside their baseline, a checkpoint that loads."""
    source = f"data.source={jobs / SMALL_JOBS[name]}.jsonl"
    example, out = str(ROOT / "examples" / f"{name}.yaml"), str(tmp_path / "run")
    assert main(["train", example, source, *SMALL, "--out", out, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["steps"] == 4
    assert load(result["checkpoint"]).model.config.family == ("encoder_decoder" if name == "names" else "encoder")
    figures = result["heldout_metrics"]
    assert all(figure["baseline"] is not None for figure in figures.values())


SHORT = ("model.hidden_size=64", "model.num_hidden_layers=2", "model.vocab_size=800", "num_threads=1")
STEPS = {"masked-lm": 300, "classifier": 200, "tagger": 60, "names": 150}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL_JOBS)
def test_small_jobs_are_done_better_than_by_counting(
    name: str, more_jobs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every held-out figure that training is for beats its baseline."""
    settings = [f"data.source={more_jobs / SMALL_JOBS[name]}.jsonl", f"max_steps={STEPS[name]}"]
    example, out = str(ROOT / "examples" / f"{name}.yaml"), str(tmp_path / "run")
    assert main(["train", example, *settings, *SHORT, "--out", out, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["heldout_metrics"]
    nats, accuracy = (next(figure for said, figure in figures.items() if word in said) for word in ("nats", "accuracy"))
    assert nats["value"] < nats["baseline"]
    assert accuracy["value"] > accuracy["baseline"]
