"""Honest models in other people's styles, none of which knows Pellucid: what an audit must not accuse."""

import torch
from torch import nn

from pellucid.probe import Probe
from pellucid.visibility import causal


class PlainModel(nn.Module):
    """Stock post-norm encoder layers and a boolean mask of the "True hides" kind."""

    def __init__(self, vocab_size=23, width=16, heads=2, layers=2, positions=32):
        super().__init__()
        self.heads = heads
        self.token_table = nn.Embedding(vocab_size, width)
        self.place_table = nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 32, dropout=0.1, batch_first=True) for _ in range(layers)
        )
        self.out = nn.Linear(width, vocab_size)

    def forward(self, ids, places, documents):
        x = self.token_table(ids) + self.place_table(places)
        x = x.masked_fill((documents == 0)[..., None], 0.0)
        length = ids.shape[1]
        hidden = documents[:, :, None] != documents[:, None, :]
        hidden = hidden | (documents == 0)[:, None, :] | torch.ones(length, length).triu(1).bool()
        hidden = hidden & ~torch.eye(length).bool()  # pads look at themselves, so that no row is empty
        mask = hidden.repeat_interleave(self.heads, 0)
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return self.out(x)


class PlainProbe(Probe):
    """What a user writes for the model above; it can also be told its loss."""

    capabilities = frozenset({"padding", "packing", "embeddings", "loss"})

    def __init__(self, module):
        self.module, self.name, self.vocab_size, self.max_length = module, "plain", 23, 32
        self.rules = (causal(),) * 2

    def logits(self, batch):
        if batch.inputs_embeds is None:
            return self.module(batch.tokens, batch.positions, batch.segments)
        handle = self.module.token_table.register_forward_hook(lambda *_: batch.inputs_embeds)
        try:
            return self.module(batch.tokens, batch.positions, batch.segments)
        finally:
            handle.remove()

    def embed(self, batch):
        return self.module.token_table(batch.tokens)

    def loss(self, batch):
        labels = torch.where(batch.loss_mask, batch.tokens, -100)[:, 1:]
        scores = self.logits(batch)[:, :-1]
        total = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")
        return total, (labels != -100).sum()

    def with_module(self, module):
        return PlainProbe(module)


class Recurrent(nn.Module):
    """``forward(tokens)`` with no attention at all."""

    def __init__(self, vocab_size=23):
        super().__init__()
        self.table, self.rnn, self.out = (
            nn.Embedding(vocab_size, 12),
            nn.GRU(12, 12, batch_first=True),
            nn.Linear(12, vocab_size),
        )

    def forward(self, tokens):
        return self.out(self.rnn(self.table(tokens))[0])


class Convolution(nn.Module):
    """Two causal convolutions; ``ahead`` pads on both sides, as the default of many libraries does."""

    def __init__(self, ahead=False):
        super().__init__()
        self.lookahead = ahead
        self.table, self.out = nn.Embedding(23, 12), nn.Linear(12, 23)
        self.layers = nn.ModuleList(nn.Conv1d(12, 12, 3) for _ in range(2))

    def forward(self, tokens):
        x = self.table(tokens).mT
        for layer in self.layers:
            x = layer(nn.functional.pad(x, (1, 1) if self.lookahead else (2, 0))).tanh()
        return self.out(x.mT)


class Experts(nn.Module):
    """Tokens are gathered by expert, so that hidden content changes the shapes of every product."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(23, 64), nn.Linear(64, 23)
        self.past, self.route = nn.Linear(64, 64), nn.Linear(64, 3)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, tokens):
        x = self.table(tokens)
        x = x + self.past(x.cumsum(1) / torch.arange(1, tokens.shape[1] + 1)[:, None].to(x))
        chosen = self.route(x).argmax(-1)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mixed[chosen == number] = expert(x[chosen == number])
        return self.out(x + mixed)


class HalfPrecise(Recurrent):
    """Casts to float32 inside, whatever it is converted to."""

    def forward(self, tokens):
        x = self.table(tokens)
        x = (x.float() * 1.1).tanh().cumsum(1).to(x.dtype)
        return self.out(x)
