"""Requests lay out rows as a batch does, by other code."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pellucid.audits.checks.cache import right_padded_prompts
from pellucid.audits.method.measure import moved
from pellucid.batch import Batch
from pellucid.errors import ShapeError
from pellucid.probe import Request

ROWS = st.lists(st.lists(st.lists(st.integers(1, 9), max_size=4), max_size=3), min_size=1, max_size=4)


@given(ROWS, st.sampled_from(["right", "left", "both"]), st.integers(0, 3))
def test_requests_equal_batches(rows, side, spare):
    length = max(sum(map(len, row)) for row in rows) + spare
    request = Request.from_documents(rows, side=side, length=length)
    batch = Batch.from_documents(rows, side=side, length=length)
    for name in ("tokens", "positions", "segments"):
        assert torch.equal(getattr(request, name), getattr(batch, name))


def test_what_must_be_learnt():
    request = Request.packed([[5, 6, 7], [8, 9]], length=7)
    assert request.learnt.tolist() == [[False, True, True, False, True, False, False]]
    only = torch.tensor([[True, True, False, True, True, True, True]])
    assert request.with_targets(only).learnt.tolist() == [[False, True, False, False, True, False, False]]


def test_parts_keep_positions_and_rows_keep_their_width():
    request = Request.from_rows([[1, 2, 3], [4]], side="left")
    assert request.part(1, 3).positions.tolist() == [[1, 2], [0, 0]]
    assert request.row(1).tokens.tolist() == [[0, 0, 4]]
    assert request.slots(1).tolist() == [2]


def test_too_short_is_refused():
    with pytest.raises(ShapeError, match="a row holds 3 tokens, but length is 2"):
        Request.from_rows([[1, 2, 3]], length=2)


def test_right_padded_prompts_have_their_padding_in_the_middle():
    request = right_padded_prompts([[1, 2, 3, 4], [5, 6]], 1)
    assert request.tokens.tolist() == [[1, 2, 3, 4], [5, 0, 0, 6]]
    assert request.positions.tolist() == [[0, 1, 2, 3], [0, 0, 0, 1]]
    assert request.segments.tolist() == [[1, 1, 1, 1], [1, 0, 0, 1]]


def test_moves_see_what_is_not_finite():
    before = torch.tensor([[[1.0, 2.0], [torch.nan, 0.0], [torch.inf, 0.0], [1.0, 1.0]]])
    after = torch.tensor([[[1.0, 2.5], [torch.nan, 0.0], [torch.inf, 0.0], [torch.nan, 1.0]]])
    assert moved(before, after).tolist() == [[0.5, 0.0, 0.0, torch.inf]]
