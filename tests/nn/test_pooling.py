"""One vector a document: by segments and positions, never by ids or slots (B34, B35)."""

import pytest
import torch

from pellucid.nn.pooling import documents_of, pooled
from pellucid.visibility import Coordinates


def places(segments, positions):
    return Coordinates(torch.tensor(positions), torch.tensor(segments))


RAGGED = places([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 1, 1, 1]], [[0, 1, 2, 0, 0], [0] * 5, [0, 0, 0, 1, 2]])
PACKED = places([[2, 2, 1, 0, 3], [1, 1, 1, 1, 2]], [[0, 1, 0, 0, 0], [3, 2, 1, 0, 0]])
X = torch.arange(30, dtype=torch.float64).view(3, 5, 2)


def test_padding_is_no_part_of_a_mean_and_a_row_without_tokens_has_no_vector():
    assert pooled(X, RAGGED, "mean").tolist() == [[2.0, 3.0], [26.0, 27.0]]


def test_first_and_last_go_by_positions():
    assert pooled(X, RAGGED, "first").tolist() == [[0.0, 1.0], [24.0, 25.0]]
    assert pooled(X, RAGGED, "last").tolist() == [[4.0, 5.0], [28.0, 29.0]]
    assert pooled(X[:2], PACKED, "first")[:, 0].tolist() == [4.0, 0.0, 8.0, 16.0, 18.0]
    assert pooled(X[:2], PACKED, "last")[:, 0].tolist() == [4.0, 2.0, 8.0, 10.0, 18.0]


def test_documents_come_row_by_row_and_segment_by_segment():
    documents = documents_of(PACKED)
    assert documents.owners.tolist() == [0, 1, 1, 2, 3, 3, 3, 3, 4]
    assert documents.slots.tolist() == [2, 0, 1, 4, 8, 7, 6, 5, 9]


@pytest.mark.parametrize("how", ["first", "mean", "last"])
def test_what_stands_in_pads_moves_nothing(how):
    loud = X.clone()
    loud[~RAGGED.real] = torch.nan
    loud.requires_grad_()
    found = pooled(loud, RAGGED, how)
    assert torch.equal(found, pooled(X, RAGGED, how))
    found.sum().backward()
    assert not loud.grad[~RAGGED.real].any()


def test_a_mean_in_bfloat16_is_taken_in_float32():
    ones = torch.full((1, 1000, 1), 1.0, dtype=torch.bfloat16)
    assert pooled(ones, Coordinates.range(1000), "mean").item() == 1.0


def test_without_a_token_there_is_no_document():
    nothing = places([[0, 0]], [[0, 0]])
    for how in ("first", "mean", "last"):
        assert pooled(X[:1, :2], nothing, how).shape == (0, 2)
