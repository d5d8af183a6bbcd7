import pytest
import torch

from pellucid.errors import ShapeError
from pellucid.visibility import Coordinates, Layout, Run


def layout_by_hand(positions, segments):
    """One slot at a time."""
    runs = []
    for row, (row_positions, row_segments) in enumerate(zip(positions, segments, strict=True)):
        for slot, (position, segment) in enumerate(zip(row_positions, row_segments, strict=True)):
            last = runs[-1] if runs else None
            if segment == 0:
                continue
            if (
                last
                and (last.row, last.stop, last.segment) == (row, slot, segment)
                and position == last.first + slot - last.start
            ):
                runs[-1] = last._replace(stop=slot + 1)
            else:
                runs.append(Run(row, slot, slot + 1, segment, position))
    return tuple(runs)


def test_layout_of_random_coordinates():
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        positions = torch.randint(0, 3, (3, 7), generator=generator)
        segments = torch.randint(0, 3, (3, 7), generator=generator)
        layout = Layout.of(positions, segments)
        assert layout.runs == layout_by_hand(positions.tolist(), segments.tolist())
        assert layout.tokens == int((segments != 0).sum())
        real = positions[segments != 0]
        assert layout.max_position == (int(real.max()) if real.numel() else -1)


def documents_by_hand(positions, segments):
    """Slots row by row, of each row the documents in the order of their numbers, each by position."""
    slots, owners = [], []
    for row, here in enumerate(segments):
        for segment in sorted(set(here) - {0}):
            own = [slot for slot, other in enumerate(here) if other == segment]
            number = owners[-1] + 1 if owners else 0
            slots += [row * len(here) + slot for slot in sorted(own, key=lambda slot: positions[row][slot])]
            owners += [number] * len(own)
    return slots, owners


def test_tokens_by_document():
    segments = [[2, 2, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0], [0, 3, 3, 1, 3, 3]]
    positions = [[0, 1, 0, 1, 2, 7], [0, 1, 2, 3, 4, 5], [0, 2, 3, 0, 0, 1]]  # the last document's end stands first
    slots, owners = Layout.of(positions, segments).by_document
    assert (slots.tolist(), owners.tolist()) == documents_by_hand(positions, segments)
    assert [len(part) for part in Layout.of([[0]], [[0]]).by_document] == [0, 0]


def test_kinds():
    assert Coordinates.range(4, 2).layout.kind == "full"
    assert Layout.of([[0, 1, 0]], [[1, 1, 0]]).kind == "ragged"
    assert Layout.of([[0, 1, 0]], [[1, 1, 2]]).kind == "packed"
    assert Layout.of([[0, 0]], [[0, 0]]).kind == "ragged"  # a row of nothing but padding
    # one document and padding behind it is not two documents (B43)
    assert Layout.of([[0, 1, 0, 0]], [[1, 1, 0, 0]]).kind == "ragged"
    # as much padding before a document as behind it, and a row that makes up for one with two documents
    assert Layout.of([[0, 0, 1, 0]], [[0, 1, 1, 0]]).kind == "ragged"
    assert Layout.of([[0, 1], [0, 0], [0, 0]], [[1, 1], [1, 2], [0, 0]]).kind == "packed"
    assert Layout.of([[0, 1], [0, 0]], [[1, 1], [0, 0]]).kind == "ragged"


def test_a_layout_is_read_where_that_costs_nothing_and_believed_where_it_is_given():
    positions, segments = torch.tensor([[0, 1, 0, 1]]), torch.tensor([[1, 1, 2, 2]])
    assert Coordinates(positions, segments).layout == Layout.of(positions, segments)
    told = Layout(1, 4, (Run(0, 0, 4, 1, 0),))
    assert Coordinates(positions, segments, layout=told).layout is told
    far = Coordinates(positions.to("meta"), segments.to("meta"))
    assert far.layout is None
    assert Coordinates(far.positions, far.segments, layout=told).layout is told


def test_what_is_made_once():
    """Masks and angles, whatever they are: nothing that was made is made again, not even None."""
    tokens, made = Coordinates.range(2), []
    for key in ("angles", "mask", "angles", "mask"):
        tokens.cached(key, lambda key=key: made.append(key))
    assert made == ["angles", "mask"]


def test_a_compiled_graph_makes_what_it_needs(monkeypatch):
    """It keeps nothing from one batch to the next."""
    tokens = Coordinates.range(2)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert [tokens.cached("mask", lambda: 5), tokens.cached("mask", lambda: 6)] == [5, 6]


def test_range_layout_is_what_would_be_read():
    tokens = Coordinates.range(5, 3)
    assert tokens.layout == Layout.of(tokens.positions, tokens.segments)
    assert Coordinates.range(0, 2).layout == Layout(2, 0, ())


@pytest.mark.usefixtures("our_checks_only")
def test_shapes_must_agree():
    four, three = torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(ShapeError, match=r"segments has shape \(1, 3\) but positions has \(1, 4\)"):
        Coordinates(four, three)
    with pytest.raises(ShapeError, match=r"groups has shape \(1, 3\) but positions has \(1, 4\)"):
        Coordinates(four, four, three)
