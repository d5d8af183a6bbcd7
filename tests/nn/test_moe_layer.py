"""Mixtures of experts: the fast form against the readable one, what may matter to a token, capacity, gradients."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.moe_reference import reference
from pellucid.errors import ShapeError
from pellucid.nn.ffn import GatedFFN
from pellucid.nn.moe import (
    ClampedGatedExperts,
    DenseExperts,
    ExpertGroups,
    GatedExperts,
    GatedSharedExpert,
    MoE,
    SharedMoE,
    SigmoidRouter,
    SoftmaxRouter,
    TopKSoftmaxRouter,
)
from pellucid.visibility import Coordinates

WIDE = torch.float64
D, F, E = 6, 10, 4
RAGGED = Coordinates(
    torch.tensor([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2], [0, 1, 0, 1, 0]]),
    torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 2, 2, 0]]),
)  # whole; padded on the left; packed, and padded on the right


def _shared(gated):
    ffn = GatedFFN(D, F, activation="silu", bias=False, dropout=0.0)
    return GatedSharedExpert(D, ffn) if gated else ffn


def moe(kind="mixtral", capacity=None):
    torch.manual_seed(3)
    match kind:
        case "mixtral":
            router = SoftmaxRouter(D, num_experts=E, num_experts_per_tok=2, norm_topk_prob=True)
            part = MoE(router=router, experts=GatedExperts(D, F, num_experts=E), expert_capacity=capacity)
        case "switch":
            router = SoftmaxRouter(D, num_experts=E, num_experts_per_tok=1, norm_topk_prob=False)
            experts = DenseExperts(D, F, num_experts=E, activation="relu", bias=True)
            part = MoE(router=router, experts=experts, expert_capacity=capacity)
        case "gpt-oss":
            router = TopKSoftmaxRouter(D, num_experts=E, num_experts_per_tok=3, bias=True)
            part = MoE(
                router=router, experts=ClampedGatedExperts(D, F, num_experts=E, limit=0.3), expert_capacity=capacity
            )
        case "deepseek":
            groups = ExpertGroups(2, topk_group=1, score="top2")
            router = SigmoidRouter(
                D, num_experts=E, num_experts_per_tok=2, norm_topk_prob=True, routed_scaling_factor=2.5, groups=groups
            )
            router.expert_bias.copy_(torch.tensor([0.1, -0.2, 0.0, 0.05]))
            experts = GatedExperts(D, F, num_experts=E)
            part = SharedMoE(router=router, experts=experts, shared=_shared(False), expert_capacity=capacity)
        case "qwen2":
            router = SoftmaxRouter(D, num_experts=E, num_experts_per_tok=2, norm_topk_prob=False)
            experts = GatedExperts(D, F, num_experts=E)
            part = SharedMoE(router=router, experts=experts, shared=_shared(True), expert_capacity=capacity)
        case "llama4":
            router = SigmoidRouter(D, num_experts=E, num_experts_per_tok=1, norm_topk_prob=False)
            experts = GatedExperts(D, F, num_experts=E, apply_weight_on_input=True)
            part = SharedMoE(router=router, experts=experts, shared=_shared(False), expert_capacity=capacity)
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return part.double()


KINDS = ["mixtral", "switch", "gpt-oss", "deepseek", "qwen2", "llama4"]


def tokens(rows=3, slots=5):
    return torch.randn(rows, slots, D, dtype=WIDE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capacity", [None, 0, 1, 3])
@pytest.mark.parametrize("places", [None, RAGGED], ids=["all", "ragged"])
def test_the_fast_form_is_the_readable_one(kind, capacity, places):
    part, x = moe(kind, capacity), tokens()
    torch.testing.assert_close(part(x, places), reference(part, x, places), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capacity", [None, 2])
def test_gradients_are_those_of_the_readable_form(kind, capacity):
    part, x, direction = moe(kind, capacity), tokens(), tokens()
    slow, x_slow = copy.deepcopy(part), x.clone().requires_grad_()
    x.requires_grad_()
    (part(x, RAGGED) * direction).sum().backward()
    (reference(slow, x_slow, RAGGED) * direction).sum().backward()
    torch.testing.assert_close(x.grad, x_slow.grad, rtol=0, atol=1e-12)
    for (name, p), q in zip(part.named_parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")
    assert part.router.weight.grad.abs().max() > 0, "the router learns through the weights"


def test_the_gradient_is_right_by_differences():
    part = moe("deepseek")
    x = tokens(1, 3).requires_grad_()
    assert torch.autograd.gradcheck(part, (x,))
    assert torch.autograd.gradcheck(
        lambda w: torch.func.functional_call(part, {"router.weight": w}, (x.detach(),)),
        (part.router.weight.detach().clone().requires_grad_(),),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_batch_mates_never_matter(kind):
    part, x = moe(kind), tokens()
    whole = part(x)
    for b in range(3):
        torch.testing.assert_close(part(x[b : b + 1])[0], whole[b], rtol=0, atol=1e-12)
    for t in range(5):  # nor do a token's own neighbours: a chunk at a time is the same
        torch.testing.assert_close(part(x[:, t : t + 1])[:, 0], whole[:, t], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capacity", [None, 2])
def test_padding_never_matters_and_gives_nothing(kind, capacity):
    part, x = moe(kind, capacity), tokens()
    out = part(x, RAGGED)
    other = x.clone()
    other[~RAGGED.real] = float("nan")
    other.requires_grad_()
    again = part(other, RAGGED)
    assert torch.equal(again, out)
    assert (again[~RAGGED.real] == 0).all()
    again.sum().backward()
    assert (other.grad[~RAGGED.real] == 0).all()
    assert all(torch.isfinite(p.grad).all() for p in part.parameters() if p.grad is not None)
    one = Coordinates.range(3)
    if capacity is None:
        torch.testing.assert_close(out[1, 2:], part(x[1:2, 2:], one)[0], rtol=0, atol=1e-12)


def test_padding_is_not_computed(monkeypatch):
    part, seen = moe(), []
    plain = part.experts.expert
    monkeypatch.setattr(part.experts, "expert", lambda x, *w: seen.append(len(x)) or plain(x, *w))
    part(tokens(), RAGGED)
    assert sum(seen) == 2 * 12  # two experts for each of twelve real tokens of fifteen slots
    assert part.route(tokens(), RAGGED).experts.shape == (12, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_padding(kind):
    part, x = moe(kind), tokens(1, 2).requires_grad_()
    nothing = Coordinates(torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 2, dtype=torch.long))
    out = part(x, nothing)
    assert (out == 0).all()
    out.sum().backward()
    assert (x.grad == 0).all()
    assert part(tokens(2, 0)).shape == (2, 0, D)


def _one_expert_of_two(capacity):
    """Top-1 by the sign of the first feature; experts multiply by 1 and by 10."""
    router = SoftmaxRouter(D, num_experts=2, num_experts_per_tok=1, norm_topk_prob=True)
    experts = DenseExperts(D, D, num_experts=2, activation="relu", bias=False)
    part = MoE(router=router, experts=experts, expert_capacity=capacity).double()
    with torch.no_grad():
        router.weight.zero_()[0, 0] = 1.0
        experts.up_proj.copy_(torch.eye(D).expand(2, D, D))
        experts.down_proj.copy_(torch.stack([torch.eye(D), 10 * torch.eye(D)]))
    return part


def test_capacity_zero_is_exactly_nothing():
    """B136: not the token itself, not the token times its weight."""
    for kind in ("mixtral", "switch", "gpt-oss"):
        assert (moe(kind, capacity=0)(tokens()) == 0).all()
    part, x = moe("deepseek", capacity=0), tokens()
    assert torch.equal(part(x).flatten(0, 1), part.shared(x.flatten(0, 1))), "what is shared is not dropped"


def test_who_is_dropped_written_out():
    """Capacity 1: each expert takes the first slot that asks, over all rows, then the lower row."""
    x = torch.ones(2, 3, D, dtype=WIDE)
    x[..., 0] = torch.tensor([[1.0, 2.0, -1.0], [1.0, -2.0, 2.0]])  # experts 0 0 1 and 0 1 0
    got = _one_expert_of_two(1)(x)[..., 1]
    assert got.tolist() == [[1, 0, 0], [0, 10, 0]]
    got = _one_expert_of_two(2)(x)[..., 1]
    assert got.tolist() == [[1, 0, 10], [1, 10, 0]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capacity", [1, 2])
def test_earlier_tokens_never_lose_to_later_ones(kind, capacity):
    part, x = moe(kind, capacity), tokens()
    whole = part(x)
    for t in range(1, 5):
        torch.testing.assert_close(part(x[:, :t]), whole[:, :t], rtol=0, atol=1e-12)  # cut off
        later = x.clone()
        later[:, t:] = 9 * torch.randn(3, 5 - t, D, dtype=WIDE)
        torch.testing.assert_close(part(later)[:, :t], whole[:, :t], rtol=0, atol=1e-12)  # replaced


def test_a_later_first_choice_does_not_beat_an_earlier_second_choice():
    router = SoftmaxRouter(2, num_experts=2, num_experts_per_tok=2, norm_topk_prob=False)
    part = MoE(router=router, experts=DenseExperts(2, 4, num_experts=2, activation="silu"), expert_capacity=1).double()
    with torch.no_grad():
        router.weight.copy_(torch.eye(2))
    x = torch.tensor([[[2.0, 1.0], [1.0, 2.0]]], dtype=WIDE)  # first prefers 0, then 1; second prefers 1, then 0
    out = part(x)
    assert (out[0, 1] == 0).all()
    torch.testing.assert_close(out[0, 0], part(x[:, :1])[0, 0])


def test_with_a_capacity_batch_mates_matter():
    part, x = moe("switch", capacity=1), tokens()
    assert (part(x)[1] - part(x[1:2])[0]).abs().max() > 1e-3


def test_what_is_dropped_is_counted_and_the_balance_sees_the_choice():
    x = torch.ones(2, 3, D, dtype=WIDE)
    x[..., 0] = torch.tensor([[1.0, 2.0, -1.0], [1.0, -2.0, 2.0]])
    router_stats = []
    _one_expert_of_two(1)(x, None, router_stats)
    assert router_stats[0].tokens.tolist() == [4, 2]
    assert router_stats[0].kept.tolist() == [1, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_twice_is_the_same_bit_for_bit(kind):
    part, x = moe(kind).float(), tokens().float().requires_grad_()
    first = part(x, RAGGED)
    (gradient,) = torch.autograd.grad(first.square().sum(), x)
    second = part(x, RAGGED)
    (again,) = torch.autograd.grad(second.square().sum(), x)
    assert torch.equal(first, second)
    assert torch.equal(gradient, again)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_goes_where_float32_goes(kind):
    part = moe(kind).bfloat16()
    x = tokens().bfloat16()
    out = part(x, RAGGED)
    assert out.dtype == torch.bfloat16
    exact = copy.deepcopy(part).double()
    assert torch.equal(part.route(x, RAGGED).experts, exact.route(x.double(), RAGGED).experts)
    expected = exact(x.double(), RAGGED)
    assert (out.double() - expected).abs().max() < 0.03 * (1 + expected.abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast(kind):
    part, x = moe(kind).float(), tokens().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = part(x, RAGGED)
    assert out.dtype == torch.float32
    expected = part(x, RAGGED)
    assert 0 < (out - expected).abs().max() < 0.03 * (1 + expected.abs().max())


def test_dropout_in_experts_changes_training_alone():
    router = SoftmaxRouter(D, num_experts=E, num_experts_per_tok=2, norm_topk_prob=True)
    for experts in (GatedExperts(D, 64, num_experts=E, dropout=0.5), ClampedGatedExperts(D, 64, num_experts=E,
    dropout=0.5),
                    DenseExperts(D, 64, num_experts=E, activation="gelu", dropout=0.5)):  # fmt: skip
        part, x = MoE(router=router, experts=experts), tokens().float()
        assert not torch.equal(part(x), part(x))
        part.eval()
        assert torch.equal(part(x), part(x))


def test_checkpointing_leaves_the_same_sums_once():
    part, x = moe(), tokens().requires_grad_()
    plain, again = [], []
    out = part(x, RAGGED, plain)
    expected = torch.autograd.grad(out.sum() + plain[0].balance(), [x, *part.parameters()])
    out = checkpoint(part, x, RAGGED, again, use_reentrant=False)
    got = torch.autograd.grad(out.sum() + again[0].balance(), [x, *part.parameters()])
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    for a, b in zip(again[0], plain[0], strict=True):
        assert torch.equal(a, b)


def test_a_pass_leaves_nothing_behind_in_the_module():
    part = moe("deepseek")
    before = {name: value.clone() for name, value in part.state_dict().items()}
    part(tokens(), RAGGED, [])
    assert all(torch.equal(before[name], value) for name, value in part.state_dict().items())
    assert not [v for m in part.modules() for v in vars(m).values() if isinstance(v, torch.Tensor)]


def test_what_does_not_fit_is_refused():
    router = SoftmaxRouter(D, num_experts=3, num_experts_per_tok=1, norm_topk_prob=True)
    with pytest.raises(ShapeError, match="chooses among 3 experts, but there are 4"):
        MoE(router=router, experts=GatedExperts(D, F, num_experts=4))
    with pytest.raises(ShapeError, match="expert_capacity is -1, but must be 0 or more"):
        MoE(router=router, experts=GatedExperts(D, F, num_experts=3), expert_capacity=-1)
    with pytest.raises(ShapeError, match=r"coordinates are \(1, 4\), but the tensor has \(3, 5\)"):
        moe()(tokens(), Coordinates.range(4))


def test_state_has_no_surprises():
    names = sorted(moe("qwen2").state_dict())
    assert names == ["experts.down_proj", "experts.gate_proj", "experts.up_proj", "router.weight"] + [
        f"shared.{name}.weight" for name in ("ffn.down_proj", "ffn.gate_proj", "ffn.up_proj", "gate")
    ]
    assert isinstance(moe("qwen2").router.groups, nn.Identity)


COMPILED = """
import torch
from torch._dynamo.utils import counters
from pellucid.nn.moe import ExpertGroups, GatedExperts, MoE, SigmoidRouter

torch.manual_seed(0)
router = SigmoidRouter(6, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, groups=ExpertGroups(2,
    topk_group=1, score="top2"))
moe = MoE(router=router, experts=GatedExperts(6, 10, num_experts=4))
doubled = lambda x, router_stats: 2 * moe(x, None, router_stats)
compiled, graphs = torch.compile(doubled, backend="eager"), []
for slots in (5, 9, 6, 7, 17, 3):
    x, ours, theirs = torch.randn(2, slots, 6), [], []
    torch.testing.assert_close(compiled(x, ours), doubled(x, theirs))
    assert torch.equal(ours[0].tokens, theirs[0].tokens)
    graphs.append(counters["stats"]["unique_graphs"])
print(graphs)
"""


@pytest.mark.slow
def test_compiled_it_is_the_same_and_no_new_length_or_load_makes_a_new_graph():
    """Experts run as they are, with the router and the sums compiled around them: once for one length, once for all.

    In a process of its own, because the checks of shapes that tests run under cannot be traced.
    """
    run = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    graphs = json.loads(run.stdout)
    assert graphs[0] > 0
    assert graphs[1:] == [graphs[1]] * 5
