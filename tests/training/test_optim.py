"""Who changes which parameter, and that each is changed once."""

from typing import Any

import pytest
import torch

from pellucid.batch import Batch
from pellucid.data.objectives import causal
from pellucid.errors import CheckpointError
from pellucid.models.build import build
from pellucid.models.config import ModelConfig
from pellucid.models.model import Decoder
from pellucid.training.config import AdamWConfig, MuonConfig
from pellucid.training.optim import make_optimizers, roles
from pellucid.training.step import OptimizerSet

BATCH = causal(Batch.from_rows([[5, 8, 2, 9, 1], [7], [3, 3, 4]]))


def tiny(**changes: Any) -> Decoder:
    words: dict[str, Any] = {
        "vocab_size": 20,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "attention": {"num_attention_heads": 2, "qkv_bias": True},
        "ffn": {"kind": "dense", "intermediate_size": 12},
    }
    return build(ModelConfig.from_mapping(words | changes))


def one_step(model: Decoder, optimizers: OptimizerSet) -> None:
    optimizers.zero_grad()
    model(BATCH, want="loss").loss.mean().backward()
    optimizers.step()


def test_roles_are_told_by_use_not_by_name() -> None:
    model = tiny(position={"kind": "learned", "max_position_embeddings": 6}, tie_word_embeddings=False, head_bias=True)
    found = roles(model)
    assert {n for n, r in found.items() if r == "embedding"} == {"embed_tokens.weight", "positions.weight"}
    assert {n for n, r in found.items() if r == "head"} == {"lm_head.weight"}
    assert {n for n, r in found.items() if r == "matrix"} == {
        *(f"layers.0.attention.{x}_proj.weight" for x in "qkvo"),
        *(f"layers.0.ffn.{n}" for n, _ in model.layers[0].ffn.named_parameters()),
    }
    assert all(r == "vector" for n, r in found.items() if n.endswith("bias") or "norm" in n)
    assert set(found) == {n for n, _ in model.named_parameters()}


@pytest.mark.parametrize("config", [AdamWConfig(), MuonConfig()], ids=["adamw", "muon"])
def test_a_tied_parameter_is_listed_once_and_stays_one(config: AdamWConfig | MuonConfig) -> None:
    """B112: one entry, one set of moments, one storage after three steps, the gradient of both uses."""
    model = tiny()
    optimizers = make_optimizers(model, config)
    listed = [id(p) for part in optimizers.parts.values() for g in part.param_groups for p in g["params"]]
    assert len(listed) == len(set(listed)) == len(list(model.parameters()))
    for _ in range(3):
        one_step(model, optimizers)
    assert model.lm_head.weight is model.embed_tokens.weight
    keys = [key for key in optimizers.state_tensors() if "embed_tokens" in key or "lm_head" in key]
    assert sorted(keys) == [f"adamw/embed_tokens.weight/{what}" for what in ("exp_avg", "exp_avg_sq", "step")]

    free = tiny(tie_word_embeddings=False)
    tied = tiny()
    free.load_state_dict(tied.state_dict())
    for each in (free, tied):
        each(BATCH, want="loss").loss.total.backward()
    both = free.embed_tokens.weight.grad + free.lm_head.weight.grad
    torch.testing.assert_close(tied.embed_tokens.weight.grad, both)


def test_muon_changes_matrices_in_blocks_only() -> None:
    model = tiny(position={"kind": "learned", "max_position_embeddings": 6}, tie_word_embeddings=False)
    muon = make_optimizers(model, MuonConfig()).parts["muon"]
    held = {id(p) for group in muon.param_groups for p in group["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in held}
    assert names == {name for name, role in roles(model).items() if role == "matrix"}


def test_norms_biases_and_tables_do_not_decay() -> None:
    """With gradients of 0 only decay moves a weight."""
    model = tiny(position={"kind": "learned", "max_position_embeddings": 6}, tie_word_embeddings=False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizers = make_optimizers(model, AdamWConfig(learning_rate=0.5, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers.step()
    for name, role in roles(model).items():
        factor = 0.75 if role in ("matrix", "head") else 1.0
        torch.testing.assert_close(model.get_parameter(name), before[name] * factor)


def test_rates_are_peaks_times_the_multiplier_however_often_set() -> None:
    """B116: what is reported is what the optimizers hold."""
    optimizers = make_optimizers(tiny(), MuonConfig(learning_rate=0.02, adamw=AdamWConfig(learning_rate=0.003)))
    for multiplier in (0.5, 0.1, 0.25):
        assert optimizers.set_learning_rate(multiplier) == optimizers.learning_rate == 0.02 * multiplier
        held = {name: {g["lr"] for g in part.param_groups} for name, part in optimizers.parts.items()}
        assert held == {"muon": {0.02 * multiplier}, "adamw": {0.003 * multiplier}}


@pytest.mark.parametrize("config", [AdamWConfig(), MuonConfig()], ids=["adamw", "muon"])
def test_the_state_given_back_goes_on_bit_for_bit(config: AdamWConfig | MuonConfig) -> None:
    straight, stopped = tiny(), tiny()
    a, b = make_optimizers(straight, config), make_optimizers(stopped, config)
    for _ in range(2):
        one_step(straight, a)
        one_step(stopped, b)
    resumed = tiny()
    resumed.load_state_dict(stopped.state_dict())
    c = make_optimizers(resumed, config)
    c.load_state_tensors(b.state_tensors())
    for _ in range(3):
        one_step(straight, a)
        one_step(resumed, c)
    for x, y in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(x, y)
    for key, tensor in a.state_tensors().items():
        assert torch.equal(tensor, c.state_tensors()[key]), key


def test_a_state_that_does_not_fit_is_refused() -> None:
    model = tiny()
    optimizers = make_optimizers(model, AdamWConfig())
    one_step(model, optimizers)
    good = optimizers.state_tensors()
    key = "adamw/norm.weight/exp_avg"
    with pytest.raises(CheckpointError, match=f"lacks {key}"):
        optimizers.load_state_tensors({k: v for k, v in good.items() if k != key})
    with pytest.raises(CheckpointError, match=r"'adamw/nrom\.weight/exp_avg' belongs to no parameter"):
        optimizers.load_state_tensors(good | {"adamw/nrom.weight/exp_avg": torch.zeros(8)})
    with pytest.raises(CheckpointError, match="belongs to no parameter"):
        optimizers.load_state_tensors({k.replace("adamw/", "muon/"): v for k, v in good.items()})
    with pytest.raises(CheckpointError, match=rf"{key}' has shape \(7,\) but the parameter \(8,\)"):
        optimizers.load_state_tensors(good | {key: torch.zeros(7)})


EXPERTS: dict[str, Any] = {
    "kind": "moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "expert": {"kind": "dense", "intermediate_size": 6, "bias": True},
    "router": {"kind": "softmax", "bias": True},
}


def test_roles_of_parts_that_are_neither_plain_matrices_nor_vectors() -> None:
    """Biases of stacked experts, norms of heads, tables of relative biases and sinks do not decay; experts do."""
    model = tiny(
        family="encoder_decoder",
        ffn=EXPERTS,
        position={"kind": "relative_bias"},
        attention={"num_attention_heads": 2, "attention_sinks": True},
    )
    found = roles(model)
    inside = [name for name in found if name.startswith(("layers.", "encoder.layers."))]
    assert {found[name] for name in inside if name.endswith("_bias") or name.endswith("sinks")} == {"vector"}
    assert {found[name] for name in inside if name.endswith(("experts.up_proj", "experts.down_proj"))} == {"matrix"}
    assert {found[name] for name in inside if name.endswith("router.weight")} == {"head"}
    assert {found[name] for name in inside if name.endswith(("q_proj.weight", "o_proj.weight"))} == {"matrix"}
    tables = {name for name, role in found.items() if role == "embedding"}
    assert tables == {"embed_tokens.weight", "position_biases.0.weight", "encoder.position_biases.0.weight"}
    assert sum("encoder.layers" in name for name in inside) > 5
    heads = roles(tiny(attention={"num_attention_heads": 2, "qk_norm": {"kind": "head_layer_norm"}}))
    assert {role for name, role in heads.items() if name.endswith(("q_norm.weight", "k_norm.weight"))} == {"vector"}


@pytest.mark.parametrize("config", [AdamWConfig(), MuonConfig()], ids=["adamw", "muon"])
def test_what_is_shared_is_changed_once(config: AdamWConfig | MuonConfig) -> None:
    """Layers that share weights, a table for both stacks, stacks of experts: each parameter in one group."""
    model = tiny(
        family="encoder_decoder",
        ffn=EXPERTS,
        layers=["causal()", {"rule": "causal()", "same_as": 0}],
        num_hidden_layers=2,
    )
    optimizers = make_optimizers(model, config)
    listed = [id(p) for part in optimizers.parts.values() for group in part.param_groups for p in group["params"]]
    assert len(listed) == len(set(listed)) == len(list(model.parameters()))
    assert model.layers[0] is model.layers[1]
    assert model.encoder.embed_tokens is model.embed_tokens
