"""The whole audit on every preset in a tiny size."""

import pytest
import torch

from pellucid.audits import audit
from pellucid.models import build
from pellucid.models.presets import names, preset

pytestmark = pytest.mark.usefixtures("our_checks_only")  # the checker of annotations draws random numbers

SMALL = ["vocab_size=43", "hidden_size=32", "dropout={}"]
HEADS = ["attention.num_attention_heads=4", "ffn.intermediate_size=48"]
LAYERS = ["num_hidden_layers=2"]
MLA = "{kind: latent, num_attention_heads: 2, q_lora_rank: 12, kv_lora_rank: 8, qk_nope_head_dim: 6,"
MLA += " qk_rope_head_dim: 4, v_head_dim: 10}"
EXPERTS = ["ffn.num_experts=8", "ffn.expert.intermediate_size=12"]
SHRUNK = {
    "bert-base": [*SMALL, *HEADS, *LAYERS, "position.max_position_embeddings=64"],
    "deepseek-v3": [
        *SMALL,
        *EXPERTS,
        f"attention={MLA}",
        "ffn.num_experts_per_tok=3",
        "ffn.shared.intermediate_size=12",
        "layers=[{rule: causal, ffn: {kind: gated, intermediate_size: 24}}, causal]",
        "position.scaling.original_max_position_embeddings=6",
        "ffn.router.groups.n_group=4",
        "ffn.router.groups.topk_group=2",
    ],
    "gpt2": [*SMALL, *HEADS, *LAYERS, "position.max_position_embeddings=64"],
    "llama-3-8b": [*SMALL, *HEADS, *LAYERS, "attention.num_key_value_heads=2"],
    "mixtral-8x7b": [*SMALL, *EXPERTS, *HEADS[:1], *LAYERS, "attention.num_key_value_heads=2"],
    "t5-base": [*SMALL, *HEADS, *LAYERS, "position.num_buckets=8", "position.max_distance=9"],
    # from a residual_init of zero a new model is the identity, of which nothing can be shown
    "tiny-decoder": [*SMALL, *HEADS, "residual_init=scaled", "layers=[causal & window(3), causal & window(3), causal]"],
    "tiny-encoder": [*SMALL, *HEADS, *LAYERS],
    "tiny-encoder-decoder": [*SMALL, *HEADS, *LAYERS],
    "tiny-mla": [*SMALL, *LAYERS, f"attention={MLA}", "ffn.intermediate_size=48"],
    "tiny-moe": [*SMALL, *EXPERTS, *HEADS[:1], "ffn.shared.intermediate_size=12"],
    "transformer-base-2017": [*SMALL, *HEADS, *LAYERS],
    "transformer-big-2017": [*SMALL, *HEADS, *LAYERS],
}


def test_none_is_left_out():
    assert tuple(sorted(SHRUNK)) == names()


def assert_passes(name, dtype=torch.float32, checks=None):
    config = preset(name, SHRUNK[name])
    assert config.norm_placement == preset(name).norm_placement
    report = audit(probe=build(config, dtype=dtype).probe(), checks=checks)
    wrong = [f for f in report.findings if f.status not in ("pass", "not_applicable")]
    assert not wrong, wrong
    assert report.passed
    passed = {check for check, verdict in report.verdicts.items() if verdict == "pass"}
    assert set(checks or ["padding", "packing", "loss", "batch"]) <= passed


@pytest.mark.parametrize(
    ("name", "checks"), [("tiny-mla", None), ("bert-base", None), ("t5-base", ["cross", "future", "cache", "padding"])]
)
def test_audits_pass(name, checks):
    assert_passes(name, checks=checks)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHRUNK)
def test_every_audit_passes_on_every_preset(name):
    assert_passes(name, torch.float64 if name == "gpt2" else torch.float32)
