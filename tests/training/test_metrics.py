"""What stands beside a loss: counted by hand on models whose answers are known."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from pellucid.batch import IGNORED, Batch
from pellucid.data.objectives import PrefixLM, SequenceToSequence
from pellucid.models import ModelConfig, build
from pellucid.training.config import TrainConfig
from pellucid.training.evaluation import exact_matches, generation_tasks
from pellucid.training.metrics import MSE, Accuracy, RetrievalAccuracy, SpanExactMatch, best_span, metric_of
from pellucid.training.results import MetricValue, Validation, parse_validation


class Says(nn.Module):
    """A model whose head says what it was given."""

    def __init__(self, answers: torch.Tensor) -> None:
        super().__init__()
        self.answers = answers

    def head(self, hidden: torch.Tensor, places: Any = None) -> torch.Tensor:
        return self.answers if places is not None or hidden.shape[-1] != self.answers.shape[-1] else hidden


def classified(*targets: int) -> Batch:
    return replace(Batch.from_rows([[5, 6]] * len(targets)), targets=torch.tensor(targets))


def test_classes_are_guessed_by_how_often_they_come() -> None:
    metric = Accuracy("document", 3, "class")
    metric.fit_baseline([classified(1, 1, 0), classified(1, IGNORED)])
    logits = torch.eye(3)[torch.tensor([1, 2, 0, 0])]
    found = metric.sums(Says(logits), torch.zeros(4, 2, 5), classified(1, 2, 1, IGNORED))  # type: ignore[arg-type]
    assert (found.correct, found.baseline_correct) == (2, 2)
    assert found.baseline_loss == pytest.approx(-2 * math.log(4 / 7) - math.log(1 / 7))


def test_tokens_are_judged_where_they_have_a_label() -> None:
    metric = Accuracy("labeled token", 3, "class")
    batch = Batch.from_rows([[5, 6, 7], [8]]).with_labels(torch.tensor([[0, IGNORED, 2], [2, IGNORED, IGNORED]]))
    metric.fit_baseline([batch])
    hidden = torch.eye(3)[torch.tensor([[0, 0, 1], [2, 0, 0]])]
    found = metric.sums(Says(torch.zeros(0, 3)), hidden, batch)  # type: ignore[arg-type]
    assert (found.correct, found.baseline_correct) == (2, 2)


def test_numbers_are_guessed_by_their_mean() -> None:
    def scored(*values: float) -> Batch:
        return replace(Batch.from_rows([[5]] * len(values)), targets=torch.tensor(values))

    metric = MSE()
    metric.fit_baseline([scored(1.0, 2.0), scored(6.0)])
    found = metric.sums(Says(torch.zeros(1)), torch.zeros(2, 1, 1), scored(3.0, 5.0))  # type: ignore[arg-type]
    assert found.baseline_loss == 4.0


def test_answers_are_the_best_span_and_guessed_by_the_usual_place() -> None:
    batch = replace(Batch.packed([[5, 6, 7], [8, 9]]), targets=torch.tensor([[1, 2], [0, 0]]))
    metric = SpanExactMatch()
    metric.fit_baseline([batch, replace(batch, targets=torch.tensor([[1, 2], [IGNORED, IGNORED]]))])
    scores = torch.tensor([[[0.0, 9], [5, 0], [0, 6], [0, 1], [0, 3]]])
    model = Says(torch.zeros(0))
    model.head = lambda hidden, places=None: scores  # type: ignore[method-assign]
    found = metric.sums(model, torch.zeros(1, 5, 1), batch)  # type: ignore[arg-type]
    assert (found.correct, found.baseline_correct) == (1, 1)
    assert found.baseline_loss == pytest.approx(math.log(3) + math.log(2))


def test_a_span_ends_where_it_begins_or_later() -> None:
    assert best_span(torch.tensor([[0.0, 9.0], [5.0, 0.0], [0.0, 6.0]])) == (1, 2)
    assert best_span(torch.tensor([[1.0, 9.0], [0.0, 0.0]])) == (0, 0)


def test_pairs_are_found_among_the_others() -> None:
    vectors = torch.tensor([[1.0, 0], [0.9, 0.1], [0, 1.0], [1.0, 0.05]])
    batch = Batch.from_rows([[5]] * 4)
    found = RetrievalAccuracy().sums(Says(vectors), torch.zeros(4, 1, 5), batch)  # type: ignore[arg-type]
    assert found.baseline_loss == pytest.approx(4 * math.log(3))
    assert found.baseline_correct == pytest.approx(4 / 3)
    assert found.correct == sum(
        int((vectors[i] @ vectors.T).scatter(0, torch.tensor(i), -9.0).argmax()) == i ^ 1 for i in range(4)
    )


def test_what_is_asked_of_a_document_is_its_prompt_and_what_must_follow() -> None:
    pairs = SequenceToSequence(1)(Batch.from_pairs([[5, 6], [7]], [[1, 8, 2], [1, 2]], packed=True))
    assert list(generation_tasks(pairs)) == [([5, 6], [1], [8, 2]), ([7], [1], [2])]
    batch = replace(Batch.from_rows([[1, 5, 6, 8, 2]]), groups=torch.tensor([[1, 1, 1, 0, 0]]))
    assert list(generation_tasks(PrefixLM()(batch))) == [(None, [1, 5, 6], [8, 2])]


def test_greedy_writing_is_compared_with_the_whole_target() -> None:
    model = build(
        ModelConfig(
            family="encoder_decoder",
            vocab_size=12,
            hidden_size=8,
            num_hidden_layers=1,
            attention={"num_attention_heads": 2},
            ffn={"kind": "dense", "intermediate_size": 8},
            tie_word_embeddings=False,
            head_bias=True,
        )
    )
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.copy_(torch.tensor([0.0] * 7 + [9.0] + [0.0] * 4))
    tasks = [([5], [1], [7, 7]), ([5, 6], [1], [7, 2]), ([6], [1], [7])]
    model.train()
    assert exact_matches(model, tasks, 2) == [True, False, True]
    assert model.training


def test_every_objective_has_a_metric_of_its_own() -> None:
    config = TrainConfig.from_mapping(
        {
            "model": {
                "vocab_size": 300,
                "hidden_size": 8,
                "num_hidden_layers": 1,
                "attention": {"num_attention_heads": 2},
                "ffn": {"kind": "dense", "intermediate_size": 8},
                "family": "encoder",
            },
            "max_steps": 1,
        }
    )
    assert (metric_of(config).item, metric_of(config).loss_name) == ("masked token", "nats a masked token")


FOUND = Validation(
    6.5, 4, 0, 3, "document", (MetricValue("nats a document", 1.625, 2.0), MetricValue("accuracy", 0.5)), "guess"
)


def test_what_is_logged_reads_back_equal_and_nothing_else_does() -> None:
    line: dict[str, Any] = {"nats": 6.5, "tokens": 4, "bytes": 0, "documents": 3, **FOUND.to_dict()}
    assert parse_validation(line) == FOUND
    odd: list[dict[str, Any]] = [
        {"nats": 6}, {"tokens": 0}, {"documents": True}, {"item": None}, {"metrics": []}, {"metrics": {"a": 1}},
        {"metrics": {"a": {"value": "inf", "baseline": None}}}, {"baseline": 3}, {"bytes": -1},
    ]  # fmt: skip
    assert [parse_validation(line | change) for change in odd] == [None] * len(odd)
    assert parse_validation({"nats": 6.5, "tokens": 4, "bytes": 9, "documents": 3}) == Validation(6.5, 4, 9, 3)
    assert str(FOUND) == "nats a document 1.6250 (baseline 2.0000), accuracy 0.5000"
    assert math.isnan(FOUND.bits_per_byte)
