"""How right a model is about one batch of held-out data, and what a constant guess would have been.

A judge first learns its guess from training batches: how often each answer comes. Then each held-out batch gives
sums: the guess's own loss, and how often the model and the guess are right.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pellucid.batch import Batch
from pellucid.models.model import Model
from pellucid.nn.pooling import documents_of
from pellucid.training import objectives as words
from pellucid.training.config import TrainConfig

_ROWS = 1024


class Judged(NamedTuple):
    """Sums over the items of one batch."""

    guess_nats: float
    right: float = 0.0
    guess_right: float = 0.0


class Judge(Protocol):
    """``item``: what is counted; ``loss``: its loss in words; ``metric``: what ``right`` is a share of, if anything."""

    item: str
    loss: str
    metric: str | None
    baseline: str

    def learn(self, batches: Iterable[Batch]) -> None: ...

    def judge(self, model: Model, hidden_BTD: Tensor, batch: Batch) -> Judged: ...


class Choices:
    """One of several answers for each labelled token, or for each document: the guess is how often each comes."""

    metric: str | None = "accuracy"

    def __init__(self, item: str, answers: int, of: str) -> None:
        self.item, self.loss = item, f"nats a {item}"
        self.baseline = f"each {of} as often as in the training data, and always the most frequent"
        self._counts = torch.zeros(answers, dtype=torch.float64)

    def learn(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            wanted, _ = _asked(batch)
            self._counts += torch.bincount(wanted, minlength=len(self._counts))

    def judge(self, model: Model, hidden_BTD: Tensor, batch: Batch) -> Judged:
        wanted, where = _asked(batch)
        share = (self._counts + 1) / (self._counts + 1).sum()  # what was never met is possible too
        guess_nats = -share[wanted].log().sum().item()
        guess_right = (wanted == int(self._counts.argmax())).sum().item()
        if batch.labels is None:
            best = model.head(hidden_BTD, batch.coordinates())[where.to(hidden_BTD.device)].argmax(-1)
        else:
            asked = hidden_BTD.flatten(0, 1)[where.to(hidden_BTD.device)]
            best = torch.cat([model.head(rows[None])[0].argmax(-1) for rows in asked.split(_ROWS)])
        return Judged(guess_nats, (best.cpu() == wanted).sum().item(), guess_right)


class Numbers:
    """Numbers of each document: the guess is their mean."""

    item, loss = "document", "mean squared error"
    metric: str | None = None
    baseline: str = "always the mean of the training data"

    def __init__(self) -> None:
        self._sum: Tensor | float = 0.0
        self._count = 0

    def learn(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            wanted = _numbers(batch)
            self._sum, self._count = self._sum + wanted.sum(0), self._count + len(wanted)

    def judge(self, model: Model, hidden_BTD: Tensor, batch: Batch) -> Judged:
        error = _numbers(batch) - self._sum / max(self._count, 1)
        return Judged(error.square().mean(1).sum().item())


class Answers:
    """First and last token of an answer: the guess is the most frequent place."""

    item, loss = "answer", "nats an end"
    metric: str | None = "exact match"
    baseline: str = "every token alike, and always the most frequent place of the training data"

    def __init__(self) -> None:
        self._met: dict[tuple[int, int], int] = {}

    def learn(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            assert batch.targets is not None
            assert batch.counted_documents is not None
            for first, last in batch.targets.cpu()[batch.counted_documents.cpu()].tolist():
                self._met[first, last] = self._met.get((first, last), 0) + 1

    def judge(self, model: Model, hidden_BTD: Tensor, batch: Batch) -> Judged:
        assert batch.targets is not None
        assert batch.counted_documents is not None
        documents = documents_of(batch.coordinates())
        scores_P2 = model.head(hidden_BTD).flatten(0, 1)[documents.slots].float().cpu()
        sizes = torch.bincount(documents.owners, minlength=len(documents.first)).tolist()
        usual = max(self._met, key=lambda place: (self._met[place], place), default=None)
        nats = right = guess_right = 0.0
        pieces, targets = scores_P2.split(sizes), batch.targets.cpu().tolist()
        for number in batch.counted_documents.tolist():
            wanted = tuple(targets[number])
            nats += math.log(sizes[number])
            right += best_span(pieces[number]) == wanted
            guess_right += usual == wanted
        return Judged(nats, right, guess_right)


class Pairs:
    """Which document belongs to a document: the guess is any other of the batch."""

    item, loss = "document", "nats a document"
    metric: str | None = "retrieval accuracy"
    baseline: str = "any other document of the batch"

    def learn(self, batches: Iterable[Batch]) -> None:
        """Nothing: the guess depends on the batch alone."""

    def judge(self, model: Model, hidden_BTD: Tensor, batch: Batch) -> Judged:
        vectors = model.head(hidden_BTD, batch.coordinates()).float()
        count = len(vectors)
        itself = torch.eye(count, dtype=torch.bool, device=vectors.device)
        nearest = (vectors @ vectors.T).masked_fill(itself, -torch.inf).argmax(-1).cpu()
        right = (nearest == torch.arange(count) ^ 1).sum().item()
        return Judged(count * math.log(count - 1), right, count / (count - 1))


def judge_of(config: TrainConfig) -> Judge:
    """Who judges what ``config`` learns."""
    head = config.model.head
    match config.objective:
        case words.MaskedLM():
            return Choices("masked token", config.model.vocab_size, "token")
        case words.Classification():
            return Choices("document", head.num_labels, "class")  # type: ignore[union-attr]
        case words.TokenLabelling():
            return Choices("labelled token", head.num_labels, "class")  # type: ignore[union-attr]
        case words.Regression():
            return Numbers()
        case words.Span():
            return Answers()
        case words.Contrastive():
            return Pairs()
    return Choices("target token", config.model.vocab_size, "token")


def best_span(scores_T2: Tensor) -> tuple[int, int]:
    """The first and last token whose scores add up to most, the last not before the first."""
    sums_TT = scores_T2[:, None, 0] + scores_T2[None, :, 1]
    later = torch.ones_like(sums_TT, dtype=torch.bool).triu()
    place = int(sums_TT.masked_fill(~later, -torch.inf).argmax())
    return place // len(scores_T2), place % len(scores_T2)


def _asked(batch: Batch) -> tuple[Tensor, Tensor]:
    """The answers that count, on the host, and where they belong: flat slots, or numbers of documents."""
    where = batch.counted if batch.labels is not None else batch.counted_documents
    answers = batch.labels if batch.labels is not None else batch.targets
    assert where is not None
    assert answers is not None
    return answers.flatten().cpu()[where.cpu()], where.cpu()


def _numbers(batch: Batch) -> Tensor:
    """``[C, k]``, in float64."""
    assert batch.targets is not None
    return batch.targets.double().cpu().reshape(len(batch.targets), -1)
