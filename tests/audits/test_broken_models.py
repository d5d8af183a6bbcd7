"""Every check catches its broken models and names the first place that is wrong: no check that cannot fail."""

from collections import Counter

import pytest

import broken_models
from broken_models import BROKEN_MODELS
from pellucid.audits import CHECKS, audit
from pellucid.records import Where

FIRST = {
    "SeesOneAhead": Where(0, 0, 1),
    "LastLayerOpen": Where(0, 0, 1),
    "UpsideDown": Where(0, 0, 1),
    "AddsSmallMask": Where(0, 0, 1),
    "CentredOverTime": Where(0, 0, 1),
    "WindowOneTooWide": Where(0, 3, 0),
    "OpenChunk": Where(0, 8, 9),  # the cached chunks of 24 tokens are 8, 15 and 1
    "SeesPads": Where(0, 0, 3),  # three tokens, then pads
    "CountsSlots": Where(0, 2),  # no pad's content moves anything: the position does
    "PadsById": Where(0, 5, 0),
    "MeanOverPads": Where(0, 2),
    "NoIsolation": Where(0, 3, 0),  # the first token of document 2 sees the first of document 1
    "LastLayerTogether": Where(0, 3, 0),
    "RunningPositions": Where(0, 3),
    "BoundaryByToken": Where(0, 3, 0),
    "CentredOverBatch": Where(0, 0, 0, 1),
    "FirstRowsMask": Where(1, 3),  # row 1 is longer than row 0
    "ShiftedTwice": Where(0, 0, 1),  # token 0 has to predict token 1
    "NotShifted": Where(0, 0, 1),
    "IgnoresTokenZero": Where(0, 2, 3),  # token 3 of the row is token id 0
    "CrossesBorders": Where(0, 2, 3),
    "EndsArePads": Where(0, 1, 2),
    "LosesChunkBorders": Where(0, 7, 8),
    "ForgetsTheLastDocument": Where(0, 8, 9),
    "PoolsOverPads": Where(0),
    "TopLeftAnchor": Where(0, 4, 1),  # the first query of the second chunk sees key 0 only
    "SharedCounter": Where(0, 4),
    "ForgetsToReorder": Where(0, 5),
    "CropOfZeroKeepsAll": Where(0, 0),
    "SnapshotAliases": Where(0, 7),  # where the original goes on after its copy did
    "SeesUnusedSlots": Where(0, 0),
    "WritesIntoTokens": Where(0, 3),
    "PoisonedByPads": Where(0, 0),
    "SumsAngles": Where(0, 1),  # the first distance that matters
    "FirstRowsAngles": Where(1, 1),
    "IgnoresPositions": Where(0, 1),
    "EncoderCountsSlots": Where(0, 4),  # three tokens behind four pads
    "LeftPadsCount": Where(0, 4),
    "DocumentsStartLate": Where(0, 3),
    "OneCounterForAllRows": Where(1, 6),  # the row of 6 tokens, in the first chunk of one slot
    "ClampsPositions": Where(0, 64),
    "WrapsPositions": Where(0, 64),
    "ChecksTheChunkOnly": Where(0, 64),
    "CutsTheRow": Where(0, 64),
    "DiscardsTheFill": Where(1, 3, 2),  # the first query after the hole
    "LengthsFromTheMask": Where(1, 3, 2),
    "SecondLayerUnmasked": Where(1, 0, 2),
    "NoLayerMasked": Where(1, 0, 2),
    "OnesWereHidden": Where(0, 0, 4),  # the first real token sees the first pad
    "PaddingUpsideDown": Where(0, 2, 0),
    "TriangleUpsideDown": Where(0, 0, 1),
    "SoftmaxOverNothing": Where(1),
    "DropsEmptyRows": Where(2, 0, None, 1),  # the row behind the empty one
    "MeanOfNothing": Where(1, 0),
    "ScaledOnlyInEval": Where(0, 1),
    "NumbersItsRows": Where(0, 0),
    "RemembersTheLongest": Where(0, 1),
    "WindowLostByOneKernel": Where(0, 3),
    "WindowWiderByOneKernel": Where(0, 3),
    "PackedByOneKernel": Where(0, 3),
    "CausalOnlyBesidePadding": Where(0, 0, 1),
    "CausalOnlyWithoutPadding": Where(0, 0),  # no pad moves it: another real token does
    "AddsWhereItShouldSelect": Where(0, 0, 3),
    "ConvolvesOverPads": Where(0, 2, 1),  # the pad just before the first token
    "ScaledByBatch": Where(1, 0, 0, 0),
    "WindowsSwapped": Where(0, 3, 0),
    "WindowLostInOneLayer": Where(0, 3, 0),
    "WindowOneTooNarrow": Where(0, 2, 0),
    "WindowLeaksTheFirst": Where(0, 3, 0),
    "PrefixIsCausal": Where(0, 0, 1),
    "PrefixOneTooLong": Where(0, 0, 4),  # the prefix holds tokens 0 to 3
    "PrefixOneTooShort": Where(0, 0, 3),
    "PrefixSeesAll": Where(0, 0, 4),
    "RightContextOneShort": Where(0, 0, 4),  # four ahead are declared
    "RightContextOneLong": Where(0, 0, 5),
    "PrefixLostInOneLayer": Where(0, 0, 1),
    "SecondLayerOneWay": Where(0, 0, 1),
    "FirstLayerLooksAheadOnly": Where(0, 1, 0),
    "SeesItselfInOneLayer": Where(0, 1, 0),
    "WindowNobodyDeclared": Where(0, 4, 0),
    "WindowLostBesideSinks": Where(0, 7, 2),  # two layers of three tokens reach four back
    "WindowWiderBesideSinks": Where(0, 7, 2),
    "SinksLostInOneLayer": Where(0, 3, 0),
    "EncoderIsCausal": Where(0, 0, 1),
    "EncoderSeesNeighbours": Where(0, 0, 2),
    "EncoderListensTooFar": Where(0, 0, 3),
    "CrossIsCausal": Where(0, 0, 1),
    "CrossHasTheWindow": Where(0, 0, 0),
    "CrossSeesPads": Where(0, 0),
    "EncoderSeesPads": Where(0, 0),
    "LosesTheLastSourceToken": Where(0, 0, 5),
    "FirstSourceForAll": Where(0, 0, 0),
    "MemoryMeansOverBatch": Where(0, 0),
    "CachedWindowOneWider": Where(0, 3),
    "ChunkOverrunsTheRing": Where(0, 0),
    "EvictsTheNewest": Where(0, 4, 3),
    "MaskOfTheFirstStep": Where(0, 4),
    "CropWrapsRound": Where(0, 0),
    "BiasLostInCache": Where(0, 4),
    "AlibiBySlots": Where(0, 5),  # the first token behind the padding in the middle
    "CountsTheChunkTwice": Where(0, 4),
    "KeysUnderAnotherTable": Where(0, 1),
    "CacheInHalf": Where(0, 4),
    "PoisonedByUnusedSlots": Where(0, 4),
    "PairsMixed": Where(0, 1),
    "AnswersFromAMemo": Where(1, 3, 2),
    "OverwritesTargets": Where(1, 4),
    "TimesTheRows": Where(0, 0, 1),
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
    ("broken", "said"),
    [
        (broken_models.ShiftedTwice, "labels are shifted twice"),
        (broken_models.NotShifted, "labels are not shifted"),
        (broken_models.MeansOfMeans, "means of means"),
        (broken_models.LearnsPads, "21 tokens were counted, but 6 have to be predicted"),
    ],
)
def test_a_wrong_loss_is_explained(broken, said):
    assert any(said in finding.message for finding in audit(broken(), checks=["loss"]).findings)
