"""What is added on entry: sinusoids as they were really run, tables with rows in front, token types."""

import math

import pytest
import torch

from pellucid.errors import InputError, LengthError, ShapeError
from pellucid.nn.positions import LearnedPositions, SinusoidalPositions, TokenTypeEmbedding
from pellucid.visibility import Coordinates


def at(*positions):
    return Coordinates(torch.tensor([positions]), torch.ones(1, len(positions), dtype=torch.long))


def untold(coordinates):
    """The same places, on a host that does not know them."""
    object.__setattr__(coordinates, "layout", None)
    return coordinates


def far_away(coordinates):
    """The same places on a device where nothing is computed."""
    return Coordinates(coordinates.positions.to("meta"), coordinates.segments.to("meta"), layout=coordinates.layout)


def test_tensor2tensor_written_out():
    """Size 6: wavelengths 2π, 2π · 100, 2π · 10000, where the paper's text has 10000 ** (2/3) for the last."""
    table = SinusoidalPositions(6, layout="tensor2tensor").table(at(0, 3))[0].tolist()
    assert table[0] == [0, 0, 0, 1, 1, 1]
    angles = [3, 3 / 100, 3 / 10000]
    assert table[1] == pytest.approx([*map(math.sin, angles), *map(math.cos, angles)])
    half = SinusoidalPositions(6, layout="half").table(at(3))[0, 0, 2].item()
    assert half == pytest.approx(math.sin(3 / 10000 ** (4 / 6)))


@pytest.mark.parametrize(("size", "pairs"), [(1, 0), (2, 1), (3, 1), (5, 2), (7, 3)])
def test_tensor2tensor_of_small_and_odd_sizes(size, pairs):
    """A lone pair turns once a radian, and an odd size ends in 0."""
    found = SinusoidalPositions(size, layout="tensor2tensor").table(at(2))[0, 0].tolist()
    angles = [2 / 10000 ** (i / max(pairs - 1, 1)) for i in range(pairs)]
    assert found == pytest.approx([*map(math.sin, angles), *map(math.cos, angles)] + [0] * (size % 2))


@pytest.mark.parametrize("layout", ["interleaved", "half", "tensor2tensor"])
def test_an_offset_moves_every_position(layout):
    moved = SinusoidalPositions(6, layout=layout, offset=2).table(at(0, 1, 7))
    assert torch.equal(moved, SinusoidalPositions(6, layout=layout).table(at(2, 3, 9)))


@pytest.mark.parametrize("layout", ["interleaved", "half", "tensor2tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sinusoids_are_rounded_last(layout, dtype):
    part = SinusoidalPositions(64, layout=layout).half().to(dtype)
    assert not list(part.buffers())
    out = part(torch.zeros(1, 1, 64, dtype=dtype), at(4095))
    assert torch.equal(out, part.table(at(4095)).to(dtype))
    assert part.table(at(4095)).dtype == torch.float64


@pytest.mark.parametrize("told", [True, False])
def test_rows_in_front_are_no_positions(told):
    """BART and OPT: length 4 and offset 2 are six rows, of which positions read the last four."""
    table = LearnedPositions(4, 3, offset=2)
    torch.nn.init.normal_(table.weight)
    assert table.weight.shape == (6, 3)
    assert table.max_position_embeddings == 4
    x = torch.zeros(1, 4, 3)

    def places(*positions):
        return at(*positions) if told else untold(at(*positions))

    assert torch.equal(table(x, places(0, 1, 2, 3))[0], table.weight[2:])
    with pytest.raises(LengthError) as error:
        table(x, places(1, 2, 3, 4))
    assert str(error.value) == ("position 4 is past the table of 4 learned positions; shorten the sequence to 4 tokens")
    with pytest.raises(LengthError, match="position -1 is before the first of 4 learned positions; count from 0"):
        table(x, places(-1, 0, 1, 2))


@pytest.mark.parametrize("told", [True, False])
def test_padding_reads_no_row_and_teaches_none(told):
    """Pads may say any position: they raise nothing, and rows that no real token reads keep a gradient of 0."""
    table = LearnedPositions(8, 3, offset=2)
    torch.nn.init.normal_(table.weight)
    places = Coordinates(torch.tensor([[99, -5, 0, 1]]), torch.tensor([[0, 0, 1, 1]]))
    out = table(torch.zeros(1, 4, 3), places if told else untold(places))
    assert torch.equal(out[0, 2:], table.weight[2:4])
    out[places.real].sum().backward()
    assert table.weight.grad.sum(1).tolist() == [0, 0, 3, 3, 0, 0, 0, 0, 0, 0]
    empty = Coordinates(torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 2, dtype=torch.long))
    assert torch.isfinite(table(torch.zeros(1, 2, 3), empty if told else untold(empty))).all()


def test_a_table_cannot_begin_before_itself():
    with pytest.raises(ShapeError, match="offset is -1"):
        LearnedPositions(4, 3, offset=-1)


def test_types_are_added():
    table = TokenTypeEmbedding(2, 3)
    x = torch.randn(1, 4, 3)
    row = Coordinates.range(4)
    out = table(x, torch.tensor([[0, 0, 1, 1]]), row)
    torch.testing.assert_close(out - x, table.weight[[0, 0, 1, 1]][None])
    assert torch.equal(table(x, None, row), table(x, torch.zeros(1, 4, dtype=torch.long), row))
    assert table(x.bfloat16(), None, row).dtype == torch.bfloat16


def test_types_outside_the_table_are_refused(our_checks_only):
    table, row = TokenTypeEmbedding(2, 3), Coordinates.range(4)
    x = torch.zeros(1, 4, 3)
    for wrong in (2, -1):
        with pytest.raises(InputError, match=f"token type {wrong} is outside the table of 2 types; use 0 to 1"):
            table(x, torch.tensor([[0, 1, wrong, 0]]), row)
    with pytest.raises(ShapeError, match=r"token types have shape \(1, 3\), but the tokens \(1, 4\)"):
        table(x, torch.zeros(1, 3, dtype=torch.long), row)


def test_types_of_padding_are_not_looked_at():
    table = TokenTypeEmbedding(2, 3)
    places = Coordinates(torch.tensor([[0, 0, 1]]), torch.tensor([[0, 1, 1]]))
    out = table(torch.zeros(1, 3, 3), torch.tensor([[77, 1, 1]]), places)
    out[places.real].sum().backward()
    assert torch.equal(out[0, 1:], table.weight[[1, 1]])
    assert table.weight.grad.tolist() == [[0, 0, 0], [2, 2, 2]]


def test_types_are_looked_at_on_a_cpu_outside_a_compiler(monkeypatch):
    table, row = TokenTypeEmbedding(2, 3), Coordinates.range(4)
    empty = table(torch.zeros(1, 0, 3), torch.zeros(1, 0, dtype=torch.long), Coordinates.range(0))
    assert empty.shape == (1, 0, 3)
    with torch.device("meta"):
        far = TokenTypeEmbedding(2, 3)(torch.zeros(1, 4, 3), torch.ones(1, 4, dtype=torch.long), far_away(row))
    assert far.is_meta
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(torch.Tensor, "__int__", lambda _: pytest.fail("a number was asked for"))
    table(torch.zeros(1, 4, 3), torch.ones(1, 4, dtype=torch.long), row)


def test_a_position_before_the_first_is_refused_in_any_document():
    places = Coordinates(torch.tensor([[-1, 0, 0, 1]]), torch.tensor([[1, 1, 2, 2]]))
    with pytest.raises(LengthError, match="position -1 is before the first of 4"):
        LearnedPositions(4, 3)(torch.zeros(1, 4, 3), places)


def test_a_layout_is_read_off_once_where_that_can_be_done(monkeypatch):
    places = untold(Coordinates.range(3))
    assert places.read_layout() is places.read_layout() == Coordinates.range(3).layout
    assert untold(far_away(places)).read_layout() is None
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert untold(Coordinates.range(3)).read_layout() is None
    assert Coordinates.range(3).read_layout() == Coordinates.range(3).layout
