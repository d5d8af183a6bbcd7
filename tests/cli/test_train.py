"""``pellucid train`` on the command line."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from pellucid.cli.main import main
from pellucid.configfile import to_yaml
from pellucid.training import setup
from pellucid.training.config import TrainConfig
from pellucid.training.loggers import MetricsLog
from pellucid.training.results import Stepped


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
        "data": {"source": str(tmp_path / "*.txt"), "heldout_fraction": 0.4, "max_length": 16},
        "max_steps": 3,
        "batch_size": 2,
        "num_threads": 1,
    }
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(words))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "small.yaml"


def test_a_run_ends_with_a_line_about_it(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "small.yaml", "max_steps=2"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("runs/small/checkpoints/step-00000002: 2 steps, ")
    assert out.count("\n") == 1
    assert "step 1  loss" in err
    assert TrainConfig.from_file("runs/small/config.yaml").max_steps == 2


def test_json_is_one_value(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "small.yaml", "--out", "elsewhere", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == 3
    assert found["checkpoint"] == "elsewhere/checkpoints/step-00000003"
    assert 0 < found["heldout_bits_per_byte"] < 20
    assert not Path("runs").exists()


def test_the_config_can_be_looked_at_without_a_run(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "small.yaml", "optimizer.learning_rate=3e-4", "optimizer.kind=muon", "--print-config"]) == 0
    out = capsys.readouterr().out
    wanted = TrainConfig.from_file("small.yaml", ["optimizer.learning_rate=3e-4", "optimizer.kind=muon"])
    assert out == to_yaml(wanted)
    assert wanted.optimizer.learning_rate == 3e-4
    assert main(["train", "small.yaml", "--print-config", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["max_steps"] == 3
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["small.yaml", "optimiser.learning_rate=1"], "did you mean 'optimizer'"),
        (["small.yaml", "max_steps=many"], "max_steps"),
        (["small.yaml", "data.source=nowhere/*.txt"], "nowhere"),
        (["nowhere.yaml"], "nowhere.yaml does not exist"),
        (["small.yaml", "--out", "0.txt/run"], "cannot write 0.txt/run"),
        (["small.yaml", "--out", "."], "holds something already"),
        (["."], "is a folder; give a configuration"),
        ([".", "--resume"], "there is no run in .: leave --resume out"),
        (["nowhere", "--resume"], "there is no run in nowhere: leave --resume out"),
        (["small.yaml", "--resume"], "there is no run in runs/small: leave --resume out"),
        (["small.yaml", "--out", "a\udcffb"], "cannot be a path: it holds the lone surrogate \\udcff"),
        (["a\udcffb.yaml"], "cannot be a path: it holds the lone surrogate \\udcff"),
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
    original = MetricsLog.__call__

    def interrupting(self: MetricsLog, event: Any) -> None:
        original(self, event)
        if isinstance(event, Stepped) and event.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(MetricsLog, "__call__", interrupting)
        assert main(["train", "small.yaml"]) == 130
    assert "step-00000002: 2 steps" in capsys.readouterr().out
    assert main(["train", "runs/small", "--resume"]) == 0
    assert "step-00000003: 3 steps" in capsys.readouterr().out


@pytest.mark.parametrize(("number", "code", "said"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")])
def test_signals_have_their_own_exit_codes_and_words(
    file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    code: int,
    said: str,
) -> None:
    """In preparation, where nothing stays, and the second time, where the last checkpoint does."""
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]

    def twice(self: MetricsLog, event: Any) -> None:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)

    try:
        for owner, name in ((setup, "build"), (MetricsLog, "__call__")):
            with monkeypatch.context() as patch:
                patch.setattr(
                    owner, name, twice if owner is MetricsLog else lambda *_, **__: os.kill(os.getpid(), number)
                )
                assert main(["train", "small.yaml"]) == code
            assert capsys.readouterr().err.splitlines()[-1] == f"stopped by {said}"
            assert Path("runs").exists() == (owner is MetricsLog)
        os.kill(os.getpid(), signal.SIGINT)  # one of a handful: the command is at its end already
    finally:
        for each, handler in zip((signal.SIGINT, signal.SIGTERM), handlers, strict=True):
            signal.signal(each, handler)


_LOADING = """
import os, signal, sys
from pellucid.cli.main import main

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            for _ in range(int(sys.argv[1])):
                os.kill(os.getpid(), int(sys.argv[2]))

sys.meta_path.insert(0, Slow())
code = main(["train", "small.yaml"])
for _ in range(2):
    os.kill(os.getpid(), int(sys.argv[2]))
sys.exit(code)
"""


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(("number", "code", "said"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")])
def test_signals_while_the_program_loads_are_one_line(
    file: Path, times: int, number: signal.Signals, code: int, said: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LOADING, str(times), str(int(number))], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (code, f"stopped by {said}\n")
    assert not Path("runs").exists()


def test_a_damaged_checkpoint_of_a_finished_run_is_one_line_and_trained_again(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "small.yaml", "save_steps=1"]) == 0
    result = capsys.readouterr().out
    path = Path("runs/small/checkpoints/step-00000003/model.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    assert main(["train", "small.yaml", "save_steps=1"]) == 0
    out, err = capsys.readouterr()
    assert out.partition(" tokens,")[0] == result.partition(" tokens,")[0]
    assert "nothing is left to do" not in err
    (line,) = [line for line in err.splitlines() if line.startswith("warning: ")]
    assert line.startswith("warning: step-00000003 cannot be used (")
    assert line.endswith("is moved to step-00000003.damaged; the run in runs/small continues from step-00000002")


def test_the_same_command_again_goes_on_then_says_it_is_finished(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = MetricsLog.__call__

    def interrupting(self: MetricsLog, event: Any) -> None:
        original(self, event)
        if isinstance(event, Stepped) and event.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(MetricsLog, "__call__", interrupting)
        assert main(["train", "small.yaml"]) == 143
    capsys.readouterr()
    assert main(["train", "small.yaml", "max_steps=2"]) == 2
    assert "max_steps: was 3, is 2; --resume continues" in capsys.readouterr().err
    assert main(["train", "small.yaml"]) == 0
    captured = capsys.readouterr()
    assert "the run in runs/small continues after step 2" in captured.err
    result = captured.out
    for again in (["small.yaml"], ["runs/small", "--resume"]):
        assert main(["train", *again]) == 0
        captured = capsys.readouterr()
        assert captured.err == "the run in runs/small is finished at step 3: nothing is left to do\n"
        assert captured.out == result


def test_tensorboard_without_its_package_is_refused_before_anything_is_trained(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert main(["train", "small.yaml", "--tensorboard"]) == 2
    assert "pip install 'pellucid[tensorboard]'" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_tensorboard_gets_what_is_logged(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a writer that only notes what it is given."""
    noted: list[tuple[Any, ...]] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            noted.append((folder, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            noted.append((name, value, step))

        def close(self) -> None:
            noted.append(("closed",))

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    assert main(["train", "small.yaml", "eval_steps=2", "--tensorboard"]) == 0
    assert noted[0] == ("runs/small/tensorboard", 1)
    assert noted[-1] == ("closed",)
    logged = [json.loads(line) for line in Path("runs/small/metrics.jsonl").read_text().splitlines()]
    for name, key in (
        ("train/loss", "loss"),
        ("train/learning_rate", "learning_rate"),
        ("train/gradient_norm", "grad_norm"),
    ):
        expected = [(line[key], line["step"]) for line in logged if line["kind"] == "step"]
        assert [(value, step) for was, value, step in noted[1:-1] if was == name] == expected
    for name, final in (("heldout/bits_per_byte", True), ("heldout_sample/bits_per_byte", False)):
        (expected,) = [
            (v["bits_per_byte"], v["step"]) for v in logged if v["kind"] == "validation" and v["final"] == final
        ]
        assert [(value, step) for was, value, step in noted[1:-1] if was == name] == [expected]
