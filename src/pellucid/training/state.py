"""Everything a run needs, besides its weights, to go on as if it had never stopped.

Kept as two plain files in the ``training`` folder of a checkpoint: ``state.safetensors`` (what the optimizers
remember, random generators) and ``state.json`` (counters, the loader's cursor). Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from pellucid.checkpoints.header import read_header
from pellucid.errors import CheckpointError
from pellucid.training.optim import Optimizers

FOLDER = "training"
_TENSORS, _COUNTERS, _VERSION = "state.safetensors", "state.json", 2
_LARGEST = 16 * 2**20


@dataclass
class Counters:
    """Where the run is; ``loader`` is the data loader's own cursor, ``best`` the lowest bits per byte."""

    step: int = 0
    tokens: int = 0
    minutes: float = 0.0
    training_seconds: float = 0.0
    best: float | None = None
    best_step: int | None = None
    loader: dict[str, Any] = field(default_factory=dict)


def save_state(folder: Path, counters: Counters, optimizers: Optimizers) -> None:
    """Write the state into ``folder``, which a checkpoint is being completed in."""
    folder.mkdir()
    tensors = {f"optimizer/{name}": tensor for name, tensor in optimizers.state_tensors().items()}
    tensors |= {f"random/{name}": tensor for name, tensor in random_state().items()}
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        safetensors.torch.save_file(held, folder / _TENSORS)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    digest = _digest(folder / _TENSORS)
    text = json.dumps({"schema_version": _VERSION, "tensors_sha256": digest, **asdict(counters)}, indent=2)
    (folder / _COUNTERS).write_text(text + "\n", encoding="utf-8")


def load_state(folder: Path, optimizers: Optimizers) -> Counters:
    """Give optimizers and random generators back what :func:`save_state` kept; returns the counters."""
    counters = read_counters(folder)
    path = folder / _TENSORS
    read_header(path)
    tensors = safetensors.torch.load_file(path)
    kinds: dict[str, dict[str, Tensor]] = {"optimizer": {}, "random": {}}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        if kind not in kinds:
            raise CheckpointError(f"{path} holds {name!r}, which is no part of a training state")
        kinds[kind][rest] = tensor
    optimizers.load_state_tensors(kinds["optimizer"])
    set_random_state(kinds["random"], path)
    return counters


def seed_all(seed: int) -> None:
    """Start every random generator of the process (torch, its devices, Python, numpy) from ``seed``."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def random_state() -> dict[str, Tensor]:
    """The state of every random generator in the process: torch, its devices, Python, numpy."""
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, gauss_next = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "numpy_gauss": torch.tensor([position, has_gauss, gauss], dtype=torch.float64),
        "python": torch.tensor([version, *internal], dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss_next is None else [gauss_next], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state |= {f"cuda{index}": s for index, s in enumerate(torch.cuda.get_rng_state_all())}
    return state


def set_random_state(state: Mapping[str, Tensor], source: Path) -> None:
    """Undo every draw since :func:`random_state`."""
    try:
        torch.set_rng_state(state["torch"])
        position, has_gauss, gauss = state["numpy_gauss"].tolist()
        keys = state["numpy"].numpy().astype(np.uint32)
        np.random.set_state(("MT19937", keys, int(position), int(has_gauss), gauss))
        version, *internal = state["python"].tolist()
        gauss_next = state["python_gauss"].tolist()
        random.setstate((version, tuple(internal), gauss_next[0] if gauss_next else None))
        devices = sorted((name for name in state if name.startswith("cuda")), key=lambda name: int(name[4:]))
        if devices and torch.cuda.is_available():
            torch.cuda.set_rng_state_all([state[name] for name in devices])
    except (LookupError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{source} holds no usable state of the random generators: {error}") from error


def read_counters(folder: Path) -> Counters:
    """Where the run was; refused if the tensors beside are not those that were saved with it."""
    data = _read(folder / _COUNTERS)
    told, found = data.pop("tensors_sha256"), _digest(folder / _TENSORS)
    if told != found:
        raise CheckpointError(
            f"{folder / _TENSORS} has SHA-256 {found[:16]}…, {_COUNTERS} says {str(told)[:16]}…; "
            "it was changed or damaged"
        )
    return Counters(**data)


def _digest(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            content = file.read(_LARGEST + 1)
        data = json.loads(content[:_LARGEST])
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    version = data.pop("schema_version", None) if isinstance(data, dict) else None
    wanted = {"tensors_sha256", *(f.name for f in fields(Counters))}
    if version != _VERSION or set(data) != wanted:
        raise CheckpointError(
            f"{path} is not a training state of version {_VERSION}; it was written by another version"
        )
    numbers = [data[name] for name in ("step", "tokens", "minutes", "training_seconds")]
    if any(type(number) not in (int, float) or not 0 <= number < 1e18 for number in numbers):
        raise CheckpointError(f"{path} holds counters {numbers}, which are not counts")
    if not isinstance(data["loader"], dict):
        raise CheckpointError(f"{path} holds no cursor of the loader")
    return data
