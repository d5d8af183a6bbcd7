"""What audits need of a batch: rows laid out as plainly written code does, parts, rows, and which tokens are scored."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pellucid.audits.checks.cache import right_padded_prompts
from pellucid.audits.engine.target_run import max_abs_diff
from pellucid.batch import Batch
from pellucid.errors import ShapeError

ROWS = st.lists(st.lists(st.lists(st.integers(1, 9), max_size=4), max_size=3), min_size=1, max_size=4)


def laid_out(documents, side, slots):
    """Tokens, positions and segments of one row, written as lists."""
    documents = [document for document in documents if document]
    free = slots - sum(map(len, documents))
    before = {"right": 0, "left": free, "both": free // 2}[side]
    fields = (
        [token for document in documents for token in document],
        [position for document in documents for position in range(len(document))],
        [number for number, document in enumerate(documents, 1) for _ in document],
    )
    return [[0] * before + field + [0] * (free - before) for field in fields]


@given(ROWS, st.sampled_from(["right", "left", "both"]), st.integers(0, 3))
def test_rows_are_laid_out_as_written_lists(rows, side, spare):
    length = max(sum(map(len, row)) for row in rows) + spare
    batch = Batch.from_documents(rows, side=side, length=length)
    for number, row in enumerate(rows):
        fields = [getattr(batch, name)[number].tolist() for name in ("tokens", "positions", "segments")]
        assert fields == laid_out(row, side, length)


def test_loss_mask_leaves_out_first_tokens_and_padding():
    batch = Batch.packed([[5, 6, 7], [8, 9]], length=7)
    assert batch.loss_mask.tolist() == [[False, True, True, False, True, False, False]]
    only = torch.tensor([[True, True, False, True, True, True, True]])
    assert batch.replace(target_mask=only).loss_mask.tolist() == [[False, True, False, False, True, False, False]]


def test_parts_keep_positions_and_rows_keep_their_width():
    batch = Batch.from_rows([[1, 2, 3], [4]], side="left")
    assert batch.part(1, 3).positions.tolist() == [[1, 2], [0, 0]]
    assert batch.row(1).tokens.tolist() == [[0, 0, 4]]
    assert batch.slots(1).tolist() == [2]
    assert batch.part(1, 3).layout.runs == ((0, 0, 2, 1, 1), (1, 1, 2, 1, 0))


def test_a_row_keeps_its_own_source_targets_and_embeddings():
    batch = Batch.from_pairs([[1, 2], [3]], [[4], [5, 6]]).replace(
        targets=torch.tensor([7, 8]), inputs_embeds=torch.arange(8.0).view(2, 2, 2)
    )
    row = batch.row(1)
    assert row.source.tokens.tolist() == [[3, 0]]
    assert row.targets.tolist() == [8]
    assert row.inputs_embeds.tolist() == [[[4.0, 5.0], [6.0, 7.0]]]
    with pytest.raises(ShapeError, match="a part cuts documents; leave targets out"):
        batch.part(0, 1)


def test_the_layout_follows_new_segments():
    batch = Batch.from_rows([[1, 2, 3]])
    assert batch.replace(tokens=batch.tokens + 1).layout is batch.layout
    hole = batch.replace(segments=torch.tensor([[1, 0, 1]]))
    assert [run[:3] for run in hole.layout.runs] == [(0, 0, 1), (0, 2, 3)]


def test_a_copy_shares_no_whole_numbers():
    batch = Batch.from_pairs([[1, 2]], [[3]])
    batch.to("cpu", copy=True).tokens[0, 0] = 9
    batch.to("cpu", copy=True).source.tokens[0, 0] = 9
    assert (batch.tokens.tolist(), batch.source.tokens.tolist()) == ([[3]], [[1, 2]])


@pytest.mark.usefixtures("our_checks_only")
def test_embeddings_of_another_shape_are_refused():
    batch = Batch.from_rows([[1, 2, 3]])
    with pytest.raises(ShapeError, match=r"inputs_embeds has shape \(1, 2, 4\), but tokens has \(1, 3\)"):
        batch.replace(inputs_embeds=torch.zeros(1, 2, 4))


def test_too_short_is_refused():
    with pytest.raises(ShapeError, match="a row holds 3 tokens, but length is 2"):
        Batch.from_rows([[1, 2, 3]], length=2)


def test_right_padded_prompts_have_their_padding_in_the_middle():
    batch = right_padded_prompts([[1, 2, 3, 4], [5, 6]], 1)
    assert batch.tokens.tolist() == [[1, 2, 3, 4], [5, 0, 0, 6]]
    assert batch.positions.tolist() == [[0, 1, 2, 3], [0, 0, 0, 1]]
    assert batch.segments.tolist() == [[1, 1, 1, 1], [1, 0, 0, 1]]


def test_moves_see_what_is_not_finite():
    before = torch.tensor([[[1.0, 2.0], [torch.nan, 0.0], [torch.inf, 0.0], [1.0, 1.0]]])
    after = torch.tensor([[[1.0, 2.5], [torch.nan, 0.0], [torch.inf, 0.0], [torch.nan, 1.0]]])
    assert max_abs_diff(before, after).tolist() == [[0.5, 0.0, 0.0, torch.inf]]
