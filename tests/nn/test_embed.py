"""Ids to vectors: what is outside the table is refused, what is padding is silent, and a device is asked nothing."""

import pytest
import torch

from pellucid.errors import InputError
from pellucid.nn import TokenEmbedding, zero_padding
from pellucid.nn.positions import LearnedPositions, TokenTypeEmbedding
from pellucid.visibility import Coordinates, Layout, Run


def table(tokens=5, size=3):
    return TokenEmbedding(tokens, size)


@pytest.mark.parametrize(
    "made", [TokenEmbedding, LearnedPositions, TokenTypeEmbedding], ids=["tokens", "positions", "types"]
)
def test_a_table_starts_with_values_of_its_own(made):
    """Never with whatever stood in that memory before; torch draws these of an ``nn.Embedding`` too."""
    torch.manual_seed(3)
    weight = made(50, 3).weight
    torch.manual_seed(3)
    assert torch.equal(weight, torch.nn.Embedding(50, 3).weight)
    with torch.device("meta"):
        assert made(50, 3).weight.is_meta


def test_each_id_is_its_row():
    part = table()
    assert torch.equal(part(torch.tensor([[0, 4], [2, 0]])), part.weight[[0, 4, 2, 0]].view(2, 2, 3))
    assert part(torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0, 3)


@pytest.mark.parametrize(("ids", "wrong"), [([0, 5], 5), ([4, -1], -1), ([7, -2], -2), ([5], 5), ([-1], -1)])
def test_ids_outside_the_table_are_named(ids, wrong):
    with pytest.raises(InputError, match=f"token id {wrong} is outside the vocabulary of 5"):
        table()(torch.tensor([ids]))


def test_a_device_and_a_compiler_are_asked_no_number(monkeypatch):
    ids = torch.tensor([[0, 4]])
    assert table().to("meta")(ids.to("meta")).device.type == "meta"
    part = table()
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        patch.setattr(torch.Tensor, "__int__", lambda _: pytest.fail("a number was asked for"))
        assert torch.equal(part(ids)[0], part.weight[[0, 4]])


def untold(places):
    object.__setattr__(places, "layout", None)
    return places


@pytest.mark.parametrize("told", [True, False])
def test_padding_is_zero_whatever_it_held(told):
    """Also where each row has a document, or as many runs as rows; NaN there reaches neither output nor gradient."""
    for segments in ([[1, 1, 0], [0, 1, 1]], [[1, 2, 0], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]], [[1, 2, 2], [1, 1, 1]]):
        segments = torch.tensor(segments)
        places = Coordinates(torch.zeros_like(segments), segments)
        x = torch.randn(2, 3, 4)
        x[segments == 0] = float("nan")
        x.requires_grad_()
        out = zero_padding(x, places if told else untold(places))
        assert torch.equal(out[segments != 0], x[segments != 0])
        assert (out[segments == 0] == 0).all()
        out.sum().backward()
        assert torch.equal(x.grad, (segments != 0).float()[..., None].expand(2, 3, 4))


def test_a_stream_without_padding_is_left_alone(monkeypatch):
    x = torch.randn(2, 3, 4)
    assert zero_padding(x, Coordinates.range(3, 2)) is x
    packed = Coordinates(torch.tensor([[0, 1, 0]] * 2), torch.tensor([[1, 1, 2]] * 2))
    assert zero_padding(x, packed) is x
    believed = Layout(2, 3, (Run(0, 0, 3, 1, 0), Run(1, 0, 2, 1, 0)))  # what the host says decides
    assert zero_padding(x, Coordinates(packed.positions, packed.segments, layout=believed)) is not x
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert zero_padding(x, packed) is not x  # one graph for batches with padding and without
