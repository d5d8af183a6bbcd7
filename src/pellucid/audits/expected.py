"""Who is expected to move whom: the declared rules, composed through the layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pellucid.probe import Request, Visibility
from pellucid.visibility import Coordinates


def expected_flow(rules: Sequence[Visibility], request: Request) -> Tensor:
    """``Bool[B, T, T]`` [query, key]: information may get from the key's input to the query's output.

    Each layer passes on what it sees and, by the residual stream, what it holds: after two layers of
    ``causal() & window(3)`` a query is reached by the four tokens before it.
    """
    places = Coordinates(request.positions, request.segments)
    itself_BTT = torch.diag_embed(request.real)
    flow_BTT = itself_BTT
    for rule in rules:
        sees_BTT = rule.mask(places, places)[:, 0] | itself_BTT
        flow_BTT = (sees_BTT.float() @ flow_BTT.float()) > 0
    return flow_BTT
