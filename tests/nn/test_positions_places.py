"""A slot is not a position: padding on either side, neighbours in the batch and chunks through a cache move nothing."""

from functools import partial

import pytest
import torch

from helpers.layers import laid_out
from pellucid.errors import ShapeError, UnsupportedError
from pellucid.nn import ContiguousCache, attend
from pellucid.nn.positions import (
    Alibi,
    DynamicNTKScaling,
    LearnedPositions,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    PartialScaling,
    RelativeBias,
    Rotary,
    SinusoidalPositions,
    YarnScaling,
)
from pellucid.visibility import Coordinates, causal

HEADS, SIZE = 2, 8
SHAPES = ((HEADS, SIZE), (HEADS, SIZE))  # of keys and values in one slot
DIVISORS = ([1.0, 1.5, 2.0, 3.0], [2.0, 3.0, 4.0, 8.0])

ROTARIES = {
    "half": Rotary(SIZE),
    "interleaved": Rotary(SIZE, interleaved=True),
    "partial": Rotary(SIZE, rotary_dim=4),
    "linear": Rotary(SIZE, scaling=LinearScaling(2.0)),
    "proportional": Rotary(SIZE, scaling=PartialScaling(0.5)),
    "llama3": Rotary(SIZE, scaling=Llama3Scaling(8.0, 1.0, 4.0, 64)),
    "yarn": Rotary(SIZE, scaling=YarnScaling(4.0, 64)),
    "longrope": Rotary(SIZE, scaling=LongRopeScaling(*DIVISORS, original_max_position_embeddings=16, factor=2.0)),
    "dynamic": Rotary(SIZE, scaling=DynamicNTKScaling(2.0, 9)),
}
BY_LENGTH = {
    "longrope 4": Rotary(SIZE, scaling=LongRopeScaling(*DIVISORS, original_max_position_embeddings=4, factor=2.0)),
    "dynamic 2": Rotary(SIZE, scaling=DynamicNTKScaling(2.0, 2)),
}


def large(bidirectional):
    """B58: a table of large random values, so that a bias that is lost or moved shows."""
    bias = RelativeBias(HEADS, bidirectional=bidirectional, num_buckets=8, max_distance=6).double()
    with torch.no_grad():
        bias.weight.normal_(std=5.0, generator=torch.Generator().manual_seed(7))
    return bias


def unmoved(x, coordinates):
    return x


def attention(turn=unmoved, bias=None, table=unmoved):
    """One attention layer of this position scheme: features of tokens to outputs, with or without a cache."""

    def run(x_BTC, chunk, cache=None):
        queries, keys = (chunk, chunk) if cache is None else cache.begin_append(chunk, [causal()])
        q, k, v = table(x_BTC, queries).unflatten(-1, (3, HEADS, SIZE)).unbind(2)
        q, k = turn(q, queries), turn(k, queries)
        if cache is not None:
            (k, v), _ = cache.layers[0].append(k, v)
            cache.commit()
        added = None if bias is None else bias(queries, keys)
        return attend(q, k, v, rule=causal(), q_coords=queries, k_coords=keys, bias=added).flatten(-2)

    return run


def learned():
    table = LearnedPositions(12, 3 * HEADS * SIZE, offset=2).double()
    torch.nn.init.normal_(table.weight, generator=torch.Generator().manual_seed(3))
    return table


SCHEMES = {name: attention(turn=rotary) for name, rotary in ROTARIES.items()}
SCHEMES |= {
    "alibi": attention(bias=partial(Alibi(HEADS), dtype=torch.float64)),
    "relative causal": attention(bias=large(bidirectional=False)),
    "relative two-way": attention(bias=large(bidirectional=True)),
    "learned": attention(table=learned()),
    "interleaved sines": attention(table=SinusoidalPositions(3 * HEADS * SIZE)),
    "tensor2tensor": attention(table=SinusoidalPositions(3 * HEADS * SIZE, layout="tensor2tensor", offset=2)),
}


def features(length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, 3 * HEADS * SIZE, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("scheme", [*SCHEMES, *BY_LENGTH])
@pytest.mark.parametrize(
    ("starts", "slots"),
    [((0, 0, 0), 5), ((2, 0, 4), 5), ((1, 1, 3), 7), ((0, 0, 0), 8), ((5, 3, 7), 8)],
    ids=["right", "left", "both", "right to 8", "left to 8"],
)
def test_padding_moves_nothing(scheme, starts, slots):
    """P-PAD and P-BATCH: rows of 3, 5 and 1 tokens, alone and together."""
    run = SCHEMES[scheme] if scheme in SCHEMES else attention(turn=BY_LENGTH[scheme])
    lengths = (3, 5, 1)
    rows = [features(length, seed) for seed, length in enumerate(lengths)]
    x = torch.randn(3, slots, 3 * HEADS * SIZE, dtype=torch.float64)
    for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
        x[i, start : start + len(row)] = row
    together = run(x, laid_out(lengths, starts, slots))
    for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
        alone = run(row[None], Coordinates.range(len(row)))[0]
        torch.testing.assert_close(together[i, start : start + len(row)], alone, atol=1e-10, rtol=0)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("chunks", [[4, 5], [1] * 9, [3, 1, 5], [8, 1]], ids=str)
@pytest.mark.parametrize("left", [0, 2])
def test_chunks_through_a_cache_equal_one_pass(scheme, chunks, left):
    """P-CACHE, for a second row that is ``left`` tokens shorter and padded on the left."""
    run = SCHEMES[scheme]
    if left and chunks[0] < 3:
        chunks = [3, *chunks[3:]]
    x = torch.stack([features(9, 1), features(9, 2)])
    whole = run(x, laid_out((9, 9 - left), (0, left), 9))
    cache = ContiguousCache(shapes=[SHAPES], rows=2, capacity=9, dtype=torch.float64)
    outs, done = [], 0
    for chunk in chunks:
        padding = left if done == 0 else 0
        places = laid_out((chunk, chunk - padding), (0, padding), chunk)
        outs.append(run(x[:, done : done + chunk], places, cache))
        done += chunk
    real = laid_out((9, 9 - left), (0, left), 9).real
    torch.testing.assert_close(torch.cat(outs, 1)[real], whole[real], atol=1e-10, rtol=0)


def test_longrope_in_a_roomy_cache_goes_by_what_is_there():
    """B94: room for 16, original length 8. Five tokens and three steps read the short table; the ninth is refused,
    the cache is as it was, and the nine tokens run again equal a run without a cache."""
    scaling = LongRopeScaling(*DIVISORS, original_max_position_embeddings=8, factor=2.0)
    run, x = attention(turn=Rotary(SIZE, scaling=scaling)), features(9, 0)[None]
    empty = partial(ContiguousCache, shapes=[SHAPES], rows=1, dtype=torch.float64)
    cache = empty(capacity=16)
    outs = [run(x[:, :5], Coordinates.range(5), cache)]
    outs += [run(x[:, i : i + 1], Coordinates.range(1), cache) for i in range(5, 8)]
    short = run(x[:, :8], Coordinates.range(8))
    torch.testing.assert_close(torch.cat(outs, 1), short, atol=1e-10, rtol=0)
    with pytest.raises(UnsupportedError, match="document of 9 tokens by other angles than its first 8"):
        run(x[:, 8:], Coordinates.range(1), cache)
    assert cache.sequence_lengths == [8]
    again = run(x, Coordinates.range(9), empty(capacity=16))
    assert torch.equal(again, run(x, Coordinates.range(9)))
    assert (again[:, :8] - short).abs().max() > 1e-3


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_tells_the_order_of_tokens(scheme):
    """What the two tests above could miss: a scheme that does nothing would pass them."""
    run = SCHEMES[scheme]
    x = features(4, 0)
    swapped = x[[2, 1, 0, 3]]
    ordered, other = (run(rows[None], Coordinates.range(4))[0, 3] for rows in (x, swapped))
    assert (ordered - other).abs().max() > 1e-6


def untold(rows, slots):
    """Coordinates without numbers behind them: shapes and devices only."""
    return Coordinates(*torch.zeros(2, rows, slots, dtype=torch.long, device="meta"))


@pytest.mark.parametrize("name", [*ROTARIES, *BY_LENGTH])
def test_angles_are_made_where_the_positions_are(name):
    """On the meta device a tensor made on the host by mistake would not mix, and asking for a number would fail."""
    x = torch.zeros(2, 5, HEADS, SIZE, device="meta")
    out = (ROTARIES | BY_LENGTH)[name](x, untold(2, 5))
    assert (out.device.type, out.shape) == ("meta", x.shape)


def test_tables_and_biases_are_made_where_the_positions_are():
    queries, keys = untold(2, 3), untold(2, 5)
    with torch.device("meta"):
        parts = RelativeBias(HEADS, bidirectional=False), RelativeBias(HEADS, bidirectional=True), Alibi(HEADS)
        tables = LearnedPositions(4, 7), SinusoidalPositions(7), SinusoidalPositions(7, layout="tensor2tensor")
    for bias in parts:
        assert (bias(queries, keys).device.type, bias(queries, keys).shape) == ("meta", (2, HEADS, 3, 5))
    for table in tables:
        assert table(torch.zeros(2, 3, 7, device="meta"), queries).device.type == "meta"


@pytest.mark.parametrize(
    "part", [Rotary(8), LearnedPositions(9, 8), SinusoidalPositions(8)], ids=["rotary", "table", "sines"]
)
@pytest.mark.parametrize(("x", "places"), [((1, 1), (1, 4)), ((1, 4), (1, 1)), ((1, 4), (3, 4)), ((3, 4), (1, 4))])
def test_places_are_not_spread_over_tokens_nor_tokens_over_places(part, x, places):
    tokens = torch.zeros(*x, *((HEADS, 8) if isinstance(part, Rotary) else (8,)))
    with pytest.raises(
        ShapeError, match=rf"x has \({x[0]}, {x[1]}\) rows and tokens, but its coordinates are \({places[0]}"
    ):
        part(tokens, Coordinates.range(places[1], places[0]))
