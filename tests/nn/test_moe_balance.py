"""The balance loss and its sums: figures written out, padding, micro-batches, gradients."""

import pytest
import torch

from pellucid.nn.moe import DenseExperts, LoadBalanceStats, MoE, SigmoidRouter, SoftmaxRouter
from pellucid.visibility import Coordinates


def moe(experts=2, top_k=1, size=2, router=None):
    router = router or SoftmaxRouter(size, num_experts=experts, num_experts_per_tok=top_k, norm_topk_prob=True)
    return MoE(router=router, experts=DenseExperts(size, 3, num_experts=experts, activation="relu")).double()


def sums(part, x, places=None):
    router_stats = []
    part(x, places, router_stats)
    return router_stats[0]


def test_b134_two_experts_one_hot():
    """One real token each: 2 · Σ f P = 1. Two pads sent to expert 0 would make it 2 · (¾² + ¼²) = 1.25."""
    part = moe()
    with torch.no_grad():
        part.router.weight.copy_(100 * torch.eye(2))
    x = torch.eye(2, dtype=torch.float64)[[0, 1, 0, 0]][None]
    padded = Coordinates(torch.tensor([[0, 1, 0, 0]]), torch.tensor([[1, 1, 0, 0]]))
    assert sums(part, x[:, :2]).balance().item() == pytest.approx(1.0)
    assert sums(part, x, padded).balance().item() == pytest.approx(1.0)
    assert sums(part, x).balance().item() == pytest.approx(1.25)
    assert sums(part, x, padded).tokens.tolist() == [1, 1]
    assert sums(part, x, padded).count.item() == 2


def test_everything_to_one_expert_costs_e_and_an_even_spread_j():
    part = moe(experts=4, size=4)
    with torch.no_grad():
        part.router.weight.zero_()[0] = 100.0
    x = torch.ones(1, 8, 4, dtype=torch.float64)
    assert sums(part, x).balance().item() == pytest.approx(4.0)
    spread = moe(experts=4, top_k=2, size=4)
    with torch.no_grad():
        spread.router.weight.copy_(torch.eye(4) + torch.eye(4).roll(1, 0))
    assert sums(spread, torch.eye(4, dtype=torch.float64)[None]).balance().item() == pytest.approx(2.0)


def test_sigmoid_scores_are_divided_by_their_sum():
    part = moe(router=SigmoidRouter(2, num_experts=2, num_experts_per_tok=1, norm_topk_prob=False))
    with torch.no_grad():
        part.router.weight.copy_(torch.tensor([[0.0, 0.0], [-(3.0**0.5), 0.0]]))
    x = torch.zeros(1, 1, 2, dtype=torch.float64)
    x[..., 0] = torch.log(torch.tensor(3.0)) / 3**0.5  # scores of 1/2 and 1/4
    got = sums(part, x)
    torch.testing.assert_close(got.probability, torch.tensor([2 / 3, 1 / 3], dtype=torch.float64), atol=1e-6, rtol=0)
    assert got.balance().item() == pytest.approx(2 * 2 / 3, abs=1e-6)


def test_micro_batches_add_up():
    """Sums of uneven parts are those of the whole; a mean of their means is not."""
    part, x = moe(experts=4, top_k=2, size=5), torch.randn(1, 12, 5, dtype=torch.float64)
    whole, first, rest = sums(part, x), sums(part, x[:, :2]), sums(part, x[:, 2:])
    both = first.plus(rest)
    for got, expected in zip(both, whole, strict=True):
        torch.testing.assert_close(got, expected)
    torch.testing.assert_close(both.balance(), whole.balance())
    assert ((first.balance() + rest.balance()) / 2 - whole.balance()).abs() > 1e-3


def test_with_the_load_of_the_step_losses_and_gradients_add_up():
    part, x = moe(experts=4, top_k=2, size=5), torch.randn(1, 12, 5, dtype=torch.float64)
    weight = part.router.weight
    whole = sums(part, x)
    (expected,) = torch.autograd.grad(whole.balance(), weight)
    first, rest = sums(part, x[:, :2]), sums(part, x[:, 2:])
    load = LoadBalanceStats(*(value.detach() for value in first.plus(rest)))
    added = first.loss(load).plus(rest.loss(load))
    torch.testing.assert_close(added.mean(), whole.balance())
    gradient = sum(torch.autograd.grad(part_.loss(load).total / added.count, weight)[0] for part_ in (first, rest))
    torch.testing.assert_close(gradient, expected)


def test_the_gradient_evens_the_load_out():
    torch.manual_seed(4)
    part, x = moe(experts=4, size=6), torch.randn(1, 64, 6, dtype=torch.float64) + 1
    optimizer = torch.optim.SGD(part.router.parameters(), lr=0.2)
    before = sums(part, x)
    for _ in range(200):
        optimizer.zero_grad()
        sums(part, x).balance().backward()
        optimizer.step()
    after = sums(part, x)
    assert before.tokens.max() > 24, "the start must be uneven"
    assert after.tokens.max() < before.tokens.max()
    assert after.balance() < before.balance()


def test_nothing_routed_costs_nothing():
    nothing = Coordinates(torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 3, dtype=torch.long))
    got = sums(moe(), torch.randn(1, 3, 2, dtype=torch.float64), nothing)
    assert got.balance().item() == 0
    assert got.count.item() == 0


@pytest.mark.parametrize("padded", [False, True])
def test_the_loss_is_mixtrals(padded):
    theirs = pytest.importorskip("transformers.models.mixtral.modeling_mixtral").load_balancing_loss_func
    part, x = moe(experts=4, top_k=2, size=5), torch.randn(2, 6, 5, dtype=torch.float64)
    segments = torch.ones(2, 6, dtype=torch.long)
    if padded:
        segments[1, 3:] = 0
    places = Coordinates(torch.arange(6).expand(2, 6).clone(), segments)
    mask = segments if padded else None
    expected = theirs((part.router.logits(x.flatten(0, 1)),), num_experts=4, top_k=2, attention_mask=mask)
    torch.testing.assert_close(sums(part, x, places).balance().float(), expected.float())
