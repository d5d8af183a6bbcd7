"""Routers: figures written out, ties, groups, scales, and the type they compute in."""

import copy
import math

import pytest
import torch

from pellucid.errors import ShapeError
from pellucid.nn.moe import ExpertGroups, SigmoidRouter, SoftmaxRouter, TopKSoftmaxRouter

LN_4321 = [math.log(4), math.log(3), math.log(2), math.log(1)]


def router(kind, logits, **words):
    """A router that gives ``logits`` to the token [1.0]."""
    part = kind(1, num_experts=len(logits), **words).double()
    with torch.no_grad():
        part.weight.copy_(torch.tensor(logits, dtype=torch.float64)[:, None])
    return part


def routed(part):
    routing = part(torch.ones(1, 1, dtype=torch.float64))
    return routing.experts[0].tolist(), routing.weights[0].tolist()


@pytest.mark.parametrize(
    ("kind", "words", "weights"),
    [
        (SoftmaxRouter, {"norm_topk_prob": False}, [0.4, 0.3]),
        (SoftmaxRouter, {"norm_topk_prob": True}, [4 / 7, 3 / 7]),
        (SoftmaxRouter, {"norm_topk_prob": True, "routed_scaling_factor": 2.5}, [10 / 7, 7.5 / 7]),
        (TopKSoftmaxRouter, {}, [4 / 7, 3 / 7]),
        (TopKSoftmaxRouter, {"routed_scaling_factor": 0.5}, [2 / 7, 1.5 / 7]),
        (SigmoidRouter, {"norm_topk_prob": False}, [4 / 5, 3 / 4]),
        (SigmoidRouter, {"norm_topk_prob": True}, [16 / 31, 15 / 31]),
        (SigmoidRouter, {"norm_topk_prob": True, "routed_scaling_factor": 2.5}, [40 / 31, 37.5 / 31]),
    ],
)
def test_logits_ln_4_3_2_1(kind, words, weights):
    """B137: softmax gives .4 .3 .2 .1; the sigmoid of ln n is n / (n + 1)."""
    chosen, got = routed(router(kind, LN_4321, num_experts_per_tok=2, **words))
    assert chosen == [0, 1]
    assert got == pytest.approx(weights, abs=1e-12)


def test_softmax_gives_four_decimals_of_b137():
    _, plain = routed(router(SoftmaxRouter, LN_4321, num_experts_per_tok=2, norm_topk_prob=False))
    _, whole = routed(router(SoftmaxRouter, LN_4321, num_experts_per_tok=2, norm_topk_prob=True))
    assert [round(w, 4) for w in plain] == [0.4, 0.3]
    assert [round(w, 4) for w in whole] == [0.5714, 0.4286]


def test_a_expert_bias_chooses_and_weighs_nothing():
    part = router(SigmoidRouter, LN_4321, num_experts_per_tok=2, norm_topk_prob=False)
    part.expert_bias[3] = 0.5  # 1/2 + 1/2 beats 4/5
    chosen, weights = routed(part)
    assert chosen == [3, 0]
    assert weights == pytest.approx([1 / 2, 4 / 5])


def test_a_expert_bias_has_no_gradient_and_the_scores_do():
    part = router(SigmoidRouter, LN_4321, num_experts_per_tok=2, norm_topk_prob=False)
    part.expert_bias[3] = 0.5
    part(torch.ones(1, 1, dtype=torch.float64)).weights[0, 0].backward()
    torch.testing.assert_close(part.weight.grad[:, 0], torch.tensor([0, 0, 0, 0.25], dtype=torch.float64))
    assert "expert_bias" in part.state_dict()
    assert "expert_bias" not in dict(part.named_parameters())


def test_rebalancing_helps_experts_below_the_mean_load():
    part = router(SigmoidRouter, LN_4321, num_experts_per_tok=1, norm_topk_prob=False)
    part.update_expert_bias(torch.tensor([6, 2, 2, 2]), rate=0.001)  # a mean of 3
    assert part.expert_bias.tolist() == pytest.approx([-0.001, 0.001, 0.001, 0.001])
    part.update_expert_bias(torch.tensor([3, 3, 3, 3]), rate=0.001)
    assert part.expert_bias.tolist() == pytest.approx([-0.001, 0.001, 0.001, 0.001])


@pytest.mark.parametrize(
    ("score", "keep", "chosen"),
    [
        ("max", 1, [0, 1]),  # the group of the best single expert
        ("top2", 1, [2, 3]),  # the group whose two best are best together
        ("top2", 2, [0, 2]),  # no group left out
    ],
)
def test_groups(score, keep, chosen):
    """Three groups of two: 5 + 0.2, 4 + 3 and 2 + 2; two of them leave out nothing that would have been chosen."""
    scores = [5.0, 0.2, 4.0, 3.0, 2.0, 2.0]
    probabilities = [s / sum(scores) for s in scores]
    groups = ExpertGroups(3, topk_group=keep, score=score)
    part = router(
        SoftmaxRouter, [math.log(p) for p in probabilities], num_experts_per_tok=2, norm_topk_prob=False, groups=groups
    )
    got, weights = routed(part)
    assert got == chosen
    assert weights == pytest.approx([probabilities[e] for e in chosen])


def test_groups_are_chosen_by_the_biased_scores():
    part = router(
        SigmoidRouter,
        LN_4321,
        num_experts_per_tok=1,
        norm_topk_prob=False,
        groups=ExpertGroups(2, topk_group=1, score="top2"),
    )  # 4/5 + 3/4 against 2/3 + 1/2
    assert routed(part)[0] == [0]
    part.expert_bias[3] = 0.5
    assert routed(part) == ([3], pytest.approx([1 / 2]))


@pytest.mark.parametrize("kind", [SoftmaxRouter, TopKSoftmaxRouter, SigmoidRouter])
@pytest.mark.parametrize("experts", [4, 64])
def test_ties_go_to_the_lower_number(kind, experts):
    words = {} if kind is TopKSoftmaxRouter else {"norm_topk_prob": True}
    part = kind(3, num_experts=experts, num_experts_per_tok=3, **words)
    with torch.no_grad():
        part.weight.zero_()
    routing = part(torch.randn(50, 3))
    assert (routing.experts == torch.arange(3)).all()
    assert routing.weights.tolist() == [pytest.approx([1 / 3] * 3)] * 50
    groups = kind(
        3, num_experts=experts, num_experts_per_tok=2, groups=ExpertGroups(2, topk_group=1, score="top2"), **words
    )
    with torch.no_grad():
        groups.weight.zero_()
    assert (groups(torch.randn(5, 3)).experts == torch.arange(2)).all()


@pytest.mark.parametrize("kind", [SoftmaxRouter, TopKSoftmaxRouter, SigmoidRouter])
def test_weights_stay_in_float32_in_a_narrower_model(kind):
    words = {} if kind is TopKSoftmaxRouter else {"norm_topk_prob": True}
    part = kind(8, num_experts=4, num_experts_per_tok=2, bias=True, **words)
    exact, narrow = copy.deepcopy(part), copy.deepcopy(part).to(torch.bfloat16)
    assert {t.dtype for t in narrow.state_dict().values()} == {torch.float32}
    assert all(
        torch.equal(a, b) for a, b in zip(exact.state_dict().values(), narrow.state_dict().values(), strict=True)
    )
    assert {t.dtype for t in copy.deepcopy(part).half().state_dict().values()} == {torch.float32}
    assert {t.dtype for t in copy.deepcopy(part).double().state_dict().values()} == {torch.float64}
    x = torch.randn(20, 8).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = narrow(x)
    assert routing.weights.dtype == torch.float32
    for got, expected in zip(routing, exact(x.float()), strict=True):
        assert torch.equal(got, expected)


def test_a_narrow_router_would_send_a_token_elsewhere():
    """Logits of 1 and 1 + 2⁻¹⁰ are the same in bfloat16, and then the first one wins."""
    part = router(SoftmaxRouter, [1.0, 1 + 2.0**-10], num_experts_per_tok=1, norm_topk_prob=False).to(torch.bfloat16)
    assert part(torch.ones(1, 1).bfloat16()).experts.item() == 1
    assert part.weight.bfloat16().argmax().item() == 0


def test_moving_to_meta_and_back_keeps_types():
    part = SigmoidRouter(4, num_experts=4, num_experts_per_tok=1, norm_topk_prob=True).to("meta").to(torch.bfloat16)
    assert part.weight.is_meta
    assert part.weight.dtype == torch.float32
    assert part.to_empty(device="cpu").expert_bias.dtype == torch.float32


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            {"num_experts": 4, "num_experts_per_tok": 5},
            "cannot go to 5 of 4 experts; choose num_experts_per_tok from 1 to 4",
        ),
        ({"num_experts": 4, "num_experts_per_tok": 0}, "cannot go to 0 of 4 experts"),
        ({"num_experts": 4, "num_experts_per_tok": 1, "groups": (3, 1, "max")}, "4 experts do not make 3 equal groups"),
        (
            {"num_experts": 4, "num_experts_per_tok": 3, "groups": (2, 1, "max")},
            "num_experts_per_tok is 3, but 1 groups of 2 experts hold only 2",
        ),
        (
            {"num_experts": 4, "num_experts_per_tok": 1, "groups": (4, 1, "top2")},
            "adds up two experts, but a group has 1",
        ),
        ({"num_experts": 4, "num_experts_per_tok": 1, "groups": (2, 3, "max")}, "3 of 2 expert groups cannot be kept"),
        ({"num_experts": 4, "num_experts_per_tok": 1, "groups": (2, 1, "sum")}, "score is 'sum'; choose max or top2"),
    ],
)
def test_what_does_not_fit_is_refused(words, message):
    def make(groups=None, **words):
        if groups is not None:
            groups = ExpertGroups(groups[0], topk_group=groups[1], score=groups[2])
        return SoftmaxRouter(4, norm_topk_prob=True, groups=groups, **words)

    with pytest.raises(ShapeError, match=message):
        make(**words)
