"""Every check catches its broken models and names the first place that is wrong: no check that cannot fail."""

from collections import Counter

import pytest

import broken_models
from broken_models import BROKEN_MODELS
from pellucid.audits import CHECKS, audit
from pellucid.records import Location

FIRST = {
    "SeesOneAhead": Location(0, 0, 1),
    "LastLayerOpen": Location(0, 0, 1),
    "UpsideDown": Location(0, 0, 1),
    "AddsSmallMask": Location(0, 0, 1),
    "CentredOverTime": Location(0, 0, 1),
    "WindowOneTooWide": Location(0, 3, 0),
    "OpenChunk": Location(0, 8, 9),  # the cached chunks of 24 tokens are 8, 15 and 1
    "SeesPads": Location(0, 0, 3),  # three tokens, then pads
    "CountsSlots": Location(0, 2),  # no pad's content moves anything: the position does
    "PadsById": Location(0, 5, 0),
    "MeanOverPads": Location(0, 2),
    "NoIsolation": Location(0, 3, 0),  # the first token of document 2 sees the first of document 1
    "LastLayerTogether": Location(0, 3, 0),
    "RunningPositions": Location(0, 3),
    "BoundaryByToken": Location(0, 3, 0),
    "CentredOverBatch": Location(0, 0, 0, 1),
    "FirstRowsMask": Location(1, 3),  # row 1 is longer than row 0
    "ShiftedTwice": Location(0, 0, 1),  # token 0 has to predict token 1
    "NotShifted": Location(0, 0, 1),
    "IgnoresTokenZero": Location(0, 2, 3),  # token 3 of the row is token id 0
    "CrossesBorders": Location(0, 2, 3),
    "EndsArePads": Location(0, 1, 2),
    "LosesChunkBorders": Location(0, 7, 8),
    "ForgetsTheLastDocument": Location(0, 8, 9),
    "PoolsOverPads": Location(0),
    "TopLeftAnchor": Location(0, 4, 1),  # the first query of the second chunk sees key 0 only
    "SharedCounter": Location(0, 4),
    "ForgetsToReorder": Location(0, 5),
    "CropOfZeroKeepsAll": Location(0, 0),
    "SnapshotAliases": Location(0, 7),  # where the original goes on after its copy did
    "SeesUnusedSlots": Location(0, 0),
    "WritesIntoTokens": Location(0, 3),
    "PoisonedByPads": Location(0, 0),
    "SumsAngles": Location(0, 1),  # the first distance that matters
    "FirstRowsAngles": Location(1, 1),
    "IgnoresPositions": Location(0, 1),
    "EncoderCountsSlots": Location(0, 4),  # three tokens behind four pads
    "LeftPadsCount": Location(0, 4),
    "DocumentsStartLate": Location(0, 3),
    "OneCounterForAllRows": Location(1, 6),  # the row of 6 tokens, in the first chunk of one slot
    "ClampsPositions": Location(0, 64),
    "WrapsPositions": Location(0, 64),
    "ChecksTheChunkOnly": Location(0, 64),
    "CutsTheRow": Location(0, 64),
    "DiscardsTheFill": Location(1, 3, 2),  # the first query after the hole
    "LengthsFromTheMask": Location(1, 3, 2),
    "SecondLayerUnmasked": Location(1, 0, 2),
    "NoLayerMasked": Location(1, 0, 2),
    "OnesWereHidden": Location(0, 0, 4),  # the first real token sees the first pad
    "PaddingUpsideDown": Location(0, 2, 0),
    "TriangleUpsideDown": Location(0, 0, 1),
    "SoftmaxOverNothing": Location(1),
    "DropsEmptyRows": Location(2, 0, None, 1),  # the row behind the empty one
    "MeanOfNothing": Location(1, 0),
    "ScaledOnlyInEval": Location(0, 1),
    "NumbersItsRows": Location(0, 0),
    "RemembersTheLongest": Location(0, 1),
    "WindowLostByOneKernel": Location(0, 3),
    "WindowWiderByOneKernel": Location(0, 3),
    "PackedByOneKernel": Location(0, 3),
    "CausalOnlyBesidePadding": Location(0, 0, 1),
    "CausalOnlyWithoutPadding": Location(0, 0, 1),  # a later token moves it, not a pad
    "AddsWhereItShouldSelect": Location(0, 0, 3),
    "ConvolvesOverPads": Location(0, 2, 1),  # the pad just before the first token
    "ScaledByBatch": Location(1, 0, 0, 0),
    "WindowsSwapped": Location(0, 3, 0),
    "WindowLostInOneLayer": Location(0, 3, 0),
    "WindowOneTooNarrow": Location(0, 2, 0),
    "WindowLeaksTheFirst": Location(0, 3, 0),
    "PrefixIsCausal": Location(0, 0, 1),
    "PrefixOneTooLong": Location(0, 0, 4),  # the prefix holds tokens 0 to 3
    "PrefixOneTooShort": Location(0, 0, 3),
    "PrefixSeesAll": Location(0, 0, 4),
    "RightContextOneShort": Location(0, 0, 4),  # four ahead are declared
    "RightContextOneLong": Location(0, 0, 5),
    "PrefixLostInOneLayer": Location(0, 0, 1),
    "SecondLayerOneWay": Location(0, 0, 1),
    "FirstLayerLooksAheadOnly": Location(0, 1, 0),
    "SeesItselfInOneLayer": Location(0, 1, 0),
    "WindowNobodyDeclared": Location(0, 4, 0),
    "WindowLostBesideSinks": Location(0, 7, 2),  # two layers of three tokens reach four back
    "WindowWiderBesideSinks": Location(0, 7, 2),
    "SinksLostInOneLayer": Location(0, 3, 0),
    "EncoderIsCausal": Location(0, 0, 1),
    "EncoderSeesNeighbours": Location(0, 0, 2),
    "EncoderListensTooFar": Location(0, 0, 3),
    "CrossIsCausal": Location(0, 0, 1),
    "CrossHasTheWindow": Location(0, 0, 0),
    "CrossSeesPads": Location(0, 0),
    "EncoderSeesPads": Location(0, 0),
    "LosesTheLastSourceToken": Location(0, 0, 5),
    "FirstSourceForAll": Location(0, 0, 0),
    "MemoryMeansOverBatch": Location(0, 0),
    "CachedWindowOneWider": Location(0, 3),
    "ChunkOverrunsTheRing": Location(0, 0),
    "EvictsTheNewest": Location(0, 4, 3),
    "MaskOfTheFirstStep": Location(0, 4),
    "CropWrapsRound": Location(0, 0),
    "BiasLostInCache": Location(0, 4),
    "AlibiBySlots": Location(0, 5),  # the first token behind the padding in the middle
    "CountsTheChunkTwice": Location(0, 4),
    "KeysUnderAnotherTable": Location(0, 1),
    "CacheInHalf": Location(0, 4),
    "PoisonedByUnusedSlots": Location(0, 4),
    "PairsMixed": Location(0, 1),
    "AnswersFromAMemo": Location(1, 3, 2),
    "OverwritesTargets": Location(1, 4),
    "TimesTheRows": Location(0, 0, 1),
}

NOWHERE_IN_PARTICULAR = {
    "AddsHooks",
    "AnchoredAtTheFirst",
    "AnglesFromOne",
    "AnglesInHalf",
    "CachesByContent",
    "CalibratesByLength",
    "CapLostByOneKernel",
    "CarriesItsState",
    "CheckpointCutsTheGradient",
    "CheckpointLosesTheMask",
    "CleansNaNForward",
    "CountsCalls",
    "DefaultIsTraining",
    "DrawsNumbers",
    "DropsOnceConfigured",
    "DropsOutInEval",
    "FastWithoutGradients",
    "GrowsAList",
    "GrowsItsTable",
    "KeepsPrompts",
    "KeepsTheLast",
    "LearnsPads",
    "LeavesGradients",
    "LooksAtTheLastColumn",
    "MaskedOnlyInTraining",
    "MeansOfMeans",
    "MovesAverages",
    "NeverDrops",
    "NormalisesOverTheBatch",
    "NothingIsNaN",
    "OneKernelInHalf",
    "OneKernelTeachesNothing",
    "OtherInInference",
    "OwnDropoutForgetsTheMode",
    "PaddingLostByOneKernel",
    "InvertedMask",
    "RandomFeatures",
    "RemembersTheLast",
    "ReusesItsAnswer",
    "ScaledAsIfDropping",
    "ScaledOtherwise",
    "SharedMemory",
    "ShortensTheRows",
    "SkipsABranchNowAndThen",
    "SwitchesGradientsOff",
    "SwitchesTheDefaultDtype",
    "TwoSmallestNumbers",
    "WakesUp",
    "WritesIntoTheMask",
}  # what they leave behind has no place, or their first wrong place depends on weights


@pytest.mark.parametrize("broken", BROKEN_MODELS, ids=lambda broken: broken.name)
def test_broken_model_is_caught_by_its_check(broken):
    report = audit(broken, checks=[broken.check])
    assert report.verdicts[broken.check] == broken.verdict
    assert report.passed == (broken.verdict == "fragile")
    wrong = next(finding for finding in report.findings if finding.status == broken.verdict)
    assert wrong.message
    if broken.name in FIRST:
        assert wrong.where == FIRST[broken.name]


@pytest.mark.slow
@pytest.mark.parametrize("broken", BROKEN_MODELS, ids=lambda broken: broken.name)
def test_broken_model_is_caught_in_float64_too(broken):
    probe = broken.probe()
    probe.module.double()
    assert audit(probe=probe, checks=[broken.check]).verdicts[broken.check] == broken.verdict


def test_the_first_wrong_place_of_every_broken_model_is_known_or_has_none():
    assert FIRST.keys() | NOWHERE_IN_PARTICULAR == {broken.name for broken in BROKEN_MODELS}
    assert not FIRST.keys() & NOWHERE_IN_PARTICULAR


def test_every_check_has_broken_models_and_every_broken_model_says_its_fault():
    assert Counter(broken.check for broken in BROKEN_MODELS if broken.verdict == "leak").keys() == CHECKS.keys()
    assert min(Counter(broken.check for broken in BROKEN_MODELS).values()) >= 2
    assert all(len(broken.fault) > 20 for broken in BROKEN_MODELS)


def test_an_open_chunk_leaks_through_the_cache_only():
    cases = {finding.case: finding.status for finding in audit(broken_models.OpenChunk(), checks=["future"]).findings}
    assert cases["tokens"] == cases["gradient"] == "pass"
    assert cases["through a cache"] == "leak"


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (broken_models.ShiftedTwice, "labels are shifted twice"),
        (broken_models.NotShifted, "labels are not shifted"),
        (broken_models.MeansOfMeans, "means of means"),
        (broken_models.LearnsPads, "21 tokens were counted, but 6 have to be predicted"),
    ],
)
def test_a_wrong_loss_is_explained(broken, message):
    assert any(message in finding.message for finding in audit(broken(), checks=["loss"]).findings)
