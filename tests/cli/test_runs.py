"""``pellucid runs``: what run folders say, side by side, and nothing in them is changed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pellucid.cli.main import main
from pellucid.errors import InputError
from pellucid.training.run_folder import Lock
from pellucid.training.run_summary import differences, find_runs, read_run

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs in ``runs``: a and, one level deeper, b."""
    folder = tmp_path_factory.mktemp("trained")
    for n in range(8):
        (folder / f"{n}.txt").write_text(f"text number {n}, to be or not to be\n" * 5)
    words: dict[str, Any] = {
        "model": {
            "vocab_size": 270,
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "attention": {"num_attention_heads": 2},
            "ffn": {"kind": "dense", "intermediate_size": 16},
        },
        "data": {"source": str(folder / "*.txt"), "heldout_fraction": 0.4, "max_length": 16},
        "max_steps": 4,
        "eval_steps": 2,
        "save_steps": 2,
        "batch_size": 2,
        "num_threads": 1,
    }
    (folder / "small.yaml").write_text(yaml.safe_dump(words))
    config = str(folder / "small.yaml")
    assert main(["train", config, "--out", str(folder / "runs" / "a")]) == 0
    wider = ["optimizer.kind=adamw", "optimizer.learning_rate=0.01", "model.hidden_size=12", "max_steps=2"]
    assert main(["train", config, *wider, "--out", str(folder / "runs" / "deep" / "b")]) == 0
    return folder


@pytest.fixture
def runs(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to play with, in the folder that commands run in."""
    shutil.copytree(trained / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return Path("runs")


def logged(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_runs_are_found_and_listed(runs: Path, capsys: Captured) -> None:
    before = files(runs)
    assert main(["runs"]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == [
        "run", "state", "steps", "tokens", "best", "final", "tokens/s", "began", "precision", "parameters",
    ]  # fmt: skip
    assert first.split()[:3] == ["runs/a", "finished", "4"]
    assert second.split()[:3] == ["runs/deep/b", "finished", "2"]
    assert files(runs) == before
    assert find_runs("runs") == find_runs(".") == [runs / "a", runs / "deep" / "b"]
    assert find_runs("runs/a") == [runs / "a"]


def test_a_summary_says_what_the_run_logged(runs: Path, capsys: Captured) -> None:
    assert main(["runs", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["runs"][0]
    steps, validations = logged(runs / "a", "step"), logged(runs / "a", "validation")
    counters = json.loads((runs / "a" / "checkpoints" / "step-00000004" / "training" / "state.json").read_text())
    environment = json.loads((runs / "a" / "environment.json").read_text())
    assert (found["steps"], found["saved"], found["tokens"]) == (4, 4, steps[-1]["tokens"])
    assert found["loss"] == steps[-1]["loss"]
    assert found["best"] == min(v["bits_per_byte"] for v in validations if not v["final"])
    assert found["final"] == validations[-1]["bits_per_byte"]
    assert found["tokens_per_second"] == counters["tokens"] / counters["training_seconds"]
    assert found["began"] == environment["sessions"][0]["at"]
    assert (found["precision"], found["parameters"]) == ("float32", environment["parameters"])
    assert (found["state"], found["problem"]) == ("finished", None)
    assert found["config"]["model"]["hidden_size"] == 8


def test_two_runs_are_compared(runs: Path, capsys: Captured) -> None:
    assert main(["runs", "runs/a", "runs/deep/b"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    cut = lines.index([])
    assert lines[0] == ["results"]
    assert lines[1] == ["runs/a", "runs/deep/b"]
    assert ["steps", "4", "2"] in lines[:cut]
    assert lines[cut + 1 : cut + 3] == [["configuration"], ["key", "runs/a", "runs/deep/b"]]
    changed = {line[0]: line[1:] for line in lines[cut + 3 :]}
    assert changed["optimizer.learning_rate"] == ["0.001", "0.01"]
    assert changed["model.hidden_size"] == ["8", "12"]
    assert changed["max_steps"] == ["4", "2"]
    assert "batch_size" not in changed
    assert main(["runs", "runs/a", "runs/deep/b", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["differences"]["optimizer.learning_rate"] == [0.001, 0.01]
    assert [run["run"] for run in found["runs"]] == ["runs/a", "runs/deep/b"]


def test_keys_that_only_one_run_has_differ(runs: Path) -> None:
    config = yaml.safe_load((runs / "a" / "config.yaml").read_text())
    config["optimizer"] = {"kind": "muon", "momentum": 0.9, "betas": []}
    (runs / "deep" / "b" / "config.yaml").write_text(yaml.safe_dump(config))
    found = differences([read_run(runs / "a"), read_run(runs / "deep" / "b")])
    assert found["optimizer.kind"] == ["adamw", "muon"]
    assert found["optimizer.momentum"] == [None, 0.9]
    assert {key.partition(".")[0] for key in found} == {"optimizer"}


def test_every_state_is_told_apart(runs: Path, capsys: Captured) -> None:
    run = runs / "a"
    lock = Lock(run)
    assert read_run(run).state == "running"
    lock.release()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:-1]) + lines[-1][:20])
    assert read_run(run).state == "stopped"
    state = run / "checkpoints" / "step-00000004" / "training" / "state.json"
    state.write_text("{")
    found = read_run(run)
    assert (found.state, found.saved, found.steps) == ("damaged", None, 4)
    assert main(["runs"]) == 0
    captured = capsys.readouterr()
    assert "runs/a  " in captured.out
    assert captured.err.startswith(f"runs/a: {state} cannot be read as JSON")
    (run / "last").unlink()
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    (run / "metrics.jsonl").unlink()
    (run / "environment.json").write_text("[]")
    found = read_run(run)
    assert (found.state, found.steps, found.loss, found.parameters, found.began) == ("begun", 0, None, None, None)
    (run / "config.yaml").write_text("a: [")
    assert read_run(run).state == "damaged"


def test_odd_lines_of_a_log_do_no_harm(runs: Path) -> None:
    odd = [
        '{"kind": "step", "step": "x", "tokens": true, "loss": "inf"}',
        '{"kind": "validation", "step": 9}',
        '{"kind": 3, "step": []}',
    ]
    (runs / "a" / "metrics.jsonl").write_text("\n".join([*odd, ""]))
    found = read_run(runs / "a")
    assert (found.steps, found.tokens, found.loss, found.best, found.final) == (0, 0, None, None, None)


def not_utf8(run: Path) -> None:
    (run / "last").write_bytes(b"\xff\xfe")


def folder_for_log(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()


def folder_for_last(run: Path) -> None:
    (run / "last").unlink()
    (run / "last").mkdir()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (not_utf8, "last holds '\ufffd\ufffd'"),
        (folder_for_log, "cannot read runs/a/metrics.jsonl"),
        (folder_for_last, "cannot read runs/a/last"),
        (lambda run: (run / "config.yaml").write_bytes(b"\xff"), "byte 0xff is not UTF-8"),
    ],
)
def test_one_broken_run_does_not_hide_the_others(
    runs: Path, capsys: Captured, damage: Callable[[Path], object], words: str
) -> None:
    damage(runs / "a")
    assert main(["runs"]) == 0
    out, err = capsys.readouterr()
    _, first, second = out.splitlines()
    assert first.split()[:2] == ["runs/a", "damaged"]
    assert second.split()[:3] == ["runs/deep/b", "finished", "2"]
    assert words in err
    assert err.count("\n") == 1
    assert main(["runs", "--json"]) == 0


def test_a_name_that_cannot_be_printed_does_not_hide_the_others(runs: Path, capsys: Captured) -> None:
    shutil.copytree(runs / "a", runs / "b\udcff")
    (runs / "b\udcff" / "last").write_text("x")
    assert main(["runs"]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [
        ["runs/a", "finished"], [r"runs/b\udcff", "damaged"], ["runs/deep/b", "finished"],
    ]  # fmt: skip
    assert err.startswith(r"runs/b\udcff: runs/b\udcff/last holds 'x'")
    assert main(["runs", "--json"]) == 0


def test_odd_types_break_nothing(runs: Path, capsys: Captured) -> None:
    odd = {"sessions": [[]], "parameters": [], "versions": 3, "data": {"train": {}}}
    (runs / "a" / "environment.json").write_text(json.dumps(odd))
    huge = "9" * 400
    with open(runs / "a" / "metrics.jsonl", "a") as file:
        file.write(f'{{"kind": "step", "step": 5, "tokens": 1.5, "loss": {huge}}}\n')
    assert main(["runs"]) == 0
    assert main(["runs", "runs/a", "runs/deep/b"]) == 0
    found = read_run(runs / "a")
    assert (found.began, found.parameters, found.loss) == (None, None, None)


def test_a_folder_that_cannot_be_read_is_passed_over(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (runs / "locked").mkdir()
    originals = Path.iterdir, Path.is_file

    def refusing(number: int) -> Any:
        def ask(self: Path) -> Any:
            if "locked" in self.parts:
                raise PermissionError(13, "Permission denied", str(self))
            return originals[number](self)

        return ask

    monkeypatch.setattr(Path, "iterdir", refusing(0))
    monkeypatch.setattr(Path, "is_file", refusing(1))
    assert find_runs("runs") == [runs / "a", runs / "deep" / "b"]
    with pytest.raises(InputError, match=r"cannot read runs/locked: Permission denied"):
        find_runs("runs/locked")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere is not a folder"),
        (["empty"], "empty holds no run; pellucid train makes one"),
        (["runs/a", "empty"], "empty is not a run folder"),
        (["a\udcffb"], "cannot be a path"),
    ],
)
def test_what_is_no_run_is_one_line_and_exit_2(runs: Path, capsys: Captured, arguments: list[str], words: str) -> None:
    Path("empty").mkdir()
    assert main(["runs", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert captured.err.count("\n") == 1
