"""Checkpoint folders, and contracts that were changed by someone who made the digests fit again."""

import json
from pathlib import Path

from pellucid.checkpoints.contract import CONTRACT, with_digest
from pellucid.checkpoints.files import digest
from pellucid.checkpoints.load_report import stored_tensors
from pellucid.checkpoints.weights import TensorSpec
from pellucid.models import build


def resign(folder: Path, change) -> None:
    """Let ``change`` alter the contract's data in ``folder``, then make every digest fit."""
    data = json.loads((folder / CONTRACT).read_text())
    change(data)
    for name in data["digests"]:
        if (folder / name).is_file() and name != CONTRACT:
            data["digests"][name] = digest(folder / name)
    (folder / CONTRACT).write_text(json.dumps(with_digest(data)))


def describe(data: dict, config) -> None:
    """Make a contract's data speak of ``config`` in every place, whatever its files hold."""
    stored, tied = stored_tensors(build(config, device="meta"))
    tensors = {name: str(TensorSpec.of(tensor)) for name, tensor in stored.items()}
    data.update(model=config.model_dump(mode="json"), tensors=tensors, tied=tied)
