"""The expert layers of published models: transformers' blocks from tiny configs, weights copied, outputs equal."""

import importlib

import pytest
import torch

from pellucid.nn.ffn import GatedFFN
from pellucid.nn.moe import (
    ClampedGatedExperts,
    ExpertGroups,
    GatedExperts,
    GatedSharedExpert,
    MoE,
    SharedMoE,
    SigmoidRouter,
    SoftmaxRouter,
    TopKSoftmaxRouter,
)

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

D, F, E = 12, 20, 8


def _randomised(module):
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.normal_(std=0.4)
    return module.eval()


def _class(model, name):
    return getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)


@torch.no_grad()
def _copy_experts(ours, theirs):
    """Theirs keep gate and up in one stack, one after the other."""
    gate, up = theirs.gate_up_proj.chunk(2, 1)
    ours.gate_proj.copy_(gate)
    ours.up_proj.copy_(up)
    ours.down_proj.copy_(theirs.down_proj)


def _shared(theirs, inner):
    ours = GatedFFN(D, inner, activation="silu", bias=False, dropout=0.0)
    ours.load_state_dict(theirs.state_dict())
    return ours


def _agree(ours, theirs, shape=(2, 7, D)):
    x = torch.randn(*shape)
    expected = theirs(x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    got = ours(x)
    assert expected.abs().max() > 0.1
    allowed = 1e-5 * (1 + expected.abs().max())
    assert (got - expected.view_as(got)).abs().max() <= allowed


def test_mixtral():
    config = transformers.MixtralConfig(
        hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=2, router_jitter_noise=0.0
    )
    theirs = _randomised(_class("mixtral", "MixtralSparseMoeBlock")(config))
    router = SoftmaxRouter(D, num_experts=E, num_experts_per_tok=2, norm_topk_prob=True)
    ours = MoE(router=router, experts=GatedExperts(D, F, num_experts=E))
    router.load_state_dict(theirs.gate.state_dict())
    _copy_experts(ours.experts, theirs.experts)
    _agree(ours, theirs)


@pytest.mark.parametrize("norm_topk_prob", [False, True])
def test_qwen2_moe(norm_topk_prob):
    config = transformers.Qwen2MoeConfig(
        hidden_size=D,
        moe_intermediate_size=F,
        shared_expert_intermediate_size=16,
        num_experts=E,
        num_experts_per_tok=3,
        norm_topk_prob=norm_topk_prob,
    )
    theirs = _randomised(_class("qwen2_moe", "Qwen2MoeSparseMoeBlock")(config))
    router = SoftmaxRouter(D, num_experts=E, num_experts_per_tok=3, norm_topk_prob=norm_topk_prob)
    shared = GatedSharedExpert(D, _shared(theirs.shared_expert, 16))
    shared.gate.load_state_dict(theirs.shared_expert_gate.state_dict())
    ours = SharedMoE(router=router, experts=GatedExperts(D, F, num_experts=E), shared=shared)
    router.load_state_dict(theirs.gate.state_dict())
    _copy_experts(ours.experts, theirs.experts)
    _agree(ours, theirs)


@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (2, 1)])
def test_deepseek_v3(norm_topk_prob, groups):
    count, keep = groups
    config = transformers.DeepseekV3Config(
        hidden_size=D,
        moe_intermediate_size=F,
        n_routed_experts=E,
        num_local_experts=E,
        n_shared_experts=2,
        num_experts_per_tok=3,
        n_group=count,
        topk_group=keep,
        norm_topk_prob=norm_topk_prob,
        routed_scaling_factor=2.5,
    )
    theirs = _randomised(_class("deepseek_v3", "DeepseekV3MoE")(config))
    router = SigmoidRouter(
        D,
        num_experts=E,
        num_experts_per_tok=3,
        norm_topk_prob=norm_topk_prob,
        routed_scaling_factor=2.5,
        groups=ExpertGroups(count, topk_group=keep, score="top2"),
    )
    ours = SharedMoE(
        router=router, experts=GatedExperts(D, F, num_experts=E), shared=_shared(theirs.shared_experts, 2 * F)
    )
    with torch.no_grad():
        router.weight.copy_(theirs.gate.weight)
        router.expert_bias.copy_(theirs.gate.e_score_correction_bias)
    _copy_experts(ours.experts, theirs.experts)
    _agree(ours, theirs)


def test_deepseek_v2_groups():
    config = transformers.DeepseekV2Config(
        hidden_size=D,
        moe_intermediate_size=F,
        n_routed_experts=E,
        num_experts=E,
        n_shared_experts=1,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        num_attention_heads=2,
        num_key_value_heads=2,
        routed_scaling_factor=1.5,
    )
    theirs = _randomised(_class("deepseek_v2", "DeepseekV2Moe")(config))
    groups = ExpertGroups(4, topk_group=2, score="max")
    router = SoftmaxRouter(
        D, num_experts=E, num_experts_per_tok=3, norm_topk_prob=False, routed_scaling_factor=1.5, groups=groups
    )
    ours = SharedMoE(router=router, experts=GatedExperts(D, F, num_experts=E), shared=_shared(theirs.shared_experts, F))
    router.load_state_dict(theirs.gate.state_dict())
    _copy_experts(ours.experts, theirs.experts)
    _agree(ours, theirs)


@pytest.mark.parametrize("limit", [7.0, 0.5])
def test_gpt_oss(limit):
    """Their files interleave gate and up, and keep matrices the other way round."""
    config = transformers.GptOssConfig(
        hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=4, swiglu_limit=limit
    )
    theirs = _randomised(_class("gpt_oss", "GptOssMLP")(config))
    router = TopKSoftmaxRouter(D, num_experts=E, num_experts_per_tok=4, bias=True)
    ours = MoE(router=router, experts=ClampedGatedExperts(D, F, num_experts=E, limit=limit, alpha=1.702))
    router.load_state_dict(theirs.router.state_dict())
    with torch.no_grad():
        ours.experts.gate_proj.copy_(theirs.experts.gate_up_proj[..., ::2].mT)
        ours.experts.up_proj.copy_(theirs.experts.gate_up_proj[..., 1::2].mT)
        ours.experts.gate_bias.copy_(theirs.experts.gate_up_proj_bias[:, ::2])
        ours.experts.up_bias.copy_(theirs.experts.gate_up_proj_bias[:, 1::2])
        ours.experts.down_proj.copy_(theirs.experts.down_proj.mT)
        ours.experts.down_bias.copy_(theirs.experts.down_proj_bias)
    _agree(ours, theirs)


def test_llama_4():
    """One expert a token, its input scaled by a sigmoid."""
    config = transformers.Llama4TextConfig(
        hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=1
    )
    theirs = _randomised(_class("llama4", "Llama4TextMoe")(config))
    router = SigmoidRouter(D, num_experts=E, num_experts_per_tok=1, norm_topk_prob=False)
    experts = GatedExperts(D, F, num_experts=E, apply_weight_on_input=True)
    ours = SharedMoE(router=router, experts=experts, shared=_shared(theirs.shared_expert, F))
    with torch.no_grad():
        router.weight.copy_(theirs.router.weight)
        gate, up = theirs.experts.gate_up_proj.chunk(2, -1)
        experts.gate_proj.copy_(gate.mT)
        experts.up_proj.copy_(up.mT)
        experts.down_proj.copy_(theirs.experts.down_proj.mT)
    _agree(ours, theirs)
