"""Labelled examples: read, checked, tokenised, and kept with their answers by the loader."""

import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch

from pellucid.data import (
    IGNORED,
    Batch,
    Classification,
    ClassificationSchema,
    Contrastive,
    Document,
    Examples,
    Loader,
    MaskedLM,
    PrefixLM,
    PromptCompletionSchema,
    QuestionAnsweringSchema,
    Regression,
    RegressionSchema,
    Seq2SeqSchema,
    SequenceToSequence,
    SimilarityPairSchema,
    Span,
    SpanCorruption,
    TokenClassification,
    TokenClassificationSchema,
    Tokenizer,
    TokenStore,
    open_corpus,
    open_examples,
    split_of,
)
from pellucid.errors import ArgumentError, DataError

X = IGNORED
FIELDS = ("tokens", "positions", "segments", "labels", "groups", "types", "targets")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["some words and some more words"] * 3, vocab_size=275)


def opened(records: list[dict], form, tokenizer, **settings) -> Examples:
    return open_examples(records, form, tokenizer, **{"split": "all", **settings})


def loader(examples, objective, **settings) -> Loader:
    return Loader(examples, **{"batch_size": 2, "length": 24, "seed": 3, "objective": objective, **settings})


def documents(batch: Batch) -> list[list[int]]:
    return [
        batch.tokens[row][batch.segments[row] == segment].tolist()
        for row, lengths in enumerate(batch.document_lengths)
        for segment in lengths
    ]


def same(a: Batch, b: Batch) -> bool:
    for field in FIELDS:
        one, other = getattr(a, field), getattr(b, field)
        if (one is None) != (other is None) or (one is not None and not torch.equal(one, other)):
            return False
    return a.layout == b.layout and (a.source is None or same(a.source, b.source))


# ---- reading


def test_classes_are_those_of_all_records_in_a_fixed_order(tokenizer, tmp_path) -> None:
    lines = [{"text": f"word {n}", "label": "bca"[n % 3], "more": n} for n in range(30)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)))
    sides = [
        open_examples(tmp_path / "x.jsonl", ClassificationSchema(), tokenizer, split=split, heldout_fraction=0.3)
        for split in ("train", "heldout", "all")
    ]
    assert [side.label_names for side in sides] == [("a", "b", "c")] * 3
    assert len(sides[0]) + len(sides[1]) == len(sides[2]) == 30
    for side, split in zip(sides[:2], ("train", "heldout"), strict=True):
        for number in range(len(side)):
            name = side.store.name(number)
            line = int(name.rpartition(":")[2]) - 1
            assert split_of(name, 0.3) == split
            assert side.store.document(number).tolist() == tokenizer.encode_document(f"word {line}")
            assert side.label_names[side.targets[number]] == lines[line]["label"]
    numbered = opened([{"text": "a", "label": n} for n in (10, 9, 2)], ClassificationSchema(), tokenizer)
    assert numbered.label_names == ("2", "9", "10")
    assert numbered.targets.tolist() == [2, 1, 0]
    named = opened(lines, ClassificationSchema(label_names=("c", "b", "a")), tokenizer)
    assert named.targets[:3].tolist() == [1, 0, 2]


def test_parquet_holds_the_same(tokenizer, tmp_path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    records = [{"words": ["some", " words"], "tags": ["a", "b"]}, {"words": ["more"], "tags": ["b"]}]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "x.parquet")
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, records)))
    one, other = (
        open_examples(tmp_path / name, TokenClassificationSchema(), tokenizer, split="all")
        for name in ("x.parquet", "x.jsonl")
    )
    assert one.digest() == other.digest() == opened(records, TokenClassificationSchema(), tokenizer).digest()


def test_two_texts_in_one_document_have_two_types(tokenizer) -> None:
    """B110: one begin token, whatever is put together."""
    examples = opened(
        [{"text": "some", "second": "more", "label": n} for n in (0, 1)],
        ClassificationSchema(text_pair="second"),
        tokenizer,
    )
    first, second = tokenizer.encode_document("some"), [*tokenizer.encode("more"), tokenizer.eos_id]
    assert examples.store.document(0).tolist() == first + second
    assert first.count(tokenizer.bos_id) == 1
    assert examples.columns["types"].tolist() == ([0] * len(first) + [1] * len(second)) * 2
    batch = next(loader(examples, Classification(2)))
    assert batch.types[batch.segments == 1].tolist() == ([0] * len(first) + [1] * len(second)) * 2
    assert not batch.types[batch.segments == 0].any()


def test_numbers(tokenizer) -> None:
    one = opened([{"text": "a", "score": 1}, {"text": "b", "score": 2.5}], RegressionSchema(), tokenizer)
    assert one.targets.tolist() == [1.0, 2.5]
    two = opened([{"text": "a", "score": [1, 2]}, {"text": "b", "score": [3, 4]}], RegressionSchema(), tokenizer)
    assert two.targets.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert next(loader(two, Regression(2), join=False)).targets.shape == (2, 2)


def test_the_first_token_of_a_word_carries_its_tag(tokenizer) -> None:
    examples = opened([{"words": ["some", " xyz"], "tags": ["n", "v"]}], TokenClassificationSchema(), tokenizer)
    pieces = [tokenizer.encode(word) for word in ("some", " xyz")]
    assert examples.store.document(0).tolist() == [tokenizer.bos_id, *pieces[0], *pieces[1], tokenizer.eos_id]
    tags = [X, 0, *[X] * (len(pieces[0]) - 1), 1, *[X] * (len(pieces[1]) - 1), X]
    assert len(pieces[1]) > 1
    assert examples.columns["labels"].tolist() == tags


def test_pairs_begin_with_the_start_token(tokenizer) -> None:
    for start, first in ((None, tokenizer.bos_id), (7, 7)):
        examples = opened([{"source": "some", "target": "more"}], Seq2SeqSchema(start_id=start), tokenizer)
        assert examples.store.document(0).tolist() == [first, *tokenizer.encode("more"), tokenizer.eos_id]
        assert examples.source.document(0).tolist() == tokenizer.encode_document("some")


def test_a_prompt_is_the_prefix(tokenizer) -> None:
    examples = opened([{"prompt": "some", "completion": " more"}], PromptCompletionSchema(), tokenizer)
    (batch,) = loader(examples, PrefixLM(), batch_size=1).one_epoch()
    completion = [*tokenizer.encode(" more"), tokenizer.eos_id]
    assert batch.labels[batch.labels != X].tolist() == completion
    assert int(batch.groups.sum()) == 1 + len(tokenizer.encode("some"))


def test_answers_are_found_by_characters(tokenizer) -> None:
    text = "some wörds and more"
    record = {"question": "what", "text": text, "start": 5, "end": 10}
    examples = opened([record, {**record, "start": None, "end": None}], QuestionAnsweringSchema(), tokenizer)
    (batch,) = loader(examples, Span(), batch_size=1, length=200).one_epoch()
    first, last = batch.targets[0].tolist()
    assert tokenizer.decode(documents(batch)[0][first : last + 1]).strip() == "wörds"
    assert batch.targets[1].tolist() == [X, X]
    assert batch.types[0, first] == 1


@pytest.mark.parametrize(
    ("form", "record", "message"),
    [
        (ClassificationSchema(), {"text": "a"}, "record 1 has no field 'label'; name fields that it has: text"),
        (ClassificationSchema(), {"text": 5, "label": 1}, "record 1: field 'text' holds int, not text"),
        (ClassificationSchema(), {"text": "a", "label": 1.5}, "record 1: a class is a text or a whole number, not 1.5"),
        (
            ClassificationSchema(),
            {"text": "a", "label": None},
            "record 1: a class is a text or a whole number, not None",
        ),
        (
            ClassificationSchema(label_names=("x", "y")),
            {"text": "a", "label": "z"},
            "class 'z' is not one of x, y; name it in label_names",
        ),
        (ClassificationSchema(), {"text": "\ud800", "label": "y"}, "record 1: character 0 is the lone surrogate"),
        (
            ClassificationSchema(),
            {"text": "a", "label": "x"},
            r"a single class or none \(x\), so there is nothing to classify",
        ),
        (RegressionSchema(), {"text": "a", "score": "5"}, "field 'score' holds '5', not a number"),
        (
            RegressionSchema(),
            {"text": "a", "score": float("inf")},
            "field 'score' holds inf, not a number that float32 can hold",
        ),
        (
            RegressionSchema(),
            {"text": "a", "score": [1.0, 2.0]},
            "has 2 numbers, but the first record has 1; give each as many",
        ),
        (TokenClassificationSchema(), {"words": ["a", "b"], "tags": ["x"]}, "record 1 has 2 words but 1 tags"),
        (TokenClassificationSchema(), {"words": "ab", "tags": ["x", "y"]}, "field 'words' holds str, not a list"),
        (
            TokenClassificationSchema(),
            {"words": ["a", 1], "tags": ["x", "y"]},
            "field 'words' holds '1', not only texts",
        ),
        (TokenClassificationSchema(), {"words": ["a", ""], "tags": ["x", "y"]}, "the word '' gives no token"),
        (
            QuestionAnsweringSchema(),
            {"question": "q", "text": "abc", "start": 1, "end": 4},
            r"start 1 to end 4, .* characters 0 … 2",
        ),
        (QuestionAnsweringSchema(), {"question": "q", "text": "abc", "start": 1, "end": None}, "start 1 to end None"),
    ],
)
def test_what_records_cannot_be_is_refused(tokenizer, form, record, message) -> None:
    good = {
        ClassificationSchema: {"text": "a", "label": "x"},
        RegressionSchema: {"text": "a", "score": 0.5},
        TokenClassificationSchema: {"words": ["a", "b"], "tags": ["x", "y"]},
        QuestionAnsweringSchema: {"question": "q", "text": "abc", "start": 0, "end": 1},
    }[type(form)]
    with pytest.raises(DataError, match=message):
        opened([good, record], form, tokenizer)


def test_what_is_no_source_is_refused(tokenizer, tmp_path) -> None:
    (tmp_path / "x.txt").write_text("a")
    with pytest.raises(DataError, match=r"x\.txt is no file of examples; give \.jsonl or \.parquet"):
        open_examples(tmp_path / "x.txt", ClassificationSchema(), tokenizer)
    with pytest.raises(DataError, match="none of the 1 examples falls into the heldout split"):
        open_examples(
            [{"text": "a", "label": 1}], ClassificationSchema(), tokenizer, split="heldout", heldout_fraction=0.0
        )
    with pytest.raises(ArgumentError, match="split is 'test'; choose train, heldout or all"):
        open_examples([{"text": "a", "label": 1}], ClassificationSchema(), tokenizer, split="test")
    with pytest.raises(DataError, match="the list of sources is empty"):
        open_examples([], ClassificationSchema(), tokenizer)


# ---- answers stay with their documents


def classified(sizes: list[int]) -> Examples:
    """Document n holds n · 100 + place, and its class is n."""
    ids = [[100 * n + t for t in range(size)] for n, size in enumerate(sizes)]
    return Examples(TokenStore.of(ids), targets=np.arange(len(sizes)))


SIZES = [3, 5, 1, 8, 2, 7, 4, 6, 1, 1, 8]


@pytest.mark.parametrize("join", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_document_comes_once_an_epoch_with_its_own_target(join, world_size) -> None:
    ranks = [
        loader(classified(SIZES), Classification(11), length=8, join=join, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    once = [list(rank.one_epoch()) for rank in ranks]
    assert len({len(batches) for batches in once}) == 1
    met = Counter()
    for batch in (batch for batches in once for batch in batches):
        assert batch.shape == (2, 8)
        for document, target in zip(documents(batch), batch.targets.tolist(), strict=True):
            assert document == [100 * target + t for t in range(SIZES[target])]
            met[target] += 1
    assert met == Counter(range(11))
    stream = ranks[0]
    epochs = Counter(target for batch in islice(stream, stream.rows) for target in batch.targets.tolist())
    if world_size == 1:
        assert epochs == Counter(dict.fromkeys(range(11), 2))


def test_labels_travel_with_their_tokens_through_pieces() -> None:
    """Cut into rows of 4 without overlap: each token, and its label, comes exactly once."""
    ids = [list(range(100 * n, 100 * n + size)) for n, size in enumerate([9, 0, 3, 4])]
    store = TokenStore.of(ids)
    examples = Examples(store, {"labels": store.tokens.astype(np.int64) % 7}, whole=False)
    seen = Counter()
    for batch in loader(examples, TokenClassification(7), length=4).one_epoch():
        real = batch.segments != 0
        assert torch.equal(batch.labels[real], batch.tokens[real] % 7)
        assert (batch.labels[~real] == X).all()
        seen.update(batch.tokens[real].tolist())
    assert seen == Counter(id_ for document in ids for id_ in document)


def paired(count: int = 9) -> Examples:
    targets = [[0, *[100 * n + t for t in range(n % 4 + 1)]] for n in range(count)]
    sources = [[100 * n + 50 + t for t in range((5 * n) % 7)] for n in range(count)]
    return Examples(TokenStore.of(targets), source=TokenStore.of(sources))


@pytest.mark.parametrize("join", [True, False])
def test_pairs_are_packed_as_pairs(join) -> None:
    examples = paired()
    stream = loader(examples, SequenceToSequence(0), length=8, source_length=9, join=join)
    met = Counter()
    for batch in stream.one_epoch():
        assert (batch.shape, batch.source.shape) == ((2, 8), (2, 9))
        assert batch.source.layout == Batch(batch.source.tokens, batch.source.positions, batch.source.segments).layout
        for row, lengths in enumerate(batch.document_lengths):
            for segment in lengths:
                target = batch.tokens[row][batch.segments[row] == segment].tolist()
                source = batch.source.tokens[row][batch.source.segments[row] == segment].tolist()
                number = target[1] // 100
                assert target == examples.store.document(number).tolist()
                assert source == examples.source.document(number).tolist()
                met[number] += 1
    assert met == Counter(range(9))
    assert (stream.rows < 9) == join


def test_those_alike_share_a_row(tokenizer) -> None:
    records = [{"first": f"some {n}", "second": f"more {n}"} for n in range(9)]
    examples = opened(records, SimilarityPairSchema(), tokenizer)
    for join in (True, False):
        stream = loader(examples, Contrastive(), length=40, join=join)
        met = []
        for batch in stream.one_epoch():
            texts = [tokenizer.decode(document) for document in documents(batch)]
            assert [texts[partner].split()[1] for partner in batch.targets] == [text.split()[1] for text in texts]
            met += texts
        assert sorted(met) == sorted(text for record in records for text in record.values())
        assert (stream.rows == 9) == (not join)


OBJECTIVES = {
    "classes": (lambda: classified(SIZES), Classification(11), {}),
    "pairs": (paired, SequenceToSequence(0), {"source_length": 9}),
    "masked": (lambda: TokenStore.of([range(5, 5 + n) for n in SIZES]), MaskedLM(1, 20, (0,)), {}),
    "spans": (lambda: TokenStore.of([range(5, 5 + n) for n in SIZES]), SpanCorruption((30, 31), 1, 0), {}),
    "prefix": (lambda: TokenStore.of([range(5, 5 + n) for n in SIZES]), PrefixLM(), {}),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_resumes_exactly_and_validates_alike(name) -> None:
    """What is drawn follows from the seed, the batch's number and the rank, wherever the stream stands."""
    make, objective, more = OBJECTIVES[name]
    stream = loader(make(), objective, length=8, **more)
    states, batches = [], []
    for _ in range(9):
        states.append(json.dumps(stream.state_dict()))
        batches.append(next(stream))
    for number in (0, 4, 7):
        again = loader(make(), objective, length=8, **more)
        again.load_state_dict(json.loads(states[number]))
        assert all(same(a, b) for a, b in zip(batches[number:], again, strict=False))
    first, second = list(stream.one_epoch()), list(stream.one_epoch())
    assert all(same(a, b) for a, b in zip(first, second, strict=True))


def test_ranks_batches_and_seeds_draw_apart() -> None:
    store = TokenStore.of([list(range(5, 25))] * 8)
    objective = MaskedLM(1, 30, (0,))
    batches = [
        loader(store, objective, length=20, **settings).batch(number)
        for settings in ({}, {"seed": 4}, {"world_size": 2}, {"world_size": 2, "rank": 1})
        for number in (0, 1)
    ]
    batches += list(loader(store, objective, length=20).one_epoch())[:2]
    chosen = {tuple((batch.labels != X).flatten().tolist()) for batch in batches}
    assert len(chosen) == len(batches) - 2  # a world of 2 draws on rank 0 as a world of 1 does


def test_masked_tokens_of_a_cut_document_are_drawn_once() -> None:
    """Pieces overlap by one token for the next token's sake alone."""
    store = TokenStore.of([list(range(5, 25))])
    batches = list(loader(store, MaskedLM(1, 30, (0,), mlm_probability=1.0), length=6).one_epoch())
    assert Counter(torch.cat([b.labels[b.labels != X] for b in batches]).tolist()) == Counter(range(5, 25))


@pytest.mark.parametrize(
    "change",
    [{"objective": MaskedLM(1, 30, (0,), mlm_probability=0.2)}, {"objective": PrefixLM()}],
)
def test_the_state_of_another_objective_is_refused(change) -> None:
    store = TokenStore.of([list(range(5, 25))])
    state = loader(store, MaskedLM(1, 30, (0,))).state_dict()
    with pytest.raises(DataError, match="with data"):
        loader(store, **{"objective": None, **change}).load_state_dict(state)


def test_the_digest_knows_every_answer() -> None:
    store = TokenStore.of([[1, 2], [3]])
    columns = {"labels": np.array([0, 1, 2])}
    digests = [
        Examples(store).digest(),
        Examples(store, columns).digest(),
        Examples(store, {"types": columns["labels"]}).digest(),
        Examples(store, targets=np.array([0, 1])).digest(),
        Examples(store, targets=np.array([1, 1])).digest(),
        Examples(store, targets=np.array([0.0, 1.0])).digest(),
        Examples(store, source=store).digest(),
        Examples(store, together=2).digest(),
    ]
    assert len(set(digests)) == len(digests)


# ---- too long, or too short


def test_documents_that_do_not_fit_are_refused_or_cut() -> None:
    examples = classified([3, 12, 2])
    with pytest.raises(DataError, match="document 1 needs 12 slots, but a row has 8 and it must not be cut"):
        loader(examples, Classification(11), length=8)
    (batch,) = loader(examples.cut(8), Classification(11), length=8, batch_size=3).one_epoch()
    assert sorted(map(len, documents(batch))) == [2, 3, 8]
    with pytest.raises(DataError, match=r"document \d needs \d+ and \d+ slots, but a row has 9 and 3"):
        loader(paired(), SequenceToSequence(0), length=9, source_length=3)
    cut = paired().cut(9, source_length=3)
    assert max(cut.source.lengths) == 3
    assert sum(b.documents for b in loader(cut, SequenceToSequence(0), length=9, source_length=3).one_epoch()) == 9


def test_an_answer_that_was_cut_off_is_none() -> None:
    store = TokenStore.of([[1, 2, 3, 4], [1, 2, 3, 4]])
    examples = Examples(store, targets=np.array([[0, 1], [1, 2]])).cut(2)
    assert examples.targets.tolist() == [[0, 1], [X, X]]
    assert examples.store.tokens.tolist() == [1, 2, 1, 2]
    assert examples.store.name(1) == "1"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"columns": {"masks": np.zeros(3)}}, "there is no column 'masks'; choose from labels, groups, types"),
        ({"columns": {"labels": np.zeros(2)}}, r"labels has shape \[2\], but there are 3 tokens"),
        ({"targets": np.zeros(3)}, "targets has 3 entries, but there are 2 documents"),
        ({"source": TokenStore.of([[1]])}, "source has 1 entries, but there are 2 documents"),
        ({"together": 3}, "2 documents do not make groups of 3"),
        ({"together": 2, "whole": False}, "cannot be cut into pieces; set whole"),
    ],
)
def test_examples_that_do_not_fit_together_are_refused(fields, message) -> None:
    with pytest.raises(DataError, match=message):
        Examples(TokenStore.of([[1, 2], [3]]), **fields)


def test_an_empty_document_with_an_answer_is_refused() -> None:
    """B49: it has no slot, so its answer would go to the next document."""
    with pytest.raises(DataError, match="document 'b' holds no token; leave it out with its label"):
        Examples(TokenStore.of([[1], [], [2]], ["a", "b", "c"]), targets=np.arange(3))


def test_a_corpus_without_ends(tokenizer) -> None:
    corpus = open_corpus([Document("a", "some words")])
    stream = Loader.from_corpus(corpus, tokenizer, "all", ends=False, batch_size=1, length=32)
    assert stream.store.document(0).tolist() == tokenizer.encode("some words")
