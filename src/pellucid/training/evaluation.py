"""Evaluation on held-out data: bits per byte of text, otherwise an objective's loss and metrics.

Bits per byte count every byte of every document exactly once. A document is its begin token, its tokens and its end
token, and everything after the begin token is predicted, the first token of the text included. A document that does
not fit into one window is scored by overlapping ones: each token once, with as much text before it as fits. Unlike a
loss per token, the result can be compared between tokenizers, and with a compressor such as gzip. Held-out rows, and
the random draws of an objective in them, are the same in every evaluation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from pellucid.batch import IGNORED, Batch
from pellucid.data.corpus import Document
from pellucid.data.loader import Loader
from pellucid.data.objectives import causal
from pellucid.errors import ConfigError, DataError
from pellucid.generation import GenerationConfig, generate_ids
from pellucid.models.model import Model
from pellucid.nn.losses import Loss
from pellucid.probe import eval_mode
from pellucid.training import objectives
from pellucid.training.config import TrainConfig
from pellucid.training.environment import Precision
from pellucid.training.metrics import Metric, MetricSums, metric_of
from pellucid.training.objectives import reads_text
from pellucid.training.results import MetricValue, Validation
from pellucid.training.step import autocast, num_targets

_BATCHES_OF_TEXT, _BATCHES_OF_EXAMPLES = 64, 2048
"""The most training batches that a baseline is fitted to."""
_GENERATED_TOGETHER = 16

Watch = Callable[[Iterable[Batch]], Iterable[Batch]]


class Evaluator:
    """Evaluates one run: made once, used many times."""

    def __init__(
        self, config: TrainConfig, loader: Loader, rows: Callable[[int | None], Loader], eos_id: int | None
    ) -> None:
        """``loader`` gives training batches, ``rows(n)`` held-out ones of n documents (None: of all)."""
        self.config, self._loader, self._eos_id = config, loader, eos_id
        self._sample, self._all = rows(config.evaluation.num_documents), rows(None)
        self._metric: Metric | None = None
        self.item = metric_of(config).item

    @property
    def metric(self) -> Metric:
        """The metric, its baseline fitted to the training data."""
        if self._metric is None:
            self._metric = metric_of(self.config)
            self._metric.fit_baseline(self._training())
        return self._metric

    def evaluate(self, model: Model, *, final: bool, watch: Watch = iter) -> Validation:
        """On the sample; with ``final`` on everything, and with targets generated. ``watch`` wraps the batches."""
        loader = self._all if final else self._sample
        precision = self.config.resolved_precision
        found = evaluate(model, watch(loader.one_epoch()), self.metric, len(loader.store), precision)
        if final and self.config.evaluation.num_generated_samples and self._generates:
            exact = self._exact_match(model, watch)
            found = found._replace(
                metrics=(*found.metrics, exact), baseline=f"{found.baseline}; the most frequent target"
            )
        return found

    @property
    def _generates(self) -> bool:
        """Whether there are targets to generate: after a random prefix of text, none is worth comparing."""
        objective = self.config.objective
        pairs = isinstance(objective, objectives.Seq2SeqConfig | objectives.SpanCorruptionConfig)
        return pairs or (isinstance(objective, objectives.PrefixLMConfig) and not reads_text(objective))

    def _training(self) -> Iterator[Batch]:
        """All training batches once, or as many as a baseline needs."""
        most = _BATCHES_OF_TEXT if reads_text(self.config.objective) else _BATCHES_OF_EXAMPLES
        if self._loader.rows <= most * self._loader.batch_size:
            return self._loader.one_epoch()
        return map(self._loader.batch, range(most))

    def _exact_match(self, model: Model, watch: Watch) -> MetricValue:
        """The fraction of targets that greedy decoding generates exactly."""
        usual = Counter(tuple(target) for batch in self._training() for _, _, target in generation_tasks(batch))
        guess = usual.most_common(1)[0][0] if usual else ()
        every = (task for batch in watch(self._all.one_epoch()) for task in generation_tasks(batch))
        tasks = islice(every, self.config.evaluation.num_generated_samples)
        right = guessed = count = 0
        while some := list(islice(tasks, _GENERATED_TOGETHER)):
            right += sum(exact_matches(model, some, self._eos_id))
            guessed += sum(tuple(target) == guess for _, _, target in some)
            count += len(some)
        return MetricValue(f"exact match of {count}", right / max(count, 1), guessed / max(count, 1))


def evaluate(
    model: Model, batches: Iterable[Batch], metric: Metric, documents: int, precision: Precision = "float32"
) -> Validation:
    """Loss and metrics of ``model`` over labelled ``batches``."""
    sums, totals = torch.zeros(2, dtype=torch.float64, device=model.device), MetricSums(0.0)
    with eval_mode(model):
        for batch in batches:
            batch = batch.to(model.device)
            with autocast(precision, model.device):
                hidden = model(batch, want="hidden").hidden
                loss: Loss = model.loss(hidden, batch)
                sums += torch.stack([loss.total.double(), loss.count.double()])
                if num_targets(batch):
                    totals = MetricSums(*map(sum, zip(totals, metric.sums(model, hidden, batch), strict=True)))
    nats, items = sums.tolist()
    if not items:
        raise DataError(f"{documents} held-out documents have no target; there is nothing to evaluate")
    metrics = [MetricValue(metric.loss_name, nats / items, totals.baseline_loss / items)]
    if metric.metric_name is not None:
        metrics.append(MetricValue(metric.metric_name, totals.correct / items, totals.baseline_correct / items))
    return Validation(nats, int(items), 0, documents, metric.item, tuple(metrics), metric.baseline)


Task = tuple[list[int] | None, list[int], list[int]]


def generation_tasks(batch: Batch) -> Iterator[Task]:
    """``(source, prompt, target)`` of each document."""
    assert batch.labels is not None
    for row, lengths in enumerate(batch.document_lengths):
        for segment in lengths:
            mine = batch.segments[row] == segment
            tokens = batch.tokens[row][mine].tolist()
            counted_T = batch.labels[row][mine] != IGNORED
            if not counted_T.any():
                continue
            begins = int(counted_T.int().argmax()) + 1
            source = None
            if batch.source is not None:
                source = batch.source.tokens[row][batch.source.segments[row] == segment].tolist()
            if tokens[begins:]:
                yield source, tokens[:begins], tokens[begins:]


def exact_matches(model: Model, tasks: list[Task], eos_id: int | None = None) -> list[bool]:
    """Whether greedy decoding generates each target, with its end token where it has one."""
    ends = () if eos_id is None else (eos_id,)
    params = [GenerationConfig(max_new_tokens=len(target), stop_token_ids=ends) for _, _, target in tasks]
    sources = [source for source, _, _ in tasks if source is not None]
    with eval_mode(model):
        found = generate_ids(model, [prompt for _, prompt, _ in tasks], params, sources=sources or None)
    return [one.tokens == target for one, (_, _, target) in zip(found, tasks, strict=True)]


_BATCHES_SORTED_TOGETHER = 32


@runtime_checkable
class DocumentEncoder(Protocol):
    """The tokenizer of :func:`bits_per_byte`."""

    @property
    def bos_id(self) -> int | None: ...

    def encode_document(self, text: str) -> list[int]: ...


class ScoringWindow(NamedTuple):
    """Slots ``start … stop-1`` of a document; of these, tokens from ``fresh`` on are scored."""

    start: int
    stop: int
    fresh: int


def windows(tokens: int, length: int, stride: int) -> Iterator[ScoringWindow]:
    """Windows of at most ``length`` over a document; each token but the first is scored exactly once."""
    if not 1 <= stride < length:
        raise ConfigError(f"stride is {stride} but a window has {length} tokens; choose 1 … {length - 1}")
    fresh = 1
    while fresh < tokens:
        stop = min(tokens, max(fresh + stride, length))
        yield ScoringWindow(max(0, stop - length), stop, fresh)
        fresh = stop


def bits_per_byte(
    model: nn.Module,
    tokenizer: DocumentEncoder,
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
        raise DataError(f"{texts} documents with 0 bytes were given; there is nothing to evaluate")
    return Validation(nats, tokens, size, texts)


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
    with eval_mode(model):
        for batch in _batches(rows, batch_tokens, length):
            with autocast(precision, device):
                loss = model(batch.to(device), want="loss").loss
            sums += torch.stack([loss.total.double(), loss.count.double()])
    nats, tokens = sums.tolist()
    return nats, int(tokens)


Row = tuple[Sequence[int], int]


def _batches(rows: Iterator[Row], batch_tokens: int, length: int) -> Iterator[Batch]:
    """Batches of rows of similar length; a few batches are sorted at a time, so little is padded or in memory."""
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
    # labels[t] is token t + 1; tokens that an earlier window scored are not counted again
    scored_from = torch.tensor([fresh - 1 for _, fresh in rows])[:, None]
    slots = torch.arange(batch.shape[1])[None, :]
    return batch.with_labels(torch.where(slots < scored_from, IGNORED, batch.labels))
