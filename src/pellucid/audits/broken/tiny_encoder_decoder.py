"""A small encoder–decoder of torch's own layers: the healthy model of the broken ones that read a source."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pellucid.batch import Batch
from pellucid.probe import Capability, Probe, Visibility
from pellucid.visibility import causal, full

WIDTH = 16


class TinyEncoderDecoder(nn.Module):
    """The healthy model: one encoder layer and two decoder layers, told where padding is."""

    source_rules: tuple[Visibility, ...] = (full(),)

    def __init__(self, vocab_size: int = 23, positions: int = 32) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.table, self.places = nn.Embedding(vocab_size, WIDTH), nn.Embedding(positions, WIDTH)
            self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True)
            self.decoder = nn.ModuleList(
                nn.TransformerDecoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True) for _ in range(2)
            )
            self.out = nn.Linear(WIDTH, vocab_size)

    # the parts that broken models get wrong

    def pads(self, source: Batch) -> Tensor:
        """``Bool[B, S]``: source slots that the encoder hides."""
        return source.segments == 0

    def memory_pads(self, source: Batch) -> Tensor:
        """``Bool[B, S]``: memory slots that the decoder hides."""
        return self.pads(source)

    def source_mask(self, sources: int) -> Tensor | None:
        """``Bool[S, S]``: what the encoder hides besides padding; nothing."""
        return None

    def memory(self, x_BSD: Tensor) -> Tensor:
        """What the decoder reads of the encoder's output."""
        return x_BSD

    def memory_mask(self, targets: int, sources: int) -> Tensor | None:
        """``Bool[T, S]``: what is hidden besides padding; nothing."""
        return None

    # the model

    def forward(self, batch: Batch) -> Tensor:
        source = batch.source
        assert source is not None
        x_BSD = self.table(source.tokens) + self.places(source.positions)
        memory_BSD = self.memory(self.encoded(x_BSD, source))
        y_BTD = self.table(batch.tokens) + self.places(batch.positions)
        slots, sources = batch.shape[1], source.shape[1]
        hidden_BTT = torch.ones(slots, slots, dtype=torch.bool).triu(1) | (batch.segments == 0)[:, None, :]
        hidden_BTT = hidden_BTT & ~torch.eye(slots, dtype=torch.bool)  # pads see themselves: no row is empty
        for layer in self.decoder:
            y_BTD = layer(
                y_BTD,
                memory_BSD,
                tgt_mask=hidden_BTT.repeat_interleave(2, 0),
                memory_mask=self.memory_mask(slots, sources),
                memory_key_padding_mask=self.memory_pads(source),
            )
        return self.out(y_BTD)

    def encoded(self, x_BSD: Tensor, source: Batch) -> Tensor:
        """What the encoder makes of the source."""
        mask, pads_BS = self.source_mask(source.shape[1]), self.pads(source)
        if mask is None:
            plain_BSD: Tensor = self.encoder(x_BSD, src_key_padding_mask=pads_BS)
            return plain_BSD
        hidden_BSS = (mask | pads_BS[:, None, :]) & ~torch.eye(len(mask), dtype=torch.bool)  # no row is empty
        result_BSD: Tensor = self.encoder(x_BSD, src_mask=hidden_BSS.repeat_interleave(2, 0))
        return result_BSD

    def probe(self) -> TinyEncoderDecoderProbe:
        """How an audit calls this model."""
        return TinyEncoderDecoderProbe(self)


class TinyEncoderDecoderProbe(Probe):
    """Calls a :class:`TinyEncoderDecoder`."""

    capabilities: frozenset[Capability] = frozenset({"source", "padding"})
    memory_name = "encoder"

    def __init__(self, model: TinyEncoderDecoder) -> None:
        self.model, self.module, self.name = model, model, type(model).__name__
        self.vocab_size, self.max_length = model.table.num_embeddings, model.places.num_embeddings
        self.rules: tuple[Visibility, ...] = (causal(),) * len(model.decoder)
        self.source_rules = model.source_rules

    def logits(self, batch: Batch) -> Tensor:
        logits: Tensor = self.model(batch)
        return logits

    def with_module(self, module: nn.Module) -> TinyEncoderDecoderProbe:
        assert isinstance(module, TinyEncoderDecoder)
        return TinyEncoderDecoderProbe(module)
