"""Norms, feed-forward networks, blocks, embeddings and their first weights."""

import math

import pytest
import torch
from torch import nn

from helpers.tiny import tiny_config, tiny_model
from pellucid.data import Batch
from pellucid.errors import InputError
from pellucid.models import build
from pellucid.nn import DenseFFN, GatedFFN, LayerNorm, PostNormBlock, PreNormBlock, RMSNorm
from pellucid.nn.attention import LayerContext
from pellucid.visibility import Coordinates


def test_rms_norm_scales_and_layer_norm_centres_too():
    """L13."""
    x = torch.randn(2, 3, 8, dtype=torch.float64) + 5
    rms = RMSNorm(8, eps=1e-6).double()(x)
    torch.testing.assert_close(rms, x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt())
    assert rms.mean().abs() > 0.5
    ln = LayerNorm(8).double()(x)
    assert ln.mean(-1).abs().max() < 1e-9
    torch.testing.assert_close(ln.var(-1, unbiased=False), torch.ones(2, 3, dtype=torch.float64), atol=1e-4, rtol=0)


def test_norms_keep_the_type_of_their_input():
    for norm in (RMSNorm(8), LayerNorm(8).bfloat16()):
        assert norm(torch.randn(2, 8).bfloat16()).dtype == torch.bfloat16
    huge = torch.full((1, 8), 60000.0, dtype=torch.float16)  # squares overflow in 16 bits, not in 32
    assert torch.isfinite(RMSNorm(8)(huge)).all()


@pytest.mark.parametrize("ffn", [DenseFFN, GatedFFN])
def test_ffn_moves_one_token_at_a_time(ffn):
    """L09."""
    part = ffn(8, 12, activation="silu", bias=True, dropout=0.0)
    x = torch.randn(1, 5, 8)
    y = x.clone()
    y[0, 2] += 1
    changed = (part(x) != part(y)).any(-1)[0]
    assert changed.tolist() == [False, False, True, False, False]


def test_gated_ffn_is_the_formula():
    part = GatedFFN(4, 6, activation="silu", bias=False, dropout=0.0).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    gate, up = x @ part.gate_proj.weight.T, x @ part.up_proj.weight.T
    torch.testing.assert_close(part(x[None])[0], (gate * torch.sigmoid(gate) * up) @ part.down_proj.weight.T)


class _Zero(nn.Module):
    def forward(self, x, *_):
        return torch.zeros_like(x)


def test_a_branch_of_zero_shows_where_the_norm_sits():
    """B107, L11: a pre-norm block becomes the identity, a post-norm block the norm."""
    x = torch.randn(2, 3, 8)
    tokens = Coordinates.range(3, 2)
    parts = {"attention": _Zero(), "ffn": _Zero(), "attn_norm": RMSNorm(8), "ffn_norm": RMSNorm(8), "dropout": 0.0}
    assert torch.equal(PreNormBlock(**parts)(x, LayerContext.of(tokens)), x)
    norm = RMSNorm(8)
    torch.testing.assert_close(PostNormBlock(**parts)(x, LayerContext.of(tokens)), norm(norm(x)))


def test_placements_bring_their_final_norm_and_first_weights():
    pre, post = tiny_model(), tiny_model("post-norm-2017")
    assert isinstance(pre.norm, RMSNorm)
    assert isinstance(post.norm, nn.Identity)
    q, o = pre.layers[0].attention.q_proj.weight, pre.layers[0].attention.o_proj.weight
    assert q.std().item() == pytest.approx(32**-0.5, rel=0.1)
    assert o.std().item() == pytest.approx(32**-0.5 / math.sqrt(2 * 2), rel=0.1)
    bound = math.sqrt(6 / (32 + 32))
    assert post.layers[0].attention.q_proj.weight.abs().max().item() == pytest.approx(bound, rel=0.05)
    zero = tiny_model(residual_init="zero")
    assert (zero.layers[1].ffn.down_proj.weight == 0).all()


def test_a_seed_says_all_weights_and_touches_no_other_random_state():
    config = tiny_config()
    state = torch.get_rng_state()
    first, again, other = build(config, seed=3), build(config, seed=3), build(config, seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_tied_and_free_heads():
    tied, free = tiny_model(), tiny_model("sinks-qk-norm-untied")
    assert tied.lm_head.weight is tied.embed_tokens.weight
    assert free.lm_head.weight is not free.embed_tokens.weight
    assert len(list(tied.parameters())) == len({id(p) for p in tied.parameters()})


def test_meta_model_uses_no_memory():
    model = build(tiny_config(vocab_size=1 << 20, hidden_size=4096), device="meta")
    assert all(p.device.type == "meta" for p in model.parameters())
    assert model.lm_head.weight is model.embed_tokens.weight


def test_dropout_sites():
    """L14: four named places, each alone changes training and none changes eval; B113."""
    batch = Batch.from_rows([[1, 2, 3, 4, 5]])
    plain = tiny_model()(batch).logits
    for site in ("embedding", "attention", "residual", "ffn"):
        model = tiny_model(dropout={site: 0.9})
        assert torch.equal(model(batch).logits, plain), site
        model.train()
        assert not torch.equal(model(batch).logits, model(batch).logits), site
        model.eval()
        assert torch.equal(model(batch).logits, plain), site


@pytest.mark.parametrize("token", [-1, 50])
def test_ids_outside_the_vocabulary(token):
    with pytest.raises(InputError, match=f"token id {token} is outside the vocabulary of 50"):
        tiny_model()(Batch.from_rows([[1, token]]))


def test_a_model_takes_a_batch_and_says_so():
    model = tiny_model()
    with pytest.raises(InputError, match="takes a Batch, not Tensor"):
        model(torch.zeros(1, 2, dtype=torch.long))
    with pytest.raises(InputError, match="choose logits, loss or hidden"):
        model(Batch.from_rows([[1]]), want="probabilities")
    with pytest.raises(InputError, match="needs labels"):
        model(Batch.from_rows([[1]]), want="loss")
    assert model(Batch.from_rows([[1]]), want="hidden").logits is None
