"""Whether a device can be used here, asked before anything is built on it."""

from __future__ import annotations

import torch

from pellucid.errors import one_line

_RAISED = (RuntimeError, AssertionError, ImportError, AttributeError, TypeError, ValueError)


def why_unusable(device: torch.device | str) -> str:
    """Why no tensor can be put on ``device`` and computed with, on one line; nothing where one can."""
    try:
        torch.zeros(1, device=device).add_(1).item()
    except _RAISED as error:
        return one_line(error, 200).split(". ")[0]
    return ""
