"""Activations and feed-forward networks against their formulas, written out."""

import math

import pytest
import torch
from torch.nn import functional as F

from pellucid.errors import InputError
from pellucid.nn.ffn import ACTIVATIONS, ClampedGatedFFN, DenseFFN, GatedFFN, clamped_gate


def _sigmoid(x):
    return 1 / (1 + math.exp(-x))


BY_DEFINITION = {
    "relu": lambda x: max(x, 0.0),
    "relu_squared": lambda x: max(x, 0.0) ** 2,
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x * _sigmoid(1.702 * x),
    "silu": lambda x: x * _sigmoid(x),
    "sigmoid": _sigmoid,
    "tanh": math.tanh,
}


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations_are_their_definitions(name):
    points = [-3.0, -1.0, -0.2, 0.0, 0.3, 1.0, 2.5]
    expected = torch.tensor([BY_DEFINITION[name](x) for x in points], dtype=torch.float64)
    torch.testing.assert_close(ACTIVATIONS[name](torch.tensor(points, dtype=torch.float64)), expected)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "quick_gelu", "relu", "relu_squared", "silu"])
def test_activations_are_those_of_transformers(name):
    theirs = pytest.importorskip("transformers.activations").ACT2FN
    other = {"gelu_tanh": "gelu_pytorch_tanh", "relu_squared": "relu2"}.get(name, name)
    x = torch.linspace(-4, 4, 33)
    torch.testing.assert_close(ACTIVATIONS[name](x), theirs[other](x))


@pytest.mark.parametrize("part", [DenseFFN, GatedFFN])
def test_an_unknown_activation_is_refused(part):
    with pytest.raises(InputError, match=r"there is no activation 'swish'; choose one of gelu, .*silu"):
        part(4, 8, activation="swish", bias=False, dropout=0.0)


@pytest.mark.parametrize("name", ["sigmoid", "silu", "gelu", "relu"])
def test_gates_multiply(name):
    """GLU, SwiGLU, GEGLU, ReGLU: Shazeer 2020 eq. 5-6."""
    part = GatedFFN(4, 6, activation=name, bias=True, dropout=0.0).double()
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    gate = x @ part.gate_proj.weight.T + part.gate_proj.bias
    up = x @ part.up_proj.weight.T + part.up_proj.bias
    expected = gate.detach().clone().apply_(BY_DEFINITION[name]) * up
    torch.testing.assert_close(part(x), expected @ part.down_proj.weight.T + part.down_proj.bias)


def test_glu_is_torchs():
    part = GatedFFN(4, 6, activation="sigmoid", bias=False, dropout=0.0).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    both = torch.cat([x @ part.up_proj.weight.T, x @ part.gate_proj.weight.T], -1)
    torch.testing.assert_close(part(x), F.glu(both) @ part.down_proj.weight.T)


def test_a_clamped_gate_by_hand():
    """Only the top of the gate is cut, and both ends of the other half, which counts from 1."""
    gate = torch.tensor([9.0, -9.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    up = torch.tensor([0.0, 0.0, 9.0, -9.0, 2.0], dtype=torch.float64)
    expected = [
        7 * _sigmoid(1.702 * 7),
        -9 * _sigmoid(-1.702 * 9),
        8 * _sigmoid(1.702),
        -6 * _sigmoid(1.702),
        3 * _sigmoid(1.702),
    ]
    got = clamped_gate(gate, up, limit=7.0, alpha=1.702)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


def test_a_clamped_network_is_two_matrices_around_the_clamped_gate():
    part = ClampedGatedFFN(4, 6, limit=0.5, alpha=2.0, bias=True, dropout=0.0).double()
    x = 3 * torch.randn(5, 4, dtype=torch.float64)
    inner = clamped_gate(part.gate_proj(x), part.up_proj(x), limit=0.5, alpha=2.0)
    torch.testing.assert_close(part(x), part.down_proj(inner))
    assert part.up_proj(x).abs().max() > 0.5


@pytest.mark.parametrize("part", ["dense", "gated", "clamped"])
def test_dropout_changes_training_alone(part):
    x = torch.randn(2, 3, 4)
    kinds = {"dense": DenseFFN, "gated": GatedFFN, "clamped": ClampedGatedFFN}
    words = {} if part == "clamped" else {"activation": "silu"}
    torch.manual_seed(1)
    plain = kinds[part](4, 64, bias=True, dropout=0.0, **words)
    torch.manual_seed(1)
    dropping = kinds[part](4, 64, bias=True, dropout=0.5, **words)
    assert not torch.equal(dropping(x), plain(x))
    assert torch.equal(dropping.eval()(x), plain(x))
