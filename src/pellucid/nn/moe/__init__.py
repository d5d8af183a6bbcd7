"""Mixtures of experts: routers, stacked experts, and how evenly these are used.

``MoE`` ``SharedMoE`` ``GatedSharedExpert``                   the feed-forward half of a block
``SoftmaxRouter`` ``TopKSoftmaxRouter`` ``SigmoidRouter``     who goes where; ``ExpertGroups`` narrows the choice first
``DenseExperts`` ``GatedExperts`` ``ClampedGatedExperts``     what is there
``Routing`` ``LoadBalanceStats``                               decisions, and how evenly they spread tokens
"""

from pellucid.nn.moe.experts import ClampedGatedExperts, DenseExperts, Experts, GatedExperts
from pellucid.nn.moe.layer import GatedSharedExpert, MoE, SharedMoE
from pellucid.nn.moe.router import (
    ExpertGroups,
    LoadBalanceStats,
    Router,
    Routing,
    SigmoidRouter,
    SoftmaxRouter,
    TopKSoftmaxRouter,
)

__all__ = [
    "ClampedGatedExperts",
    "DenseExperts",
    "ExpertGroups",
    "Experts",
    "GatedExperts",
    "GatedSharedExpert",
    "LoadBalanceStats",
    "MoE",
    "Router",
    "Routing",
    "SharedMoE",
    "SigmoidRouter",
    "SoftmaxRouter",
    "TopKSoftmaxRouter",
]
