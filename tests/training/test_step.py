"""One step over sums and counts; nothing broken ever reaches the weights."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pellucid.batch import IGNORED, Batch
from pellucid.data.objectives import causal
from pellucid.errors import ShapeError, TrainingError
from pellucid.models.build import build
from pellucid.models.config import ModelConfig
from pellucid.models.model import Decoder
from pellucid.nn.losses import Loss
from pellucid.training.config import AdamWConfig, MuonConfig
from pellucid.training.optim import make_optimizers
from pellucid.training.step import NotFiniteError, OptimizerSet, StepContext, train_step

CONTEXT = StepContext(12, lambda: ["a.py", "b.py"], Path("runs/x/checkpoints/step-00000010"))
ROWS = [[5, 8, 2, 9, 1, 4], [7], [3, 3, 4], [6, 1], [2]]


def tiny(dtype: torch.dtype = torch.float64) -> Decoder:
    words: dict[str, Any] = {
        "vocab_size": 20,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "attention": {"num_attention_heads": 2},
        "ffn": {"kind": "gated", "intermediate_size": 12},
    }
    return build(ModelConfig.from_mapping(words), dtype=dtype)


def batch(*rows: list[int]) -> Batch:
    return causal(Batch.from_rows(rows))


def frozen(model: nn.Module) -> tuple[dict[str, torch.Tensor], OptimizerSet]:
    """Optimizers of rate 0: gradients can be looked at, weights stay."""
    return {n: p.detach().clone() for n, p in model.named_parameters()}, make_optimizers(
        model, AdamWConfig(learning_rate=0.0)
    )


class Fixed(nn.Module):
    """A model whose loss at each counted position is its label, times a weight of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, batch: Batch, *, want: str) -> Any:
        assert want == "loss"
        labels = batch.labels[batch.labels != IGNORED]
        return SimpleNamespace(loss=Loss((labels * self.weight).sum(), torch.tensor(labels.numel())))


def labelled(*labels: int) -> Batch:
    return Batch.from_rows([[1] * len(labels)]).with_labels(torch.tensor([labels]))


def test_one_token_of_loss_4_and_three_of_loss_1_are_1_75() -> None:
    """B73, B74: not 2.5, not multiplied by the number of micro-batches, and so is the gradient."""
    model = Fixed()
    _, optimizers = frozen(model)
    result = train_step(
        model, [labelled(4), labelled(1, 1, 1, IGNORED)], optimizers, max_grad_norm=None, context=CONTEXT
    )
    assert (result.loss_total, result.num_targets, result.loss) == (7.0, 4, 1.75)
    assert model.weight.grad.item() == result.grad_norm == 1.75


PARTITIONS = [
    [[0, 1, 2, 3, 4]],
    [[0], [1], [2], [3], [4]],
    [[4, 1], [0, 2, 3]],
    [[0, 1, 2], [3], [4]],
]


@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
def test_gradients_are_those_of_one_big_batch(partition: list[list[int]]) -> None:
    """B73: for every partition, with micro-batches that count nothing among them."""
    model = tiny()
    _, optimizers = frozen(model)
    whole = model(batch(*ROWS), want="loss").loss
    whole.mean().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    parts = [batch(*(ROWS[row] for row in rows)) for rows in partition]
    result = train_step(model, parts, optimizers, max_grad_norm=None, context=CONTEXT)
    assert result.num_targets == whole.count == 8
    assert result.loss == pytest.approx(whole.mean().item(), rel=1e-12)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("config", [AdamWConfig(), MuonConfig()], ids=["adamw", "muon"])
def test_nothing_to_learn_from_changes_nothing(config: AdamWConfig | MuonConfig) -> None:
    """B79: no NaN, a count of 0, weights and optimizer as they were, decay included."""
    model = tiny(torch.float32)
    optimizers = make_optimizers(model, config)
    train_step(model, [batch(*ROWS)], optimizers, max_grad_norm=1.0, context=CONTEXT)
    before = [p.detach().clone() for p in model.parameters()]
    memory = {name: t.clone() for name, t in optimizers.state_tensors().items()}
    result = train_step(model, [batch([7], [2]), batch([3])], optimizers, max_grad_norm=1.0, context=CONTEXT)
    assert (result.loss_total, result.num_targets, result.loss, result.grad_norm) == (0.0, 0, 0.0, 0.0)
    assert all(map(torch.equal, before, model.parameters()))
    assert all(torch.equal(t, memory[name]) for name, t in optimizers.state_tensors().items())


def test_clipping_scales_the_whole_gradient_and_reports_the_norm_before() -> None:
    model = tiny()
    _, optimizers = frozen(model)
    free = train_step(model, [batch(*ROWS)], optimizers, max_grad_norm=None, context=CONTEXT)
    gradients = [p.grad.clone() for p in model.parameters()]
    assert free.grad_norm == pytest.approx(float(torch.cat([g.flatten() for g in gradients]).norm()), rel=1e-12)
    clipped = train_step(model, [batch(*ROWS)], optimizers, max_grad_norm=free.grad_norm / 4, context=CONTEXT)
    assert clipped.grad_norm == pytest.approx(free.grad_norm, rel=1e-12)
    for p, g in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, g / 4, rtol=1e-5, atol=1e-12)
    loose = train_step(model, [batch(*ROWS)], optimizers, max_grad_norm=free.grad_norm * 2, context=CONTEXT)
    assert loose.grad_norm == pytest.approx(free.grad_norm, rel=1e-12)
    for p, g in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-12, atol=1e-14)


def test_the_reported_rate_is_the_used_one() -> None:
    """B116: by what the weights did, not by an attribute: Adam's first step moves each weight by the rate."""
    model = Fixed()
    optimizers = make_optimizers(model, AdamWConfig(learning_rate=0.5, weight_decay=0.0))
    optimizers.set_learning_rate(0.25)
    result = train_step(model, [labelled(4)], optimizers, max_grad_norm=None, context=CONTEXT)
    assert result.learning_rate == 0.125
    assert 1 - model.weight.item() == pytest.approx(0.125, rel=1e-5)


@pytest.mark.parametrize("config", [AdamWConfig(), MuonConfig()], ids=["adamw", "muon"])
@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_numbers_that_are_not_finite_stop_before_the_weights(config: AdamWConfig | MuonConfig, broken: str) -> None:
    """The step, the documents and the last good checkpoint are named; weights and optimizer are untouched."""
    model = tiny(torch.float32)
    optimizers = make_optimizers(model, config)
    train_step(model, [batch(*ROWS)], optimizers, max_grad_norm=1.0, context=CONTEXT)
    memory = {name: t.clone() for name, t in optimizers.state_tensors().items()}
    with torch.no_grad():
        if broken == "loss":
            model.norm.weight[0] = float("nan")
        else:
            model.layers[0].attention.q_proj.weight.register_hook(lambda g: g * float("inf"))
    before = [p.detach().clone() for p in model.parameters()]
    what = "the loss is nan" if broken == "loss" else "the gradient's norm is (nan|inf)"
    with pytest.raises(NotFiniteError, match=rf"step 12: {what}; .* a\.py, b\.py\. .*step-00000010") as caught:
        train_step(model, [batch(*ROWS)], optimizers, max_grad_norm=1.0, context=CONTEXT)
    assert isinstance(caught.value, TrainingError)
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(before, model.parameters(), strict=True))
    assert all(torch.equal(t, memory[name]) for name, t in optimizers.state_tensors().items())
    assert all(p.grad is None for p in model.parameters())


def test_labels_the_host_cannot_see_are_refused() -> None:
    model = tiny()
    with pytest.raises(ShapeError, match="needs labels made on the host"):
        train_step(
            model, [Batch.from_rows(ROWS)], make_optimizers(model, AdamWConfig()), max_grad_norm=1.0, context=CONTEXT
        )


def test_bfloat16_learns_and_keeps_float32_weights() -> None:
    model = tiny(torch.float32).train()
    optimizers = make_optimizers(model, AdamWConfig(learning_rate=0.02))
    losses = [
        train_step(model, [batch(*ROWS)], optimizers, max_grad_norm=1.0, context=CONTEXT, precision="bfloat16").loss
        for _ in range(30)
    ]
    assert losses[-1] < losses[0] / 2
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {t.dtype for t in optimizers.state_tensors().values()} == {torch.float32}


def test_recomputed_activations_give_the_same_gradients() -> None:
    model = tiny().train()
    _, optimizers = frozen(model)
    train_step(model, [batch(*ROWS)], optimizers, max_grad_norm=None, context=CONTEXT)
    expected = [p.grad.clone() for p in model.parameters()]
    model.gradient_checkpointing = True
    train_step(model, [batch(*ROWS)], optimizers, max_grad_norm=None, context=CONTEXT)
    assert all(map(torch.equal, expected, [p.grad for p in model.parameters()]))
