"""The table of checks, in the order in which they run."""

from pellucid.audits.checks import (
    batch,
    cache,
    cross,
    determinism,
    dropout,
    future,
    hidden_rows,
    kernels,
    loss,
    mask_ignored,
    modes,
    packing,
    padding,
    polarity,
    positions,
    prefix,
    trace,
    window,
)
from pellucid.audits.checks.check import Check

__all__ = ["CHECKS", "Check"]

CHECKS: dict[str, Check] = {
    module.check.name: module.check
    for module in (
        *(future, window, prefix, padding, packing, batch, cross, loss, cache),
        *(positions, mask_ignored, polarity, hidden_rows, modes, dropout, determinism, trace, kernels),
    )
}
