"""Metrics of held-out batches, each beside the baseline of a constant answer.

The baseline is fitted to training batches first: how often each answer occurs in them. Each held-out batch then gives
sums: the loss of the baseline, and how often the model and the baseline are correct.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pellucid.batch import Batch
from pellucid.models.model import Model
from pellucid.nn.pooling import documents_of
from pellucid.training import objectives
from pellucid.training.config import TrainConfig

_ROWS = 1024


class MetricSums(NamedTuple):
    """Sums over the items of one batch."""

    baseline_loss: float
    correct: float = 0.0
    baseline_correct: float = 0.0


class Metric(Protocol):
    """``item`` is what is counted, ``loss_name`` its loss in words, ``metric_name`` what ``correct`` is a rate of."""

    item: str
    loss_name: str
    metric_name: str | None
    baseline: str

    def fit_baseline(self, batches: Iterable[Batch]) -> None: ...

    def sums(self, model: Model, hidden_BTD: Tensor, batch: Batch) -> MetricSums: ...


class Accuracy:
    """One of several classes for each labeled token, or for each document; the baseline is their frequencies."""

    metric_name: str | None = "accuracy"

    def __init__(self, item: str, num_classes: int, of: str) -> None:
        self.item, self.loss_name = item, f"nats a {item}"
        self.baseline = f"each {of} as often as in the training data, and always the most frequent"
        self._counts = torch.zeros(num_classes, dtype=torch.float64)

    def fit_baseline(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            targets, _ = _targets(batch)
            self._counts += torch.bincount(targets, minlength=len(self._counts))

    def sums(self, model: Model, hidden_BTD: Tensor, batch: Batch) -> MetricSums:
        targets, index = _targets(batch)
        frequency = (self._counts + 1) / (self._counts + 1).sum()  # a class that never occurred is possible too
        baseline_loss = -frequency[targets].log().sum().item()
        baseline_correct = (targets == int(self._counts.argmax())).sum().item()
        index = index.to(hidden_BTD.device)
        if batch.labels is None:
            predicted = model.head(hidden_BTD, batch.coordinates())[index].argmax(-1)
        else:
            rows = hidden_BTD.flatten(0, 1)[index].split(_ROWS)
            predicted = torch.cat([model.head(some[None])[0].argmax(-1) for some in rows])
        return MetricSums(baseline_loss, (predicted.cpu() == targets).sum().item(), baseline_correct)


class MSE:
    """Numbers of each document; the baseline is their mean."""

    item, loss_name = "document", "mean squared error"
    metric_name: str | None = None
    baseline: str = "always the mean of the training data"

    def __init__(self) -> None:
        self._sum: Tensor | float = 0.0
        self._count = 0

    def fit_baseline(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            targets = _numbers(batch)
            self._sum, self._count = self._sum + targets.sum(0), self._count + len(targets)

    def sums(self, model: Model, hidden_BTD: Tensor, batch: Batch) -> MetricSums:
        error = _numbers(batch) - self._sum / max(self._count, 1)
        return MetricSums(error.square().mean(1).sum().item())


class SpanExactMatch:
    """First and last token of an answer; the baseline is the most frequent span."""

    item, loss_name = "answer", "nats an end"
    metric_name: str | None = "exact match"
    baseline: str = "every token alike, and always the most frequent place of the training data"

    def __init__(self) -> None:
        self._counts: Counter[tuple[int, ...]] = Counter()

    def fit_baseline(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            targets, _ = _targets(batch)
            self._counts.update(map(tuple, targets.tolist()))

    def sums(self, model: Model, hidden_BTD: Tensor, batch: Batch) -> MetricSums:
        targets, index = _targets(batch)
        documents = documents_of(batch.coordinates())
        scores_P2 = model.head(hidden_BTD).flatten(0, 1)[documents.slots].float().cpu()
        sizes = torch.bincount(documents.owners, minlength=len(documents.first)).tolist()
        usual = max(self._counts, key=lambda span: (self._counts[span], span), default=None)
        pieces = scores_P2.split(sizes)
        loss = correct = baseline_correct = 0.0
        for number, target in zip(index.tolist(), map(tuple, targets.tolist()), strict=True):
            loss += math.log(sizes[number])
            correct += best_span(pieces[number]) == target
            baseline_correct += usual == target
        return MetricSums(loss, correct, baseline_correct)


class RetrievalAccuracy:
    """Which document belongs to a document; the baseline is any other of the batch."""

    item, loss_name = "document", "nats a document"
    metric_name: str | None = "retrieval accuracy"
    baseline: str = "any other document of the batch"

    def fit_baseline(self, batches: Iterable[Batch]) -> None:
        """Nothing: the baseline depends on the batch only."""

    def sums(self, model: Model, hidden_BTD: Tensor, batch: Batch) -> MetricSums:
        vectors = model.head(hidden_BTD, batch.coordinates()).float()
        count = len(vectors)
        itself = torch.eye(count, dtype=torch.bool, device=vectors.device)
        nearest = (vectors @ vectors.T).masked_fill(itself, -torch.inf).argmax(-1).cpu()
        correct = (nearest == torch.arange(count) ^ 1).sum().item()
        return MetricSums(count * math.log(count - 1), correct, count / (count - 1))


def metric_of(config: TrainConfig) -> Metric:
    """The metric of the objective in ``config``."""
    head = config.model.head
    match config.objective:
        case objectives.MaskedLMConfig():
            return Accuracy("masked token", config.model.vocab_size, "token")
        case objectives.ClassificationConfig():
            return Accuracy("document", head.num_labels, "class")  # type: ignore[union-attr]
        case objectives.TokenClassificationConfig():
            return Accuracy("labeled token", head.num_labels, "class")  # type: ignore[union-attr]
        case objectives.RegressionConfig():
            return MSE()
        case objectives.QuestionAnsweringConfig():
            return SpanExactMatch()
        case objectives.ContrastiveConfig():
            return RetrievalAccuracy()
    return Accuracy("target token", config.model.vocab_size, "token")


def best_span(scores_T2: Tensor) -> tuple[int, int]:
    """The first and last token whose scores have the largest sum, the last not before the first."""
    sums_TT = scores_T2[:, None, 0] + scores_T2[None, :, 1]
    ordered = torch.ones_like(sums_TT, dtype=torch.bool).triu()
    index = int(sums_TT.masked_fill(~ordered, -torch.inf).argmax())
    return index // len(scores_T2), index % len(scores_T2)


def _targets(batch: Batch) -> tuple[Tensor, Tensor]:
    """The targets that count, on the host, and where they belong: flat positions, or numbers of documents."""
    if batch.labels is not None:
        assert batch.label_indices is not None
        return batch.labels.flatten().cpu()[batch.label_indices.cpu()], batch.label_indices.cpu()
    assert batch.target_indices is not None
    assert batch.targets is not None
    return batch.targets.cpu()[batch.target_indices.cpu()], batch.target_indices.cpu()


def _numbers(batch: Batch) -> Tensor:
    """``[C, k]``, in float64."""
    assert batch.targets is not None
    return batch.targets.double().cpu().reshape(len(batch.targets), -1)
