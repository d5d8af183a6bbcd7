"""Names that stand for a checkpoint of a run: ``RUN/best``, ``RUN/last``, and the run's folder itself.

A run keeps its checkpoints in ``RUN/checkpoints``; ``best`` and ``last`` are files that hold the name of one of them.
What they hold is hostile until checked: only the name of a step leads anywhere, and only into that folder.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from pellucid.checkpoints.arguments import folder_path
from pellucid.checkpoints.files import read
from pellucid.errors import CheckpointError

STEP = re.compile(r"step-[0-9]{8,12}\Z")
INSIDE = "checkpoints"
POINTERS = ("best", "last")


def pointed(pointer: Path) -> Path | None:
    """The checkpoint that the file ``RUN/best`` or ``RUN/last`` points to, None where there is no such file.

    Raises:
        CheckpointError: what the file holds is not the name of a step.
    """
    if not os.path.lexists(pointer):
        return None
    text = read(pointer, 1000).decode("utf-8", errors="replace").strip()[:100]
    if not STEP.match(text):
        raise CheckpointError(f"{pointer} holds {text!r}, which is not the name of a step such as step-00000200")
    return pointer.parent / INSIDE / text


def meant(path: str | os.PathLike[str]) -> Path:
    """The checkpoint folder that ``path`` stands for: of a run its best or, before any validation, its last.

    What is neither a run nor a pointer of one is given back as it is.
    """
    path = folder_path(path)
    try:
        if path.name in POINTERS and not path.is_dir() and (path.parent / INSIDE).is_dir():
            return pointed(path) or path
        if (path / INSIDE).is_dir() and not (path / "pellucid.json").exists():
            return pointed(path / "best") or pointed(path / "last") or path
    except OSError:
        pass  # whoever reads the folder says why it cannot be read
    return path
