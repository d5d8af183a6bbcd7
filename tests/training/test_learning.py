"""Each objective learns: the model is better than the guess beside it, and micro-batches add up to one batch."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.small_jobs import JOBS, job
from pellucid.batch import Batch
from pellucid.training.config import AdamWConfig, TrainConfig
from pellucid.training.optim import make_optimizers
from pellucid.training.results import Validation
from pellucid.training.run_folder import RunFolder
from pellucid.training.setup import RunComponents, prepare
from pellucid.training.step import StepContext, lr_multiplier, train_step

CONTEXT = StepContext(1, list, None)


def parts_of(words: dict[str, Any], folder: Path, **changes: Any) -> tuple[TrainConfig, RunComponents]:
    config = TrainConfig.from_mapping(words | changes)
    return config, prepare(config, RunFolder(folder), None, pytest.fail)


def learnt(
    words: dict[str, Any], folder: Path, steps: int, **changes: Any
) -> tuple[Validation, Validation, RunComponents]:
    """What is found before the first step and after the last."""
    config, parts = parts_of(words, folder, **changes)
    assert parts.evaluator is not None
    before = parts.evaluator.evaluate(parts.model, final=False)
    assert parts.evaluator.evaluate(parts.model, final=False) == before, "the same rows, and the same dice"
    parts.model.train()
    for step in range(steps):
        parts.optimizers.set_learning_rate(lr_multiplier(config, step, 0.0))
        train_step(
            parts.model,
            [next(parts.loader)],
            parts.optimizers,
            max_grad_norm=1.0,
            context=CONTEXT,
            load_balancing=config.load_balancing,
        )
    return before, parts.evaluator.evaluate(parts.model, final=True), parts


STEPS = {"span_corruption": 80, "seq2seq": 80, "prompted": 60}
"""Writing takes longer to learn than choosing."""


@pytest.mark.parametrize("name", JOBS)
def test_an_objective_is_learnt_better_than_its_guess(name: str, tmp_path: Path) -> None:
    words = job(name, tmp_path / "data")
    steps = STEPS.get(name, 40)
    before, after, _ = learnt(words, tmp_path, steps, max_steps=steps)
    loss = after.metrics[0]
    assert loss.value == after.loss < 0.8 * loss.baseline
    assert loss.value < before.loss
    for figure in after.metrics[1:2]:
        assert figure.value > figure.baseline
    assert after.bytes == 0
    assert after.measure == after.loss


@pytest.mark.parametrize("name", [name for name in JOBS if name != "contrastive"])
def test_micro_batches_add_up_to_one_batch(name: str, tmp_path: Path) -> None:
    """B73, for labels and for documents: unevenly filled micro-batches give the gradient of all rows at once.

    Not for pairs: a text is told from those of its own micro-batch, so other micro-batches are other questions.
    """
    _, parts = parts_of(job(name, tmp_path / "data"), tmp_path, batch_size=6, label_smoothing_factor=0.0)
    model = parts.model.double()
    rows = parts.loader.batch(0)
    optimizers = make_optimizers(model, AdamWConfig(learning_rate=0.0))
    results, gradients = [], []
    for cuts in ((0, 6), (0, 1, 4, 6)):
        some = [piece(rows, start, stop) for start, stop in pairwise(cuts)]
        results.append(train_step(model, some, optimizers, max_grad_norm=None, context=CONTEXT))
        gradients.append([p.grad.clone() for p in optimizers.parameters])
    assert results[0].num_targets == results[1].num_targets > 3
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-10)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-10)


def piece(batch: Batch, start: int, stop: int) -> Batch:
    """Some rows of a batch, with what belongs to them."""
    before = sum(map(len, batch.document_lengths[:start]))
    documents = sum(map(len, batch.document_lengths[start:stop]))
    given = {name: getattr(batch, name) for name in ("positions", "segments", "labels", "groups", "types")}
    fields = {name: None if field is None else field[start:stop].clone() for name, field in given.items()}
    return replace(
        batch,
        tokens=batch.tokens[start:stop].clone(),
        source=None if batch.source is None else piece(batch.source, start, stop),
        layout=None,
        targets=None if batch.targets is None else batch.targets[before : before + documents],
        **fields,
    )
