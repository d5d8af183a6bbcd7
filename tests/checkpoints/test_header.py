"""The header of a safetensors file is believed only as far as the file bears it out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pellucid.checkpoints.weights import LONGEST_HEADER, SAFETENSORS_DTYPES, TensorSpec, read_header
from pellucid.errors import CheckpointError


def written(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(*shape: int, start: int = 0, dtype: str = "F32", **more: Any) -> dict[str, Any]:
    size = SAFETENSORS_DTYPES[dtype].itemsize
    for length in shape:
        size *= length
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + size], **more}


def test_every_dtype_is_read_as_it_was_written(tmp_path: Path) -> None:
    tensors = {code: torch.zeros(2, 3).to(dtype) for code, dtype in SAFETENSORS_DTYPES.items()} | {
        "scalar": torch.zeros(())
    }
    save_file(tensors, tmp_path / "x", metadata={"format": "pt"})
    assert read_header(tmp_path / "x") == {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
    assert str(TensorSpec.of(tensors["BF16"])) == "bfloat16[2, 3]"


def test_no_tensors_is_a_header_too(tmp_path: Path) -> None:
    assert read_header(written(tmp_path / "x", {})) == {}


HOSTILE = {
    "overlap": ({"a": entry(2), "b": entry(2, start=4)}, 12),
    "hole": ({"a": entry(2), "b": entry(2, start=12)}, 20),
    "data left over": ({"a": entry(2)}, 9),
    "data too short": ({"a": entry(2)}, 7),
    "starts late": ({"a": entry(2, start=4)}, 12),
    "size of another shape": ({"a": entry(2) | {"shape": [3]}}, 8),
    "negative": ({"a": entry(2) | {"shape": [-2]}}, 8),
    "true is no number": ({"a": entry(1) | {"shape": [True]}}, 4),
    "float is no number": ({"a": entry(2) | {"shape": [2.0]}}, 8),
    "absurd dimensions": ({"a": entry(2) | {"shape": [2**62, 2**62, 2**62]}}, 8),
    "too many axes": ({"a": entry(*[1] * 9)}, 4),
    "unknown dtype": ({"a": entry(2) | {"dtype": "F8_E4M3"}}, 8),
    "unknown key": ({"a": entry(2, code="import os")}, 8),
    "offsets of one number": ({"a": entry(2) | {"data_offsets": [8]}}, 8),
    "not a tensor": ({"a": 5}, 0),
    "a list": ([entry(2)], 8),
    "named twice": (
        b'{"a": ' + json.dumps(entry(1)).encode() + b', "a": ' + json.dumps(entry(1)).encode() + b"}",
        4,
    ),
    "not JSON": (b"{'a'", 0),
    "not UTF-8": (b'{"\xff": 1}', 0),
    "nested without end": (b"[" * 100_000, 0),
    "a number without end": (b'{"a": ' + b"9" * 10_000 + b"}", 0),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_header_that_lies_is_refused(tmp_path: Path, kind: str) -> None:
    """B109: overlaps, holes, wrong sizes and names given twice are refused before a tensor is read."""
    header, size = HOSTILE[kind]
    path = written(tmp_path / "x", header, bytes(size))
    with pytest.raises(CheckpointError, match=str(path)) as caught:
        read_header(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600 + len(str(path))


@pytest.mark.parametrize(
    "content", [b"\x01", b"\x01\x00", (2**63).to_bytes(8, "little"), (100).to_bytes(8, "little") + b"{}"]
)
def test_a_file_cut_short_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(CheckpointError, match="cut short or not safetensors"):
        read_header(tmp_path / "x")


def test_an_empty_file_is_said_to_be_empty(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with pytest.raises(CheckpointError, match=r"/x is empty; it was not written completely: copy it again"):
        read_header(tmp_path / "x")


def test_a_type_that_is_not_supported_is_named_as_such(tmp_path: Path) -> None:
    path = written(tmp_path / "x", {"a": entry(2) | {"dtype": "F8_E4M3", "shape": [8]}}, bytes(8))
    with pytest.raises(CheckpointError, match="holds tensor 'a' in the unsupported type 'F8_E4M3'; convert it to one"):
        read_header(path)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"a": entry(2), "c": entry(2, start=12)}, "invalid offset for tensor `c`"),
        ({"c": entry(2, start=4)}, "invalid offset for tensor `c`"),
        ({"a": entry(2)}, "file not fully covered"),
        ({"a": entry(2), "b": entry(2, start=4)}, "invalid offset for tensor `b`"),
    ],
)
def test_tensors_cover_the_data_exactly(tmp_path: Path, header: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_header(written(tmp_path / "x", header, bytes(20)))


def test_a_giant_header_is_refused_unread(tmp_path: Path) -> None:
    with open(tmp_path / "x", "wb") as file:
        file.write((10**9).to_bytes(8, "little"))
        file.truncate(10**9 + 8)  # a hole: takes no room on the disk
    with pytest.raises(CheckpointError, match=f"header of 1000000000 bytes; at most {LONGEST_HEADER}"):
        read_header(tmp_path / "x")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*/x: No such file"):
        read_header(tmp_path / "x")
