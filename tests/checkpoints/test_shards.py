"""Weights in several files: the same model, and an index that is believed only about its own folder."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.folders import resign
from helpers.tiny import tiny_config, tiny_model
from pellucid.batch import Batch
from pellucid.checkpoints import MismatchError, load, save, verify
from pellucid.checkpoints.contract import CONTRACT
from pellucid.checkpoints.weights import INDEX, WEIGHTS, read_weights
from pellucid.errors import ArgumentError, CheckpointError
from pellucid.models import build

BATCH = Batch.from_rows([[5, 8, 2], [7]])


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards") / "a"
    save(folder, tiny_model(seed=1), max_shard_bytes=20_000)
    return folder


@pytest.fixture
def sharded(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "a"))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def rewrite_index(folder: Path, change: Any) -> None:
    data = json.loads((folder / INDEX).read_text())
    change(data["weight_map"])
    (folder / INDEX).write_text(json.dumps(data))


def say_size(folder: Path, metadata: Any) -> None:
    data = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps(data | {"metadata": metadata}))


def test_a_model_in_shards_is_the_same_model(sharded: Path) -> None:
    names = [path.name for path in shards(sharded)]
    assert names == [f"model-{n:05}-of-{len(names):05}.safetensors" for n in range(1, len(names) + 1)]
    assert len(names) > 3
    assert not (sharded / WEIGHTS).exists()
    found = load(sharded, check="witness")
    assert torch.equal(found.model(BATCH).logits, tiny_model(seed=1)(BATCH).logits)
    assert set(found.contract.digests) == {*names, INDEX, CONTRACT}
    assert found.report.complete


def test_the_index_is_the_one_that_others_read(sharded: Path) -> None:
    data = json.loads((sharded / INDEX).read_text())
    assert set(data) == {"metadata", "weight_map"}
    tensors = {name: path.name for path in shards(sharded) for name in load_file(path)}
    assert data["weight_map"] == tensors
    assert data["metadata"]["total_size"] == sum(t.nbytes for p in shards(sharded) for t in load_file(p).values())


def test_no_shard_is_larger_than_asked_unless_one_tensor_is(tmp_path: Path) -> None:
    model = tiny_model(dtype=torch.float32)
    largest = max(weight.nbytes for weight in model.parameters())
    for most in (1, 5000, largest + 1):
        save(tmp_path / str(most), model, max_shard_bytes=most)
        for path in shards(tmp_path / str(most)):
            held = load_file(path)
            assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= most
    assert len(shards(tmp_path / "1")) == len(list(model.parameters()))


def test_what_fits_in_one_file_has_no_index(tmp_path: Path) -> None:
    save(tmp_path / "a", tiny_model(), max_shard_bytes=10**9)
    assert sorted(os.listdir(tmp_path / "a")) == [WEIGHTS, CONTRACT]


def test_shards_are_mapped_and_read_one_tensor_at_a_time(sharded: Path) -> None:
    before = {path: path.read_bytes() for path in shards(sharded)}
    with torch.no_grad():
        for weight in load(sharded).model.parameters():
            weight.add_(1)
    assert {path: path.read_bytes() for path in shards(sharded)} == before


@pytest.mark.parametrize("most", [0, -1, "x", True, 1.5, "20_000"])
@pytest.mark.usefixtures("our_checks_only")
def test_a_size_that_is_none_is_refused(tmp_path: Path, most: Any) -> None:
    with pytest.raises(ArgumentError, match=r"max_shard_bytes is .*, but must be a whole number of at least 1"):
        save(tmp_path / "a", tiny_model(), max_shard_bytes=most)
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------- what is refused


def refused(folder: Path, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["../outside.safetensors", "/etc/passwd", "sub/inner.safetensors", "..", ".hidden.safetensors", "a\0.safetensors",
     "model.safetensors/../../x.safetensors", "C:\\x.safetensors", "m.bin", "", "a" * 999 + ".safetensors", 7, None],
)  # fmt: skip
def test_an_index_names_only_files_of_its_folder(sharded: Path, name: Any) -> None:
    save_file({"norm.weight": torch.zeros(32)}, sharded.parent / "outside.safetensors")
    rewrite_index(sharded, lambda places: places.update({"norm.weight": name}))
    refused(sharded, "may only name .safetensors files of its own folder")


@pytest.mark.parametrize("kind", ["link", "relative link", "folder", "pipe"])
@pytest.mark.parametrize("name", [INDEX, "model-00002", CONTRACT])
def test_only_regular_files_are_read(sharded: Path, kind: str, name: str) -> None:
    path = next(sharded.glob(f"{name}*"))
    real = path.rename(sharded.parent / "outside")
    match kind:
        case "link":
            path.symlink_to(real)
        case "relative link":
            path.symlink_to("../outside")
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
    refused(sharded, "is a link|not a regular file|cannot read|has no pellucid.json")


def test_a_shard_that_is_missing_is_named(sharded: Path) -> None:
    shards(sharded)[1].unlink()
    refused(sharded, rf"cannot read .*{'model-00002'}.*No such file")


@pytest.mark.parametrize("name", ["model-00009-of-00009.safetensors", "model.safetensors", "model-old.safetensors"])
def test_a_file_of_weights_that_is_not_read_is_named(sharded: Path, name: str) -> None:
    save_file({"x": torch.zeros(2)}, sharded / name)
    refused(sharded, f"also holds {name}, which model.safetensors.index.json does not name")


def test_shards_beside_a_single_file_are_named(tmp_path: Path) -> None:
    save(tmp_path / "a", tiny_model())
    for number in (1, 2):
        save_file({"x": torch.zeros(2)}, tmp_path / "a" / f"model-0000{number}-of-00002.safetensors")
    refused(tmp_path / "a", "also holds model-00001-of-00002.safetensors and 1 more, which is no part of its weights")


def test_a_tensor_in_two_shards_is_named(sharded: Path) -> None:
    first, second, *_ = shards(sharded)
    name = next(iter(load_file(first)))
    save_file(load_file(second) | {name: torch.zeros(2)}, second)
    refused(sharded, f"{second.name} holds tensor '{name}', but {INDEX} places it in {first.name}")


def test_a_tensor_that_the_index_does_not_name_is_named(sharded: Path) -> None:
    first = shards(sharded)[0]
    save_file(load_file(first) | {"extra": torch.zeros(2)}, first)
    refused(sharded, f"holds tensor 'extra', but {INDEX} does not name it")


def test_a_tensor_that_lies_elsewhere_is_named(sharded: Path) -> None:
    last = shards(sharded)[-1].name
    rewrite_index(sharded, lambda places: places.update({"embed_tokens.weight": last}))
    refused(sharded, f"places tensor 'embed_tokens.weight' in {last}, which does not hold it")


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": "x.safetensors"}, "b": 1}']
)
def test_an_index_that_is_none_is_refused(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    refused(sharded, "is not a mapping|is not an index")


@pytest.mark.parametrize("size", [None, True, "91904", [1], {}, "absent"])
def test_an_index_says_its_size_as_a_number(sharded: Path, size: Any) -> None:
    for metadata in [{} if size == "absent" else {"total_size": size}, size]:
        say_size(sharded, metadata)
        refused(sharded, "has the metadata.total_size .*, but a number is wanted: copy it again")


@pytest.mark.parametrize("more", [1, -1, 0.5, 10**30])
def test_the_size_in_an_index_is_that_of_its_tensors(sharded: Path, more: float) -> None:
    real = sum(weight.nbytes for weight in load(sharded).model.parameters())
    say_size(sharded, {"total_size": real + more})
    refused(sharded, rf"has a metadata.total_size of .*, but its tensors have {real} bytes; copy it again")
    say_size(sharded, {"total_size": float(real), "total_parameters": 7})  # as others write it
    assert load(sharded).report.complete


def test_more_files_than_anybody_has_are_refused(sharded: Path) -> None:
    rewrite_index(sharded, lambda places: places.update({f"t{n}": f"m{n}.safetensors" for n in range(1001)}))
    refused(sharded, "at most 1000 are read")


def test_digests_cover_each_shard_and_the_index(sharded: Path) -> None:
    """Also what changes no tensor: the order in the index, a comment in a header."""
    for path in [*shards(sharded), sharded / INDEX]:
        before = path.read_bytes()
        if path.suffix == ".json":
            path.write_bytes(before + b" ")
        else:
            save_file(load_file(path), path, metadata={"format": "np"})
        load(sharded)
        with pytest.raises(MismatchError, match=f"{path.name} has SHA-256 .* it was changed or damaged"):
            load(sharded, check="digests")
        path.write_bytes(before)
    load(sharded, check="digests")


def test_a_digest_of_another_file_is_refused_unread(sharded: Path) -> None:
    resign(sharded, lambda data: data["digests"].update({"../outside": "0" * 64}))
    assert "has no ../outside, but its contract has a digest of it" in verify(sharded, "digests").problem
    resign(sharded, lambda data: (data["digests"].pop("../outside"), data["digests"].pop(INDEX)))
    assert f"has a {INDEX}, but its contract has no digest of it" in verify(sharded, "digests").problem


def test_the_headers_of_all_shards_make_one(sharded: Path) -> None:
    found = read_weights(sharded)
    assert set(found.header) == set(found.places) == set(build(tiny_config()).state_dict()) - {"lm_head.weight"}
    assert found.files == (sharded / INDEX, *shards(sharded))
