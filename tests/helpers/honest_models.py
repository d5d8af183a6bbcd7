"""Honest models in many styles, none of which knows Pellucid.

``TOKENS_ONLY`` are called ``forward(tokens)``; ``MASKED`` are told what is padding and where tokens stand.
"""

import functools
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pellucid.probe import Probe
from pellucid.visibility import causal, full, window

V, D = 19, 16


class Tokens(nn.Module):
    """A table, something in between, a head."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(V, D), nn.Linear(D, V)
        self.build()

    def build(self): ...

    def between(self, x):
        return x

    def forward(self, tokens):
        return self.out(self.between(self.table(tokens)))


def past(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


class PreNormStack(Tokens):
    def build(self):
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(D, 2, 32, batch_first=True, norm_first=True) for _ in range(2)
        )

    def between(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return x


class PostNormEncoder(Tokens):
    def build(self):
        layer = nn.TransformerEncoderLayer(D, 2, 32, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def between(self, x):
        return self.encoder(x, mask=~past(x.shape[1]))


class DecoderOfNothing(Tokens):
    """``nn.TransformerDecoder`` with one learned memory slot."""

    def build(self):
        self.memory = nn.Parameter(torch.randn(1, 1, D))
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(D, 2, 32, batch_first=True), 2)

    def between(self, x):
        return self.decoder(x, self.memory.expand(len(x), -1, -1), tgt_mask=~past(x.shape[1]))


class Lstm(Tokens):
    def build(self):
        self.rnn = nn.LSTM(D, D, 2, batch_first=True, dropout=0.2)

    def between(self, x):
        return self.rnn(x)[0]


class DilatedConvolution(Tokens):
    """With batch norm, as WaveNets have it."""

    def build(self):
        self.convolutions = nn.ModuleList(nn.Conv1d(D, D, 2, dilation=2**n) for n in range(3))

    def between(self, x):
        x = x.mT
        for convolution in self.convolutions:
            x = x + convolution(F.pad(x, (convolution.dilation[0], 0))).relu()
        return x.mT


class BatchNormalised(DilatedConvolution):
    def build(self):
        super().build()
        self.norm = nn.BatchNorm1d(D)
        with torch.no_grad():
            self.norm.running_mean.normal_()
            self.norm.running_var.uniform_(0.5, 2)

    def between(self, x):
        return self.norm(super().between(x).mT).mT


class Attention(Tokens):
    """One head, written out; ``turned`` and ``bias`` are where the styles differ."""

    def build(self):
        self.q, self.k, self.v = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.drop = nn.Dropout(0.1)

    def turned(self, x):
        return x

    def bias(self, length):
        return torch.zeros(())

    def sees(self, length):
        return past(length)

    def between(self, x):
        length = x.shape[1]
        scores = self.turned(self.q(x)) @ self.turned(self.k(x)).mT / math.sqrt(D) + self.bias(length).to(x)
        return x + self.drop(scores.masked_fill(~self.sees(length), -math.inf).softmax(-1)) @ self.v(x)


class Alibi(Attention):
    def bias(self, length):
        places = torch.arange(length)
        return -0.25 * (places[:, None] - places).abs()


class RelativeBuckets(Attention):
    """Distances fall into buckets that widen, as in T5."""

    def build(self):
        super().build()
        self.buckets = nn.Embedding(8, 1)

    def bias(self, length):
        back = (torch.arange(length)[:, None] - torch.arange(length)).clamp(min=0)
        far = 4 + (back.clamp(min=1).float().log2() * 1.5).long()
        return self.buckets(torch.where(back < 4, back, far).clamp(max=7))[..., 0]


class LazyRotary(Attention):
    """Tables grow when a longer request comes, and are kept in attributes."""

    def build(self):
        super().build()
        self.longest, self.tables = 0, {}

    def table_for(self, length, like):
        if length > self.longest:
            self.longest, self.tables = length, {}
        if like.dtype not in self.tables:
            rates = 100.0 ** (-torch.arange(D // 2) / (D // 2))
            angles = torch.arange(self.longest)[:, None] * rates
            self.tables[like.dtype] = angles.cos().to(like), angles.sin().to(like)
        return tuple(table[:length] for table in self.tables[like.dtype])

    def turned(self, x):
        cos, sin = self.table_for(x.shape[1], x)
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


class RotaryBuffers(LazyRotary):
    """The same tables as buffers that are registered anew."""

    def build(self):
        Attention.build(self)
        self.longest = 0

    def table_for(self, length, like):
        if length > self.longest:
            angles = torch.arange(length)[:, None] * 100.0 ** (-torch.arange(D // 2) / (D // 2))
            self.register_buffer("cos", angles.cos().to(like), persistent=False)
            self.register_buffer("sin", angles.sin().to(like), persistent=False)
            self.longest = length
        return self.cos[:length].to(like), self.sin[:length].to(like)


class LazyMask(Attention):
    """Tied weights, learned positions, and a mask that is built by the first request."""

    def build(self):
        super().build()
        self.out.weight = self.table.weight
        self.places = nn.Embedding(64, D)
        self.register_buffer("mask", None, persistent=False)

    def sees(self, length):
        if self.mask is None or len(self.mask) < length:
            self.mask = past(length)
        return self.mask[:length, :length]

    def between(self, x):
        return super().between(x * D**0.5 + self.places(torch.arange(x.shape[1])))


@functools.lru_cache(maxsize=8)
def _remembered_window(length):
    back = torch.arange(length)[:, None] - torch.arange(length)
    return (back >= 0) & (back < 4)


class CachedWindow(Attention):
    """A mask that a cache outside of the module remembers by length."""

    def sees(self, length):
        return _remembered_window(length)


class SharedHeads(Tokens):
    """Four query heads over one key head, by torch's kernel; normed queries and a bent output."""

    def build(self):
        self.q, self.kv = nn.Linear(D, 32), nn.Linear(D, 16)
        self.norm, self.o = nn.RMSNorm(8), nn.Linear(32, D)

    def between(self, x):
        q = self.norm(self.q(x).unflatten(-1, (4, 8)).transpose(1, 2))
        k, v = self.kv(x).unflatten(-1, (2, 1, 8)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, self.norm(k), v, is_causal=True, enable_gqa=True)
        return 3 * torch.tanh((x + self.o(mixed.transpose(1, 2).flatten(-2))) / 3)


class LinearAttention(Tokens):
    """Sums over the past in place of a softmax."""

    def build(self):
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))

    def between(self, x):
        q, k = F.elu(self.q(x)) + 1, F.elu(self.k(x)) + 1
        kv = (k[..., :, None] * self.v(x)[..., None, :]).cumsum(1)
        return x + torch.einsum("btd,btde->bte", q, kv) / torch.einsum("btd,btd->bt", q, k.cumsum(1))[..., None]


class LongConvolution(Tokens):
    """A causal filter as long as the sequence, by FFT: hidden content moves the last bits."""

    def build(self):
        self.filter = nn.Parameter(torch.randn(D, 64) / 8)

    def between(self, x):
        length, wide = x.shape[1], x if x.dtype == torch.float64 else x.float()
        spectrum = torch.fft.rfft(wide.mT, n=2 * length) * torch.fft.rfft(
            self.filter[:, :length].to(wide), n=2 * length
        )
        return x + torch.fft.irfft(spectrum, n=2 * length)[..., :length].mT.to(x)


class Scan(Tokens):
    """A state that decays by what it reads, step by step."""

    def build(self):
        self.gate, self.read = nn.Linear(D, D), nn.Linear(D, D)

    def between(self, x):
        state, outputs = torch.zeros_like(x[:, 0]), []
        for step in x.unbind(1):
            keep = self.gate(step).sigmoid()
            state = keep * state + (1 - keep) * self.read(step)
            outputs.append(state)
        return torch.stack(outputs, 1)


class TokenShift(Tokens):
    """Each token is mixed with the one before."""

    def build(self):
        self.share, self.up = nn.Parameter(torch.rand(D)), nn.Linear(D, D)

    def between(self, x):
        before = F.pad(x[:, :-1], (0, 0, 1, 0))
        return x + self.up(x * self.share + before * (1 - self.share)).relu().square()


class StochasticDepth(Tokens):
    """A branch that is left out at random in training."""

    def build(self):
        self.drop_prob, self.rnn = 0.2, nn.GRU(D, D, batch_first=True)

    def between(self, x):
        branch = self.rnn(x)[0]
        if not self.training or not self.drop_prob:
            return x + branch
        kept = (torch.rand(len(x), 1, 1) >= self.drop_prob).to(x) / (1 - self.drop_prob)
        return x + branch * kept


class LayerDrop(PreNormStack):
    """Layers that are skipped at random in training, by a number in a configuration."""

    def build(self):
        super().build()
        self.config = type("Config", (), {})()
        self.config.layerdrop = 0.5

    def between(self, x):
        mask = ~past(x.shape[1])
        for layer in self.layers:
            if not self.training or float(torch.rand(())) >= self.config.layerdrop:
                x = layer(x, src_mask=mask)
        return x


class LiteralDropout(Lstm):
    """Functional dropout that looks at the mode, with its probability written into the code."""

    def between(self, x):
        return F.dropout(super().between(x), 0.1, self.training)


class NoiseInTraining(Lstm):
    """Noise that no probability switches off, in train mode only."""

    def between(self, x):
        x = super().between(x)
        return x + torch.randn_like(x) / 10 if self.training else x


class Parametrised(Tokens):
    """A weight that is computed from others, with a power iteration in train mode."""

    def build(self):
        self.rnn = nn.GRU(D, D, batch_first=True)
        self.mixing = nn.utils.parametrizations.spectral_norm(nn.Linear(D, D))

    def between(self, x):
        return self.mixing(self.rnn(x)[0])


class Recomputed(PreNormStack):
    """Checkpointed layers in train mode."""

    def between(self, x):
        mask = ~past(x.shape[1])
        for layer in self.layers:
            x = checkpoint(layer, x, mask, use_reentrant=False) if self.training else layer(x, mask)
        return x


class Sinusoids(Attention):
    """A table of sines that ends, and raises there."""

    def build(self):
        super().build()
        angles = torch.arange(64)[:, None] / 100.0 ** (torch.arange(D // 2) / (D // 2))
        self.register_buffer("places", torch.cat([angles.sin(), angles.cos()], -1))

    def between(self, x):
        return super().between(x + self.places[: x.shape[1]].to(x))


class Float32Inside(Attention):
    """Softmax in float32 whatever it is given, as many do."""

    def build(self):
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))

    def between(self, x):
        scores = (self.q(x) @ self.k(x).mT).float() / math.sqrt(D)
        return x + scores.masked_fill(~past(x.shape[1]), -1e9).softmax(-1).to(x) @ self.v(x)


class Tuple(Lstm):
    """Returns more than logits; a wrapper takes the first."""

    def forward(self, tokens):
        return super().forward(tokens), {"length": tokens.shape[1]}


class TakesFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Tuple()

    def forward(self, tokens):
        return self.inner(tokens)[0]


class Routed(Tokens):
    """Two of four experts for every token, none dropped."""

    def build(self):
        self.before, self.route = nn.GRU(D, D, batch_first=True), nn.Linear(D, 4)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def between(self, x):
        x = self.before(x)[0]
        weights, chosen = self.route(x).softmax(-1).topk(2, -1)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = (weights * (chosen == number)).sum(-1, keepdim=True)
            mixed = mixed + share * expert(x)
        return x + mixed


class Scripted(nn.Module):
    """Simple enough for TorchScript."""

    def __init__(self):
        super().__init__()
        self.table, self.rnn, self.out = nn.Embedding(V, D), nn.GRU(D, D, batch_first=True), nn.Linear(D, V)
        self.drop = nn.Dropout(0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(self.rnn(self.table(tokens))[0]))


TOKENS_ONLY = (
    PreNormStack, PostNormEncoder, DecoderOfNothing, Lstm, DilatedConvolution, BatchNormalised, Attention, Alibi,
    RelativeBuckets, LazyRotary, RotaryBuffers, LazyMask, CachedWindow, SharedHeads, LinearAttention, LongConvolution,
    Scan, TokenShift, StochasticDepth, LayerDrop, LiteralDropout, NoiseInTraining, Parametrised, Recomputed, Sinusoids,
    Float32Inside, TakesFirst, Routed,
)  # fmt: skip


# ------------------------------------------------------------------------------------------------- with a mask


class Masked(nn.Module):
    """``forward(tokens, mask, places)``, the mask being True for real tokens."""

    causal = True

    def __init__(self):
        super().__init__()
        self.table, self.places, self.out = nn.Embedding(V, D), nn.Embedding(32, D), nn.Linear(D, V)
        self.build()

    def build(self): ...

    def forward(self, tokens, mask, places):
        return self.out(self.between(self.table(tokens) + self.places(places), mask))


class KeyPadding(Masked):
    """``nn.MultiheadAttention`` and what it calls a key padding mask; a pad sees itself."""

    def build(self):
        self.attention = nn.MultiheadAttention(D, 2, dropout=0.1, batch_first=True)

    def between(self, x, mask):
        length = x.shape[1]
        hidden = ~past(length) | ~mask[:, None, :]
        hidden = hidden & ~torch.eye(length, dtype=torch.bool)
        return x + self.attention(x, x, x, attn_mask=hidden.repeat_interleave(2, 0), need_weights=False)[0]


class FastPath(Masked):
    """Stock encoder layers, which take a fast path without gradients; rows without tokens hide nothing."""

    causal = False

    def build(self):
        layer = nn.TransformerEncoderLayer(D, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def between(self, x, mask):
        return self.encoder(x, src_key_padding_mask=~mask & mask.any(1, keepdim=True))


class FiniteMinimum(Masked):
    """The smallest number of the dtype is put where nothing may be seen."""

    def build(self):
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))

    def between(self, x, mask):
        seen = past(x.shape[1]) & mask[:, None, :]
        scores = (self.q(x) @ self.k(x).mT / 4).masked_fill(~seen, torch.finfo(x.dtype).min)
        return x + scores.softmax(-1) @ self.v(x)


class BooleanKernel(FiniteMinimum):
    """Torch's kernel with a boolean mask; what sees nothing is 0."""

    def between(self, x, mask):
        seen = past(x.shape[1]) & mask[:, None, :]
        seen = seen | (torch.eye(x.shape[1], dtype=torch.bool) & ~mask[:, None, :])
        heads = [part(x)[:, None] for part in (self.q, self.k, self.v)]
        return x + F.scaled_dot_product_attention(*heads, seen[:, None])[:, 0]


class Gathered(FiniteMinimum):
    """Padding is taken out before attention and put back afterwards."""

    def between(self, x, mask):
        mixed = torch.zeros_like(x)
        for row, real in enumerate(mask):
            if real.any():
                held = x[row, real][None, None]
                heads = [part(held) for part in (self.q, self.k, self.v)]
                mixed[row, real] = F.scaled_dot_product_attention(*heads, is_causal=True)[0, 0]
        return x + mixed


class MaskedMean(Masked):
    """Every token is moved by the mean of the real ones; an empty row has none."""

    causal = False

    def build(self):
        self.up = nn.Linear(D, D)

    def between(self, x, mask):
        real = mask[..., None].to(x)
        return x + self.up((x * real).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp(min=1))


class HeldState(Masked):
    """A recurrence that stands still at pads."""

    def build(self):
        self.cell = nn.GRUCell(D, D)

    def between(self, x, mask):
        state, outputs = torch.zeros_like(x[:, 0]), []
        for step, real in zip(x.unbind(1), mask.unbind(1), strict=True):
            state = torch.where(real[:, None], self.cell(step, state), state)
            outputs.append(state)
        return torch.stack(outputs, 1)


class MaskedProbe(Probe):
    """Tokens, a mask and places."""

    capabilities = frozenset({"padding", "positions", "embeddings"})
    max_length = 32

    def __init__(self, module):
        self.module, self.name, self.vocab_size = module, type(module).__name__, V
        self.rules = (causal() if module.causal else full(),)

    def logits(self, batch):
        handle = None
        if batch.inputs_embeds is not None:
            handle = self.module.table.register_forward_hook(lambda *_: batch.inputs_embeds)
        try:
            return self.module(batch.tokens, batch.token_mask, batch.positions)
        finally:
            if handle is not None:
                handle.remove()

    def embed(self, batch):
        return self.module.table(batch.tokens)

    def with_module(self, module):
        return MaskedProbe(module)


MASKED = (KeyPadding, FastPath, FiniteMinimum, BooleanKernel, Gathered, MaskedMean, HeldState)
WINDOWED = {CachedWindow: (causal() & window(4),)}
