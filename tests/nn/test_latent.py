"""Latent attention: the paper's formula head by head, and the absorbed form, which must be the same numbers."""

import math

import pytest
import torch
from torch import nn

from helpers.layers import (
    CHUNKS,
    assert_chunks_agree,
    assert_unread_slots_never_matter,
    laid_out,
    new_cache,
    packed,
    run,
)
from pellucid.errors import InputError, ShapeError, UnsupportedError
from pellucid.nn import MLA, PreNormBlock, RMSNorm, Rotary
from pellucid.nn.positions import RelativeBias, YarnScaling
from pellucid.visibility import Coordinates, causal, full, sinks, window

D, N, R, P, Q, U = 12, 3, 8, 4, 6, 5
BACKENDS = ["reference", "sdpa", "varlen"]
YARN = YarnScaling(4.0, 64, mscale=1.0, mscale_all_dim=0.8)

OPTIONS = {
    "plain": lambda: {},
    "no q rank": lambda: {"q_lora_rank": None},
    "biases": lambda: {"biases": ("q_a", "kv_a", "o")},
    "interleaved": lambda: {"rotary": Rotary(P, interleaved=True)},
    "yarn": lambda: {"rotary": Rotary(P, scaling=YARN)},
    "softcap": lambda: {"softcap": 0.5},
    "scale": lambda: {"scale": 1.0},
    "large rank": lambda: {"kv_lora_rank": 40, "q_lora_rank": 30},
}


def make(name="plain", *, absorbed=False, **changes):
    torch.manual_seed(1)
    words = {
        "num_heads": N, "q_lora_rank": 7, "kv_lora_rank": R, "qk_nope_head_dim": Q, "qk_rope_head_dim": P, "v_head_dim": U, "rule": causal(),
        "rotary": Rotary(P), "norm": RMSNorm, **OPTIONS[name](), **changes,
    }  # fmt: skip
    part = MLA(D, absorbed=absorbed, **words).double().eval()
    with torch.no_grad():
        for parameter in part.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return part


def layer(attention):
    class Nothing(nn.Module):
        def forward(self, x):
            return torch.zeros_like(x)

    return PreNormBlock(
        attention=attention, ffn=Nothing(), attn_norm=nn.Identity(), ffn_norm=nn.Identity(), dropout=0.0
    )


def stream(rows=2, slots=5):
    return torch.randn(rows, slots, D, dtype=torch.float64)


def written_out(part, x, places, scale):
    """DeepSeek-V2, eq. 9 to 19, one head and one query at a time."""
    queries = part.q_b_proj(part.q_a_norm(part.q_a_proj(x))) if part.has_q_lora else part.q_proj(x)
    low = part.kv_a_proj(x)
    latent = part.kv_a_norm(low[..., : part.kv_lora_rank])
    shared = part.rotary(low[..., None, part.kv_lora_rank :], places)[:, :, 0]
    out = torch.zeros(*x.shape[:2], N * U, dtype=torch.float64)
    for head in range(N):
        own = queries[..., head * (Q + P) : (head + 1) * (Q + P)]
        rows = part.kv_b_proj.weight[head * (Q + U) : (head + 1) * (Q + U)]
        keys = torch.cat([latent @ rows[:Q].T, shared], -1)
        query = torch.cat([own[..., :Q], part.rotary(own[..., None, Q:], places)[:, :, 0]], -1)
        for row in range(len(x)):
            for t in range(x.shape[1]):
                scores = scale * keys[row, : t + 1] @ query[row, t]
                if part.softcap:
                    scores = part.softcap * (scores / part.softcap).tanh()
                values = latent[row, : t + 1] @ rows[Q:].T
                out[row, t, head * U : (head + 1) * U] = scores.softmax(0) @ values
    return part.o_proj(out)


@pytest.mark.parametrize("absorbed", [False, True, "auto"])
@pytest.mark.parametrize("option", OPTIONS)
def test_it_is_the_papers_formula(option, absorbed):
    """B133: the scale is that of a head's query, in the absorbed form too, whose vectors are longer."""
    part, x, places = make(option, absorbed=absorbed), stream(), Coordinates.range(5, 2)
    plain = 10**-0.5
    scale = {"scale": 1.0, "yarn": plain * (0.1 * 0.8 * math.log(4) + 1) ** 2}.get(option, plain)
    torch.testing.assert_close(part(x, places, places), written_out(part, x, places, scale), atol=1e-10, rtol=0)


def test_no_option_does_nothing():
    x, places = stream(), Coordinates.range(5, 2)
    outs = [make(option)(x, places, places) for option in OPTIONS]
    for i, a in enumerate(outs):
        for b in outs[:i]:
            assert (a - b).abs().max() > 1e-4


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
@pytest.mark.parametrize("rule", [causal(), full(), causal() & (window(2) | sinks(1))], ids=str)
@pytest.mark.parametrize(
    "places",
    [Coordinates.range(6, 2), laid_out((6, 3), (0, 2), 6), packed(3, 2, 1), laid_out((0, 4), (0, 0), 6)],
    ids=["full", "padded", "packed", "empty row"],
)
def test_both_forms_agree_in_numbers_and_gradients(places, rule, backend):
    x = stream(*places.shape).requires_grad_()
    outcomes = []
    for absorbed in (False, True):
        part = make(absorbed=absorbed, rule=rule, backend=backend)
        out = part(x, places, places)
        gradients = torch.autograd.grad((out * torch.arange(D)).square().sum(), [x, *part.parameters()])
        outcomes.append([out, *gradients])
    for explicit, absorbed in zip(*outcomes, strict=True):
        size = explicit.abs().max().clamp(min=1)
        torch.testing.assert_close(absorbed / size, explicit / size, atol=1e-10, rtol=0)


def test_both_forms_agree_under_a_bias_and_a_softcap():
    places, bias = (
        laid_out((6, 3), (0, 2), 6),
        RelativeBias(N, bidirectional=False, num_buckets=8, max_distance=6).double(),
    )
    nn.init.normal_(bias.weight, std=5.0)
    x, added = stream(2, 6), bias(places, places)
    explicit, absorbed = (make("softcap", absorbed=form)(x, places, places, bias=added) for form in (False, True))
    torch.testing.assert_close(absorbed, explicit, atol=1e-10, rtol=0)
    assert (explicit - make("softcap")(x, places, places)).abs().max() > 1e-3


@pytest.mark.parametrize("absorbed", [False, True, "auto"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_chunks_through_a_cache_equal_one_pass(option, chunks, absorbed):
    """P-CACHE, B133; the second row left-padded."""
    same_group = [layer(make(option, absorbed=absorbed)), layer(make(option, absorbed=absorbed))]
    assert_chunks_agree(same_group, stream(2, 9), laid_out((9, 7), (0, 2), 9), chunks)


@pytest.mark.parametrize("absorbed", [False, True, "auto"])
def test_a_bias_stays_through_a_cache(absorbed):
    """B58."""
    bias = RelativeBias(N, bidirectional=False, num_buckets=8, max_distance=6).double()
    nn.init.normal_(bias.weight, std=5.0)
    assert_chunks_agree(
        [layer(make(absorbed=absorbed))], stream(2, 9), laid_out((9, 7), (0, 2), 9), [3, 1, 5], None, bias
    )


def test_a_cache_holds_the_latent_and_one_key():
    part = make()
    assert part.cache_shapes == ((R,), (P,))
    cache = new_cache([layer(part)], 2, 9)
    run([layer(part)], stream(2, 4), Coordinates.range(4, 2), cache)
    assert [tuple(tensor.shape) for tensor in cache.layers[0].tensors] == [(2, 9, R), (2, 9, P)]
    cache.reorder(torch.tensor([1, 1, 0]))
    assert [tuple(tensor.shape) for tensor in cache.layers[0].tensors] == [(3, 9, R), (3, 9, P)]


@pytest.mark.parametrize(("absorbed", "expected"), [("auto", [1, 0, 0]), (False, [1, 1, 1]), (True, [0, 0, 0])])
def test_auto_absorbs_where_few_queries_meet_many_latents(absorbed, expected):
    """A prompt makes keys and values; a step over it makes none."""
    part = make(absorbed=absorbed)
    same_group, cache, calls = [layer(part)], new_cache([layer(part)], 1, 60), []
    part.kv_b_proj.register_forward_hook(lambda *_: calls.append(1))
    counts = []
    for length in (50, 1, 1):
        calls.clear()
        run(same_group, stream(1, length), Coordinates.range(length), cache)
        counts.append(len(calls))
    assert counts == expected
    calls.clear()
    run(same_group, stream(1, 1), Coordinates.range(1))
    assert len(calls) == (absorbed is not True), "without a cache auto is the explicit form"


@pytest.mark.parametrize("absorbed", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_what_unused_and_padded_slots_hold_never_matters(bad, absorbed):
    """B20, B25: outputs and gradients as if it were 0, also those of the matrix that reads old latents."""
    same_group = [layer(make(absorbed=absorbed)), layer(make("biases", absorbed=absorbed))]
    assert_unread_slots_never_matter(same_group, stream(2, 9), bad, atol=1e-12)


@pytest.mark.parametrize("absorbed", [False, True])
def test_later_tokens_padding_and_other_documents_never_matter(absorbed):
    """P-CAUSAL, P-PAD, P-PACK, for other numbers and for NaN."""
    same_group, x = [layer(make(absorbed=absorbed)), layer(make(absorbed=absorbed))], stream(1, 6)
    plain = run(same_group, x, Coordinates.range(6))
    apart = run(same_group, x, packed(3, 2, 1))
    for other in (1e4, float("nan")):
        for j in range(1, 6):
            y = x.clone()
            y[0, j] = other
            assert torch.equal(run(same_group, y, Coordinates.range(6))[0, :j], plain[0, :j])
        y = x.clone()
        y[0, :3] = other
        assert torch.equal(run(same_group, y, packed(3, 2, 1))[0, 3:], apart[0, 3:])
        places = laid_out((3,), (2,), 6)
        y = x.clone()
        y[~places.real] = other
        alone = run(same_group, x[:, 2:5], Coordinates.range(3))
        torch.testing.assert_close(run(same_group, y, places)[:, 2:5], alone, atol=1e-10, rtol=0)


@pytest.mark.parametrize("absorbed", [False, True])
def test_a_row_that_sees_nothing_gives_zero(absorbed):
    """B23."""
    same_group = [layer(make(absorbed=absorbed)), layer(make(absorbed=absorbed))]
    x = stream(3, 4)
    x[1] = float("nan")
    x.requires_grad_()
    out = run(same_group, x, laid_out((4, 0, 2), (0, 0, 1), 4))
    assert (out[1] == 0).all()
    out.square().sum().backward()
    assert (x.grad[1] == 0).all()
    for name, parameter in nn.ModuleList(same_group).named_parameters():
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_weights_are_those_of_the_forward_pass():
    for option in OPTIONS:
        part, x, places = make(option), stream(), laid_out((5, 3), (0, 2), 5)
        weights = part.weights(x, places)
        assert (weights[~causal().mask(places, places).expand_as(weights)] == 0).all()
        latent, _ = part._latents(x, places)
        v = torch.einsum("bsr,nur->bsnu", latent, part.up()[1])
        out = part.o_proj(torch.einsum("bnts,bsnu->btnu", weights, v).flatten(-2))
        torch.testing.assert_close(out, part(x, places, places), atol=1e-10, rtol=0)


def test_names_in_the_state_dict():
    with_rank = {"q_a_proj.weight", "q_a_norm.weight", "q_b_proj.weight"}
    rest = {f"{p}.weight" for p in ("kv_a_proj", "kv_a_norm", "kv_b_proj", "o_proj")}
    assert set(make().state_dict()) == with_rank | rest
    assert set(make("no q rank").state_dict()) == {"q_proj.weight"} | rest
    biases = {"q_a_proj.bias", "kv_a_proj.bias", "o_proj.bias"}
    assert set(make("biases").state_dict()) == with_rank | rest | biases


def test_dropout_is_for_training_alone():
    for absorbed in (False, True):
        part, x, places = make(dropout=0.9, absorbed=absorbed), stream(), Coordinates.range(5, 2)
        assert torch.equal(part(x, places, places), make(absorbed=absorbed)(x, places, places))
        part.train()
        assert not torch.equal(part(x, places, places), part(x, places, places))


def test_what_does_not_fit_is_named():
    with pytest.raises(ShapeError, match="qk_rope_head_dim is 4, but the rotary turns 8; make them agree"):
        make(rotary=Rotary(8))
    with pytest.raises(
        InputError, match=r"biases names \['q_a'\], but .* kv_a, o and, with a q_lora_rank \(here None\), q_a"
    ):
        make("no q rank", biases=("q_a",))
    with pytest.raises(InputError, match=r"biases names \['kv_b'\]"):
        make(biases=("kv_b",))
    with pytest.raises(UnsupportedError, match="sdpa has no softcap"):
        make("softcap", backend="sdpa")(stream(), Coordinates.range(5, 2), Coordinates.range(5, 2))
