"""Twins of an encoder–decoder: sources that are cut, hidden, mixed up or padded. Stock layers of torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pellucid.audits.twins.twin import Twin
from pellucid.batch import Batch
from pellucid.probe import Capability, Probe, Visibility
from pellucid.visibility import causal, full, lookahead

WIDTH = 16


class Pair(nn.Module):
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

    # the parts that twins get wrong

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

    def probe(self) -> PairProbe:
        """How an audit calls this model."""
        return PairProbe(self)


class PairProbe(Probe):
    """Calls a :class:`Pair`."""

    capabilities: frozenset[Capability] = frozenset({"source", "padding"})
    memory_name = "encoder"

    def __init__(self, pair: Pair) -> None:
        self.pair, self.module, self.name = pair, pair, type(pair).__name__
        self.vocab_size, self.max_length = pair.table.num_embeddings, pair.places.num_embeddings
        self.rules: tuple[Visibility, ...] = (causal(),) * len(pair.decoder)
        self.source_rules = pair.source_rules

    def logits(self, batch: Batch) -> Tensor:
        logits: Tensor = self.pair(batch)
        return logits

    def with_module(self, module: nn.Module) -> PairProbe:
        assert isinstance(module, Pair)
        return PairProbe(module)


class CrossIsCausal(Pair):
    """The decoder's causal mask was handed to cross-attention too: query 0 sees the first source token only."""

    def memory_mask(self, targets: int, sources: int) -> Tensor:
        return torch.ones(targets, sources, dtype=torch.bool).triu(1)


class CrossHasTheWindow(Pair):
    """The decoder's window was inherited by cross-attention: of a long source only the last tokens are read."""

    def memory_mask(self, targets: int, sources: int) -> Tensor:
        hidden_TS = torch.zeros(targets, sources, dtype=torch.bool)
        hidden_TS[:, : sources - 3] = True
        return hidden_TS


class CrossSeesPads(Pair):
    """The encoder hides the source's padding, the decoder does not."""

    def memory_pads(self, source: Batch) -> Tensor:
        return torch.zeros_like(source.segments, dtype=torch.bool)


class EncoderSeesPads(Pair):
    """The decoder hides the source's padding, the encoder does not."""

    def pads(self, source: Batch) -> Tensor:
        return torch.zeros_like(source.segments, dtype=torch.bool)

    def memory_pads(self, source: Batch) -> Tensor:
        return source.segments == 0


class LosesTheLastSourceToken(Pair):
    """An off-by-one in the source's length hides its last token."""

    def pads(self, source: Batch) -> Tensor:
        last_BS = source.token_mask & ~torch.roll(source.token_mask, -1, 1)
        last_BS[:, -1] = source.token_mask[:, -1]
        return (source.segments == 0) | (last_BS & (source.positions > 0))


class FirstSourceForAll(Pair):
    """The memory of row 0 is read by every row, as when a cross cache is not reordered."""

    def memory(self, x_BSD: Tensor) -> Tensor:
        return x_BSD[:1].expand_as(x_BSD)


class MemoryMeansOverBatch(Pair):
    """The memory is centred over the rows of the batch."""

    def memory(self, x_BSD: Tensor) -> Tensor:
        return x_BSD - 0.2 * x_BSD.mean(0, keepdim=True)


class EncoderIsCausal(Pair):
    """The decoder's causal mask was handed to the encoder: a slot of the memory knows nothing of what follows."""

    def source_mask(self, sources: int) -> Tensor | None:
        return torch.ones(sources, sources, dtype=torch.bool).triu(1)


class EncoderSeesNeighbours(Pair):
    """The encoder's window was left at its smallest: a slot knows of the two tokens beside it."""

    def source_mask(self, sources: int) -> Tensor | None:
        places = torch.arange(sources)
        return (places[:, None] - places).abs() > 1


class StreamingPair(Pair):
    """The encoder looks two tokens ahead, as one that listens must."""

    source_rules = (lookahead(2),)
    ahead = 2

    def source_mask(self, sources: int) -> Tensor | None:
        return torch.ones(sources, sources, dtype=torch.bool).triu(self.ahead + 1)


class EncoderListensTooFar(StreamingPair):
    """An encoder with a right context of two looks three tokens ahead."""

    ahead = 3


TWINS = tuple(
    Twin(make, "cross")
    for make in (
        CrossIsCausal,
        CrossHasTheWindow,
        CrossSeesPads,
        EncoderSeesPads,
        LosesTheLastSourceToken,
        FirstSourceForAll,
        MemoryMeansOverBatch,
        EncoderIsCausal,
        EncoderSeesNeighbours,
        EncoderListensTooFar,
    )
)
