"""A run that is killed again and again ends as if nothing had happened, and leaves nothing wrong on the way."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

LIVES = Path(__file__).with_name("lives.py")

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="lives are forks")

# What a kill is in the middle of, and which one of them; the run has about 20 of each.
POINTS = [
    ("sync", 1),  # nothing but an empty run folder
    ("accumulation", 8),
    ("state written", 1),
    ("after rename", 1),  # a whole checkpoint that nothing points to yet
    ("validation", 3),
    ("log", 9),
    ("weights written", 2),
    ("before pointer", 3),
    ("folder written", 1),
    ("after pointer", 2),
    ("prune", 2),
    ("before rename", 2),
    ("optimizer", 7),
]


def config(folder: Path, steps: int) -> dict[str, Any]:
    for n in range(12):
        (folder / f"{n}.txt").write_text(f"line {n} of the text, to be or not to be {n * n}\n" * (3 + n % 5))
    return {
        "model": {
            "vocab_size": 270,
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "attention": {"num_attention_heads": 2},
            "ffn": {"kind": "dense", "intermediate_size": 16},
            "dropout": {"residual": 0.1},
        },
        "data": {"source": str(folder / "*.txt"), "heldout_fraction": 0.3, "max_length": 16},
        "max_steps": steps,
        "lr_scheduler": {"warmup_steps": 3},
        "batch_size": 2,
        "gradient_accumulation_steps": 2,
        "eval_steps": 3,
        "evaluation": {"num_documents": 2},
        "save_steps": 4,
        "num_threads": 1,
    }


def lived(folder: Path, steps: int, plan: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train straight, and killed as ``plan`` says; what came of each life."""
    (folder / "config.yaml").write_text(yaml.safe_dump(config(folder, steps)))
    (folder / "plan.json").write_text(json.dumps(plan))
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(LIVES), str(folder)], env=os.environ | threads, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((folder / "report.json").read_text())
    assert report["last"] == 0, done.stderr
    assert [life["looked"] for life in report["lives"]] == [0] * len(plan), done.stderr
    lives: list[dict[str, Any]] = report["lives"]
    return lives


def lines(run: Path, kind: str, names: tuple[str, ...]) -> list[list[Any]]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [[record[name] for name in names] for record in records if record["kind"] == kind]


def assert_same_run(folder: Path, keep: int = 2) -> None:
    """Weights, optimizer, generators, cursor, data order, log, pointers: bit for bit."""
    straight, killed = folder / "straight", folder / "killed"
    step = (straight / "last").read_text().strip()
    assert (killed / "last").read_text().strip() == step
    for name in ("model.safetensors", "training/state.safetensors"):
        a, b = (load_file(run / "checkpoints" / step / name) for run in (straight, killed))
        assert a.keys() == b.keys()
        assert [key for key in a if not torch.equal(a[key], b[key])] == []
    a, b = (
        json.loads((run / "checkpoints" / step / "training" / "state.json").read_text()) for run in (straight, killed)
    )
    for counters in (a, b):
        del counters["minutes"], counters["training_seconds"], counters["sha256"]  # which is of all others
    assert a == b
    logged = ("step", "tokens", "num_targets", "loss", "learning_rate", "grad_norm", "epoch")
    assert lines(straight, "step", logged) == lines(killed, "step", logged)
    found = ("step", "bits_per_byte", "best", "final")
    assert lines(straight, "validation", found) == lines(killed, "validation", found)
    assert (straight / "best").read_text() == (killed / "best").read_text()
    saved = sorted(os.listdir(straight / "checkpoints"))
    assert sorted(os.listdir(killed / "checkpoints")) == sorted({*saved[-keep:], (killed / "best").read_text().strip()})
    order = dict(line.split() for line in Path(f"{straight}.order").read_text().splitlines())
    again = [line.split() for line in Path(f"{killed}.order").read_text().splitlines()]
    assert {number for number, _ in again} == order.keys()
    assert [number for number, digest in again if order[number] != digest] == []


def test_a_run_killed_in_the_middle_of_everything_ends_the_same(tmp_path: Path) -> None:
    lives = lived(tmp_path, 40, [{"point": point, "nth": nth} for point, nth in POINTS])
    assert [life["doom"]["point"] for life in lives if life["ended"] != -9] == []
    assert_same_run(tmp_path)


@pytest.mark.slow
def test_a_run_killed_at_fifty_random_moments_ends_the_same(tmp_path: Path) -> None:
    """Half of them by the clock, half of them inside something."""
    draw = random.Random(20261129)
    timed = [{"share": draw.random()} for _ in range(25)]
    inside = [{"point": draw.choice(POINTS)[0], "nth": draw.randint(1, 4)} for _ in range(25)]
    plan = [*timed, *inside]
    draw.shuffle(plan)
    lives = lived(tmp_path, 600, plan)
    assert [life["ended"] for life in lives] == [-9] * 50
    assert_same_run(tmp_path)
