"""The header of a safetensors file, read and checked before a byte of a tensor is touched.

The file comes from outside: its header may be huge, cut, doubled or lie about sizes. Everything it says is
checked against the file's real size here, in bounded time and memory, and nothing in it is ever run.
"""

from __future__ import annotations

import json
import os
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pellucid.checkpoints.files import once, opened
from pellucid.errors import CheckpointError

LONGEST_HEADER = 8 * 2**20
"""Bytes of header that are read at most: room for some 75 000 tensors."""

MOST_AXES = 8

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class TensorSpec(NamedTuple):
    """What a tensor must look like; ``dtype`` is the name after ``torch.``."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype.itemsize

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The shape and dtype of ``tensor``."""
        return cls(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def read_header(path: Path) -> dict[str, TensorSpec]:
    """Shape and dtype of every tensor in the file, or a :class:`CheckpointError` saying what is wrong."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        text = _header_bytes(path, size, file.read(8), file.read)
    try:
        header = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has a header that is no JSON ({str(error)[:200]}); it is damaged") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a header that is not a mapping; the file is damaged")
    header.pop("__metadata__", None)
    spans = {name: _entry(path, name, entry) for name, entry in header.items()}
    _check_spans(path, spans, size - 8 - len(text))
    return {name: spec for name, (spec, _, _) in spans.items()}


def _header_bytes(path: Path, size: int, prefix: bytes, read: Any) -> bytes:
    if not size:
        raise CheckpointError(f"{path} is empty; it was never written to its end: copy it again")
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > size - 8:
        raise CheckpointError(
            f"{path} has {size} bytes but promises a header of {length}; it is cut short or not safetensors"
        )
    if length > LONGEST_HEADER:
        raise CheckpointError(f"{path} has a header of {length} bytes; at most {LONGEST_HEADER} are read")
    text = read(length)
    assert isinstance(text, bytes)
    if len(text) != length:
        raise CheckpointError(f"{path} became shorter while it was read; copy it again")
    return text


def _entry(path: Path, name: str, entry: Any) -> tuple[TensorSpec, int, int]:
    """One tensor's spec and its span of bytes, of consistent size."""
    match entry:
        case {"dtype": str(code), "shape": [*shape], "data_offsets": [start, stop], **rest} if not rest:
            numbers = [*shape, start, stop]
            if code not in DTYPES:
                raise CheckpointError(
                    f"{path} holds tensor {name[:80]!r} in the unsupported type {code[:40]!r}; "
                    f"convert it to one of {', '.join(DTYPES)}"
                )
            whole = all(type(number) is int and 0 <= number < 2**63 for number in numbers)
            if whole and len(shape) <= MOST_AXES and prod(shape) * DTYPES[code].itemsize == stop - start:
                return TensorSpec(tuple(shape), str(DTYPES[code]).removeprefix("torch.")), start, stop
    raise CheckpointError(
        f"{path} describes tensor {name[:80]!r} by {str(entry)[:120]}, whose type, shape and size disagree; "
        "the file is damaged or of an unknown kind"
    )


def _check_spans(path: Path, spans: dict[str, tuple[TensorSpec, int, int]], size: int) -> None:
    """The tensors must cover the data exactly: no overlap, no hole, no rest."""
    end = 0
    for name, (_, start, stop) in sorted(spans.items(), key=lambda item: item[1][1:]):
        if start > end:
            raise CheckpointError(
                f"{path} holds bytes {end} to {start} before tensor {name[:80]!r} that belong to none; "
                "a tensor is missing from its header, or it is damaged"
            )
        if start < end:
            raise CheckpointError(
                f"{path} places tensor {name[:80]!r} at byte {start}, but the one before ends at {end}; "
                "tensors must not overlap: it is damaged"
            )
        end = stop
    if end != size:
        why = "a tensor is missing from its header, or it is damaged" if end < size else "it is cut short"
        raise CheckpointError(f"{path} holds {size} bytes of data but its tensors need {end}; {why}")
