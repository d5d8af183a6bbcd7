"""The attention weights that a decoder's probe gives are those that the layers use."""

import pytest
import torch

from helpers.tiny import KINDS, tiny_model
from pellucid.batch import Batch
from pellucid.models.probe import DecoderProbe
from pellucid.visibility import Coordinates

REQUESTS = {
    "plain": Batch.from_rows([[5, 8, 2, 9, 11, 3], [7, 1, 4, 4, 30, 6]]),
    "padded": Batch.from_rows([[5, 8, 2], [7, 1, 4, 4, 30, 6]], side="both"),
    "packed": Batch.packed([[5, 8, 2], [7, 1, 4, 4]], length=9),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", REQUESTS.values(), ids=REQUESTS)
def test_hidden_weights_are_exactly_0_and_rows_sum_to_1(kind, batch):
    model = tiny_model(kind)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = DecoderProbe(model).attention(batch)
    places = Coordinates(batch.positions, batch.segments)
    heads = model.config.attention.num_attention_heads
    assert len(weights) == len(model.rules)
    for rule, weights_BNTT in zip(model.rules, weights, strict=True):
        may_BNTT = rule.mask(places, places).expand(-1, heads, -1, -1)
        assert weights_BNTT.shape == may_BNTT.shape
        assert torch.equal(weights_BNTT == 0, ~may_BNTT)
        want_BNT = batch.token_mask[:, None].expand(-1, heads, -1).double()
        torch.testing.assert_close(weights_BNTT.sum(-1), want_BNT, rtol=0, atol=1e-12)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_weights_are_those_of_the_forward_pass():
    """Heads that add their values up by these weights give what the layer gives."""
    model, request = tiny_model("mqa-window"), REQUESTS["plain"]
    attention = model.layers[1].attention
    given, taken = [], []
    attention.register_forward_pre_hook(lambda module, arguments: given.append(arguments[0]))
    attention.register_forward_hook(lambda module, arguments, out: taken.append(out))
    weights_BNTT = DecoderProbe(model).attention(request)[1]
    v_BTH = attention.v_proj(given[0])
    out_BTNH = torch.einsum("bnts,bsh->btnh", weights_BNTT, v_BTH)
    torch.testing.assert_close(attention.o_proj(out_BTNH.flatten(-2)), taken[0], rtol=0, atol=1e-12)
    assert float(weights_BNTT.detach().std()) > 0.05
