"""Everything that a run needs besides its weights to continue as if it had never stopped.

Two files in the ``training`` folder of a checkpoint: ``state.safetensors`` (states of the optimizers and of the random
generators) and ``state.json`` (:class:`TrainerState`, and the SHA-256 of the other file and of its own content).
Nothing is pickled.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from pellucid.checkpoints.files import canonical_digest, digest, read_json
from pellucid.checkpoints.weights import read_header, write_tensors
from pellucid.configfile.yaml import yaml_repr
from pellucid.errors import CheckpointError
from pellucid.training.step import OptimizerSet

FOLDER = "training"
_TENSORS, _COUNTERS, _VERSION = "state.safetensors", "state.json", 3
_LARGEST = 2**20
_MOST = 2**53
_FIELDS: dict[str, tuple[tuple[type, ...], str]] = {
    "step": ((int,), "a count"),
    "tokens": ((int,), "a count"),
    "minutes": ((int, float), "an amount of time"),
    "training_seconds": ((int, float), "an amount of time"),
    "best": ((int, float, type(None)), "a loss or null"),
    "best_step": ((int, type(None)), "a step or null"),
    "loader": ((dict,), "a cursor of the loader"),
}
"""The types of a :class:`TrainerState`'s fields, and what an error calls them."""


@dataclass
class TrainerState:
    """Where a run is; ``loader`` is the data loader's own cursor, ``best`` the lowest loss or bits per byte."""

    step: int = 0
    tokens: int = 0
    minutes: float = 0.0
    training_seconds: float = 0.0
    best: float | None = None
    best_step: int | None = None
    loader: dict[str, Any] = field(default_factory=dict)


def save_state(folder: Path, trainer_state: TrainerState, optimizers: OptimizerSet) -> None:
    """Write the state into ``folder``, a new folder of an unfinished checkpoint."""
    folder.mkdir()
    tensors = {f"optimizer/{name}": tensor for name, tensor in optimizers.state_tensors().items()}
    tensors |= {f"random/{name}": tensor for name, tensor in random_state().items()}
    tensors_sha256 = write_tensors(folder / _TENSORS, tensors)
    record = {"schema_version": _VERSION, "tensors_sha256": tensors_sha256, **asdict(trainer_state)}
    record["sha256"] = canonical_digest(record)
    (folder / _COUNTERS).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def load_state(folder: Path, optimizers: OptimizerSet) -> TrainerState:
    """Restore optimizers and random generators from what :func:`save_state` wrote; returns the trainer state."""
    trainer_state = read_trainer_state(folder)
    path = folder / _TENSORS
    read_header(path)
    try:
        tensors = safetensors.torch.load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {str(error)[:200]}") from error
    kinds: dict[str, dict[str, Tensor]] = {"optimizer": {}, "random": {}}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        if kind not in kinds:
            raise CheckpointError(f"{path} holds {name!r}, which is no part of a training state")
        kinds[kind][rest] = tensor
    optimizers.load_state_tensors(kinds["optimizer"])
    set_random_state(kinds["random"], path)
    return trainer_state


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
    """Restore the random generators from :func:`random_state`."""
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


def read_trainer_state(folder: Path, *, tensors: bool = True) -> TrainerState:
    """The state in ``folder``; raises if it or, with ``tensors``, the tensors beside it were changed."""
    path = folder / _COUNTERS
    record = read_json(path, _LARGEST)
    version = record.get("schema_version")
    if type(version) is not int or version != _VERSION:
        raise CheckpointError(
            f"{path} has schema_version {str(version)[:40]}, this version reads {_VERSION}; "
            "use the Pellucid that wrote it, or a newer one"
        )
    known = {"schema_version", "tensors_sha256", "sha256", *(f.name for f in fields(TrainerState))}
    if odd := sorted(known ^ record.keys()):
        raise CheckpointError(f"{path} lacks or does not know {str(odd[0])[:80]!r}; it was changed or damaged")
    _check_trainer_state(path, record)
    noted = record.pop("sha256")
    if noted != (found := canonical_digest(record)):
        _refuse_digest(f"{path} says something else than when it was written", found, noted)
    del record["schema_version"]
    noted = record.pop("tensors_sha256")
    if tensors and noted != (found := digest(folder / _TENSORS)):
        _refuse_digest(f"{folder / _TENSORS} is not what {_COUNTERS} was written with", found, noted)
    return TrainerState(**record)


def _refuse_digest(what: str, found: str, noted: object) -> NoReturn:
    raise CheckpointError(f"{what} (SHA-256 {found[:16]}…, noted {str(noted)[:16]}…); it was changed or damaged")


def _check_trainer_state(path: Path, record: Mapping[str, Any]) -> None:
    """Every field has the type and the range that a run gives it."""
    for name, (kinds, description) in _FIELDS.items():
        value = record[name]
        if type(value) not in kinds or (isinstance(value, int | float) and not 0 <= value < _MOST):
            raise CheckpointError(
                f"{path}: {name} is {yaml_repr(value)}, but must be {description}; put the file back as it was written"
            )
    step, best, best_step = record["step"], record["best"], record["best_step"]
    if (best is None) != (best_step is None) or (best_step is not None and best_step > step):
        raise CheckpointError(
            f"{path}: best is {yaml_repr(best)}, best_step {yaml_repr(best_step)} and step {step}, which contradict "
            "each other; put the file back as it was written"
        )
