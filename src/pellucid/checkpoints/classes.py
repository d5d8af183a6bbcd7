"""``classes.json``: the names of a classifier's classes, in the order of its logits, so that an answer can be named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pellucid.checkpoints.files import read
from pellucid.data.files import plain
from pellucid.errors import CheckpointError

NAME = "classes.json"
_LARGEST = 8 * 2**20
_LONGEST = 1000


def write_classes(folder: Path, classes: Sequence[str]) -> None:
    """Write the file into ``folder``; nothing where there are no classes."""
    if classes:
        text = json.dumps(list(classes), indent=2, ensure_ascii=False)
        (folder / NAME).write_text(text + "\n", encoding="utf-8")


def read_classes(folder: Path, wanted: int | None = None) -> tuple[str, ...]:
    """The names in ``folder``; none where it has no such file.

    Raises:
        CheckpointError: the file is no list of different names, or not of ``wanted`` ones.
    """
    path = folder / NAME
    if not path.exists():
        return ()
    try:
        found = json.loads(read(path, _LARGEST).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{plain(path)} is no JSON; copy it again") from error
    if not isinstance(found, list) or not all(isinstance(name, str) and 0 < len(name) <= _LONGEST for name in found):
        raise CheckpointError(f"{plain(path)} is no list of names; copy it again")
    if len(set(found)) != len(found):
        raise CheckpointError(f"{plain(path)} names a class twice; copy it again")
    if wanted is not None and len(found) != wanted:
        raise CheckpointError(f"{plain(path)} names {len(found)} classes, but the model has {wanted}; copy it again")
    return tuple(found)
