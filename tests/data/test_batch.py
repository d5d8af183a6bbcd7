import pytest

from pellucid.data import Batch
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
