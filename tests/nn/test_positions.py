import math

import pytest
import torch

from pellucid.errors import LengthError, ShapeError
from pellucid.nn import LearnedPositions, Rotary, SinusoidalPositions
from pellucid.visibility import Coordinates


def at(*positions):
    return Coordinates(torch.tensor([positions]), torch.ones(1, len(positions), dtype=torch.long))


def turned(rotary, vector, position, dtype=torch.float64):
    x = torch.tensor(vector, dtype=dtype).view(1, 1, 1, -1)
    return rotary(x, at(position)).flatten().tolist()


def test_pairings_written_out():
    """B88: d = 4, base 10000, position 1, x = [1, 0, 0, 0]."""
    cos, sin = math.cos(1), math.sin(1)
    assert turned(Rotary(4), [1, 0, 0, 0], 1) == pytest.approx([cos, 0, sin, 0])
    assert turned(Rotary(4, interleaved=True), [1, 0, 0, 0], 1) == pytest.approx([cos, sin, 0, 0])
    second = math.cos(0.01), math.sin(0.01)
    assert turned(Rotary(4), [0, 1, 0, 0], 1) == pytest.approx([0, second[0], 0, second[1]])


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_distance_alone(interleaved):
    """L18: shifting query and key together changes no score."""
    rotary = Rotary(8, interleaved=interleaved)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    scores = [
        (rotary(q, at(m + shift)) * rotary(k, at(n + shift))).sum().item()
        for m, n in ((5, 2),)
        for shift in (0, 1, 77, 4000)
    ]
    assert scores == pytest.approx([scores[0]] * 4, abs=1e-9)
    assert (rotary(q, at(5)) * rotary(k, at(3))).sum().item() != pytest.approx(scores[0])


def test_permuted_weights_turn_one_pairing_into_the_other():
    order = [0, 4, 1, 5, 2, 6, 3, 7]  # interleaved feature i comes from half-split feature order[i]
    x = torch.randn(1, 1, 1, 8, dtype=torch.float64)
    half = Rotary(8)(x, at(9))
    interleaved = Rotary(8, interleaved=True)(x[..., order], at(9))
    torch.testing.assert_close(interleaved, half[..., order])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_angles_survive_sixteen_bits(dtype):
    """B89: after any cast of the module, angles at 4095 are those of float64, and 512 positions are distinct."""
    rotary = Rotary(128).half().to(dtype).float()
    angles = rotary.angles(at(4095))
    expected = 4095 * 10000.0 ** (-torch.arange(64, dtype=torch.float64) / 64)
    torch.testing.assert_close(angles[0, 0], expected)
    ones = torch.ones(1, 512, 1, 128, dtype=dtype)
    table = Rotary(128)(ones, at(*range(512)))[0, :, 0]
    assert len({tuple(row) for row in table.tolist()}) == 512


def test_rows_have_their_own_positions():
    """B65: three rows, three angles."""
    rotary = Rotary(4)
    x = torch.randn(1, 2, 1, 4, dtype=torch.float64).expand(3, 2, 1, 4)
    rows = Coordinates(torch.tensor([[0, 1], [5, 6], [2, 9]]), torch.ones(3, 2, dtype=torch.long))
    together = rotary(x, rows)
    for row in range(3):
        alone = rotary(x[:1], Coordinates(rows.positions[row : row + 1], rows.segments[row : row + 1]))
        assert torch.equal(together[row], alone[0])


@pytest.mark.parametrize("size", [1, 2, 5, 6])
@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_sinusoids_of_odd_and_even_sizes(size, layout):
    """L15."""
    table = SinusoidalPositions(size, layout=layout).table(at(0, 1, 10_000))[0]
    sines = [[math.sin(p / 10000 ** (2 * i / size)) for i in range((size + 1) // 2)] for p in (0, 1, 10_000)]
    cosines = [[math.cos(p / 10000 ** (2 * i / size)) for i in range(size // 2)] for p in (0, 1, 10_000)]
    for row, s, c in zip(table.tolist(), sines, cosines, strict=True):
        if layout == "half":
            assert row == pytest.approx(s + c)
        else:
            assert row[0::2] == pytest.approx(s)
            assert row[1::2] == pytest.approx(c)


def test_a_learned_table_ends_where_it_ends():
    """B100: an error that names both, before any kernel; pads never reach the table."""
    table = LearnedPositions(4, 3)
    torch.nn.init.normal_(table.weight)
    x = torch.zeros(1, 4, 3)
    assert torch.equal(table(x, at(0, 1, 2, 3))[0], table.weight)
    with pytest.raises(LengthError, match="position 4 is past the table of 4"):
        table(x, at(1, 2, 3, 4))
    padded = Coordinates(torch.tensor([[0, 1, 99, -7]]), torch.tensor([[1, 1, 0, 0]]))
    assert torch.isfinite(table(x, padded)).all()


def test_odd_heads_cannot_be_turned():
    with pytest.raises(ShapeError, match="head_dim is 5"):
        Rotary(5)
    assert Rotary(5, rotary_dim=4).rotary_dim == 4


def test_partial_rotary_written_out():
    """B95: d = 8, half of it turned. e0 at position 1 meets feature 2 (half) or 1 (interleaved), never 4."""
    cos, sin = math.cos(1), math.sin(1)
    e0 = [1, 0, 0, 0, 0, 0, 0, 0]
    assert turned(Rotary(8, rotary_dim=4), e0, 1) == pytest.approx([cos, 0, sin, 0, 0, 0, 0, 0])
    interleaved = Rotary(8, rotary_dim=4, interleaved=True)
    assert turned(interleaved, e0, 1) == pytest.approx([cos, sin, 0, 0, 0, 0, 0, 0])
    # exponents are those of the turned part: the second pair turns by 10000 ** (-2 / 4) = 0.01
    e1 = [0, 1, 0, 0, 0, 0, 0, 0]
    assert turned(Rotary(8, rotary_dim=4), e1, 1) == pytest.approx([0, math.cos(0.01), 0, math.sin(0.01), 0, 0, 0, 0])


@pytest.mark.parametrize("interleaved", [False, True])
def test_what_is_not_rotated_is_left_bit_for_bit(interleaved):
    x = torch.randn(2, 3, 2, 8)
    out = Rotary(8, rotary_dim=6, interleaved=interleaved)(x, Coordinates.range(3, rows=2))
    assert torch.equal(out[..., 6:], x[..., 6:])
    assert not torch.isclose(out[:, 1:, :, :6], x[:, 1:, :, :6]).all(-1).any()
    assert torch.equal(out[:, 0], x[:, 0])


@pytest.mark.parametrize("rotated", [0, 3, 10, -2])
def test_parts_that_cannot_be_turned(rotated):
    with pytest.raises(ShapeError, match=f"rotary_dim is {rotated}"):
        Rotary(8, rotary_dim=rotated)


def test_a_head_of_another_size_is_refused():
    with pytest.raises(ShapeError, match=r"have 8 features, but this Rotary rotates heads of 4; make it Rotary\(8\)"):
        Rotary(4)(torch.zeros(1, 1, 1, 8), at(0))


def test_huge_positions_keep_their_angles():
    where = 1_000_000_007
    cos, sin = math.cos(where), math.sin(where)
    assert turned(Rotary(4), [1, 0, 0, 0], where) == pytest.approx([cos, 0, sin, 0], abs=1e-9)
    table = SinusoidalPositions(4).table(at(where))[0, 0]
    assert table.tolist() == pytest.approx([sin, cos, math.sin(where * 0.01), math.cos(where * 0.01)], abs=1e-6)


def test_a_table_of_angles_is_made_once_a_forward():
    """One table for queries and keys of all layers that turn alike; others have their own."""
    made = []

    class Counted(Rotary):
        def angles(self, coordinates):
            made.append(self.rope_theta)
            return super().angles(coordinates)

    row = Coordinates.range(3)
    layers = [Counted(4), Counted(4, interleaved=True), Counted(4, rope_theta=1e6)]
    for layer in layers:
        for heads in (4, 2):
            layer(torch.randn(1, 3, heads, 4), row)
    assert made == [10000.0, 1e6]


def test_a_rotation_keeps_lengths_and_gradients():
    """It is orthogonal: the gradient of the sum of squares is 2x, whatever the angles; nothing else is learnt."""
    rotary = Rotary(8, rotary_dim=4)
    assert not list(rotary.parameters())
    assert not list(rotary.buffers())
    x = torch.randn(1, 5, 2, 8, dtype=torch.float64, requires_grad=True)
    rotary(x, Coordinates.range(5)).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())
