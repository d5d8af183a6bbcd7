"""Held-out bits per byte: every byte of every document is paid for, exactly once.

A document is its begin token, its tokens and its end token, and everything after the begin token is
predicted, the first token of the text included. What does not fit into one window is scored by overlapping
ones: each token once, with as much text before it as fits. Unlike a loss per token, the result can be
compared between tokenizers, and with a compressor such as gzip.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from pellucid.batch import IGNORED, Batch
from pellucid.data.corpus import Document
from pellucid.data.objectives import causal
from pellucid.errors import ConfigError, DataError
from pellucid.training.precision import Precision, autocast
from pellucid.training.results import Validation

_BATCHES_SORTED_TOGETHER = 32


@runtime_checkable
class Encoder(Protocol):
    """What is asked of a tokenizer here."""

    @property
    def bos_id(self) -> int | None: ...

    def encode_document(self, text: str) -> list[int]: ...


class Window(NamedTuple):
    """Slots ``start … stop-1`` of a document; of these, tokens from ``fresh`` on are scored."""

    start: int
    stop: int
    fresh: int


def windows(tokens: int, length: int, stride: int) -> Iterator[Window]:
    """Windows of at most ``length`` over a document; each token but the first is scored exactly once."""
    if not 1 <= stride < length:
        raise ConfigError(f"stride is {stride} but a window has {length} tokens; choose 1 … {length - 1}")
    fresh = 1
    while fresh < tokens:
        stop = min(tokens, max(fresh + stride, length))
        yield Window(max(0, stop - length), stop, fresh)
        fresh = stop


def bits_per_byte(
    model: nn.Module,
    tokenizer: Encoder,
    documents: Iterable[Document],
    *,
    length: int,
    stride: int | None = None,
    batch_tokens: int = 16384,
    precision: Precision = "float32",
) -> Validation:
    """Score ``documents``. Memory stays bounded by ``batch_tokens`` however many and long they are."""
    if tokenizer.bos_id is None:
        raise DataError(
            "the tokenizer has no begin token, so nothing could predict the first token of a document; use one that has"
        )
    size = texts = 0

    def encoded() -> Iterator[list[int]]:
        nonlocal size, texts
        for document in documents:
            size, texts = size + document.size, texts + 1
            yield tokenizer.encode_document(document.text)

    nats, tokens = score(model, encoded(), length=length, stride=stride, batch_tokens=batch_tokens, precision=precision)
    if not size:
        raise DataError(f"{texts} documents with 0 bytes were given to validate on; there is nothing to measure")
    return Validation(nats, tokens, size, texts)


@torch.no_grad()
def score(
    model: nn.Module,
    sequences: Iterable[Sequence[int]],
    *,
    length: int,
    stride: int | None = None,
    batch_tokens: int = 16384,
    precision: Precision = "float32",
) -> tuple[float, int]:
    """Total nats and number of scored tokens of ``sequences``; the first token of each is only given."""
    stride = max(length // 2, 1) if stride is None else stride
    device = next(model.parameters()).device
    rows = (
        (sequence[w.start : w.stop], w.fresh - w.start)
        for sequence in sequences
        for w in windows(len(sequence), length, stride)
    )
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    try:
        for batch in _batches(rows, batch_tokens, length):
            with autocast(precision, device):
                loss = model(batch.to(device), want="loss").loss
            sums += torch.stack([loss.total.double(), loss.count.double()])
    finally:
        model.train(was_training)
    nats, tokens = sums.tolist()
    return nats, int(tokens)


Row = tuple[Sequence[int], int]


def _batches(rows: Iterator[Row], batch_tokens: int, length: int) -> Iterator[Batch]:
    """Rows of like length together: a stretch of them is sorted, so little is padded and little is held."""
    most = max(batch_tokens // length, 1)
    while stretch := list(islice(rows, most * _BATCHES_SORTED_TOGETHER)):
        stretch.sort(key=lambda row: len(row[0]))
        while stretch:
            longest = len(stretch[-1][0])
            taken = max(batch_tokens // longest, 1)
            yield _labelled(stretch[-taken:])
            del stretch[-taken:]


def _labelled(rows: Sequence[Row]) -> Batch:
    batch = causal(Batch.from_rows([tokens for tokens, _ in rows]))
    assert batch.labels is not None
    # labels[t] is token t + 1: what was scored by an earlier window is not counted again
    scored_from = torch.tensor([fresh - 1 for _, fresh in rows])[:, None]
    return batch.with_labels(torch.where(_slots(batch) < scored_from, IGNORED, batch.labels))


def _slots(batch: Batch) -> Tensor:
    return torch.arange(batch.shape[1])[None, :]
