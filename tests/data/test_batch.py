from dataclasses import fields, replace

import pytest
import torch

from pellucid.data import IGNORED, Batch
from pellucid.errors import DataError, ShapeError


@pytest.mark.parametrize("rows", [[[5, 1.5]], [[True]], [5, 6], [["a"]], [[2**70]], [[[1]]], ["ab"], [None]])
def test_what_is_no_row_of_ids_is_refused(rows):
    with pytest.raises(DataError, match=r"a document is a list of token ids .* rows look like \[\[5, 8, 2\], \[7\]\]"):
        Batch.from_rows(rows)


def test_sides_lengths_and_empty_documents():
    assert Batch.from_rows([[1, 2], [3]], side="left").tokens.tolist() == [[1, 2], [0, 3]]
    assert Batch.from_rows([[1, 2], []], length=3).segments.tolist() == [[1, 1, 0], [0, 0, 0]]
    packed = Batch.packed([[], [7], [], [8, 9]])
    assert packed.segments.tolist() == [[1, 2, 2]]
    assert packed.positions.tolist() == [[0, 0, 1]]
    with pytest.raises(ShapeError, match="a row holds 3 tokens, but length is 2"):
        Batch.from_rows([[1, 2, 3]], length=2)
    with pytest.raises(DataError, match="at least one row"):
        Batch.from_rows([])
    with pytest.raises(ShapeError, match="choose right, left or both"):
        Batch.from_rows([[1]], side="middle")


# ---- pairs, and one entry a document


def test_pairs_share_rows_and_segments():
    batch = Batch.from_pairs([[5, 8, 9], [6]], [[7, 2], [3, 4, 2]], side="left", length=4)
    assert batch.source.tokens.tolist() == [[5, 8, 9], [0, 0, 6]]
    assert batch.tokens.tolist() == [[0, 0, 7, 2], [0, 3, 4, 2]]
    assert batch.source.segments.tolist() == [[1, 1, 1], [0, 0, 1]]
    packed = Batch.from_pairs([[5, 8, 9], [6]], [[7, 2], [3, 4, 2]], packed=True, source_length=6)
    assert packed.source.segments.tolist() == [[1, 1, 1, 2, 0, 0]]
    assert packed.segments.tolist() == [[1, 1, 2, 2, 2]]
    assert packed.source.positions.tolist() == [[0, 1, 2, 0, 0, 0]]


def test_an_empty_half_keeps_its_pair_apart():
    """B49's kind: without its number, the second target would read the first pair's source."""
    batch = Batch.from_pairs([[5], [], [6]], [[7], [8], []], packed=True)
    assert batch.source.segments.tolist() == [[1, 3]]
    assert batch.segments.tolist() == [[1, 2]]
    same = Batch.from_pairs([[5], [], []], [[7], [], [8]], packed=True)
    assert same.segments.tolist() == [[1, 2]]


def test_pairs_that_do_not_fit_are_refused():
    with pytest.raises(DataError, match="2 sources were given for 1 targets"):
        Batch.from_pairs([[1], [2]], [[3]])
    with pytest.raises(ShapeError, match="the sources: a row holds 3 tokens, but length is 2"):
        Batch.from_pairs([[1, 2, 3]], [[3]], source_length=2)
    two, one = Batch.from_rows([[1], [2]]), Batch.from_rows([[1]])
    with pytest.raises(ShapeError, match="source has 2 rows, but tokens has 1"):
        replace(one, source=two)


def test_one_target_a_document():
    batch = Batch.from_documents([[[1, 2], [3]], [], [[4]]])
    assert batch.documents == 3
    assert batch.document_lengths == [{1: 2, 2: 1}, {}, {1: 1}]
    assert replace(batch, targets=torch.tensor([0, IGNORED, 2])).target_indices.tolist() == [0, 2]
    spans = torch.tensor([[0, 1], [IGNORED, IGNORED], [0, 0]])
    assert replace(batch, targets=spans).target_indices.tolist() == [0, 2]
    assert replace(batch, targets=torch.zeros(3, 2)).target_indices.tolist() == [0, 1, 2]
    with pytest.raises(ShapeError, match=r"targets has shape \(2,\), but there are 3 documents"):
        replace(batch, targets=torch.tensor([0, 1]))


def test_documents_are_in_the_order_of_their_segments():
    segments = torch.tensor([[2, 1, 1, 0], [0, 1, 1, 3]])
    batch = Batch(segments * 7, torch.tensor([[0, 0, 1, 0], [0, 0, 1, 0]]), segments)
    slots, document = batch.document_slots
    assert slots.tolist() == [1, 2, 0, 5, 6, 7]
    assert document.tolist() == [0, 0, 1, 2, 2, 3]
    assert batch.document_lengths == [{1: 2, 2: 1}, {1: 2, 3: 1}]


def test_types_have_one_entry_a_slot(our_checks_only):
    with pytest.raises(ShapeError, match=r"types has shape \(1, 3\), but tokens has \(1, 2\)"):
        replace(Batch.from_rows([[1, 2]]), types=torch.zeros(1, 3, dtype=torch.int64))


def test_every_field_goes_along():
    """A field that ``to`` or ``with_labels`` forgot would be learnt from in silence."""
    batch = Batch.from_pairs([[5, 8], [6]], [[7, 2], [3]])
    ones = torch.ones_like(batch.tokens)
    labels = torch.where(batch.segments != 0, 1, IGNORED)
    batch = replace(batch, groups=ones, types=ones, labels=labels, targets=torch.tensor([1, IGNORED]))
    batch = replace(batch, target_mask=ones.bool(), inputs_embeds=torch.zeros(*batch.shape, 4))
    there = batch.to("meta")
    for field in fields(batch):
        value = getattr(there, field.name)
        assert value is not None
        assert not isinstance(value, torch.Tensor) or value.device.type == "meta"
    assert there.source.tokens.device.type == "meta"
    assert (there.documents, there.label_indices.shape, there.target_indices.shape) == (2, (3,), (1,))
    relabelled = batch.with_labels(labels)
    assert relabelled.source is batch.source
    assert relabelled.targets is batch.targets
    assert relabelled.types is ones


def test_a_label_on_padding_is_refused():
    """What is padding, segments say; a shifted or hand-made label would be learnt in silence (B80)."""
    batch = Batch.from_rows([[1, 2], [1]])
    with pytest.raises(DataError, match=r"slot 1 of row 1 is padding, but its label is 2; padding has -100"):
        batch.with_labels(torch.tensor([[3, 1], [2, 2]]))
    assert batch.with_labels(torch.tensor([[3, 1], [2, IGNORED]])).label_indices.tolist() == [0, 1, 2]
