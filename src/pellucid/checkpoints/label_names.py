"""``classes.json``: the names of a classifier's classes, in the order of its logits, so that an answer can be named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pellucid.checkpoints.files import read
from pellucid.errors import CheckpointError
from pellucid.messages import printable

NAME = "classes.json"
_LARGEST = 8 * 2**20
_LONGEST = 1000


def write_label_names(folder: Path, classes: Sequence[str], wanted: int | None) -> None:
    """Write the file into ``folder``; nothing where there are no classes.

    Raises:
        CheckpointError: they are no different names, or not as many as the model's ``wanted`` ones.
    """
    if classes:
        _refuse_odd("classes", list(classes), wanted, "name each class of the model once")
        text = json.dumps(list(classes), indent=2, ensure_ascii=False)
        (folder / NAME).write_text(text + "\n", encoding="utf-8")


def read_label_names(folder: Path, wanted: int | None) -> tuple[str, ...]:
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
        raise CheckpointError(f"{printable(path)} is no JSON; copy it again") from error
    _refuse_odd(printable(path), found, wanted, "copy it again")
    return tuple(found)


def _refuse_odd(what: str, names: object, wanted: int | None, way: str) -> None:
    if not isinstance(names, list) or not all(isinstance(name, str) and 0 < len(name) <= _LONGEST for name in names):
        raise CheckpointError(f"{what}: this is no list of names; {way}")
    if len(set(names)) != len(names):
        raise CheckpointError(f"{what}: a class is named twice; {way}")
    if len(names) != wanted:
        raise CheckpointError(f"{what}: {len(names)} classes are named, but the model has {wanted or 'none'}; {way}")
