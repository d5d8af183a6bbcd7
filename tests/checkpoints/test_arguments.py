"""What is handed in wrongly is refused in one line of our own, before anything is read or written."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.tiny import tiny_config, tiny_model
from pellucid.checkpoints import load, save, verify
from pellucid.checkpoints.contract import CONTRACT
from pellucid.checkpoints.weights import DTYPES, WEIGHTS
from pellucid.errors import ArgumentError, CheckpointError, InputError
from pellucid.models import build

pytestmark = pytest.mark.usefixtures("our_checks_only")
ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arguments") / "a"
    save(folder, tiny_model(dtype=torch.float32, hidden_size=16))
    return folder


def refused(
    words: str, function: Callable[..., Any], *values: Any, error: type[InputError] = ArgumentError, **named: Any
) -> None:
    with pytest.raises(error, match=words) as caught:
        function(*values, **named)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    str(caught.value).encode()  # can be printed


# ---------------------------------------------------------------- load


@pytest.mark.parametrize("name", DTYPES)
def test_a_type_may_be_given_by_its_name(saved: Path, name: str) -> None:
    found = load(saved, dtype=name).model
    assert {weight.dtype for weight in found.parameters()} == {DTYPES[name]} == {getattr(torch, name)}


ODD_DTYPES = [torch.int32, torch.complex64, torch.float8_e4m3fn, torch.bool, "bf16", "float", "torch.float32", "", 5]


@pytest.mark.parametrize("dtype", ODD_DTYPES, ids=str)
def test_another_type_is_refused(saved: Path, dtype: Any) -> None:
    refused("dtype is .*, but weights can be float64, float32, bfloat16, float16; choose one", load, saved, dtype=dtype)


@pytest.mark.parametrize("device", ["zz", "", "cpu:x", 5, True, None, [1]], ids=str)
def test_a_device_that_is_none_is_refused(saved: Path, device: Any) -> None:
    refused("device is .*, but a device like 'cpu' or 'cuda:0' is wanted; leave it out", load, saved, device=device)


def test_a_device_that_is_not_there_is_refused(saved: Path) -> None:
    refused("device is 'meta', which holds no weights", load, saved, device="meta")
    refused("device is 'cuda:99', which cannot be used here: .*; choose cpu", load, saved, device="cuda:99")
    refused("device is 'fpga', which cannot be used here: .*; choose cpu", load, saved, device=torch.device("fpga"))


ODD_PATHS = {
    "none": (None, "not None"),
    "a number": (5, "not 5"),
    "bytes": (b"folder", "not b'folder'"),
    "empty": ("", "the name of a checkpoint folder is empty"),
    "a NUL": ("a\0b", r"'a.*b' cannot be a path: it holds a NUL character; choose another name"),
    "half a character": ("a\ud800", r"holds the lone surrogate \\ud800"),
    "a byte that was no text": ("a\udcff", r"holds the lone surrogate \\udcff"),
}


@pytest.mark.parametrize("kind", ODD_PATHS)
def test_a_path_that_is_none_is_refused(kind: str) -> None:
    path, words = ODD_PATHS[kind]
    for function in (load, verify, lambda path: save(path, tiny_model())):
        refused(words, function, path)


# ---------------------------------------------------------------- save


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"tokenizer": "x"}, "tokenizer is 'x', but a pellucid.Tokenizer is wanted; Tokenizer.load reads"),
        ({"tokenizer": {"a": 1}}, "tokenizer is {'a': 1}, but"),
        ({"chat_template": 5}, "chat_template is 5, but a ChatTemplate or its text is wanted"),
        ({"chat_template": b"x"}, "chat_template is b'x', but"),
        ({"max_shard_bytes": "x"}, "max_shard_bytes is 'x', but must be a whole number of at least 1"),
    ],
)
def test_what_is_saved_beside_is_what_it_should_be(tmp_path: Path, named: dict[str, Any], words: str) -> None:
    refused(words, save, tmp_path / "a", tiny_model(), **named)
    assert os.listdir(tmp_path) == []


def _one_layer_in_another_type() -> Any:
    model = tiny_model(dtype=torch.float32)
    model.layers[1].double()
    return model


MODELS = {
    "nothing": (lambda: None, "a NoneType without a ModelConfig in .config cannot be saved"),
    "a number": (lambda: 5, "a int without a ModelConfig"),
    "on meta": (
        lambda: build(tiny_config(), device="meta"),
        "no numbers in 'embed_tokens.weight', which is on",
    ),
    "complex": (
        lambda: tiny_model().to(torch.complex64),
        "has complex64 in 'embed_tokens.weight', but weights can be float64, .*; convert it with model.to",
    ),
    "two types": (
        _one_layer_in_another_type,
        r"has float64\[.* as 'layers.1.*', but its .* float32\[.*; convert it with model.to\(torch.float32\)",
    ),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.filterwarnings("ignore:Complex modules")
def test_a_model_that_cannot_be_kept_is_named(tmp_path: Path, kind: str) -> None:
    make, words = MODELS[kind]
    refused(words, save, tmp_path / "a", make(), error=CheckpointError)
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------- folders that are something else


def test_a_file_is_no_folder(saved: Path) -> None:
    for name in (CONTRACT, WEIGHTS):
        refused(f"{name} is not a folder; did you mean {saved}\\?", load, saved / name, error=CheckpointError)
    (saved.parent / "file").touch()
    refused("file is not a folder; give a folder", load, saved.parent / "file", error=CheckpointError)


@pytest.mark.parametrize("kind", ["pipe", "link to an endless file", "folder", "link to nothing"])
def test_a_contract_of_another_kind_is_there(tmp_path: Path, kind: str) -> None:
    path = tmp_path / CONTRACT
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case _:
            path.symlink_to("/dev/zero" if "endless" in kind else "nowhere")
    words = r"pellucid\.json is (a link|not a regular file)|cannot read .*pellucid\.json: Is a dir"
    refused(words, load, tmp_path, error=CheckpointError)


def as_somebody_else() -> AbstractContextManager[None]:
    """Root may read everything: ask as nobody."""

    class Nobody(AbstractContextManager[None]):
        def __enter__(self) -> None:
            os.seteuid(65534)

        def __exit__(self, *_: object) -> None:
            os.seteuid(0)

    return Nobody() if ROOT else nullcontext()


@pytest.mark.parametrize("name", ["", CONTRACT, WEIGHTS])
def test_what_may_not_be_read_is_named(tmp_path: Path, name: str) -> None:
    save(tmp_path / "a", tiny_model(hidden_size=16))
    path = tmp_path / "a" / name if name else tmp_path / "a"
    parents = [p for p in tmp_path.parents if ROOT and not p.stat().st_mode & 1]
    modes = {p: p.stat().st_mode for p in (tmp_path, *parents, path)}
    for parent in (tmp_path, *parents):
        parent.chmod(modes[parent] | 0o55)
    path.chmod(0)
    try:
        with as_somebody_else():
            words = f"cannot read {path}: Permission denied; choose .* that you may read"
            refused(words, load, tmp_path / "a", error=CheckpointError)
    finally:
        for each, mode in modes.items():
            each.chmod(mode & 0o7777)
