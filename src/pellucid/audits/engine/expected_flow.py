"""Who may influence whom by the declared rules of all layers together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pellucid.batch import Batch
from pellucid.probe import Visibility
from pellucid.visibility import Coordinates


def expected_flow(rules: Sequence[Visibility], batch: Batch) -> Tensor:
    """``Bool[B, T, T]`` [query, key]: information may get from the key's input to the query's output.

    Each layer passes on what it sees and, by the residual stream, what it holds: after two layers of
    ``causal() & window(3)`` a query is reached by the four tokens before it. Besides its mask, the bounds
    count that a rule states (``lookahead``, ``lookback``), so that a mask that breaks them is found out.
    """
    coords = Coordinates(batch.positions, batch.segments)
    itself_BTT = torch.diag_embed(batch.token_mask)
    flow_BTT = itself_BTT
    for rule in rules:
        sees_BTT = rule.mask(coords, coords)[:, 0] | itself_BTT
        flow_BTT = (sees_BTT.float() @ flow_BTT.float()) > 0
    return flow_BTT & _within_bounds(rules, batch.positions)


def _within_bounds(rules: Sequence[Visibility], positions_BT: Tensor) -> Tensor:
    """``Bool[B, T, T]``: not further ahead or back than all layers together say that they look."""
    back_BTT = positions_BT[:, :, None] - positions_BT[:, None, :]
    inside_BTT = torch.ones_like(back_BTT, dtype=torch.bool)
    aheads = [rule.lookahead for rule in rules if rule.lookahead is not None]
    if len(aheads) == len(rules):
        inside_BTT &= back_BTT >= -sum(aheads)
    backs = [rule.lookback[0] for rule in rules if rule.lookback[0] is not None and not rule.lookback[1]]
    if len(backs) == len(rules):
        inside_BTT &= back_BTT <= sum(back for back in backs if back is not None)
    return inside_BTT
