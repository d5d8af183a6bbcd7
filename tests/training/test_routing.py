"""Mixtures of experts in a step: the balance loss over real tokens, choice biases by the whole step, the log."""

from typing import Any

import pytest
import torch
from torch import nn

from pellucid.batch import Batch
from pellucid.data.objectives import SequenceToSequence, causal
from pellucid.models import Model, ModelConfig, build
from pellucid.nn.moe import SigmoidRouter
from pellucid.training.config import AdamWConfig, LoadBalancingConfig
from pellucid.training.optim import make_optimizers
from pellucid.training.step import OptimizerSet, StepContext, routers, train_step

CONTEXT = StepContext(1, list, None)
ROWS = [[5, 8, 2, 9, 1, 4], [7, 3], [3, 3, 4], [6, 1, 1, 2]]


def mixture(router: str = "softmax", **changes: Any) -> Model:
    words: dict[str, Any] = {
        "vocab_size": 20,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "attention": {"num_attention_heads": 2},
        "ffn": {
            "kind": "moe",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "expert": {"kind": "dense", "intermediate_size": 6},
            "router": {"kind": router},
        },
    }
    return build(ModelConfig.from_mapping(words | changes), dtype=torch.float64)


def still(model: nn.Module) -> OptimizerSet:
    return make_optimizers(model, AdamWConfig(learning_rate=0.0))


def batch(*rows: list[int], side: str = "right") -> Batch:
    return causal(Batch.from_rows(rows, side=side))  # type: ignore[arg-type]


def gradients(model: Model, batches: list[Batch], balance: LoadBalancingConfig | None) -> list[torch.Tensor]:
    optimizers = still(model)
    train_step(model, batches, optimizers, max_grad_norm=None, context=CONTEXT, load_balancing=balance)
    return [p.grad.clone() for p in optimizers.parameters]


def test_the_balance_loss_is_added_once_for_each_layer_and_divided_by_real_tokens() -> None:
    model, whole = mixture(), batch(*ROWS)
    output = model(whole, want="loss")
    assert len(output.routing) == 2
    wanted = output.loss.total / output.loss.count + 0.3 * sum(sums.balance() for sums in output.routing)
    expected = torch.autograd.grad(wanted, list(model.parameters()))
    found = gradients(model, [whole], LoadBalancingConfig(router_aux_loss_coef=0.3))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


def test_padding_changes_nothing() -> None:
    """Statistics and loss are over real tokens only, wherever padding lies and however much of it."""
    model, balance = mixture(), LoadBalancingConfig(router_aux_loss_coef=0.3)
    expected = gradients(model, [batch(*ROWS)], balance)
    wide = causal(Batch.from_rows(ROWS, length=11, side="left"))
    for one, other in zip(gradients(model, [wide], balance), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    results = [
        train_step(model, [some], still(model), max_grad_norm=None, context=CONTEXT, load_balancing=balance).routing
        for some in (batch(*ROWS), wide)
    ]
    assert results[0] is not None
    assert results[0] == pytest.approx(results[1])


def test_equal_micro_batches_give_what_one_big_batch_gives() -> None:
    """f is a micro-batch's own; where those are equal, the sum over tokens is divided once, by the whole step's."""
    model, balance = mixture(), LoadBalancingConfig(router_aux_loss_coef=0.3)
    rows = ROWS[:2]
    one = gradients(model, [batch(*rows, *rows)], balance)
    two = gradients(model, [batch(*rows), batch(*rows)], balance)
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_recomputed_activations_count_nothing_twice() -> None:
    model, balance = (
        mixture("sigmoid").train(),
        LoadBalancingConfig(router_aux_loss_coef=0.3, router_bias_update_rate=0.125),
    )
    found = []
    for recomputed in (False, True):
        model.gradient_checkpointing = recomputed
        for router in routers(model):
            router.expert_bias.zero_()
        result = train_step(
            model, [batch(*ROWS)], still(model), max_grad_norm=None, context=CONTEXT, load_balancing=balance
        )
        grads = [p.grad.clone() for p in model.parameters()]
        found.append((result.routing, grads, [router.expert_bias.clone() for router in routers(model)]))
    (stats, grads, biases), (again, same, moved) = found
    assert stats == again
    assert all(map(torch.equal, grads, same))
    assert all(map(torch.equal, biases, moved))


def test_expert_biases_move_by_the_loads_of_all_micro_batches() -> None:
    """One move a step: towards what the step as a whole used too little, not what its last micro-batch did."""
    model = mixture("sigmoid")
    parts = [batch(row) for row in ROWS]
    loads = [torch.zeros(4, dtype=torch.int64) for _ in range(2)]
    for some in parts:
        for load, sums in zip(loads, model(some, want="loss").routing, strict=True):
            load += sums.tokens
    balance = LoadBalancingConfig(router_aux_loss_coef=0.0, router_bias_update_rate=0.125)
    train_step(model, parts, still(model), max_grad_norm=None, context=CONTEXT, load_balancing=balance)
    for router, load in zip(routers(model), loads, strict=True):
        assert isinstance(router, SigmoidRouter)
        assert torch.equal(router.expert_bias, 0.125 * (load.double().mean() - load).sign())
        assert router.expert_bias.abs().sum() > 0
    before = [router.expert_bias.clone() for router in routers(model)]
    train_step(model, parts, still(model), max_grad_norm=None, context=CONTEXT)
    assert all(torch.equal(b, r.expert_bias) for b, r in zip(before, routers(model), strict=True))


def test_layers_that_share_weights_move_their_bias_once() -> None:
    model = mixture("sigmoid", layers=["causal()", {"rule": "causal()", "same_as": 0}], num_hidden_layers=2)
    first, second = routers(model)
    assert first is second
    loads = sum(sums.tokens for sums in model(batch(*ROWS), want="loss").routing)
    balance = LoadBalancingConfig(router_aux_loss_coef=0.0, router_bias_update_rate=0.125)
    train_step(model, [batch(*ROWS)], still(model), max_grad_norm=None, context=CONTEXT, load_balancing=balance)
    assert torch.equal(first.expert_bias, 0.125 * (loads.double().mean() - loads).sign())


def test_an_encoder_is_divided_by_the_tokens_of_its_sources() -> None:
    model = mixture(family="encoder_decoder")
    pairs = SequenceToSequence(0)(Batch.from_pairs([[5, 8, 9, 3, 3], [2]], [[0, 7, 2], [0, 4, 4, 2]]))
    output = model(pairs, want="loss")
    assert [int(sums.count) for sums in output.routing] == [6, 6, 7, 7]
    wanted = output.loss.total / output.loss.count + 0.3 * sum(sums.balance() for sums in output.routing)
    expected = torch.autograd.grad(wanted, list(model.parameters()))
    for one, other in zip(
        gradients(model, [pairs], LoadBalancingConfig(router_aux_loss_coef=0.3)), expected, strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


def test_what_is_logged() -> None:
    model = mixture(ffn=mixture().config.ffn.model_copy(update={"expert_capacity": 3}))
    result = train_step(model, [batch(*ROWS)], still(model), max_grad_norm=None, context=CONTEXT)
    sums = model(batch(*ROWS), want="loss").routing
    assert result.routing is not None
    assert result.routing.most == pytest.approx(max(float((s.tokens / s.count).max()) for s in sums))
    assert result.routing.mean == 0.5
    assert result.routing.dropped == pytest.approx(1 - sum(int(s.kept.sum()) for s in sums) / (2 * 15 * 2))
    assert result.routing.dropped > 0
    assert result.routing.balance_loss == pytest.approx(float(sum(s.balance() for s in sums).detach()) / 2)


def test_a_balance_loss_evens_a_router_out() -> None:
    """Of a router that prefers one expert; without the loss it stays as uneven."""
    spread = {}
    for router_aux_loss_coef in (0.0, 1.0):
        model = mixture(num_hidden_layers=1).float().train()
        with torch.no_grad():
            (router,) = routers(model)
            router.weight[1:] = router.weight[0] + 0.01 * router.weight[1:]
        optimizers = make_optimizers(model, AdamWConfig(learning_rate=0.02))
        for _ in range(25):
            result = train_step(
                model,
                [batch(*ROWS)],
                optimizers,
                max_grad_norm=1.0,
                context=CONTEXT,
                load_balancing=LoadBalancingConfig(router_aux_loss_coef=router_aux_loss_coef),
            )
        assert result.routing is not None
        spread[router_aux_loss_coef] = result.routing.balance_loss
    assert spread[1.0] < 2.1  # even: the two experts of a token
    assert spread[1.0] < spread[0.0]
