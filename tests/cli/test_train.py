"""``pellucid train`` on the command line."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from pellucid.cli.main import main
from pellucid.configfile import to_yaml
from pellucid.training.config import TrainConfig
from pellucid.training.events import Stepped
from pellucid.training.monitors import Metrics


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small config, in the folder that the command runs in."""
    for n in range(8):
        (tmp_path / f"{n}.txt").write_text(f"text number {n}, to be or not to be\n" * 5)
    words: dict[str, Any] = {
        "model": {
            "vocab_size": 270,
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "attention": {"num_attention_heads": 2},
            "ffn": {"kind": "dense", "intermediate_size": 16},
        },
        "data": {"source": str(tmp_path / "*.txt"), "heldout_share": 0.4, "length": 16},
        "budget": {"kind": "steps", "steps": 3},
        "batch_size": 2,
        "threads": 1,
    }
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(words))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "small.yaml"


def test_a_run_ends_with_a_line_about_it(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "small.yaml", "budget.steps=2"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("runs/small/checkpoints/step-00000002: 2 steps, ")
    assert out.count("\n") == 1
    assert "step 1  loss" in err
    assert TrainConfig.from_file("runs/small/config.yaml").budget.steps == 2


def test_json_is_one_value(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "small.yaml", "--out", "elsewhere", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == 3
    assert found["checkpoint"] == "elsewhere/checkpoints/step-00000003"
    assert 0 < found["heldout_bits_per_byte"] < 20
    assert not Path("runs").exists()


def test_the_config_can_be_looked_at_without_a_run(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "small.yaml", "optimizer.rate=3e-4", "optimizer.kind=muon", "--print-config"]) == 0
    out = capsys.readouterr().out
    wanted = TrainConfig.from_file("small.yaml", ["optimizer.rate=3e-4", "optimizer.kind=muon"])
    assert out == to_yaml(wanted)
    assert wanted.optimizer.rate == 3e-4
    assert main(["train", "small.yaml", "--print-config", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["budget"] == {"kind": "steps", "steps": 3}
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["small.yaml", "optimiser.rate=1"], "did you mean 'optimizer'"),
        (["small.yaml", "budget.steps=many"], "budget.steps"),
        (["small.yaml", "data.source=nowhere/*.txt"], "nowhere"),
        (["nowhere.yaml"], "nowhere.yaml does not exist"),
        (["small.yaml", "--out", "0.txt/run"], "cannot write 0.txt/run"),
        (["small.yaml", "--out", "."], "holds something already"),
        (["."], "is a folder; give a configuration"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    before = sorted(os.listdir())
    assert main(["train", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert words in err
    assert sorted(os.listdir()) == before or os.listdir("runs") == []


def test_ctrl_c_saves_exits_130_and_the_run_goes_on(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Metrics.__call__

    def interrupting(self: Metrics, event: Any) -> None:
        original(self, event)
        if isinstance(event, Stepped) and event.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Metrics, "__call__", interrupting)
        assert main(["train", "small.yaml"]) == 130
    assert "step-00000002: 2 steps" in capsys.readouterr().out
    assert main(["train", "runs/small", "--resume"]) == 0
    assert "step-00000003: 3 steps" in capsys.readouterr().out
