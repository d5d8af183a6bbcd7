"""Weights copied from torch's own layers give torch's outputs, with masks converted by name (L08, L47)."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pellucid.data import Batch
from pellucid.errors import InputError, UnsupportedError
from pellucid.nn import CrossAttention, EncoderOutput, GroupedQueryAttention, PostNormBlock, PreNormBlock, from_torch
from pellucid.visibility import Coordinates, causal, from_additive, from_hidden, full

D, HEADS, T, S = 16, 4, 6, 5
KEPT = [6, 3, 4]  # real tokens of each row, padded on the right
MEMORY = [2, 5, 4]

each_norm_first = pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
each_bias = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])


@pytest.fixture(autouse=True)
def _float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def shaken(module):
    """Every weight drawn anew: torch starts biases at 0 and norms at 1, which would hide a swap."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return module.eval()


def stream(slots=T):
    return torch.randn(len(KEPT), slots, D)


def hidden_future():
    return torch.ones(T, T).triu(1).bool()


def hidden_padding(kept, slots):
    return torch.arange(slots)[None] >= torch.tensor(kept)[:, None]


def additive(hidden):
    return torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)


def whole(slots=T):
    return Coordinates.range(slots, len(KEPT))


def padded(kept, slots):
    return Batch.from_rows([[1] * n for n in kept], length=slots).coordinates()


def agree(ours, theirs, kept=None):
    real = torch.ones(ours.shape[:2], dtype=torch.bool) if kept is None else ~hidden_padding(kept, ours.shape[1])
    torch.testing.assert_close(ours[real], theirs[real], rtol=0, atol=1e-12)
    assert float(theirs[real].detach().std()) > 0.05


def turned(x, module):
    """As ``module`` takes it."""
    attention = next(part for part in module.modules() if isinstance(part, nn.MultiheadAttention))
    return x if attention.batch_first else x.transpose(0, 1)


MASKS = {
    "none": ({}, full()),
    "boolean": ({"attn_mask": hidden_future()}, from_hidden(hidden_future())),
    "additive": ({"attn_mask": additive(hidden_future())}, from_additive(additive(hidden_future()))),
    "keys": (
        {"key_padding_mask": hidden_padding(KEPT, T)},
        from_hidden(hidden_padding(KEPT, T), padding=True),
    ),
    "keys, additive": (
        {"key_padding_mask": additive(hidden_padding(KEPT, T))},
        from_additive(additive(hidden_padding(KEPT, T)), padding=True),
    ),
    "both": (
        {"attn_mask": hidden_future(), "key_padding_mask": hidden_padding(KEPT, T)},
        from_hidden(hidden_future()) & from_hidden(hidden_padding(KEPT, T), padding=True),
    ),
    "both, additive": (
        {"attn_mask": additive(hidden_future()), "key_padding_mask": additive(hidden_padding(KEPT, T))},
        from_additive(additive(hidden_future())) & from_additive(additive(hidden_padding(KEPT, T)), padding=True),
    ),
}


@pytest.mark.parametrize(("masks", "rule"), MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("batch_first", [True, False])
@each_bias
def test_attention(masks, rule, batch_first, bias):
    masks = {name: mask.double() if mask.is_floating_point() else mask for name, mask in masks.items()}
    theirs = shaken(nn.MultiheadAttention(D, HEADS, bias=bias, batch_first=batch_first))
    x = turned(stream(), theirs)
    expected, weights = theirs(x, x, x, average_attn_weights=False, **masks)
    ours = from_torch(theirs, rule=rule)
    assert type(ours) is GroupedQueryAttention
    x = turned(x, theirs)
    agree(ours(x, whole(), whole()), turned(expected, theirs))
    torch.testing.assert_close(ours.weights(x, whole()), weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize("encoder_hidden_size", [D, 10])
@each_bias
def test_attention_to_a_memory(encoder_hidden_size, bias):
    theirs = shaken(
        nn.MultiheadAttention(D, HEADS, kdim=encoder_hidden_size, vdim=encoder_hidden_size, bias=bias, batch_first=True)
    )
    x, memory = stream(), torch.randn(len(KEPT), S, encoder_hidden_size)
    expected, _ = theirs(x, memory, memory, key_padding_mask=hidden_padding(MEMORY, S))
    ours = from_torch(theirs, cross=True)
    assert type(ours) is CrossAttention
    agree(ours(x, whole(), EncoderOutput(memory, padded(MEMORY, S))), expected)


@pytest.mark.parametrize(("masks", "rule"), MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(
    "activation", ["relu", "gelu", F.silu, nn.GELU("tanh")], ids=lambda a: getattr(a, "__name__", str(a))
)
@each_norm_first
def test_encoder_layers(masks, rule, activation, norm_first):
    kind = {"attn_mask": "src_mask", "key_padding_mask": "src_key_padding_mask"}
    masks = {kind[n]: mask.double() if mask.is_floating_point() else mask for n, mask in masks.items()}
    theirs = nn.TransformerEncoderLayer(D, HEADS, 24, 0.1, activation, 1e-3, batch_first=True, norm_first=norm_first)
    ours = from_torch(shaken(theirs), rule=rule)
    assert type(ours) is (PreNormBlock if norm_first else PostNormBlock)
    x = stream()
    agree(ours(x, whole(), whole()), theirs(x, **masks))


@each_norm_first
@each_bias
@pytest.mark.parametrize("batch_first", [True, False])
def test_padding_may_be_said_by_coordinates(norm_first, bias, batch_first):
    theirs = nn.TransformerEncoderLayer(D, HEADS, 24, batch_first=batch_first, norm_first=norm_first, bias=bias)
    ours = from_torch(shaken(theirs), rule=causal())
    x, places = stream(), padded(KEPT, T)
    expected = theirs(turned(x, theirs), src_mask=hidden_future(), src_key_padding_mask=hidden_padding(KEPT, T))
    agree(ours(x, places, places), turned(expected, theirs), KEPT)


@each_norm_first
@each_bias
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_decoder_layers(norm_first, bias, batch_first, activation):
    theirs = nn.TransformerDecoderLayer(
        D, HEADS, 24, 0.1, activation, batch_first=batch_first, norm_first=norm_first, bias=bias
    )
    ours = from_torch(shaken(theirs))
    x, memory, places = stream(), stream(S), padded(KEPT, T)
    expected = theirs(
        turned(x, theirs),
        turned(memory, theirs),
        tgt_mask=hidden_future(),
        tgt_key_padding_mask=hidden_padding(KEPT, T),
        memory_key_padding_mask=hidden_padding(MEMORY, S),
    )
    got = ours(x, places, places, memory=EncoderOutput(memory, padded(MEMORY, S)))
    agree(got, turned(expected, theirs), KEPT)


@each_norm_first
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("gradients", [False, True])  # without them torch takes a fused path of its own
def test_encoders(norm_first, norm, gradients):
    layer = nn.TransformerEncoderLayer(D, HEADS, 24, batch_first=True, norm_first=norm_first)
    theirs = nn.TransformerEncoder(layer, 2, nn.LayerNorm(D) if norm else None, enable_nested_tensor=False)
    ours, x, places = from_torch(shaken(theirs)), stream(), padded(KEPT, T)
    with torch.set_grad_enabled(gradients):
        expected = theirs(x, src_key_padding_mask=hidden_padding(KEPT, T))
    agree(ours(x, places), expected, KEPT)


@each_norm_first
def test_decoders(norm_first):
    layer = nn.TransformerDecoderLayer(D, HEADS, 24, batch_first=True, norm_first=norm_first)
    theirs = shaken(nn.TransformerDecoder(layer, 2, nn.LayerNorm(D)))
    ours, x, memory, places = from_torch(theirs), stream(), stream(S), padded(KEPT, T)
    masks = {"tgt_key_padding_mask": hidden_padding(KEPT, T), "memory_key_padding_mask": hidden_padding(MEMORY, S)}
    expected = theirs(x, memory, tgt_mask=hidden_future(), **masks)
    agree(ours(x, places, EncoderOutput(memory, padded(MEMORY, S))), expected, KEPT)


@each_norm_first
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("batch_first", [True, False])
def test_whole_transformers(norm_first, batch_first):
    theirs = shaken(nn.Transformer(D, HEADS, 2, 2, 24, batch_first=batch_first, norm_first=norm_first))
    ours, x, source, places = from_torch(theirs), stream(), stream(S), padded(KEPT, T)
    expected = theirs(
        turned(source, theirs),
        turned(x, theirs),
        tgt_mask=hidden_future(),
        src_key_padding_mask=hidden_padding(MEMORY, S),
        tgt_key_padding_mask=hidden_padding(KEPT, T),
        memory_key_padding_mask=hidden_padding(MEMORY, S),
    )
    agree(ours(source, padded(MEMORY, S), x, places), turned(expected, theirs), KEPT)


def test_a_mask_taken_the_other_way_round_gives_something_else():
    """L47: what hides in one API shows in the next."""
    theirs = shaken(nn.TransformerEncoderLayer(D, HEADS, 24, batch_first=True))
    hidden = torch.rand(T, T) < 0.5
    hidden.fill_diagonal_(False)
    x = stream()
    expected = theirs(x, src_mask=hidden)
    agree(from_torch(theirs, rule=from_hidden(hidden))(x, whole(), whole()), expected)
    upside_down = from_torch(theirs, rule=from_hidden(~hidden))(x, whole(), whole())
    assert float((upside_down - expected).detach().abs().max()) > 0.1


def test_a_row_that_sees_nothing_attends_to_nothing():
    """torch gives NaN or 0, by whether it is asked for weights; ours gives 0, and what follows it is the bias."""
    theirs = shaken(nn.MultiheadAttention(D, HEADS, batch_first=True))
    hidden = hidden_padding([6, 0, 4], T)
    x = stream()
    fused, _ = theirs(x, x, x, key_padding_mask=hidden, need_weights=False)
    plain, _ = theirs(x, x, x, key_padding_mask=hidden, need_weights=True)
    got = from_torch(theirs, rule=from_hidden(hidden, padding=True))(x, whole(), whole())
    agree(got[[0, 2]], plain[[0, 2]])
    agree(got, fused)
    assert plain[1].isnan().all()
    torch.testing.assert_close(got[1], theirs.out_proj.bias.expand(T, -1), rtol=0, atol=0)


def test_weights_are_copies_and_nothing_random_happens():
    theirs = shaken(nn.TransformerDecoderLayer(D, HEADS, 24, 0.25)).float().train()
    theirs.linear1.weight.requires_grad_(False)
    before = torch.get_rng_state()
    ours = from_torch(theirs)
    assert torch.equal(torch.get_rng_state(), before)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float32}
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    assert [n for n, p in ours.named_parameters() if not p.requires_grad] == ["ffn.up_proj.weight"]
    assert not {p.data_ptr() for p in ours.parameters()} & {p.data_ptr() for p in theirs.parameters()}
    assert ours.training
    assert (ours.attention.dropout, ours.ffn.inner_dropout.p, ours.residual_dropout.p) == (0.25, 0.25, 0.25)


def test_gradients_agree_too():
    theirs = shaken(nn.TransformerEncoderLayer(D, HEADS, 24, batch_first=True))
    ours, x = from_torch(theirs, rule=causal()), stream()
    theirs(x, src_mask=hidden_future()).square().sum().backward()
    ours(x, whole(), whole()).square().sum().backward()
    q, k, v = theirs.self_attn.in_proj_weight.grad.chunk(3)
    for got, expected in ((ours.attention.q_proj, q), (ours.attention.k_proj, k), (ours.attention.v_proj, v)):
        torch.testing.assert_close(got.weight.grad, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.ffn.up_proj.weight.grad, theirs.linear1.weight.grad, rtol=1e-12, atol=1e-12)


def unequal_dropout():
    layer = nn.TransformerEncoderLayer(D, HEADS, 24)
    layer.dropout1.p = 0.5
    return layer


def other_norm():
    layer = nn.TransformerEncoderLayer(D, HEADS, 24)
    layer.norm1 = nn.RMSNorm(D)
    return layer


REFUSED = {
    "Linear": (lambda: nn.Linear(2, 2), "not Linear"),
    "bias_kv": (lambda: nn.MultiheadAttention(D, HEADS, add_bias_kv=True), "add_bias_kv"),
    "zero_attn": (lambda: nn.MultiheadAttention(D, HEADS, add_zero_attn=True), "add_zero_attn"),
    "memory": (lambda: nn.MultiheadAttention(D, HEADS, kdim=3, vdim=3), "give cross=True"),
    "activation": (lambda: nn.TransformerEncoderLayer(D, HEADS, 24, activation=torch.tanh), "has no name here"),
    "dropout": (unequal_dropout, "one probability serves all"),
    "norm": (other_norm, "only nn.LayerNorm"),
    "custom": (lambda: nn.Transformer(D, HEADS, 1, 1, 24, custom_encoder=nn.Identity()), "of its own kind"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_what_has_no_counterpart_is_named(make, message):
    with pytest.raises(UnsupportedError, match=message):
        from_torch(make())


def test_what_means_nothing_is_refused():
    with pytest.raises(InputError, match=r"cross=True belongs to nn\.MultiheadAttention"):
        from_torch(nn.TransformerEncoderLayer(D, HEADS, 24), cross=True)
    with pytest.raises(InputError, match="takes no rule"):
        from_torch(nn.MultiheadAttention(D, HEADS), cross=True, rule=causal())
    with pytest.raises(UnsupportedError, match="a memory has one size"):
        from_torch(nn.MultiheadAttention(D, HEADS, kdim=3, vdim=4), cross=True)
