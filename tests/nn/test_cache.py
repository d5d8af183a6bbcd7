"""The cache is state with coordinates: it can be reordered, cropped and copied, and a failed step leaves it whole."""

import pytest
import torch

from helpers.tiny import assert_agree, tiny_model
from pellucid.data import Batch
from pellucid.errors import InputError, LengthError, ShapeError, UnsupportedError


@pytest.fixture
def model():
    return tiny_model()


def filled(model, rows, capacity=20, side="left"):
    cache = model.new_cache(len(rows), capacity)
    model(Batch.from_rows(rows, side=side), cache=cache)
    return cache


def following(model, cache, *tokens):
    return model(Batch.from_rows([[token] for token in tokens]), cache=cache).logits[:, -1]


def fresh(model, row):
    return model(Batch.from_rows([row])).logits[0, -1]


def test_positions_go_on_from_what_each_row_holds(model):
    """B16, B22: mask [0,0,1,1,1] gives positions [0,1,2], and the next steps 3 and 4, whatever the slots are."""
    cache = filled(model, [[1, 2, 3], [1, 2, 3, 4, 5]])
    assert cache.positions_BS[0, :5].tolist() == [0, 0, 0, 1, 2]
    for step, token in enumerate([6, 7, 8, 9, 10]):
        got = following(model, cache, token, token)
        assert cache.positions_BS[:, 5 + step].tolist() == [3 + step, 5 + step]
        tail = list(range(6, 7 + step))
        assert_agree(got[0], fresh(model, [1, 2, 3, *tail]), f"step {step}")
        assert_agree(got[1], fresh(model, [1, 2, 3, 4, 5, *tail]), f"step {step}")


def test_a_row_that_rests_takes_a_slot_and_nothing_else(model):
    cache = filled(model, [[1, 2, 3], [4, 5]])
    model(Batch.from_rows([[6], []], side="left"), cache=cache)
    assert cache.sequence_lengths == [4, 2]
    got = following(model, cache, 7, 7)
    assert_agree(got[0], fresh(model, [1, 2, 3, 6, 7]))
    assert_agree(got[1], fresh(model, [4, 5, 7]))


def test_reorder_takes_everything_along(model):
    """B55: after reorder [1, 1, 0] every row goes on as the row it was."""
    rows = [[1, 2, 3], [4, 5, 6, 7], [8]]
    cache = filled(model, rows)
    cache.reorder(torch.tensor([1, 1, 0]))
    got = following(model, cache, 9, 10, 11)
    for row, (old, token) in enumerate([(1, 9), (1, 10), (0, 11)]):
        assert_agree(got[row], fresh(model, [*rows[old], token]))
    with pytest.raises(InputError, match="rows 0 to 2"):
        cache.reorder(torch.tensor([0, 1, 3]))


@pytest.mark.parametrize(("keep", "left"), [(0, 0), (2, 2), (-1, 2), (-3, 0), (-5, 0), (9, 3)])
def test_crop_is_clamped_and_exact(model, keep, left):
    """B53."""
    cache = filled(model, [[1, 2, 3]])
    cache.crop(keep)
    assert cache.length == left
    assert cache.sequence_lengths == [left]
    assert_agree(following(model, cache, 9)[0], fresh(model, [*[1, 2, 3][:left], 9]))


def test_snapshot_shares_nothing(model):
    cache = filled(model, [[1, 2, 3]])
    copy = cache.snapshot()
    following(model, cache, 9)
    for tensor in cache.layers[0].tensors:
        tensor.fill_(7.0)
    assert copy.length == 3
    assert_agree(following(model, copy, 5)[0], fresh(model, [1, 2, 3, 5]))


def test_too_much_is_refused_before_anything_changes(model):
    """B67: the bound counts what is there and what comes."""
    cache = filled(model, [[1, 2, 3]], capacity=4)
    with pytest.raises(LengthError, match=r"2 new tokens do not fit: the cache uses 3 of 4.*capacity=5"):
        model(Batch.from_rows([[4, 5]]), cache=cache)
    assert cache.length == 3
    assert_agree(following(model, cache, 9)[0], fresh(model, [1, 2, 3, 9]))


def test_learned_positions_are_checked_behind_a_cache_too():
    model = tiny_model("learned-dense-ln", position={"kind": "learned", "max_position_embeddings": 8})
    cache = filled(model, [[1] * 7, [2]])
    with pytest.raises(LengthError, match="position 8 is past the table of 8"):
        model(Batch.from_rows([[3, 3], [3]]), cache=cache)
    assert cache.length == 7, "a refused chunk must not count"
    model(Batch.from_rows([[3], [3]]), cache=cache)
    assert cache.sequence_lengths == [8, 2]


def test_a_forward_that_fails_midway_leaves_the_cache_as_it_was(model):
    cache = filled(model, [[1, 2, 3]])
    broken = model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("midway")))
    with pytest.raises(RuntimeError, match="midway"):
        following(model, cache, 4)
    broken.remove()
    assert_agree(following(model, cache, 9)[0], fresh(model, [1, 2, 3, 9]))


def test_rows_must_agree_and_packed_rows_do_not_go_on(model):
    cache = filled(model, [[1, 2, 3]])
    with pytest.raises(ShapeError, match="2 rows but the cache has 1"):
        model(Batch.from_rows([[1], [2]]), cache=cache)
    with pytest.raises(UnsupportedError, match="one document a row"):
        model(Batch.packed([[1], [2]]), cache=cache)


def test_a_packed_first_chunk_goes_on_in_its_last_document(model):
    cache = model.new_cache(1, 9)
    model(Batch.packed([[1, 2, 3], [4, 5]]), cache=cache)
    assert_agree(following(model, cache, 6)[0], fresh(model, [4, 5, 6]))


def test_gradients_flow_in_the_newest_chunk(model):
    cache = filled(model, [[1, 2, 3]])
    following(model, cache, 4).sum().backward()
    following(model, cache, 5).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_a_cache_of_nothing_is_refused(model):
    with pytest.raises(ShapeError, match="0 rows"):
        model.new_cache(0, 4)
