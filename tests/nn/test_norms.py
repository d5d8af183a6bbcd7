"""Norms against their definitions, torch's modules, and those that published models use."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pellucid.nn.init import init_norms
from pellucid.nn.norms import BareLayerNorm, BareRMSNorm, HeadLayerNorm, L2Norm, LayerNorm, RMSNorm

WIDE = torch.float64
X = torch.linspace(-3, 5, 48, dtype=WIDE).view(2, 3, 8).sin() * 2 + 0.7


def _theirs(module, name):
    return getattr(pytest.importorskip(f"transformers.models.{module}.modeling_{module}"), name)


def test_rms_norm_is_torchs():
    ours, theirs = RMSNorm(8, eps=1e-5).double(), nn.RMSNorm(8, eps=1e-5).double()
    weight = torch.randn(8, dtype=WIDE)
    with torch.no_grad():
        ours.weight.copy_(weight)
        theirs.weight.copy_(weight)
    torch.testing.assert_close(ours(X), theirs(X))


def test_an_offset_is_added_to_the_weight():
    plain, offset = RMSNorm(8).double(), RMSNorm(8, offset=1.0).double()
    assert (offset.weight == 0).all()
    torch.testing.assert_close(offset(X), plain(X))
    with torch.no_grad():
        plain.weight.copy_(torch.linspace(0.5, 2, 8))
        offset.weight.copy_(plain.weight - 1)
    torch.testing.assert_close(offset(X), plain(X))


def test_an_offset_keeps_differences_from_one_that_a_narrow_type_cannot_say():
    """1 + 2⁻⁹ is 1 in bfloat16, 2⁻⁹ is not 0."""
    norm = RMSNorm(1, eps=0.0, offset=1.0).bfloat16()
    with torch.no_grad():
        norm.weight.fill_(2.0**-9)
    assert norm(torch.tensor([[3.0]])).item() == 1 + 2.0**-9
    assert (torch.tensor(1.0).bfloat16() + norm.weight).item() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_offset_is_gemmas(dtype):
    ours, theirs = RMSNorm(8, offset=1.0).to(dtype), _theirs("gemma2", "Gemma2RMSNorm")(8).to(dtype)
    with torch.no_grad():
        ours.weight.normal_(std=0.2)
        theirs.weight.copy_(ours.weight)
    assert torch.equal(ours(X.to(dtype)), theirs(X.to(dtype)))


def test_bare_norms_have_no_weights_and_are_torchs_without_them():
    for norm in (BareRMSNorm(), BareLayerNorm(), L2Norm()):
        assert not list(norm.parameters())
    torch.testing.assert_close(BareRMSNorm(eps=1e-5)(X), F.rms_norm(X, (8,), eps=1e-5))
    torch.testing.assert_close(BareLayerNorm(eps=1e-5)(X), F.layer_norm(X, (8,), eps=1e-5))


def test_unit_vectors():
    torch.testing.assert_close(L2Norm(eps=0.0)(torch.tensor([[3.0, -4.0]])), torch.tensor([[0.6, -0.8]]))
    assert (L2Norm()(torch.zeros(1, 4)) == 0).all()
    torch.testing.assert_close(BareRMSNorm(eps=0.0)(X), L2Norm(eps=0.0)(X) * 8**0.5)


def test_bare_norms_are_llama_4s_and_olmos():
    x = X.float()
    torch.testing.assert_close(BareRMSNorm(eps=1e-6)(x), _theirs("llama4", "Llama4TextL2Norm")(1e-6)(x))
    torch.testing.assert_close(BareLayerNorm()(x), _theirs("olmo", "OlmoLayerNorm")(8)(x))


def test_without_a_bias_the_mean_is_still_subtracted():
    ours, theirs = LayerNorm(8, bias=False), _theirs("cohere", "CohereLayerNorm")(8, eps=1e-5)
    weight = torch.linspace(0.5, 2, 8)
    with torch.no_grad():
        ours.weight.copy_(weight)
        theirs.weight.copy_(weight)
    torch.testing.assert_close(ours(X.float()), theirs(X.float()))
    torch.testing.assert_close(ours(X.float() + 7), ours(X.float()), atol=1e-4, rtol=0)
    assert (RMSNorm(8)(X + 7) - RMSNorm(8)(X)).abs().max() > 0.1


def test_each_head_has_its_own_weights():
    x_btnh = X[:, :, None].expand(2, 3, 4, 8).float()
    ours, theirs = HeadLayerNorm(4, 8), _theirs("cohere", "CohereLayerNorm")((4, 8), eps=1e-5)
    with torch.no_grad():
        ours.weight.copy_(torch.arange(1.0, 5)[:, None].expand(4, 8))
        theirs.weight.copy_(ours.weight)
    torch.testing.assert_close(ours(x_btnh), theirs(x_btnh))
    torch.testing.assert_close(ours(x_btnh)[:, :, 3], 4 * F.layer_norm(X.float(), (8,)))


EACH = [RMSNorm(8), RMSNorm(8, offset=1.0), LayerNorm(8), LayerNorm(8, bias=False), HeadLayerNorm(3, 8)]
EACH += [BareRMSNorm(), BareLayerNorm(), L2Norm()]


@pytest.mark.parametrize("norm", EACH, ids=lambda norm: repr(norm))
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
def test_the_type_of_the_stream_is_kept_whatever_the_weights_are_in(norm, weights, stream):
    exact = copy.deepcopy(norm).double()(X.to(stream).double())
    out = copy.deepcopy(norm).to(weights)(X.to(stream))
    assert out.dtype == stream
    half_a_step = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8}[stream]  # weights of 1 and 0 are exact in both
    torch.testing.assert_close(out.double(), exact, rtol=half_a_step, atol=1e-5)


@pytest.mark.parametrize("norm", EACH, ids=lambda norm: repr(norm))
def test_large_features_do_not_overflow_in_16_bits(norm):
    huge = torch.full((1, 3, 8), 60000.0, dtype=torch.float16)
    huge[..., ::2] *= -1
    assert torch.isfinite(norm(huge)).all()


def test_first_weights_of_every_norm():
    norms = nn.ModuleList([RMSNorm(4), RMSNorm(4, offset=1.0), LayerNorm(4), HeadLayerNorm(2, 4), BareRMSNorm()])
    with torch.no_grad():
        for parameter in norms.parameters():
            parameter.fill_(9.0)
    init_norms(norms)
    plain, offset, layer, heads, _ = norms
    assert (plain.weight == 1).all()
    assert (offset.weight == 0).all()
    assert (layer.weight == 1).all()
    assert (layer.bias == 0).all()
    assert (heads.weight == 1).all()
