"""Stretched rotary angles: the figures of the definitions, and tables that depend on how long a document is."""

import math
from contextlib import nullcontext

import pytest
import torch

from pellucid.errors import InputError, ShapeError, UnsupportedError
from pellucid.nn.positions import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    PartialScaling,
    RopeScaling,
    Rotary,
    YarnScaling,
    document_lengths,
)
from pellucid.visibility import Coordinates

LONG = LongRopeScaling(
    short_factor=(1.0, 2.0), long_factor=(4.0, 8.0), original_max_position_embeddings=8, attention_factor=1.0
)
NTK = DynamicNTKScaling(factor=2.0, original_max_position_embeddings=8)


def row(length, first=0):
    positions = torch.arange(first, first + length)[None]
    return Coordinates(positions, torch.ones_like(positions))


def radians(scaling, size, base, length=1):
    """Radians a position for a document of ``length`` tokens."""
    found = scaling.frequencies(size, base, row(length))
    return (found if found.dim() == 1 else found[0, -1]).tolist()


def plain(size, base):
    return [base ** (-2 * i / size) for i in range(size // 2)]


def test_linear_divides_positions():
    assert radians(LinearScaling(4.0), 8, 1e4) == pytest.approx([x / 4 for x in plain(8, 1e4)])
    x = torch.randn(1, 1, 1, 8, dtype=torch.float64)
    four = Rotary(8, scaling=LinearScaling(4.0))(x, row(1, first=12))
    torch.testing.assert_close(four, Rotary(8)(x, row(1, first=3)))


def test_llama3_written_out():
    """B92: a small table, and the one of Llama 3.2."""
    small = radians(
        Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
        8,
        1e4,
    )
    assert small == pytest.approx([1, 0.0130423, 0.00125, 0.000125], rel=1e-5)
    real = radians(
        Llama3Scaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192),
        64,
        5e5,
    )
    before = plain(64, 5e5)
    assert real[:15] == pytest.approx(before[:15], rel=1e-12)
    assert real[15:18] == pytest.approx([0.00129055, 0.00042956, 0.0000970829], rel=1e-5)
    assert real[18:] == pytest.approx([x / 32 for x in before[18:]], rel=1e-12)


def test_the_scaled_table_is_the_one_that_is_applied():
    """B92: the vectors turn by the scaled angles, at a far position too."""
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
    x = torch.tensor([0, 0, 1.0, 0, 0, 0, 0, 0], dtype=torch.float64).view(1, 1, 1, 8)
    out = Rotary(8, scaling=scaling)(x, row(1, first=1000)).flatten().tolist()
    assert out == pytest.approx([0, 0, math.cos(1.25), 0, 0, 0, math.sin(1.25), 0], abs=1e-12)


def test_yarn_written_out():
    """d = 8, base 1e4, factor 4, original 4096: pair p turns ``4096 · 1e4 ** (-p/4) / 2π`` times.

    Those are 651.9, 65.2, 6.5, 0.65 turns. 32 turns lie at pair 1.309, 1 turn at pair 2.814: the ramp runs from
    1 to 3 when truncated and from 1.309 to 2.814 when not.
    """
    low, high = (8 * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(1e4)) for turns in (32, 1))
    assert (low, high) == pytest.approx((1.3090, 2.8142), abs=1e-4)
    before = plain(8, 1e4)
    whole = [before[0], before[1], before[2] * (0.5 + 0.5 / 4), before[3] / 4]
    assert radians(YarnScaling(4.0, 4096), 8, 1e4) == pytest.approx(whole, rel=1e-12)
    share = (2 - low) / (high - low)
    exact = [before[0], before[1], before[2] * (1 - share + share / 4), before[3] / 4]
    assert radians(YarnScaling(4.0, 4096, truncate=False), 8, 1e4) == pytest.approx(exact, rel=1e-12)


def test_yarn_ramps_end_with_the_features():
    """d = 8, base 10, original 1000: 32 turns lie at pair 2.79 and 1 turn at 8.81, past feature 7, where it is cut."""
    before = plain(8, 10.0)
    assert radians(YarnScaling(4.0, 1000), 8, 10.0) == pytest.approx(
        [*before[:3], before[3] * (0.8 + 0.2 / 4)], rel=1e-12
    )


def test_yarn_has_two_corrections():
    """B91: factor 40, both mscales 0.707: tables are multiplied by 1, scores by (1 + 0.0707 ln 40)²."""
    deepseek = YarnScaling(40.0, 4096, mscale=0.707, mscale_all_dim=0.707)
    assert deepseek.multiplier(row(1)) == 1.0
    assert deepseek.score_multiplier == pytest.approx(1.5896, abs=5e-5)
    one = YarnScaling(40.0, 4096)
    assert one.multiplier(row(1)) == pytest.approx(1 + 0.1 * math.log(40))
    assert one.score_multiplier == 1.0
    uneven = YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=0.5)
    assert uneven.multiplier(row(1)) == pytest.approx((1 + 0.1 * math.log(40)) / (1 + 0.05 * math.log(40)))
    assert YarnScaling(1.0, 4096).multiplier(row(1)) == 1.0
    assert YarnScaling(40.0, 4096, attention_factor=1.25).multiplier(row(1)) == 1.25
    by_hand = YarnScaling(40.0, 4096, attention_factor=1.25, mscale_all_dim=0.707)
    assert by_hand.multiplier(row(1)) == 1.25
    assert by_hand.score_multiplier == deepseek.score_multiplier


def test_attention_factors_multiply_the_turned_vector_and_nothing_else():
    """At position 0 a turned feature is multiplied; what is not turned is not."""
    rotary = Rotary(8, rotary_dim=4, scaling=YarnScaling(4.0, 64, attention_factor=1.5))
    x = torch.ones(1, 1, 1, 8, dtype=torch.float64)
    assert rotary(x, row(1)).flatten().tolist() == [1.5] * 4 + [1.0] * 4


def test_dynamic_ntk_written_out():
    """d = 8, factor 2, original 8. At 16 tokens the base is 1e4 · (2 · 2 − 1) ** (8/6)."""
    assert radians(NTK, 8, 1e4, length=8) == pytest.approx(plain(8, 1e4), rel=1e-12)
    assert radians(NTK, 8, 1e4, length=3) == pytest.approx(plain(8, 1e4), rel=1e-12)
    assert radians(NTK, 8, 1e4, length=16) == pytest.approx(plain(8, 1e4 * 3 ** (8 / 6)), rel=1e-12)


def test_longrope_written_out():
    """B94: eight tokens read the short table, nine the long one."""
    assert radians(LONG, 4, 1e4, length=8) == pytest.approx([1.0, 0.01 / 2])
    assert radians(LONG, 4, 1e4, length=9) == pytest.approx([1 / 4, 0.01 / 8])
    scaled = LongRopeScaling((1.0,), (2.0,), 4096, factor=32.0)
    assert scaled.multiplier(row(1)) == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    assert LongRopeScaling((1.0,), (2.0,), 4096, factor=0.5).multiplier(row(1)) == 1.0
    assert LongRopeScaling((1.0,), (2.0,), 2, factor=4.0).multiplier(row(1)) == pytest.approx(math.sqrt(3))


def test_longrope_takes_a_factor_for_each_table():
    rotary = Rotary(2, scaling=LongRopeScaling((1.0,), (2.0,), 2, attention_factor=(1.25, 1.5)))
    x = torch.ones(1, 4, 1, 2, dtype=torch.float64)
    both = Coordinates(torch.tensor([[0, 1, 0, 0], [0, 1, 2, 3]]), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]))
    out = rotary(x.expand(2, 4, 1, 2), both)
    assert out[:, 0, 0].tolist() == [[1.25, 1.25], [1.5, 1.5]]


def test_proportional_turns_the_first_pairs_of_the_whole_head():
    """Gemma 4: d = 8, share 0.5: pairs 0 and 1 turn as in a whole head, partners are i + 4, the rest stays."""
    assert radians(PartialScaling(0.5), 8, 1e4) == pytest.approx([1, 0.1, 0, 0])
    x = torch.eye(8, dtype=torch.float64)
    ones = torch.ones(8, 1, dtype=torch.long)
    out = Rotary(8, scaling=PartialScaling(0.5))(x.view(8, 1, 1, 8), Coordinates(ones, ones))
    assert out[0].flatten().tolist() == pytest.approx([math.cos(1), 0, 0, 0, math.sin(1), 0, 0, 0])
    assert torch.equal(out[[2, 3, 6, 7], 0, 0], x[[2, 3, 6, 7]])


def test_lengths_are_those_of_documents():
    """Packed, padded on both sides, and going on from a cache; the order of slots does not matter."""
    places = Coordinates(
        torch.tensor([[0, 1, 2, 0, 1], [9, 0, 1, 7, 7], [6, 7, 0, 1, 2]]),
        torch.tensor([[1, 1, 1, 2, 2], [0, 1, 1, 0, 0], [2, 2, 1, 1, 1]]),
    )
    lengths = document_lengths(places)
    assert lengths[0].tolist() == [3, 3, 3, 2, 2]
    assert lengths[1, 1:3].tolist() == [2, 2]
    assert lengths[2].tolist() == [8, 8, 3, 3, 3]
    assert document_lengths(Coordinates.range(0)).shape == (1, 0)


@pytest.mark.parametrize("scaling", [LONG, NTK], ids=["longrope", "dynamic"])
def test_each_document_has_its_own_table(scaling):
    """A short document turns as it does alone, beside a long one in its batch or in its row."""
    rotary = Rotary(4, scaling=scaling)
    short, long = torch.randn(1, 5, 2, 4, dtype=torch.float64), torch.randn(1, 12, 2, 4, dtype=torch.float64)
    alone = rotary(short, row(5)), rotary(long, row(12))
    positions = torch.cat([torch.arange(5), torch.arange(12)])[None]
    segments = torch.tensor([[1] * 5 + [2] * 12])
    packed = rotary(torch.cat([short, long], 1), Coordinates(positions, segments))
    assert torch.equal(packed, torch.cat(alone, 1))
    padded = torch.cat([torch.zeros(1, 7, 2, 4, dtype=torch.float64), short], 1)
    places = Coordinates(
        torch.stack([torch.tensor([99] * 7 + [0, 1, 2, 3, 4]), torch.arange(12)]),
        torch.tensor([[0] * 7 + [1] * 5, [1] * 12]),
    )
    batch = rotary(torch.cat([padded, long]), places)
    assert torch.equal(batch[0, 7:], alone[0][0])
    assert torch.equal(batch[1], alone[1][0])
    assert not torch.equal(rotary(long[:, :5], row(5)), alone[1][:, :5])


@pytest.mark.parametrize(
    ("positions", "refused"),
    [
        ([5, 6, 7, 8, 9, 0, 1, 2, 3, 4], None),  # whole, its end first
        ([5, 6, 3, 4], None),
        ([3, 4, 8, 9], "a document of 10 tokens by other angles than its first 3"),
        ([8, 9, 3, 4], "a document of 10 tokens by other angles than its first 3"),
    ],
)
def test_a_document_in_pieces_is_one_document(positions, refused):
    """Its first token here and its last decide, wherever in the row they stand."""
    padding = [0] * 6
    places = Coordinates(torch.tensor([padding + positions]), torch.tensor([padding + [1] * len(positions)]))
    with pytest.raises(UnsupportedError, match=refused) if refused else nullcontext():
        Rotary(4, scaling=LONG)(torch.randn(1, len(positions) + 6, 1, 4), places)


def test_crosses_says_where_a_cache_ends():
    """B94: a cache may grow or be cropped only where both lengths share one table."""
    assert [LONG.changes_angles(6, after) for after in (7, 8, 9, 16)] == [False, False, True, True]
    assert [LONG.changes_angles(9, after) for after in (10, 16, 8)] == [False, False, True]
    assert not LONG.changes_angles(0, 16)
    assert not LONG.changes_angles(16, 0)
    assert [NTK.changes_angles(6, after) for after in (8, 9)] == [False, True]
    assert NTK.changes_angles(9, 10)
    for steady in (
        RopeScaling(),
        LinearScaling(2.0),
        PartialScaling(0.5),
        YarnScaling(4.0, 8),
        Llama3Scaling(8.0, 1.0, 4.0, 8),
    ):
        assert not steady.changes_angles(6, 1000)
    assert Rotary(4, scaling=LONG).scaling.changes_angles(8, 9)
    assert not Rotary(4).scaling.changes_angles(8, 9)


@pytest.mark.parametrize("scaling", [LONG, NTK], ids=["longrope", "dynamic"])
@pytest.mark.parametrize("told", [True, False])
def test_tables_are_never_mixed(scaling, told):
    """B94: 6 tokens, then 2 more, then one too many: refused by a pass that cannot reach the earlier keys."""
    rotary = Rotary(4, scaling=scaling)

    def turn(length, first):
        places = row(length, first)
        if not told:
            object.__setattr__(places, "layout", None)
        return rotary(torch.ones(1, length, 1, 4), places)

    turn(6, 0)
    turn(2, 6)
    with pytest.raises(UnsupportedError) as error:
        turn(1, 8)
    kind = type(scaling).__name__
    assert str(error.value) == (
        f"{kind} rotates a document of 9 tokens by other angles than its first 8, which are not in this pass; "
        "run all 9 tokens again, with an empty cache or none"
    )
    turn(9, 0)


def test_a_long_document_goes_on_under_the_long_table():
    turned = Rotary(4, scaling=LONG)(torch.ones(1, 1, 1, 4, dtype=torch.float64), row(1, first=20))
    whole = Rotary(4, scaling=LONG)(torch.ones(1, 21, 1, 4, dtype=torch.float64), row(21))
    assert torch.equal(turned[:, 0], whole[:, 20])


@pytest.mark.parametrize(
    "scaling",
    [
        LinearScaling(2.0),
        PartialScaling(0.5),
        YarnScaling(4.0, 64),
        Llama3Scaling(8.0, 1.0, 4.0, 64),
        LongRopeScaling([1.0, 1.5, 2.0, 3.0], [2.0, 3.0, 4.0, 8.0], 64, factor=4.0),
        DynamicNTKScaling(2.0, 8000),
    ],
    ids=lambda scaling: type(scaling).__name__,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_scaling_sees_distances_alone_and_keeps_exact_angles(scaling, dtype):
    rotary = Rotary(8, scaling=scaling).half()
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(m, n, x=q):
        return (rotary(x, row(1, first=m)) * rotary(k, row(1, first=n))).sum().item()

    assert score(105, 102) == pytest.approx(score(4105, 4102), abs=1e-9)
    assert score(105, 102) != pytest.approx(score(105, 101), abs=1e-3)
    exact = rotary(q, row(1, first=4095))
    rounded = rotary(q.to(dtype), row(1, first=4095))
    torch.testing.assert_close(rounded.double(), exact, atol=0.06 if dtype == torch.bfloat16 else 0, rtol=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearScaling(0.0), "factor is 0.0, but a finite number above 0"),
        (lambda: LinearScaling(math.inf), "factor is inf"),
        (lambda: DynamicNTKScaling(2.0, 0), "original_max_position_embeddings is 0"),
        (lambda: Llama3Scaling(8.0, 4.0, 1.0, 64), "low_freq_factor is 4.0 and high_freq_factor is 1.0"),
        (lambda: YarnScaling(4.0, 64, beta_fast=1.0, beta_slow=32.0), "beta_slow is 32.0 and beta_fast 1.0"),
        (lambda: YarnScaling(4.0, 64, mscale=0.7), "mscale is 0.7 and mscale_all_dim is None; give both"),
        (
            lambda: LongRopeScaling((1.0,), (0.0,), 8, attention_factor=1.0),
            "a divisor of short_factor or long_factor is 0.0",
        ),
        (lambda: LongRopeScaling((1.0,), (1.0,), 8), "attention_factor is None, factor None"),
        (
            lambda: LongRopeScaling((1.0,), (1.0,), 1, factor=4.0),
            "factor 4.0 and original_max_position_embeddings 1; give",
        ),
        (lambda: PartialScaling(1.5), "partial_rotary_factor is 1.5"),
        (lambda: Rotary(4, rope_theta=1.0, scaling=YarnScaling(4.0, 64)), "base above 1, but the base is 1.0"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_tables_that_do_not_fit_the_head_are_refused():
    with pytest.raises(ShapeError, match="2 short and 2 long divisors, but 8 rotated features are 4 pairs"):
        Rotary(8, scaling=LONG)
    with pytest.raises(ShapeError, match="2 features are rotated; rotate 4 or more"):
        Rotary(8, rotary_dim=2, scaling=NTK)
    with pytest.raises(ShapeError, match="of 4 pairs none would rotate"):
        Rotary(8, scaling=PartialScaling(0.1))
    assert Rotary(8, rotary_dim=4, scaling=LONG).rotary_dim == 4


def test_what_differs_from_plain_is_printed():
    assert repr(Rotary(8)) == "Rotary(head_dim=8, rope_theta=10000.0, interleaved=False)"
    stretched = Rotary(8, rotary_dim=4, scaling=LinearScaling(2.0))
    assert repr(stretched) == (
        "Rotary(head_dim=8, rope_theta=10000.0, interleaved=False, rotary_dim=4, scaling=LinearScaling(factor=2.0))"
    )


def test_angles_of_padding_are_finite():
    places = Coordinates(torch.tensor([[0, 1, 10**12, -7]]), torch.tensor([[1, 1, 0, 0]]))
    for scaling in (LONG, NTK):
        assert torch.isfinite(Rotary(4, scaling=scaling)(torch.ones(1, 4, 1, 4), places)).all()
