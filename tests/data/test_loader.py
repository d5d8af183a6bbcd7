"""The loader: full batches for ever, each row once an epoch, ranks apart, exact resume."""

import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch

from pellucid.data import IGNORED, Batch, Document, Loader, Tokenizer, TokenStore, causal, open_corpus, pack
from pellucid.errors import ArgumentError, DataError
from pellucid.visibility import Layout

DOCUMENTS = [[100 * n + t for t in range(size)] for n, size in enumerate([7, 1, 12, 0, 3, 30, 2, 9, 5, 4, 11], 1)]


def loader(documents=DOCUMENTS, **settings) -> Loader:
    return Loader(documents, **{"batch_size": 2, "length": 8, "seed": 3, **settings})


def same(a: Batch, b: Batch) -> bool:
    fields = ("tokens", "positions", "segments", "labels")
    return all(torch.equal(getattr(a, f), getattr(b, f)) for f in fields) and a.layout == b.layout


def rows_of(batch: Batch) -> list[tuple[int, ...]]:
    return [tuple(row) for row in (batch.tokens * (batch.segments != 0)).tolist()]


def all_rows(length: int = 8, join: bool = True) -> Counter[tuple[int, ...]]:
    rows = list(pack(DOCUMENTS, length, join=join))
    return Counter(rows_of(Batch.from_documents(rows, length=length)))


@pytest.mark.parametrize("join", [True, False])
def test_rows_are_those_of_pack(join: bool) -> None:
    """The fast assembly equals the readable path, field by field, layout included."""
    rows = list(pack(DOCUMENTS, 8, join=join))
    given = list(loader(batch_size=3, join=join).one_epoch())
    for first, batch in zip(range(0, len(rows), 3), given, strict=True):
        part = rows[first : first + 3] + [[]] * max(0, first + 3 - len(rows))
        assert same(batch, causal(Batch.from_documents(part, length=8)))
        assert batch.layout == Layout.of(batch.positions, batch.segments)


@pytest.mark.parametrize("batch_size", [1, 2, 5, 40])
def test_each_row_comes_once_an_epoch_and_batches_are_full(batch_size: int) -> None:
    expected = all_rows()
    total = sum(expected.values())
    stream = loader(batch_size=batch_size)
    rows = [row for batch in islice(stream, -(-3 * total // batch_size)) for row in rows_of(batch)]
    epochs = [rows[n * total : (n + 1) * total] for n in range(3)]
    assert [Counter(epoch) for epoch in epochs] == [expected] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    assert stream.rows == total
    assert stream.epoch == stream.batches * batch_size / total


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_stream_of_one_process(world_size: int) -> None:
    one = loader(batch_size=2 * world_size)
    ranks = [loader(rank=rank, world_size=world_size) for rank in range(world_size)]
    for _ in range(20):
        together = [row for rank in ranks for row in rows_of(next(rank))]
        assert together == rows_of(next(one))
    assert len({json.dumps(rank.state_dict()) for rank in ranks}) == 1


@pytest.mark.parametrize("world_size", [1, 2, 5, 40])
def test_one_pass_gives_every_rank_the_same_number_of_batches(world_size: int) -> None:
    passes = [list(loader(rank=rank, world_size=world_size).one_epoch()) for rank in range(world_size)]
    assert len({len(batches) for batches in passes}) == 1
    rows = Counter(row for batches in passes for batch in batches for row in rows_of(batch))
    del rows[(0,) * 8]
    assert rows == all_rows()
    assert all(batch.shape == (2, 8) for batches in passes for batch in batches)
    counted = sum(len(batch.label_indices) for batches in passes for batch in batches)
    assert counted == loader().num_token_pairs == sum(max(len(d) - 1, 0) for d in DOCUMENTS)


def test_one_pass_leaves_the_stream_where_it_is() -> None:
    stream, other = loader(), loader()
    next(stream), next(other)
    list(stream.one_epoch())
    assert same(next(stream), next(other))


def test_resumes_at_every_batch() -> None:
    """Over three epochs, from a state that went through JSON, into a loader that stands elsewhere."""
    stream = loader()
    states, batches = [], []
    for _ in range(3 * stream.rows // 2 + 2):
        states.append(json.dumps(stream.state_dict()))
        batches.append(next(stream))
    for number, state in enumerate(states):
        again = loader()
        list(islice(again, 5))
        again.load_state_dict(json.loads(state))
        assert again.batches == number
        assert all(same(a, b) for a, b in zip(batches[number : number + 3], again, strict=False))


def test_the_shuffle_is_the_same_on_every_machine() -> None:
    order = loader()._order(0).tolist()
    assert order == [0, 4, 9, 7, 1, 10, 5, 6, 11, 3, 8, 2]
    assert sorted(order) == list(range(12))
    assert loader(seed=4)._order(0).tolist() != order != loader()._order(1).tolist()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"seed": 4}, "with seed 3, but this loader has 4"),
        ({"world_size": 2}, "with world_size 1, but this loader has 2"),
        ({"batch_size": 3}, "with batch_size 2, but this loader has 3"),
        ({"length": 9}, "with data '.*', but this loader has '.*'"),
        ({"join": False}, "with data '.*', but this loader has '.*'"),
        (
            {"documents": [[*DOCUMENTS[0][:-1], 5], *DOCUMENTS[1:]]},
            "with data '.*', but this loader has '.*'",
        ),
        ({"documents": [[], *DOCUMENTS]}, "with data"),
    ],
)
def test_the_state_of_another_stream_is_refused(change: dict, match: str) -> None:
    other = loader(**change)
    with pytest.raises(DataError, match=match):
        other.load_state_dict(loader().state_dict())
    assert other.batches == 0


@pytest.mark.parametrize("batch", [-1, 1.5, True, "3", None])
def test_an_impossible_state_is_refused(batch: object) -> None:
    with pytest.raises(DataError, match="the state's batch is"):
        loader().load_state_dict({**loader().state_dict(), "batch": batch})
    with pytest.raises(DataError, match="not a loader's state"):
        loader().load_state_dict({"batch": 1})


def test_documents_of_a_batch_are_named() -> None:
    names = [f"doc{n}" for n in range(1, len(DOCUMENTS) + 1)]
    stream = loader(TokenStore.of(DOCUMENTS, names))
    for _ in range(20):
        tokens = {int(token) for token in next(stream).tokens.flatten() if token}
        assert set(stream.names()) == {f"doc{token // 100}" for token in tokens}
    assert stream.names(0) == loader(TokenStore.of(DOCUMENTS, names)).names()
    assert same(stream.batch(4), next(islice(loader(), 4, None)))


def test_another_objective() -> None:
    def copy(batch: Batch, generator: torch.Generator | None = None) -> Batch:
        return batch.with_labels(torch.where(batch.segments == 0, IGNORED, batch.tokens))

    batch = next(loader(objective=copy))
    assert torch.equal(batch.labels[batch.segments != 0], batch.tokens[batch.segments != 0])


# ---- from text


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["some words, some more words"], vocab_size=270)


def test_from_a_corpus(tokenizer: Tokenizer) -> None:
    documents = [Document(f"d{n}", "wörds " * n) for n in range(40)]
    corpus = open_corpus(documents, heldout_fraction=0.5)
    seen: list[tuple[int, int]] = []
    for split in ("train", "heldout"):
        stream = Loader.from_corpus(
            corpus, tokenizer, split, batch_size=2, length=16, progress=lambda *done: seen.append(done)
        )
        mine = list(corpus.documents(split))
        assert stream.bytes == sum(document.size for document in mine)
        assert seen[-1] == (len(mine), stream.bytes)
        assert [stream.store.name(n) for n in range(len(mine))] == [document.name for document in mine]
        for number, document in enumerate(mine):
            assert stream.store.document(number).tolist() == tokenizer.encode_document(document.text)
        assert stream.tokens == sum(len(tokenizer.encode_document(d.text)) for d in mine)


def test_every_document_start_is_predicted_from_begin(tokenizer: Tokenizer) -> None:
    """The first token of each text is charged: its label stands at the begin token."""
    corpus = open_corpus([Document("a", "words"), Document("b", "more")], heldout_fraction=0.0)
    (batch,) = Loader.from_corpus(corpus, tokenizer, batch_size=1, length=32).one_epoch()
    starts = (batch.tokens == tokenizer.bos_id) & (batch.segments != 0)
    assert batch.labels[starts].tolist() == [tokenizer.encode(text)[0] for text in ("words", "more")]
    assert (batch.labels == tokenizer.eos_id).sum() == 2


def test_chunks_of_text_change_nothing(tokenizer: Tokenizer, monkeypatch) -> None:
    corpus = open_corpus([Document(str(n), "words " * n) for n in range(30)])
    whole = TokenStore.from_corpus(corpus, tokenizer, "all")
    monkeypatch.setattr("pellucid.data.examples._CHUNK", 50)
    assert TokenStore.from_corpus(corpus, tokenizer, "all").digest() == whole.digest()


def test_ids_are_kept_in_four_bytes(tokenizer: Tokenizer) -> None:
    corpus = open_corpus([Document("a", "words")])
    for store in (TokenStore.of(DOCUMENTS), TokenStore.from_corpus(corpus, tokenizer, "all")):
        assert store.tokens.dtype == np.int32


# ---- bad input


@pytest.mark.parametrize("id_", [-1, 2**31])
def test_impossible_ids_are_refused(id_: int) -> None:
    with pytest.raises(DataError, match=rf"document 1 holds the token id {id_}"):
        loader([[1], [2, id_]])


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"rank": 2, "world_size": 2}, "rank is 2 and world_size 2"),
        ({"world_size": 0}, "rank is 0 and world_size 0"),
    ],
)
def test_impossible_settings_are_refused(settings: dict, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        loader(**settings)


def test_nothing_to_load() -> None:
    with pytest.raises(DataError, match="the 2 documents hold no token"):
        loader([[], []])
    with pytest.raises(DataError, match="rows of 1 tokens"):
        loader(length=1)
    with pytest.raises(DataError, match="1 names were given for 2 documents"):
        TokenStore.of([[1], [2]], ["one"])
