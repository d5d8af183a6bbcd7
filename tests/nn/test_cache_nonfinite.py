"""NaN and Inf behind a cache: found where slots are appended, and as loud as in one pass, on a CPU and elsewhere."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.layers import in_chunks, laid_out, new_cache, packed, piece, run
from helpers.tiny import tiny_model
from pellucid.data import Batch
from pellucid.nn import MLA, ContiguousCache, EncoderOutput, PreNormBlock, RMSNorm, Rotary
from pellucid.nn.attention import AttentionOptions, CrossAttention, GroupedQueryAttention
from pellucid.nn.backends import inputs
from pellucid.visibility import Coordinates, causal, window

BACKENDS = ["auto", "reference", "sdpa", "varlen"]
NAN, INF = float("nan"), float("inf")
VIEWS = {"view", "slice", "transpose", "unsqueeze", "squeeze", "expand", "permute", "detach", "alias", "_unsafe_view"}


@pytest.fixture(params=["CPU", "other device"])
def device(request, monkeypatch):
    """The second is a CPU that nobody asks for a number, as no other device is."""
    if request.param == "other device":
        monkeypatch.setattr(inputs, "can_read", lambda _: False)


def part(kind, rule=None, backend="auto"):
    torch.manual_seed(0)
    rule, options = causal() if rule is None else rule, AttentionOptions(backend=backend)
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4}
    if kind == "grouped":
        return GroupedQueryAttention(16, rule=rule, options=options, rotary=Rotary(4), **heads).double()
    sizes = {"q_lora_rank": None, "kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
    form = {"absorbed": kind == "absorbed", "norm": RMSNorm, "options": options}
    return MLA(16, num_heads=4, rule=rule, rotary=Rotary(4), **sizes, **form).double()


def layer(attention):
    """Attention alone: what it reads is what it is given, so that NaN of one token reaches others by attention only."""
    none = {"attn_norm": nn.Identity(), "ffn_norm": nn.Identity()}
    return PreNormBlock(attention=attention, ffn=nn.Identity(), dropout=0.0, **none)


def tokens(length, rows=1):
    return torch.randn(rows, length, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["grouped", "explicit", "absorbed"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_query_gets_nan_where_it_sees_one_and_only_there(kind, backend, bad):
    """Window 3: token 2 of six is seen by tokens 2, 3 and 4, whatever chunk they come in."""
    block = layer(part(kind, causal() & window(3), backend))
    whole, x = laid_out((7, 7), (0, 0), 7), tokens(7, rows=2)
    clean = run([block], x, whole)
    x[0, 2, 5] = bad
    for chunks in ([7], [3, 4], [2, 1, 1, 1, 2], [1] * 7):
        got = in_chunks([block], x, whole, chunks)
        assert got.isnan().any(-1).nonzero().tolist() == [[0, 2], [0, 3], [0, 4]], chunks
        sound = ~got.isnan().any(-1)
        torch.testing.assert_close(got[sound], clean[sound], atol=1e-10, rtol=0)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("kind", ["grouped", "explicit", "absorbed"])
def test_an_earlier_document_stays_apart(kind):
    block, x = layer(part(kind)), tokens(5)
    x[0, 1] = NAN
    cache = new_cache([block], 1, 9)
    run([block], x, packed(3, 2), cache)
    assert not run([block], tokens(1), Coordinates.range(1), cache).isnan().any()


@pytest.mark.usefixtures("device")
def test_the_marks_follow_their_slots():
    block, x = layer(part("grouped")), tokens(4, rows=2)
    x[0, 2] = NAN
    cache = new_cache([block], 2, 9)
    run([block], x, Coordinates.range(4, 2), cache)

    def rows_with_nan(cache):
        return run([block], tokens(1, cache.rows), Coordinates.range(1, cache.rows), cache).isnan().any(-1)[:, 0]

    cache.reorder(torch.tensor([1, 0, 0]))
    copy = cache.snapshot()
    assert rows_with_nan(cache).tolist() == [False, True, True]
    cache.crop(3)
    assert rows_with_nan(cache).tolist() == [False, True, True]
    cache.crop(2)
    assert rows_with_nan(cache).tolist() == [False] * 3, "the slot was written again"
    assert rows_with_nan(copy).tolist() == [False, True, True], "a copy has marks of its own"


@pytest.mark.usefixtures("device")
def test_a_number_too_large_for_the_cache_is_finite_in_its_own_pass_alone():
    cache = ContiguousCache(shapes=[[(1, 1), (1, 1)]], rows=1, capacity=4, dtype=torch.float16)
    large = torch.tensor([1.0, 1e6]).view(1, 2, 1, 1)
    cache.begin_append(Coordinates.range(2))
    (k, _), nonfinite = cache.layers[0].append(large, torch.ones_like(large))
    assert k.flatten().tolist() == [1.0, 1e6]
    assert not nonfinite.any()
    cache.commit()
    cache.begin_append(Coordinates.range(1))
    (k, _), nonfinite = cache.layers[0].append(large[:, :1], large[:, :1])
    assert k.flatten().tolist() == [1.0, 0.0, 1.0]
    assert nonfinite.tolist() == [[False, True, False]]


@pytest.mark.usefixtures("device")
def test_a_finite_latent_whose_keys_are_too_large():
    """Half the rows of the matrix make Inf of a latent: NaN for those who see it, nothing for the document after it."""
    mla = part("explicit")
    block, x = layer(mla), tokens(4)
    with torch.no_grad():
        mla.kv_b_proj.weight[:4] *= 1e200
        mla.kv_a_proj.weight[:6] *= 1e-3
    mla.kv_a_norm = nn.Identity()
    x[0, 1] *= 1e150
    cache = new_cache([block], 1, 9)
    first = run([block], x, packed(3, 1), cache)
    second = run([block], tokens(2), Coordinates.range(2), cache)
    assert first.isnan().any(-1).tolist() == [[False, True, True, False]]
    assert not second.isnan().any()


@pytest.mark.usefixtures("device")
def test_a_memory_is_looked_at_once(monkeypatch):
    torch.manual_seed(0)
    cross = CrossAttention(16, num_heads=4, num_kv_heads=2, head_dim=4).double()
    norms = {name: nn.Identity() for name in ("attn_norm", "ffn_norm", "cross_norm")}
    block = PreNormBlock(attention=part("grouped"), ffn=nn.Identity(), cross_attention=cross, dropout=0.0, **norms)
    states, x = tokens(3, rows=2), tokens(3, rows=2)
    states[1, 2] = INF
    memory = EncoderOutput(states, Coordinates.range(3, 2))
    whole = Coordinates.range(3, 2)
    expected = run([block], x, whole, memory=memory)
    cache = new_cache([block], 2, 5)
    got = [run([block], x[:, :1], piece(whole, 0, 1), cache, memory)]
    sizes, real = [], inputs.replace_nonfinite
    monkeypatch.setattr(inputs, "replace_nonfinite", lambda *t: sizes.append(t[0].shape[1]) or real(*t))
    got += [run([block], x[:, at : at + 1], piece(whole, at, at + 1), cache) for at in (1, 2)]
    assert sizes == []
    torch.testing.assert_close(torch.cat(got, 1), expected, atol=1e-10, rtol=0, equal_nan=True)
    assert expected.isnan().all(-1).any(1).tolist() == [False, True]


class Reads(TorchDispatchMode):
    """Which operations, views apart, read all slots of a cache."""

    def __init__(self, cache):
        super().__init__()
        self.slots, self.names = cache.length + 1, []
        self.stores = {tensor.untyped_storage().data_ptr() for layer in cache.layers for tensor in layer.tensors}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        flat = [x for x in args if isinstance(x, torch.Tensor)]
        name = function.overloadpacket.__name__
        whole = [x for x in flat if x.untyped_storage().data_ptr() in self.stores and self.slots in x.shape]
        if whole and name not in VIEWS:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("rows", [[[1, 2, 3, 4, 5]], [[1, 2, 3, 4, 5], [6, 7]]], ids=["whole", "padded"])
def test_a_step_reads_the_cache_with_the_kernel_alone(rows):
    model = tiny_model(dtype=torch.float32)
    cache = model.new_cache(len(rows), 11)
    with torch.no_grad():
        model(Batch.from_rows(rows), cache=cache)
        batch = Batch.from_rows([[8]] * len(rows))
        with Reads(cache) as reads:
            model(batch, cache=cache)
    assert reads.names == ["_scaled_dot_product_flash_attention_for_cpu"] * 2
