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


def test_kinds():
    assert Coordinates.range(4, 2).layout.kind == "full"
    assert Layout.of([[0, 1, 0]], [[1, 1, 0]]).kind == "ragged"
    assert Layout.of([[0, 1, 0]], [[1, 1, 2]]).kind == "packed"
    assert Layout.of([[0, 0]], [[0, 0]]).kind == "ragged"  # a row of nothing but padding
    # one document and padding behind it is not two documents (B43)
    assert Layout.of([[0, 1, 0, 0]], [[1, 1, 0, 0]]).kind == "ragged"


def test_range_layout_is_what_would_be_read():
    tokens = Coordinates.range(5, 3)
    assert tokens.layout == Layout.of(tokens.positions, tokens.segments)
    assert Coordinates.range(0, 2).layout == Layout(2, 0, ())


@pytest.mark.usefixtures("our_checks_only")
def test_shapes_must_agree():
    with pytest.raises(ShapeError, match=r"segments has shape \(1, 3\) but positions has \(1, 4\)"):
        Coordinates(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 3, dtype=torch.long))
