"""A run's state goes to two plain files and comes back whole."""

import hashlib
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from pellucid.checkpoints.files import canonical_digest
from pellucid.errors import CheckpointError
from pellucid.training.config import AdamWConfig
from pellucid.training.optim import make_optimizers
from pellucid.training.state import (
    TrainerState,
    load_state,
    random_state,
    read_trainer_state,
    save_state,
    seed_all,
    set_random_state,
)
from pellucid.training.step import OptimizerSet

COUNTERS = TrainerState(
    step=7,
    tokens=900,
    minutes=1.5,
    training_seconds=80.25,
    best=2.125,
    best_step=5,
    loader={"batch": 7, "data": "ab"},
)


def stepped() -> tuple[nn.Module, OptimizerSet]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizers = make_optimizers(model, AdamWConfig())
    model(torch.ones(1, 3)).sum().backward()
    optimizers.step()
    return model, optimizers


def draws() -> list[float]:
    return [torch.rand(()).item(), random.random(), random.gauss(), np.random.rand(), np.random.randn()]


def draws_of_a_copy() -> list[float]:
    """What the generators would draw next, without drawing it."""
    state = random_state()
    found = draws()
    set_random_state(state, Path("memory"))
    return found


def test_counters_optimizers_and_every_generator_come_back(tmp_path: Path) -> None:
    _, optimizers = stepped()
    random.gauss()  # leaves half a pair behind, which is state too
    np.random.randn()
    save_state(tmp_path / "training", COUNTERS, optimizers)
    memory = {name: tensor.clone() for name, tensor in optimizers.state_tensors().items()}
    expected = draws()
    _, fresh = stepped()
    fresh.step()
    assert load_state(tmp_path / "training", fresh) == COUNTERS
    assert draws() == expected
    assert {name: tensor.tolist() for name, tensor in fresh.state_tensors().items()} == {
        name: tensor.tolist() for name, tensor in memory.items()
    }


def test_a_seed_starts_every_generator() -> None:
    found = []
    for seed in (3, 3, 4, 2**32 + 5):
        seed_all(seed)
        found.append(draws())
    assert found[0] == found[1]
    assert all(a != b for a, b in zip(found[1], found[2], strict=True))


def test_there_is_nothing_in_it_to_unpickle(tmp_path: Path) -> None:
    _, optimizers = stepped()
    save_state(tmp_path / "training", COUNTERS, optimizers)
    assert sorted(p.name for p in (tmp_path / "training").iterdir()) == ["state.json", "state.safetensors"]
    assert json.loads((tmp_path / "training" / "state.json").read_text())["step"] == 7


def rewritten(path: Path, **changes: Any) -> None:
    """Change what the file says, and its digest with it."""
    said = {**json.loads(path.read_text()), **changes}
    del said["sha256"]
    path.write_text(json.dumps({**said, "sha256": canonical_digest(said)}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema_version": 2}, "schema_version 2, this version reads 3"),
        ({"schema_version": True}, "schema_version True, this version reads 3"),
        ({"surprise": 1}, "does not know 'surprise'"),
        ({"step": -1}, "step is -1, but must be a count"),
        ({"step": True}, "step is true, but must be a count"),
        ({"step": 12.0}, "step is 12.0, but must be a count"),
        ({"step": 10**30}, "step is 1000000000000000000000000000000, but must be a count"),
        ({"step": 10**90}, "step is a number of 299 bits, but must be a count"),
        ({"tokens": "9"}, "tokens is '9', but must be a count"),
        ({"minutes": None}, "minutes is null, but must be an amount of time"),
        ({"training_seconds": []}, r"training_seconds is \[\], but must be an amount of time"),
        ({"best": "abc"}, "best is 'abc', but must be a loss or null"),
        ({"best": 10**400}, "best is a number of"),
        ({"best_step": 5.0}, "best_step is 5.0, but must be a step or null"),
        ({"best_step": None}, "contradict each other"),
        ({"best_step": 8}, "best_step 8 and step 7, which contradict each other"),
        ({"loader": None}, "loader is null, but must be a cursor"),
    ],
)
def test_counters_that_are_none_are_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    _, optimizers = stepped()
    save_state(tmp_path / "training", COUNTERS, optimizers)
    rewritten(tmp_path / "training" / "state.json", **change)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_state(tmp_path / "training", optimizers)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [{"step": 8}, {"tokens": 901}, {"minutes": 1.25}, {"best": 2.0}, {"best_step": 4}, {"loader": {"batch": 8}}],
)
def test_counters_that_were_changed_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    """Each would be a place where a run could be."""
    _, optimizers = stepped()
    save_state(tmp_path / "training", COUNTERS, optimizers)
    path = tmp_path / "training" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    for tensors in (True, False):
        with pytest.raises(CheckpointError, match="says something else than when it was written"):
            read_trainer_state(tmp_path / "training", tensors=tensors)
    rewritten(path, **change)
    assert read_trainer_state(tmp_path / "training", tensors=False) == replace(COUNTERS, **change)


def test_a_number_too_long_to_read_is_refused(tmp_path: Path) -> None:
    _, optimizers = stepped()
    save_state(tmp_path / "training", COUNTERS, optimizers)
    path = tmp_path / "training" / "state.json"
    path.write_text(path.read_text().replace('"step": 7', f'"step": {"9" * 5000}'))
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        read_trainer_state(tmp_path / "training")


@pytest.mark.parametrize("content", [b"", b"[]", b"[" * 100_000, b"\xff"])
def test_counters_that_cannot_be_read_are_refused(tmp_path: Path, content: bytes) -> None:
    _, optimizers = stepped()
    save_state(tmp_path / "training", COUNTERS, optimizers)
    (tmp_path / "training" / "state.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"state\.json"):
        load_state(tmp_path / "training", optimizers)


@pytest.mark.parametrize("name", ["torch", "numpy", "python", "python_gauss", "numpy_gauss"])
def test_a_generator_without_a_state_is_refused(name: str) -> None:
    state = random_state()
    broken = {key: torch.zeros(3, dtype=value.dtype) for key, value in state.items()}
    with pytest.raises(CheckpointError, match="no usable state of the random generators"):
        set_random_state({key: value for key, value in state.items() if key != name}, Path("x"))
    with pytest.raises(CheckpointError, match="no usable state"):
        set_random_state(state | {name: broken[name][:2]} if name != "python_gauss" else {}, Path("x"))


def test_tensors_that_belong_to_nothing_are_refused(tmp_path: Path) -> None:
    _, optimizers = stepped()
    save_state(tmp_path / "training", COUNTERS, optimizers)
    path = tmp_path / "training" / "state.safetensors"
    save_file(load_file(path) | {"surprise": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match="it was changed or damaged"):
        load_state(tmp_path / "training", optimizers)
    counters = tmp_path / "training" / "state.json"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    rewritten(counters, tensors_sha256=digest)
    with pytest.raises(CheckpointError, match="'surprise', which is no part"):
        load_state(tmp_path / "training", optimizers)


def test_one_changed_bit_is_found_before_anything_is_taken_over(tmp_path: Path) -> None:
    _, optimizers = stepped()
    save_state(tmp_path / "training", COUNTERS, optimizers)
    path = tmp_path / "training" / "state.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    before = draws_of_a_copy()
    with pytest.raises(CheckpointError, match="it was changed or damaged"):
        load_state(tmp_path / "training", optimizers)
    assert draws_of_a_copy() == before
    path.unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*state\.safetensors"):
        load_state(tmp_path / "training", optimizers)
