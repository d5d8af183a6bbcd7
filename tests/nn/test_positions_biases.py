"""Position biases written out, and what they must not depend on."""

import weakref

import pytest
import torch

from pellucid.errors import InputError, ShapeError
from pellucid.nn import attend
from pellucid.nn.positions import Alibi, RelativeBias
from pellucid.visibility import Coordinates, causal, full


def at(*positions):
    return Coordinates(torch.tensor([positions]), torch.ones(1, len(positions), dtype=torch.long))


def relative(heads, **words):
    """A table of large random numbers: as it is made it holds whatever memory held."""
    bias = RelativeBias(heads, **words)
    torch.nn.init.normal_(bias.weight, std=5.0)
    return bias


def test_buckets_written_out_both_ways():
    """T5's own numbers: 32 buckets, 16 a side, 8 of them single; the rest begin at 8 · 16 ** (k / 8)."""
    bias = relative(1, bidirectional=True)
    assert bias.bounds == (12, 16, 23, 32, 46, 64, 91)
    behind = {0: 0, 1: 1, 7: 7, 8: 8, 11: 8, 12: 9, 15: 9, 16: 10, 22: 10, 23: 11, 90: 14, 91: 15, 128: 15, 10**9: 15}
    for distance, bucket in behind.items():
        assert bias.buckets(at(distance), at(0)).item() == bucket
        if distance:
            assert bias.buckets(at(0), at(distance)).item() == 16 + bucket


def test_buckets_written_out_one_way():
    """8 buckets to 20: four single, the rest begin at 4 · 5 ** (k / 4) = 4, 5.98, 8.94, 13.4; ahead is bucket 0."""
    bias = relative(1, bidirectional=False, num_buckets=8, max_distance=20)
    keys = at(*range(21))
    behind = [0, 1, 2, 3, 4, 4, 5, 5, 5, 6, 6, 6, 6, 6, 7, 7, 7, 7, 7, 7, 7]
    assert bias.buckets(at(20), keys)[0, 0].flip(0).tolist() == behind
    assert bias.buckets(at(0), keys).unique().tolist() == [0]


def test_the_fewest_buckets_and_the_nearest_end():
    """Two buckets; four both ways; an odd number one way; and an end right behind the single ones."""
    assert relative(1, bidirectional=False, num_buckets=2, max_distance=4).buckets(at(3), at(0, 1, 2, 3)).tolist() == [
        [[1, 1, 1, 0]]
    ]
    both = relative(1, bidirectional=True, num_buckets=4, max_distance=4)
    assert both.buckets(at(2), at(0, 1, 2, 3, 4)).tolist() == [[[1, 1, 0, 3, 3]]]
    assert relative(1, bidirectional=False, num_buckets=9, max_distance=20).num_embeddings == 9
    near = relative(1, bidirectional=False, num_buckets=8, max_distance=5)
    assert near.buckets(at(6), at(*range(7))).tolist() == [[[7, 7, 4, 3, 2, 1, 0]]]


@pytest.mark.parametrize("bias", [Alibi(2), RelativeBias(2, bidirectional=True)], ids=["alibi", "relative"])
def test_keys_may_stand_elsewhere_in_each_row(bias):
    """Also where all queries stand at one place: rows are only shared where both sides are alike."""
    queries = Coordinates(torch.tensor([[4], [4]]), torch.ones(2, 1, dtype=torch.long))
    keys = Coordinates(torch.tensor([[0, 1, 2], [0, 0, 1]]), torch.tensor([[1, 1, 1], [0, 1, 1]]))
    both = bias(queries, keys)
    assert both.shape == (2, 2, 1, 3)
    assert torch.equal(both[0], bias(at(4), at(0, 1, 2))[0])
    assert torch.equal(both[1, ..., 1:], bias(at(4), at(0, 1))[0])


def test_what_is_made_once_holds_its_keys_but_never_itself():
    """The id of keys that are gone would be given to others; queries that hold themselves would never go."""
    queries, keys = at(4), at(0, 1, 2)
    gone, alone = weakref.ref(keys), weakref.ref(queries)
    bias = Alibi(2)
    bias(queries, keys)
    bias(queries, queries)
    del keys
    assert gone() is not None
    del queries
    assert gone() is alone() is None


def test_the_table_is_read_by_bucket_and_head():
    bias = relative(2, bidirectional=False, num_buckets=4, max_distance=8)
    with torch.no_grad():
        bias.weight.copy_(torch.arange(8.0).view(4, 2))
    out = bias(at(2), at(0, 1, 2))
    assert out.tolist() == [[[[4, 2, 0]], [[5, 3, 1]]]]
    assert bias.bfloat16()(at(2), at(0, 1)).dtype == torch.bfloat16
    assert bias(at(2), at(0, 1), torch.float32).dtype == torch.float32


def test_slopes_keep_the_precision_that_is_asked_for():
    slopes = torch.tensor(Alibi(6, alibi_bias_max=5.0).slopes, dtype=torch.float64)  # no powers of two
    found = Alibi(6, alibi_bias_max=5.0)(at(7), at(0), torch.float64).flatten()
    assert torch.equal(found, -7 * slopes)
    assert not torch.equal(found.float().double(), found)


def test_slopes_written_out():
    """B97."""
    assert Alibi(4).slopes == (0.25, 0.0625, 0.015625, 0.00390625)
    assert Alibi(6).slopes == (0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125)
    assert Alibi(8).slopes == tuple(2.0**-h for h in range(1, 9))
    assert Alibi(1).slopes == (2.0**-8,)
    assert Alibi(3).slopes == (2.0**-4, 2.0**-8, 2.0**-2)
    assert Alibi(2, alibi_bias_max=4.0).slopes == (0.25, 0.0625)


def test_alibi_written_out():
    out = Alibi(2, alibi_bias_max=2.0)(at(1, 2), at(0, 1, 2, 5))
    near, far = [[1, 0, 1, 4], [2, 1, 0, 3]], 0.25
    expected = torch.tensor([near], dtype=torch.float32)
    assert torch.equal(out[0], -torch.cat([expected * 0.5, expected * far]))
    assert not out.signbit()[out == 0].any()


def test_slopes_are_fixed_and_exact_in_sixteen_bits():
    """B89 for slopes: nothing to cast, nothing to train, and distances past 256 stay apart."""
    bias = Alibi(6).bfloat16()
    assert not list(bias.parameters())
    assert not list(bias.buffers())
    out = bias(at(4095), at(0, 1, 2))
    assert out.dtype == torch.float32
    assert out[0, 4, 0].tolist() == [-4095 / 2, -4094 / 2, -4093 / 2]
    assert torch.equal(bias(at(4095), at(0), torch.bfloat16), out[..., :1].bfloat16())


def scores_of(rule, bias, queries):
    q, k, v = (
        torch.randn(1, 6, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(3)
    )
    return attend(q, k, v, rule=rule, q_coords=queries, k_coords=queries, bias=bias)


def test_one_row_for_all_queries_is_right_only_under_causality():
    """B98: ``slope · j`` differs from ``−slope · |i − j|`` by a number a row where no key is ahead, and only there."""
    row = Coordinates.range(6)
    alibi = Alibi(4)
    distance = alibi(row, row, torch.float64)
    one_row = torch.tensor(alibi.slopes, dtype=torch.float64).view(1, 4, 1, 1) * torch.arange(6).expand(1, 1, 6, 6)
    torch.testing.assert_close(scores_of(causal(), distance, row), scores_of(causal(), one_row, row))
    apart = scores_of(full(), distance, row) - scores_of(full(), one_row, row)
    assert apart[:, :5].abs().amax() > 1e-2
    assert torch.equal(distance, distance.transpose(-1, -2))


@pytest.mark.parametrize("bias", [relative(2, bidirectional=False), relative(2, bidirectional=True), Alibi(2)])
def test_shifting_queries_and_keys_together_changes_nothing(bias):
    here, far = bias(at(5, 9), at(0, 5, 30)), bias(at(10**9 + 5, 10**9 + 9), at(10**9, 10**9 + 5, 10**9 + 30))
    assert torch.equal(here, far)
    assert not torch.equal(here, bias(at(5, 9), at(1, 6, 31)))


def test_rows_share_a_bias_only_where_they_share_positions():
    alibi = Alibi(2)
    assert alibi(Coordinates.range(3, rows=4), Coordinates.range(3, rows=4)).shape == (1, 2, 3, 3)
    two = Coordinates(torch.tensor([[0, 1], [5, 9]]), torch.ones(2, 2, dtype=torch.long))
    assert alibi(two, two).shape == (2, 2, 2, 2)
    assert alibi(two, two)[:, 0, 1, 0].tolist() == [-(2**-4), -4 * 2**-4]
    shifted = Coordinates(torch.tensor([[0, 1], [1, 2]]), torch.ones(2, 2, dtype=torch.long))
    assert alibi(shifted, Coordinates.range(2, rows=2))[1, 0, 0].tolist() == [-(2**-4), 0]
    padded = Coordinates(torch.tensor([[0, 0, 1], [0, 1, 2]]), torch.tensor([[0, 1, 1], [1, 1, 1]]))
    assert alibi(padded, padded).shape == (2, 2, 3, 3)
    with pytest.raises(ShapeError, match="queries have 2 rows and keys 1; give both for the same rows"):
        alibi(two, at(0, 1))


def test_made_once_for_both_coordinates():
    """Layers share the result; other keys, other slopes and other buckets have their own."""
    queries, keys, other = at(2, 3), at(0, 1, 2, 3), at(0, 1, 2, 3)
    first = Alibi(4)(queries, keys)
    assert Alibi(4)(queries, keys) is first
    assert Alibi(4)(queries, other) is not first
    assert Alibi(2)(queries, keys).shape == (1, 2, 2, 4)
    assert Alibi(4)(queries, keys, torch.float64).dtype == torch.float64
    one = relative(3, bidirectional=False).buckets(queries, keys)
    assert relative(5, bidirectional=False).buckets(queries, keys) is one
    assert relative(5, bidirectional=True).buckets(queries, keys) is not one


def test_a_changed_table_is_seen_at_once():
    """The same coordinates after a step: the new bias, and a graph that can be walked again."""
    bias, row = relative(2, bidirectional=False), Coordinates.range(3)
    for _ in range(2):
        before = bias(row, row)
        before.sum().backward()
        with torch.no_grad():
            bias.weight += 1
        torch.testing.assert_close(bias(row, row), before + 1)


def test_gradient_reaches_only_buckets_that_were_seen():
    """Four tokens under a causal rule use distances 0 to 3; the pad's and all other buckets keep exactly 0."""
    bias = relative(4, bidirectional=True)
    places = Coordinates(torch.tensor([[0, 1, 2, 3, 40]]), torch.tensor([[1, 1, 1, 1, 0]]))
    q, k, v = torch.randn(3, 1, 5, 4, 8)
    attend(
        q, k, v, rule=causal(), q_coords=places, k_coords=places, bias=bias(places, places)
    ).square().sum().backward()
    rows = bias.weight.grad.abs().sum(1)
    assert (rows[:4] > 0).all()
    assert (rows[4:] == 0).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: RelativeBias(2, bidirectional=True, num_buckets=2),
            "num_buckets is 2, but bidirectional biases need an even number of 4",
        ),
        (lambda: RelativeBias(2, bidirectional=True, num_buckets=9), "num_buckets is 9, but bidirectional"),
        (
            lambda: RelativeBias(2, bidirectional=False, num_buckets=1),
            "num_buckets is 1, but one-way biases need 2 or more",
        ),
        (lambda: RelativeBias(2, bidirectional=False, max_distance=16), "max_distance is 16, .* make it above 16"),
        (lambda: Alibi(0), "num_heads is 0"),
        (lambda: Alibi(2, alibi_bias_max=0.0), "alibi_bias_max is 0.0"),
    ],
)
def test_sizes_that_mean_nothing_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()
