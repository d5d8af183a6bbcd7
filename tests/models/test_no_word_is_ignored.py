"""Every word of a config changes what its model answers, all weights being equal: none is read and forgotten."""

import pytest
import torch

from helpers.spread import BASE, LATENT, PAIR, answer, asked, moe, rope, scaled, spread_config
from helpers.tiny import assert_agree
from pellucid.models import build

ROWS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [30, 31, 32, 33]]
GROUPED = BASE["attention"]
SHARED = moe(shared={"intermediate_size": 12})
TABLE = {"kind": "learned", "max_position_embeddings": 24}
DENSE = {"kind": "dense", "intermediate_size": 24}
CLAMPED = moe(expert={"kind": "clamped_gated", "intermediate_size": 12})
SIGMOID = {"kind": "sigmoid"}
YARN = {"factor": 4.0, "original_max_position_embeddings": 6}
BUCKETS = {"kind": "relative_bias", "num_buckets": 8, "max_distance": 9}
QK = {"kind": "rms_norm"}

CHANGED = {
    "rule": ({}, {"rule": "causal & window(2)"}),
    "rule of one layer": ({}, {"layers": ["causal", "causal & chunk(2)"]}),
    "position of one layer": ({}, {"layers": ["causal", {"position": {"kind": "none"}}]}),
    "family": ({}, {"family": "encoder", "head": {"kind": "language_model"}}),
    "scale": ({}, {"attention": {**GROUPED, "scale": 0.9}}),
    "scale of latent attention": ({"attention": LATENT}, {"attention": {**LATENT, "scale": 0.9}}),
    "soft cap of scores": ({}, {"attention": {**GROUPED, "attn_logit_softcapping": 0.1}}),
    "soft cap of latent scores": ({"attention": LATENT}, {"attention": {**LATENT, "attn_logit_softcapping": 0.1}}),
    "clip": ({}, {"attention": {**GROUPED, "clip_qkv": 0.1}}),
    "sinks": ({}, {"attention": {**GROUPED, "attention_sinks": True}}),
    "kind of norm on queries": (
        {"attention": {**GROUPED, "qk_norm": QK}},
        {"attention": {**GROUPED, "qk_norm": {"kind": "layer_norm"}}},
    ),
    "eps of norm on queries": (
        {"attention": {**GROUPED, "qk_norm": QK}},
        {"attention": {**GROUPED, "qk_norm": {**QK, "eps": 0.1}}},
    ),
    "norm before or behind the turn": (
        {"attention": {**GROUPED, "qk_norm": QK}, "position": rope(rotary_dim=4)},
        {"attention": {**GROUPED, "qk_norm": {**QK, "after_positions": True}}, "position": rope(rotary_dim=4)},
    ),
    "scale of cross-attention": (PAIR, {**PAIR, "cross_attention": {**GROUPED, "scale": 0.9}}),
    "soft cap in cross-attention": (PAIR, {**PAIR, "cross_attention": {**GROUPED, "attn_logit_softcapping": 0.1}}),
    "clip in cross-attention": (PAIR, {**PAIR, "cross_attention": {**GROUPED, "clip_qkv": 0.1}}),
    "rule of the encoder": (PAIR, {**PAIR, "encoder": {"rule": "window(2)"}}),
    "multiplier of the encoder": (PAIR, {**PAIR, "encoder": {"embedding_multiplier": 3.0}}),
    "rope_theta": ({}, {"position": rope(rope_theta=10.0)}),
    "pairing": ({}, {"position": rope(interleaved=True)}),
    "rotary_dim": ({}, {"position": rope(rotary_dim=4)}),
    "linear": ({}, {"position": scaled("linear", factor=2.0)}),
    "dynamic ntk": ({}, {"position": scaled("dynamic", factor=2.0, original_max_position_embeddings=6)}),
    "llama3": ({}, {"position": scaled("llama3", **YARN)}),
    "bounds of llama3": (
        {"position": scaled("llama3", **YARN)},
        {"position": scaled("llama3", **YARN, low_freq_factor=0.1, high_freq_factor=0.4)},
    ),
    "betas of yarn": (
        {"position": scaled("yarn", factor=4.0, original_max_position_embeddings=64)},
        {"position": scaled("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=2.0, beta_slow=0.1)},
    ),
    "truncation of yarn": ({"position": scaled("yarn", **YARN)}, {"position": scaled("yarn", **YARN, truncate=False)}),
    "factor of yarn's attention": (
        {"position": scaled("yarn", **YARN)},
        {"position": scaled("yarn", **YARN, attention_factor=2.0)},
    ),
    "mscale of yarn": (
        {"position": scaled("yarn", **YARN)},
        {"position": scaled("yarn", **YARN, mscale=2.0, mscale_all_dim=1.0)},
    ),
    "mscale_all_dim in latent scores": (
        {"attention": LATENT, "position": scaled("yarn", **YARN, mscale=1.0, mscale_all_dim=1.0)},
        {"attention": LATENT, "position": scaled("yarn", **YARN, mscale=2.0, mscale_all_dim=2.0)},
    ),
    "long divisors": (
        {
            "position": scaled(
                "longrope",
                short_factor=[1.0] * 4,
                long_factor=[1.5] * 4,
                original_max_position_embeddings=5,
                factor=4.0,
            )
        },
        {
            "position": scaled(
                "longrope",
                short_factor=[1.0] * 4,
                long_factor=[3.0] * 4,
                original_max_position_embeddings=5,
                factor=4.0,
            )
        },
    ),
    "share": ({}, {"position": scaled("proportional", partial_rotary_factor=0.5)}),
    "offset of a table": ({"position": TABLE}, {"position": {**TABLE, "max_position_embeddings": 22, "offset": 2}}),
    "base of sinusoids": ({"position": {"kind": "sinusoidal"}}, {"position": {"kind": "sinusoidal", "base": 10.0}}),
    "layout of sinusoids": (
        {"position": {"kind": "sinusoidal"}},
        {"position": {"kind": "sinusoidal", "layout": "half"}},
    ),
    "offset of sinusoids": ({"position": {"kind": "sinusoidal"}}, {"position": {"kind": "sinusoidal", "offset": 2}}),
    "alibi": ({"position": {"kind": "none"}}, {"position": {"kind": "alibi"}}),
    "exponent of alibi": ({"position": {"kind": "alibi"}}, {"position": {"kind": "alibi", "alibi_bias_max": 2.0}}),
    "max_distance": ({"position": BUCKETS}, {"position": {**BUCKETS, "max_distance": 5}}),
    "both ways": ({"position": BUCKETS}, {"position": {**BUCKETS, "bidirectional": True}}),
    "eps": ({}, {"norm": {"kind": "rms_norm", "eps": 0.5}}),
    "kind of norm": ({"norm": {"kind": "bare_rms_norm"}}, {"norm": {"kind": "bare_layer_norm"}}),
    "placement": ({}, {"norm_placement": "parallel_two"}),
    "deepnorm": (
        {"norm_placement": "post", "norm": {"kind": "layer_norm"}},
        {"norm_placement": "deep", "norm": {"kind": "layer_norm"}},
    ),
    "residual_multiplier": ({}, {"residual_multiplier": 0.3}),
    "embedding_multiplier": ({}, {"embedding_multiplier": "sqrt"}),
    "embedding_norm": ({}, {"embedding_norm": True}),
    "logit_multiplier": ({}, {"logit_multiplier": 0.5}),
    "soft cap of logits": ({}, {"final_logit_softcapping": 0.5}),
    "activation": ({}, {"ffn": {"kind": "gated", "intermediate_size": 24, "activation": "relu"}}),
    "activation of a dense network": ({"ffn": DENSE}, {"ffn": {**DENSE, "activation": "relu_squared"}}),
    "limit": (
        {"ffn": {"kind": "clamped_gated", "intermediate_size": 24}},
        {"ffn": {"kind": "clamped_gated", "intermediate_size": 24, "limit": 0.1}},
    ),
    "alpha": (
        {"ffn": {"kind": "clamped_gated", "intermediate_size": 24}},
        {"ffn": {"kind": "clamped_gated", "intermediate_size": 24, "alpha": 3.0}},
    ),
    "limit of experts": ({"ffn": CLAMPED}, {"ffn": moe(expert={**CLAMPED["expert"], "limit": 0.1})}),
    "activation of experts": ({"ffn": moe()}, {"ffn": moe(expert={**moe()["expert"], "activation": "relu"})}),
    "experts of a token": ({"ffn": moe()}, {"ffn": moe(num_experts_per_tok=1)}),
    "router": ({"ffn": moe()}, {"ffn": moe(router={"kind": "softmax", "norm_topk_prob": False})}),
    "scores one by one": ({"ffn": moe()}, {"ffn": moe(router=SIGMOID)}),
    "renormalised scores": ({"ffn": moe(router=SIGMOID)}, {"ffn": moe(router={**SIGMOID, "norm_topk_prob": False})}),
    "scale of the router": ({"ffn": moe()}, {"ffn": moe(router={"kind": "softmax", "routed_scaling_factor": 2.0})}),
    "groups of experts": (
        {"ffn": moe(router=SIGMOID)},
        {"ffn": moe(router={**SIGMOID, "groups": {"n_group": 2, "topk_group": 1, "score": "max"}})},
    ),
    "weighed inputs": ({"ffn": moe()}, {"ffn": moe(apply_weight_on_input=True)}),
    "capacity": ({"ffn": moe()}, {"ffn": moe(expert_capacity=1)}),
    "a gate on what is shared": ({"ffn": SHARED}, {"ffn": moe(shared={"intermediate_size": 12, "gated": True})}),
    "pooling": (
        {"head": {"kind": "sequence_classification", "num_labels": 3, "pooling": "mean"}},
        {"head": {"kind": "sequence_classification", "num_labels": 3, "pooling": "last"}},
    ),
    "pooler": (
        {"head": {"kind": "regression", "pooler": "tanh"}},
        {"head": {"kind": "regression", "pooler": "relu"}},
    ),
    "length of vectors": (
        {"head": {"kind": "sentence_embedding"}},
        {"head": {"kind": "sentence_embedding", "normalize": False}},
    ),
}


def made(words, state=None):
    """A model with the weights of another, by name, wherever both have them."""
    model = build(spread_config(words), dtype=torch.float64)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if state is not None and name.replace("shared.ffn.", "shared.") in state:
                tensor.copy_(state[name.replace("shared.ffn.", "shared.")])
            elif state is not None and name in state:
                tensor.copy_(state[name])
            elif tensor.ndim and name.endswith(("weight", "bias", "sinks")):
                tensor.copy_(torch.randn_like(tensor) * 0.3)
    return model


@pytest.mark.parametrize(("before", "after"), CHANGED.values(), ids=CHANGED)
@torch.no_grad()
def test_a_word_changes_the_answer(before, after):
    first = made(before)
    state = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    second, again = made(after, state), made(before, state)
    batch = asked(first, ROWS)
    said = [model(batch).logits for model in (first, again, second)]
    assert_agree(said[1], said[0])  # the weights are all that was drawn
    assert float((said[2] - said[0]).abs().max()) > 1e-4


@pytest.mark.parametrize("place", ["embedding", "attention", "residual", "ffn"])
@pytest.mark.parametrize(
    "words", [{}, {"attention": LATENT}, PAIR, {"ffn": moe()}], ids=["plain", "latent", "pair", "moe"]
)
@torch.no_grad()
def test_dropout_at_each_place_acts_in_training_alone(place, words):
    model = made({**words, "dropout": {place: 0.5}})
    batch = asked(model, ROWS)
    assert torch.equal(answer(model, batch), answer(model, batch))
    model.train()
    assert not torch.equal(answer(model, batch), answer(model, batch))


def test_heads_differ_in_their_temperature():
    words = {"family": "encoder", "head": {"kind": "sentence_embedding", "temperature": 0.5}}
    model = made(words)
    other = made({**words, "head": {"kind": "sentence_embedding"}}, model.state_dict())
    batch = asked(model, [*ROWS, [7, 8], [9]])
    losses = [float(m(batch, want="loss").loss.total.detach()) for m in (model, other)]
    assert abs(losses[0] - losses[1]) > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_stream_is_wider_than_the_weights_where_it_is_asked(dtype):
    seen = []
    model = build(spread_config({"residual_dtype": "float32"}), dtype=dtype)
    model.layers[-1].register_forward_hook(lambda module, arguments, out: seen.append(out.dtype))
    model(asked(model, ROWS))
    assert seen == [torch.promote_types(dtype, torch.float32)]
