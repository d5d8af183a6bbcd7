"""The weights of a folder: one file, or several with an index that says which tensor lies where.

The index is the one Hugging Face writes. It comes from outside like everything else: it may name only files of
the folder itself, and each tensor must lie in the one file that the index gives for it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pellucid.checkpoints.files import digest, open_regular, read_json, reject_duplicate_keys
from pellucid.data.records import printable
from pellucid.errors import CheckpointError

LONGEST_HEADER = 8 * 2**20
"""Bytes of header that are read at most: room for some 75 000 tensors."""

MOST_AXES = 8

SAFETENSORS_DTYPES = {
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
_CODES = {dtype: code for code, dtype in SAFETENSORS_DTYPES.items()}


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
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        text = _header_bytes(path, size, file.read(8), file.read)
    try:
        header = json.loads(text, object_pairs_hook=reject_duplicate_keys)
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
            if code not in SAFETENSORS_DTYPES:
                raise CheckpointError(
                    f"{path} holds tensor {name[:80]!r} in the unsupported type {code[:40]!r}; "
                    f"convert it to one of {', '.join(SAFETENSORS_DTYPES)}"
                )
            whole = all(type(number) is int and 0 <= number < 2**63 for number in numbers)
            if whole and len(shape) <= MOST_AXES and prod(shape) * SAFETENSORS_DTYPES[code].itemsize == stop - start:
                return TensorSpec(tuple(shape), str(SAFETENSORS_DTYPES[code]).removeprefix("torch.")), start, stop
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


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_LARGEST_INDEX = 8 * 2**20
_MOST_SHARDS = 1000
_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,150}\.safetensors")


@dataclass(frozen=True)
class Weights:
    """What the headers say: each tensor's shape and dtype, and its file."""

    header: Mapping[str, TensorSpec]
    places: Mapping[str, Path]
    files: tuple[Path, ...]
    """All files of the weights, the index first."""

    @contextmanager
    def opened(self) -> Iterator[Reader]:
        """A reader of single tensors, each mapped from its file and private to whoever asked."""
        with ExitStack() as stack:
            yield Reader(self, stack)


class Reader:
    """``reader(name)`` is that tensor on the CPU; a file is opened when it is first needed."""

    def __init__(self, weights: Weights, stack: ExitStack) -> None:
        self._weights = weights
        self._stack = stack
        self._open: dict[Path, safe_open] = {}

    def __call__(self, name: str) -> Tensor:
        path = self._weights.places[name]
        try:
            if path not in self._open:
                self._open[path] = self._stack.enter_context(safe_open(path, framework="pt"))
            tensor: Tensor = self._open[path].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        return tensor


def write_weights(folder: Path, tensors: Mapping[str, Tensor], most: int | None = None) -> dict[str, str]:
    """Write ``tensors`` into ``folder``; returns the SHA-256 of each file by its name.

    With ``most`` bytes a file, they are spread over as few as their order allows, with an index; a larger tensor
    gets a file of its own.
    """
    shards = [dict(tensors)] if most is None else _shared_out(tensors, most)
    if len(shards) == 1:
        return {SINGLE: write_tensors(folder / SINGLE, shards[0])}
    if len(shards) > _MOST_SHARDS:
        raise CheckpointError(f"max_shard_bytes {most} gives {len(shards)} files, at most {_MOST_SHARDS}; raise it")
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    digests = {name: write_tensors(folder / name, shard) for name, shard in zip(names, shards, strict=True)}
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return {INDEX: digest(folder / INDEX), **digests}


def read_weights(folder: Path) -> Weights:
    """The checked headers of a folder's weights, whether in one file or in several."""
    _refuse_pickles(folder)
    single, index = folder / SINGLE, folder / INDEX
    if not (index.exists() or index.is_symlink()):
        _refuse_others(folder, [single], "which is no part of its weights")
        header = read_header(single)
        return Weights(header, dict.fromkeys(header, single), (single,))
    places, size = _read_index(index)
    files = [folder / name for name in dict.fromkeys(places.values())]
    _refuse_others(folder, files, f"which {INDEX} does not name")
    headers = {path: read_header(path) for path in files}
    _compare(index, places, headers)
    header = {name: headers[folder / file][name] for name, file in places.items()}
    found = sum(prod(spec.shape) * spec.itemsize for spec in header.values())
    if size != found:
        raise CheckpointError(
            f"{index} has a metadata.total_size of {size}, but its tensors have {found} bytes; copy it again"
        )
    return Weights(header, {name: folder / file for name, file in places.items()}, (index, *files))


def _shared_out(tensors: Mapping[str, Tensor], most: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    room = most
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = most
        shards[-1][name] = tensor
        room -= tensor.nbytes
    return shards


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write a safetensors file and return its SHA-256, which a second thread computes meanwhile.

    Tensors may lie on any device and need not be contiguous; one at a time is copied, where it must be. The layout is
    that of ``safetensors.torch.save_file``: wide types first, then by name, and a header of a multiple of 8 bytes.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    whole = hashlib.sha256(head := len(text).to_bytes(8, "little") + text)
    with open(path, "wb") as file, ThreadPoolExecutor(1) as pool:
        file.write(head)
        for _, tensor in ordered:
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            hashed = pool.submit(whole.update, data)
            file.write(data)
            hashed.result()
    return whole.hexdigest()


def _read_index(path: Path) -> tuple[dict[str, str], float]:
    """Tensor names and the names of their files, which can only lie in the folder of the index; bytes in all."""
    data = read_json(path, _LARGEST_INDEX)
    places = data.get("weight_map")
    if not isinstance(places, dict) or not places or set(data) - {"metadata", "weight_map"}:
        raise CheckpointError(f"{path} is not an index: it needs a weight_map from tensors to files, and nothing else")
    metadata = data.get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    if not isinstance(size, int | float) or isinstance(size, bool):
        raise CheckpointError(f"{path} has the metadata.total_size {size!r:.60}, but a number is wanted: copy it again")
    for name in dict.fromkeys(map(_text, places.values())):
        if not _SHARD.fullmatch(name):
            raise CheckpointError(
                f"{path} names the file {name[:80]!r}; an index may only name .safetensors files of its own folder"
            )
    if len(set(places.values())) > _MOST_SHARDS:
        raise CheckpointError(f"{path} names {len(set(places.values()))} files; at most {_MOST_SHARDS} are read")
    return places, size


def _text(value: object) -> str:
    return value if isinstance(value, str) else repr(value)


def _refuse_pickles(folder: Path) -> None:
    """A pickle would be passed over in silence, or opened by somebody who takes it for the weights."""
    if found := sorted(path.name for path in folder.iterdir() if path.suffix.lower() in _PICKLES):
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise CheckpointError(
            f"{folder} holds {printable(found[0])[:80]}{more}, which may be a pickle and is never opened; "
            f"remove it, the weights belong in {SINGLE}"
        )


def _refuse_others(folder: Path, files: list[Path], why: str) -> None:
    """Weights that lie beside those that are read would be passed over in silence."""
    others = sorted({*folder.glob("model*.safetensors"), *folder.glob("model*.index.json")} - {*files, folder / INDEX})
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise CheckpointError(f"{folder} also holds {others[0].name}{more}, {why}; remove it")


def _compare(index: Path, places: Mapping[str, str], headers: Mapping[Path, Mapping[str, TensorSpec]]) -> None:
    """Each tensor lies in the file that the index gives, in no other, and nothing else does."""
    for name, file in places.items():
        if name not in headers[index.parent / file]:
            raise CheckpointError(f"{index} places tensor {name[:80]!r} in {file}, which does not hold it")
    for path, header in headers.items():
        for name in header:
            if places.get(name) != path.name:
                told = f"places it in {places[name]}" if name in places else "does not name it"
                raise CheckpointError(f"{path} holds tensor {name[:80]!r}, but {index.name} {told}")
