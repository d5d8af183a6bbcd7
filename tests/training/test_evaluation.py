"""Every byte is paid for, exactly once."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pellucid.batch import IGNORED, Batch
from pellucid.data.corpus import Document
from pellucid.data.tokenizer import Tokenizer
from pellucid.errors import ConfigError, DataError
from pellucid.models.build import build
from pellucid.models.config import ModelConfig
from pellucid.models.model import Decoder
from pellucid.nn import losses
from pellucid.nn.losses import Loss
from pellucid.training.evaluation import ScoringWindow, bits_per_byte, score, windows


class Spy(nn.Module):
    """Uniform over ``vocab`` tokens; notes what it was asked to predict, and after how much context."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.nats = math.log(vocab)
        self.asked: list[tuple[int, int]] = []
        self.shapes: list[tuple[int, int]] = []

    def forward(self, batch: Batch, *, want: str) -> Any:
        assert want == "loss"
        assert not self.training
        assert not torch.is_grad_enabled()
        self.shapes.append(batch.shape)
        rows, slots = (batch.labels != IGNORED).nonzero(as_tuple=True)
        self.asked += [
            (int(batch.labels[r, t]), int(batch.positions[r, t]) + 1) for r, t in zip(rows, slots, strict=True)
        ]
        count = torch.tensor(len(rows))
        return SimpleNamespace(loss=Loss(self.nats * count.float(), count))


def test_twenty_tokens_in_windows_of_ten_by_five() -> None:
    """B85: each of tokens 1 … 19 once; the uniform model over 4 has perplexity 4."""
    assert list(windows(20, 10, 5)) == [ScoringWindow(0, 10, 1), ScoringWindow(5, 15, 10), ScoringWindow(10, 20, 15)]
    spy = Spy(4)
    nats, tokens = score(spy, [list(range(20))], length=10, stride=5)
    assert sorted(token for token, _ in spy.asked) == list(range(1, 20))
    assert tokens == 19
    assert math.exp(nats / tokens) == pytest.approx(4)


@given(st.integers(0, 60), st.integers(2, 12), st.data())
def test_each_token_is_scored_once_with_as_much_before_it_as_fits(
    tokens: int, length: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, length - 1))
    scored = []
    for window in windows(tokens, length, stride):
        assert window.stop - window.start <= length
        assert window.start < window.fresh
        scored += range(window.fresh, window.stop)
        if window.start:
            assert window.stop - window.start == length
            assert window.stop - window.fresh <= stride
    assert scored == list(range(1, tokens))


@pytest.mark.parametrize("stride", [0, 10, 11])
def test_a_stride_that_leaves_no_context_is_refused(stride: int) -> None:
    with pytest.raises(ConfigError, match=rf"stride is {stride} but a window has 10 tokens; choose 1 … 9"):
        list(windows(20, 10, stride))


def test_memory_is_bounded_and_little_is_padded() -> None:
    spy = Spy(4)
    sequences = [list(range(n)) for n in (3, 50, 7, 2, 31, 18, 0, 1, 44)]
    _, tokens = score(spy, sequences, length=16, stride=8, batch_tokens=64)
    assert tokens == sum(max(len(s) - 1, 0) for s in sequences)
    assert all(rows * slots <= 64 for rows, slots in spy.shapes)
    assert sum(rows * slots for rows, slots in spy.shapes) <= 1.1 * sum(
        w.stop - w.start for s in sequences for w in windows(len(s), 16, 8)
    )


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["to be or not to be, that is the question: grüße 漢字"] * 3, vocab_size=290)


DOCUMENTS = [
    Document("a", "to be or not to be"),
    Document("b", "grüße"),
    Document("empty", ""),
    Document("c", "漢" * 30),
]


def test_bits_per_byte_counts_bytes_and_every_token_after_begin(tokenizer: Tokenizer) -> None:
    """The first token of a file and its end are charged; bytes are those of UTF-8, not characters."""
    spy = Spy(2)
    found = bits_per_byte(spy, tokenizer, DOCUMENTS, length=8, stride=3)
    ids = [tokenizer.encode_document(d.text) for d in DOCUMENTS]
    assert sorted(token for token, _ in spy.asked) == sorted(token for document in ids for token in document[1:])
    assert found.tokens == sum(len(document) - 1 for document in ids)
    assert found.bytes == sum(len(d.text.encode()) for d in DOCUMENTS) == 18 + 7 + 0 + 90
    assert found.documents == 4
    assert found.bits_per_byte == pytest.approx(found.tokens / found.bytes)


def tiny(vocab: int, **changes: Any) -> Decoder:
    words: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "attention": {"num_attention_heads": 2},
        "ffn": {"kind": "gated", "intermediate_size": 12},
        "initializer_range": 0.5,
    }
    return build(ModelConfig.from_mapping(words | changes), dtype=torch.float64)


def token_by_token(model: Decoder, ids: list[int], length: int, stride: int) -> float:
    """Slow and readable: each token's logits from a prefix of its own."""
    nats = 0.0
    for window in windows(len(ids), length, stride):
        for place in range(window.fresh, window.stop):
            logits = model(Batch.from_rows([ids[window.start : place]])).logits[0, -1]
            nats -= float(logits.detach().log_softmax(-1)[ids[place]])
    return nats


def test_batched_windows_equal_one_token_at_a_time(tokenizer: Tokenizer) -> None:
    model = tiny(tokenizer.vocab_size)
    found = bits_per_byte(model, tokenizer, DOCUMENTS, length=8, stride=3, batch_tokens=32)
    slow = sum(token_by_token(model, tokenizer.encode_document(d.text), 8, 3) for d in DOCUMENTS)
    assert found.nats == pytest.approx(slow, rel=1e-10)


def test_the_batch_size_changes_nothing(tokenizer: Tokenizer) -> None:
    """B151, P-BATCH: the figure does not depend on who shares a batch, nor does the last window get lost."""
    model = tiny(tokenizer.vocab_size)
    each = [
        bits_per_byte(model, tokenizer, DOCUMENTS, length=8, stride=3, batch_tokens=size).nats
        for size in (1, 20, 100, 10_000)
    ]
    assert each == pytest.approx([each[0]] * 4, rel=1e-10)


def test_a_document_that_fits_is_one_window() -> None:
    """With room for all, the sum is that of one forward pass; with less context it is not."""
    model = tiny(50)
    ids = torch.randint(50, (12,), generator=torch.Generator().manual_seed(0)).tolist()
    whole, _ = score(model, [ids], length=12, stride=4)
    assert whole == pytest.approx(token_by_token(model, ids, 99, 1), rel=1e-10)
    short, _ = score(model, [ids], length=4, stride=2)
    assert abs(short - whole) > 1e-3


def test_dropout_is_off_and_the_mode_comes_back(tokenizer: Tokenizer) -> None:
    model = tiny(tokenizer.vocab_size, dropout={"embedding": 0.9, "residual": 0.9})
    quiet = bits_per_byte(model, tokenizer, DOCUMENTS, length=8)
    model.train()
    assert bits_per_byte(model, tokenizer, DOCUMENTS, length=8).nats == quiet.nats
    assert model.training


def test_no_gradient_is_computed(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scoring costs a forward pass, not three."""
    asked = []
    original = losses._chunk

    def chunk(*arguments: Any) -> Any:
        asked.append(arguments[-1])
        return original(*arguments)

    monkeypatch.setattr(losses, "_chunk", chunk)
    bits_per_byte(tiny(tokenizer.vocab_size, head_bias=True), tokenizer, DOCUMENTS, length=8)
    assert set(asked) == {False}


def test_bfloat16_is_close(tokenizer: Tokenizer) -> None:
    model = tiny(tokenizer.vocab_size).float()
    exact = bits_per_byte(model, tokenizer, DOCUMENTS, length=8).bits_per_byte
    rough = bits_per_byte(model, tokenizer, DOCUMENTS, length=8, precision="bfloat16").bits_per_byte
    assert rough != exact
    assert rough == pytest.approx(exact, rel=0.02)


def test_nothing_to_measure_is_refused(tokenizer: Tokenizer) -> None:
    model = tiny(tokenizer.vocab_size)
    for documents in ([], [Document("empty", "")]):
        with pytest.raises(DataError, match=f"{len(documents)} documents with 0 bytes"):
            bits_per_byte(model, tokenizer, documents, length=8)
    without = SimpleNamespace(bos_id=None, encode_document=tokenizer.encode_document)
    with pytest.raises(DataError, match="no begin token"):
        bits_per_byte(model, without, DOCUMENTS, length=8)
