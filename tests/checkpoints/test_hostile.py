"""Folders made to harm: each is one clear error, in bounded time and memory, and nothing in them is run."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.folders import describe, resign
from helpers.tiny import tiny_config, tiny_model
from pellucid.checkpoints import load, save, verify
from pellucid.checkpoints.contract import CONTRACT
from pellucid.checkpoints.weights import WEIGHTS
from pellucid.errors import ArgumentError, CheckpointError, InputError


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "a"
    save(folder, tiny_model(dtype=torch.float32, hidden_size=16))
    return folder


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "a"))


def refused(folder: Path, words: str, check: Any = "headers") -> None:
    started = time.process_time()
    with pytest.raises(CheckpointError, match=words) as caught:
        load(folder, check=check)
    assert time.process_time() - started < 5
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 2000


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    resign(folder, change)


# ---------------------------------------------------------------- the weights (see test_header for single headers)


def _resized(size: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:size] + bytes(max(0, size - len(content)))


def _swapped(content: bytes) -> bytes:
    """Two tensors of one shape change places: every header stays right."""
    a, b = b"layers.0.attn_norm.weight", b"layers.1.attn_norm.weight"
    return content.replace(a, b"#" * len(a)).replace(b, a).replace(b"#" * len(a), b)


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str, str]] = {
    "empty": (_resized(0), "headers", "is empty; it was not written completely"),
    "cut in the header": (_resized(100), "headers", "cut short"),
    "cut by a byte": (lambda c: c[:-1], "headers", "file not fully covered.*cut short or damaged"),
    "longer by a byte": (lambda c: c + b"\0", "headers", "file not fully covered.*cut short or damaged"),
    "a header of 1 GB": (lambda c: (1 << 30).to_bytes(8, "little") + c[8:], "headers", "cut short"),
    "one bit of a weight": (lambda c: c[:-1] + bytes([c[-1] ^ 1]), "digests", "was changed or damaged"),
    "two tensors swapped": (_swapped, "digests", "was changed or damaged"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_weights_are_refused_at_the_level_that_promises_it(saved: Path, kind: str) -> None:
    change, level, words = DAMAGE[kind]
    (saved / WEIGHTS).write_bytes(change((saved / WEIGHTS).read_bytes()))
    refused(saved, words, level)
    if level == "digests":
        load(saved)


@pytest.mark.parametrize("kind", ["one bit of a weight", "two tensors swapped"])
def test_damage_with_fitting_digests_is_seen_by_the_witness(saved: Path, kind: str) -> None:
    with torch.no_grad():
        model = load(saved).model
        model.layers[0].attn_norm.weight.mul_(1.5)
    save(saved.parent / "b", model)
    content = bytearray((saved.parent / "b" / WEIGHTS).read_bytes())
    if kind == "one bit of a weight":
        content[-2] ^= 0x40
    else:
        content = bytearray(_swapped(bytes(content)))
    (saved.parent / "b" / WEIGHTS).write_bytes(content)
    resign(saved.parent / "b", lambda data: None)
    load(saved.parent / "b", check="digests")
    refused(saved.parent / "b", "does not have the outputs|cannot run its probes", "witness")


def test_a_weight_that_is_not_finite_has_no_witness(saved: Path) -> None:
    tensors = load_file(saved / WEIGHTS)
    tensors["norm.weight"][0] = float("nan")
    save_file(tensors, saved / WEIGHTS)
    rewrite(saved, lambda data: None)
    refused(saved, "does not have the outputs .* by nan", "witness")
    assert verify(saved).to_dict()["probes"][0]["size"] == "nan"


# ---------------------------------------------------------------- the contract


def _nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


CONTRACTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "names code": (lambda c: c["model"].update(auto_map={"AutoModel": "evil.Model"}), "no key 'auto_map'"),
    "many wrong keys in a probe": (
        lambda c: c["witness"]["probes"]["plain"].update({f"k{n}": n for n in range(100)}),
        "witness.probes.plain has no key 'k0'",
    ),
    "heads without end": (
        lambda c: c["model"]["attention"].update(num_attention_heads=1 << 24, num_key_value_heads=1 << 24),
        "num_attention_heads is 16777216, but must be at most",
    ),
    "names internals": (lambda c: c["model"].update(_attn_implementation="x/y"), "no key '_attn_implementation'"),
    "nested deep": (lambda c: c.update(model=_nested(40)), "nests values deeper than 16 levels"),
    "many values": (lambda c: c["model"].update({f"k{n}": n for n in range(41_000)}), "values and .* keys besides"),
    "too many wrong keys": (
        lambda c: c["model"].update({f"k{n}": n for n in range(5000)}),
        "values and .* keys besides",
    ),
    "many wrong keys": (lambda c: c["model"].update({f"k{n}": n for n in range(3000)}), "model has no key 'k0'"),
    "many wrong tensors": (lambda c: c.update(tensors={f"k{n}": "?" for n in range(20_000)}), "a dtype and shape"),
    "a tensor that is a list": (lambda c: c["tensors"].update(x=[1]), "tensors must map names to text"),
    "a digest that is a number": (lambda c: c["digests"].update(x=1), "digests must map names to text"),
    "endless digits": (lambda c: c["model"].update(layers=[f"window({'9' * 400})"] * 2), "1329 bits, but must be"),
    "a rule that is code": (lambda c: c["model"].update(layers=["__import__('os')"] * 2), "holds '__import__|no rule"),
    "a rule without end": (lambda c: c["model"].update(layers=["(" * 400] * 2), "cannot be read"),
    "a huge probe": (
        lambda c: c["witness"]["probes"]["plain"]["probe"]["batch"].update(tokens=[[1] * 2000]),
        "at most 1100 items",
    ),
    "a token out of the vocabulary": (
        lambda c: c["witness"]["probes"]["plain"]["probe"]["batch"]["tokens"][0].__setitem__(0, 999),
        "cannot run its probes: token id 999",
    ),
}


@pytest.mark.parametrize("kind", CONTRACTS)
def test_a_hostile_contract_is_refused(saved: Path, kind: str) -> None:
    change, words = CONTRACTS[kind]
    data = json.loads((saved / CONTRACT).read_text())
    change(data)
    (saved / CONTRACT).write_text(json.dumps(data))
    if "contract was changed" in words or "cannot run" in words:
        resign(saved, lambda _: None)
    refused(saved, words, "witness")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"schema_version": 2, "schema_version": 2}', "is named twice"),
        ('{"schema_version": NaN}', "NaN is not a finite number"),
        ('{"schema_version": 1e999}', "1e999 is not a finite number"),
        ('{"schema_version": "\\ud800"}', "schema_version"),
        ("[" * 1_000_000, "cannot be read as JSON"),
        ("{" * 9 + " " * 9_000_000, "larger than"),
        ("2", "not a mapping"),
    ],
)
def test_a_text_that_is_no_contract_is_refused(saved: Path, text: str, words: str) -> None:
    (saved / CONTRACT).write_text(text)
    refused(saved, words)


ABSURD = {
    "hidden_size": {"hidden_size": 1 << 24},
    "vocab_size": {"vocab_size": 1 << 24},
    "heads": {"attention": {"num_attention_heads": 1 << 14, "num_key_value_heads": 1 << 14, "head_dim": 1 << 24}},
    "ffn": {"ffn": {"kind": "gated", "intermediate_size": 1 << 24}},
    "full": {
        "hidden_size": 1 << 24,
        "vocab_size": 1 << 24,
        "attention": {"num_attention_heads": 1 << 14, "num_key_value_heads": 1, "head_dim": 1 << 24},
    },
}


@pytest.mark.parametrize("kind", ABSURD)
@pytest.mark.parametrize("lists", ["as they were", "as absurd"])
def test_absurd_dimensions_are_refused_before_anything_is_allocated(saved: Path, kind: str, lists: str) -> None:
    """The lists are held against the file first, and the model is laid out without memory."""

    def change(data: dict[str, Any]) -> None:
        changed = tiny_config(hidden_size=16).model_copy(update=ABSURD[kind])
        if lists == "as they were":
            data.update(model=changed.model_dump(mode="json"))
        else:
            describe(data, changed)

    try:
        resign(saved, change)
    except RuntimeError:  # no tensor, not even an empty one, can have this size: there are no such lists
        return
    refused(saved, "contradicts itself|cannot be laid out|does not hold the tensors", "witness")


def test_absurd_layers_are_refused_before_they_are_made(saved: Path) -> None:
    rewrite(saved, lambda data: data["model"].update(layers=["causal()"] * 4096))
    refused(saved, "describes 4096 layers but only 20 tensors")


# ---------------------------------------------------------------- bounded memory


def peak() -> int:
    """The most MiB that this process had in memory since it was last told to forget."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) // 1024


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's record of peak memory")
def test_memory_stays_bounded(saved: Path) -> None:
    """A sparse gigabyte, a header of many small objects, a contract full of keys, absurd sizes."""
    made = []

    def copy(name: str) -> Path:
        made.append(Path(shutil.copytree(saved, saved.parent / name)))
        return made[-1]

    os.truncate(copy("sparse") / WEIGHTS, 1 << 33)
    with open(copy("long header") / WEIGHTS, "wb") as file:
        file.write((1 << 30).to_bytes(8, "little"))
        file.truncate((1 << 30) + 8)
    header = ("{" + ",".join(f'"{n}":{{}}' for n in range(150_000)) + "}").encode()
    (copy("busy header") / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)
    keys = ",".join(f'"{n}":[]' for n in range(150_000))
    (copy("busy contract") / CONTRACT).write_text(f'{{"schema_version":2,{keys}}}')
    resign(copy("absurd"), lambda data: data["model"].update(hidden_size=1 << 24))
    for folder in made:
        Path("/proc/self/clear_refs").write_text("5")
        before = peak()
        refused(folder, ".", "witness")
        assert peak() - before < 400, folder


# ---------------------------------------------------------------- names that are no folders


@pytest.mark.parametrize("path", ["", "\0", "a" * 5000, "nowhere/at/all"])
def test_a_path_that_leads_nowhere_is_one_line(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for function in (load, verify):
        with pytest.raises(InputError) as caught:
            function(path)
        assert "\n" not in str(caught.value)


def test_a_level_that_is_none_is_refused(saved: Path) -> None:
    with pytest.raises(ArgumentError, match="check is 'full'; choose one of headers, digests, witness"):
        load(saved, check="full")  # type: ignore[arg-type]
