"""Faulty twins: each is the healthy :class:`~pellucid.audits.toy.Toy` with one part wrong, as seen in public.

Every check has to catch its twins; ``TWINS`` says which twin belongs to which. To see an audit bite::

    audit(twins.SeesOneAhead(), checks=["future"])
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pellucid.audits.toy import Toy, ToyProbe
from pellucid.audits.twins.flow import (
    AddsSmallMask,
    BoundaryByToken,
    CentredOverBatch,
    CentredOverTime,
    CountsSlots,
    FirstRowsMask,
    LastLayerOpen,
    LastLayerTogether,
    MeanOverPads,
    NoIsolation,
    OpenChunk,
    PadsById,
    PoisonedByPads,
    RunningPositions,
    ScaledByBatch,
    SeesOneAhead,
    SeesPads,
    UpsideDown,
    WindowOneTooWide,
)
from pellucid.audits.twins.state import (
    CountsCalls,
    CropOfZeroKeepsAll,
    DrawsNumbers,
    DropsOutInEval,
    ForgetsToReorder,
    RemembersTheLast,
    SeesUnusedSlots,
    SharedCounter,
    SnapshotAliases,
    TopLeftAnchor,
    WritesIntoTokens,
)
from pellucid.audits.twins.sums import (
    CrossesBorders,
    IgnoresTokenZero,
    LearnsPads,
    MeansOfMeans,
    NothingIsNaN,
    NotShifted,
    ShiftedTwice,
)
from pellucid.records import Status


@dataclass(frozen=True)
class Twin:
    """A faulty model, the check that has to catch it, and the verdict that it deserves."""

    make: Callable[[], Toy]
    check: str
    verdict: Status = "leak"

    @property
    def name(self) -> str:
        return getattr(self.make, "__name__", str(self.make))

    @property
    def fault(self) -> str:
        """What is wrong with it."""
        return " ".join((self.make.__doc__ or "").split())

    def probe(self) -> ToyProbe:
        return self.make().probe()


_OF_CHECK: dict[str, tuple[Callable[[], Toy], ...]] = {
    "future": (
        SeesOneAhead,
        LastLayerOpen,
        UpsideDown,
        AddsSmallMask,
        CentredOverTime,
        WindowOneTooWide,
        OpenChunk,
    ),
    "padding": (SeesPads, CountsSlots, PadsById, MeanOverPads),
    "packing": (NoIsolation, LastLayerTogether, RunningPositions, BoundaryByToken),
    "batch": (CentredOverBatch, FirstRowsMask, ScaledByBatch),
    "loss": (
        ShiftedTwice,
        NotShifted,
        MeansOfMeans,
        IgnoresTokenZero,
        LearnsPads,
        CrossesBorders,
        NothingIsNaN,
    ),
    "cache": (
        TopLeftAnchor,
        SharedCounter,
        ForgetsToReorder,
        CropOfZeroKeepsAll,
        SnapshotAliases,
        SeesUnusedSlots,
    ),
    "trace": (CountsCalls, DropsOutInEval, DrawsNumbers, WritesIntoTokens, RemembersTheLast),
}

TWINS: tuple[Twin, ...] = (
    *(Twin(make, check) for check, makes in _OF_CHECK.items() for make in makes),
    Twin(PoisonedByPads, "padding", "fragile"),
)
"""Every shipped twin."""

__all__ = [
    "TWINS",
    "AddsSmallMask",
    "BoundaryByToken",
    "CentredOverBatch",
    "CentredOverTime",
    "CountsCalls",
    "CountsSlots",
    "CropOfZeroKeepsAll",
    "CrossesBorders",
    "DrawsNumbers",
    "DropsOutInEval",
    "FirstRowsMask",
    "ForgetsToReorder",
    "IgnoresTokenZero",
    "LastLayerOpen",
    "LastLayerTogether",
    "LearnsPads",
    "MeanOverPads",
    "MeansOfMeans",
    "NoIsolation",
    "NotShifted",
    "NothingIsNaN",
    "OpenChunk",
    "PadsById",
    "PoisonedByPads",
    "RemembersTheLast",
    "RunningPositions",
    "ScaledByBatch",
    "SeesOneAhead",
    "SeesPads",
    "SeesUnusedSlots",
    "SharedCounter",
    "ShiftedTwice",
    "SnapshotAliases",
    "TopLeftAnchor",
    "Twin",
    "UpsideDown",
    "WindowOneTooWide",
    "WritesIntoTokens",
]
