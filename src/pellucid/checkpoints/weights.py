"""The weights of a folder: safetensors files, alone or with an index that says which tensor lies in which file.

Files come from outside. Their headers are checked before a byte of a tensor is read: ``safetensors`` refuses sizes,
types and offsets that disagree; refused here are what it lets pass, such as a name that is given twice. An index is the
one Hugging Face writes; it may only name files of its own folder, and each tensor must lie in the file that it gives.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
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
from pellucid.errors import CheckpointError
from pellucid.messages import join_some, printable

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The types that weights may have, by name."""

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
"""The types that are read, by their names in a header."""

LONGEST_HEADER = 8 * 2**20
"""Bytes of header that are read at most: enough for about 75,000 tensors."""

_CODES = {dtype: code for code, dtype in SAFETENSORS_DTYPES.items()}
_MAX_AXES = 8
_LARGEST_INDEX = 8 * 2**20
_MAX_SHARDS = 1000
_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,150}\.safetensors")

ReadTensor = Callable[[str], Tensor]


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor; ``dtype`` is the name after ``torch.``."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return prod(self.shape) * dtype.itemsize

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The shape and dtype of ``tensor``."""
        return cls(tuple(tensor.shape), dtype_name(tensor.dtype))


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


# ---- reading


@dataclass(frozen=True)
class Weights:
    """Checked headers: each tensor's shape and dtype, and the file that holds it."""

    header: Mapping[str, TensorSpec]
    places: Mapping[str, Path]
    files: tuple[Path, ...]
    """All files of the weights, the index first."""

    @contextmanager
    def opened(self) -> Iterator[ReadTensor]:
        """A function from a name to that tensor on the CPU, mapped privately from a file opened when first needed."""
        opened: dict[Path, Any] = {}
        with ExitStack() as stack:

            def read(name: str) -> Tensor:
                path = self.places[name]
                try:
                    if path not in opened:
                        opened[path] = stack.enter_context(safe_open(path, framework="pt"))
                    tensor: Tensor = opened[path].get_tensor(name)
                except (OSError, SafetensorError) as error:
                    raise CheckpointError(f"cannot read {path}: {error}") from error
                return tensor

            yield read


def read_weights(folder: Path) -> Weights:
    """The checked headers of a folder's weights, in one file or in several."""
    _refuse_pickles(folder)
    single, index = folder / WEIGHTS, folder / INDEX
    if not (index.exists() or index.is_symlink()):
        _refuse_other_weights(folder, [single], "which is no part of its weights")
        header = read_header(single)
        return Weights(header, dict.fromkeys(header, single), (single,))
    places, size = _read_index(index)
    files = [folder / name for name in dict.fromkeys(places.values())]
    _refuse_other_weights(folder, files, f"which {INDEX} does not name")
    headers = {path: read_header(path) for path in files}
    _compare_index(index, places, headers)
    header = {name: headers[folder / file][name] for name, file in places.items()}
    found = sum(spec.nbytes for spec in header.values())
    if size != found:
        raise CheckpointError(
            f"{index} has a metadata.total_size of {size}, but its tensors have {found} bytes; copy it again"
        )
    return Weights(header, {name: folder / file for name, file in places.items()}, (index, *files))


def read_header(path: Path) -> dict[str, TensorSpec]:
    """Shape and dtype of every tensor in a safetensors file.

    Raises:
        CheckpointError: the file is not regular, cut short, damaged, or has a header that contradicts itself.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            raise CheckpointError(f"{path} is empty; it was not written completely: copy it again")
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > size - 8:
            raise CheckpointError(
                f"{path} has {size} bytes but promises a header of {length}; it is cut short or not safetensors"
            )
        if length > LONGEST_HEADER:
            raise CheckpointError(f"{path} has a header of {length} bytes; at most {LONGEST_HEADER} are read")
        text = file.read(length)
    try:
        with safe_open(path, framework="pt"):  # refuses overlaps, holes, and sizes that disagree
            header = json.loads(text, object_pairs_hook=reject_duplicate_keys)
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({printable(str(error))[:200]}); it is cut short or damaged: "
            "copy it again"
        ) from error
    header.pop("__metadata__", None)
    return {name: _spec(path, name, **entry) for name, entry in header.items()}


def _spec(
    path: Path, name: str, /, dtype: str, shape: list[int], data_offsets: object, **surplus: object
) -> TensorSpec:
    """One entry of a header, less what the library lets pass."""
    if dtype not in SAFETENSORS_DTYPES:
        raise CheckpointError(
            f"{path} holds tensor {name[:80]!r} in the unsupported type {dtype[:40]!r}; "
            f"convert it to one of {', '.join(SAFETENSORS_DTYPES)}"
        )
    if surplus or len(shape) > _MAX_AXES:
        what = f"the unknown key {next(iter(surplus))[:80]!r}" if surplus else f"{len(shape)} axes"
        raise CheckpointError(
            f"{path} describes tensor {name[:80]!r} with {what}, but only dtype, data_offsets and a shape of at most "
            f"{_MAX_AXES} axes are read; write the file again"
        )
    return TensorSpec(tuple(shape), dtype_name(SAFETENSORS_DTYPES[dtype]))


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
    names = dict.fromkeys(value if isinstance(value, str) else repr(value) for value in places.values())
    for name in names:
        if not _SHARD.fullmatch(name):
            raise CheckpointError(
                f"{path} names the file {name[:80]!r}; an index may only name .safetensors files of its own folder"
            )
    if len(names) > _MAX_SHARDS:
        raise CheckpointError(f"{path} names {len(names)} files; at most {_MAX_SHARDS} are read")
    return places, size


def _compare_index(index: Path, places: Mapping[str, str], headers: Mapping[Path, Mapping[str, TensorSpec]]) -> None:
    """Each tensor lies in the file that the index gives, in no other, and nothing else does."""
    for name, file in places.items():
        if name not in headers[index.parent / file]:
            raise CheckpointError(f"{index} places tensor {name[:80]!r} in {file}, which does not hold it")
    for path, header in headers.items():
        for name in header:
            if places.get(name) != path.name:
                has = f"places it in {places[name]}" if name in places else "does not name it"
                raise CheckpointError(f"{path} holds tensor {name[:80]!r}, but {index.name} {has}")


def _refuse_pickles(folder: Path) -> None:
    """A pickle would be ignored silently, or opened by somebody who takes it for the weights."""
    if found := sorted(printable(path.name) for path in folder.iterdir() if path.suffix.lower() in _PICKLES):
        raise CheckpointError(
            f"{folder} holds {join_some(found, 1)[:100]}, which may be a pickle and is never opened; "
            f"remove it, the weights belong in {WEIGHTS}"
        )


def _refuse_other_weights(folder: Path, files: list[Path], why: str) -> None:
    """Weights that lie beside those that are read would be ignored silently."""
    others = {*folder.glob("model*.safetensors"), *folder.glob("model*.index.json")} - {*files, folder / INDEX}
    if others:
        raise CheckpointError(
            f"{folder} also holds {join_some(sorted(path.name for path in others), 1)}, {why}; remove it"
        )


# ---- writing


def write_weights(folder: Path, tensors: Mapping[str, Tensor], max_bytes: int | None = None) -> dict[str, str]:
    """Write ``tensors`` into ``folder``; returns the SHA-256 of each file by its name.

    With ``max_bytes`` a file, they are spread over as few files as their order allows, with an index; a larger tensor
    gets a file of its own.
    """
    shards = [dict(tensors)] if max_bytes is None else _split(tensors, max_bytes)
    if len(shards) == 1:
        return {WEIGHTS: write_tensors(folder / WEIGHTS, shards[0])}
    if len(shards) > _MAX_SHARDS:
        raise CheckpointError(f"max_shard_bytes {max_bytes} gives {len(shards)} files, at most {_MAX_SHARDS}; raise it")
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    digests = {name: write_tensors(folder / name, shard) for name, shard in zip(names, shards, strict=True)}
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return {INDEX: digest(folder / INDEX), **digests}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write a safetensors file and return its SHA-256, which a second thread computes meanwhile.

    Tensors may be on any device and need not be contiguous; only one of them is copied at a time, if it must be. The
    layout is that of ``safetensors.torch.save_file``: wide types first, then by name, and a header of a multiple of
    8 bytes.

    Raises:
        OSError: the disk refuses.
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


def _split(tensors: Mapping[str, Tensor], max_bytes: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    room = max_bytes
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = max_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    return shards
