"""Mixtures of experts: routers, stacked experts, and what they say about how evenly they are used.

``MoE`` ``SharedMoE`` ``GatedShared``                         the feed-forward half of a block
``SoftmaxRouter`` ``TopKSoftmaxRouter`` ``SigmoidRouter``     who goes where; ``ExpertGroups`` narrows the choice first
``DenseExperts`` ``GatedExperts`` ``ClampedGatedExperts``     what is there
``Routing`` ``RoutingSums`` ``RoutingTally``                   decisions, their sums, and where a layer leaves them
"""

from pellucid.nn.moe.experts import ClampedGatedExperts, DenseExperts, Experts, GatedExperts
from pellucid.nn.moe.layer import GatedSharedExpert, MoE, SharedMoE
from pellucid.nn.moe.router import ExpertGroups, Router, SigmoidRouter, SoftmaxRouter, TopKSoftmaxRouter
from pellucid.nn.moe.routing import LoadBalanceStats, RouterStatsSink, Routing

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
    "RouterStatsSink",
    "Routing",
    "SharedMoE",
    "SigmoidRouter",
    "SoftmaxRouter",
    "TopKSoftmaxRouter",
]
