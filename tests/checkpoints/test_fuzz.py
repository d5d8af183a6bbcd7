"""Random damage to every file of a folder: an error in our own words, or the same content as before."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from helpers.folders import resign
from helpers.tiny import tiny_config, tiny_model
from pellucid.checkpoints import load, save
from pellucid.checkpoints.contract import CONTRACT
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import InputError

short_and_long = pytest.mark.parametrize("seed", [1, *(pytest.param(s, marks=pytest.mark.slow) for s in range(2, 40))])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "a"
    tokenizer = Tokenizer.train(["to be or not to be"] * 3, vocab_size=262)
    # heads of 4: with heads of 2 there is one pair to turn, and a RoPE base has no say in it
    config = {"vocab_size": 262, "hidden_size": 16, "num_hidden_layers": 1}
    save(path, tiny_model(seed=1, **config), tokenizer=tokenizer, max_shard_bytes=34_000)
    return path


def damaged(content: bytes, dice: random.Random) -> bytes:
    """One to three random changes of a few bytes, or of many."""
    changed = bytearray(content)
    for _ in range(dice.randint(1, 3)):
        at = dice.randrange(len(changed) + 1)
        end = min(len(changed), at + dice.choice([1, 1, 2, 8, 64, len(changed)]))
        match dice.randrange(7):
            case 0 if at < len(changed):
                changed[at] ^= 1 << dice.randrange(8)
            case 1:
                changed[at:end] = dice.randbytes(end - at)
            case 2:
                del changed[at:end]
            case 3:
                changed[at:at] = changed[at:end]
            case 4:
                changed[at:at] = dice.choice([b"{", b"]", b'"', b"\\u0000", b"9" * 30, b"NaN", b",", b"\xff", b" "])
            case 5 if at < len(changed):
                changed[at] = dice.choice(b'0123456789"{}[]:,.eE+-/ \n')
            case 6:
                other = dice.randrange(len(changed) + 1)
                piece = changed[other : other + end - at]
                changed[at : at + len(piece)] = piece
        changed = changed or bytearray(b"\0")
    return bytes(changed)


def outcome(folder: Path, check: Any) -> str:
    try:
        load(folder, check=check)
    except InputError as error:
        return type(error).__name__ if "\n" not in str(error) else f"more than one line: {error}"
    return "loaded"


@short_and_long
def test_random_bytes_are_never_loaded_in_silence(folder: Path, seed: int) -> None:
    """Files are hashed before anything else is made of them; the contract hashes itself."""
    dice = random.Random(seed)
    paths = sorted(folder.iterdir())
    assert len(paths) == 5
    seen: Counter[str] = Counter()
    for number in range(160):
        path = dice.choice([*paths, folder / CONTRACT])
        before = path.read_bytes()
        after = damaged(before, dice)
        if after == before:
            continue
        path.write_bytes(after)
        try:
            check = "headers" if number % 6 == 0 else "digests"
            result = outcome(folder, check)
            seen[result] += 1
            if result == "loaded" and check == "digests":
                assert path.name == CONTRACT, path
                assert json.loads(after) == json.loads(before)
        finally:
            path.write_bytes(before)
    assert set(seen) <= {"loaded", "CheckpointError", "MismatchError", "LoadError", "DataError"}
    assert min(seen["CheckpointError"], seen["MismatchError"]) > 10
    assert outcome(folder, "witness") == "loaded"


NUMBERS = [True, -1, 0, 1, 3, 1 << 70, 0.5, 1e308]
VALUES = [None, *NUMBERS, "", "x" * 50, "causal()", "window(1)", "float32[1]", [], [[]], {}]


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [found for key, value in items for found in [(*path, key), *places(value, (*path, key))]]


@short_and_long
def test_random_values_with_fitting_digests_never_pass_the_witness(folder: Path, seed: int) -> None:
    """Whoever signs a contract again still has to bear it out."""
    dice = random.Random(seed)
    before = (folder / CONTRACT).read_text()
    forward = [place for place in places(json.loads(before)) if place[0] != "digests"]
    config = tiny_config(vocab_size=262, hidden_size=16, num_hidden_layers=1)
    for _ in range(20):
        *path, key = dice.choice(forward)
        value = dice.choice(VALUES)

        def change(data: Any, path: list[Any] = path, key: Any = key, value: Any = value) -> None:
            for step in path:
                data = data[step]
            data[key] = value

        try:
            resign(folder, change)
            if outcome(folder, "witness") == "loaded":
                found = load(folder).contract
                free = {"initializer_range", "residual_init"}
                assert found.model.model_dump(exclude=free) == config.model_dump(exclude=free), (path, key, value)
        finally:
            (folder / CONTRACT).write_text(before)
