"""Models of an encoder–decoder: sources that are cut, hidden, mixed up or padded. Stock layers of torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from broken_models.catalog import caught_by
from pellucid.batch import Batch
from pellucid.probe import Capability, Probe, Visibility
from pellucid.visibility import causal, full, lookahead

WIDTH, HEADS = 16, 2


class TinyEncoderDecoder(nn.Module):
    """The healthy model: one encoder layer and two decoder layers, which are told where padding is."""

    source_rules: tuple[Visibility, ...] = (full(),)

    def __init__(self, vocab_size: int = 23, positions: int = 32) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.table, self.positions = nn.Embedding(vocab_size, WIDTH), nn.Embedding(positions, WIDTH)
            self.encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.1, batch_first=True)
            self.decoder = nn.ModuleList(
                nn.TransformerDecoderLayer(WIDTH, HEADS, 32, dropout=0.1, batch_first=True) for _ in range(2)
            )
            self.out = nn.Linear(WIDTH, vocab_size)

    # the parts that broken models get wrong; in masks, True hides

    def pads(self, source: Batch) -> Tensor:
        """``Bool[B, S]``: source slots that the encoder hides."""
        return source.segments == 0

    def memory_pads(self, source: Batch) -> Tensor:
        """``Bool[B, S]``: encoder outputs that the decoder hides."""
        return self.pads(source)

    def source_mask(self, sources: int) -> Tensor | None:
        """``Bool[S, S]``: what the encoder hides besides padding; nothing."""
        return None

    def memory(self, x_BSD: Tensor) -> Tensor:
        """What the decoder reads of the encoder's output."""
        return x_BSD

    def memory_mask(self, targets: int, sources: int) -> Tensor | None:
        """``Bool[T, S]``: what the decoder hides besides padding; nothing."""
        return None

    # the model

    def forward(self, batch: Batch) -> Tensor:
        assert batch.source is not None
        slots, sources = batch.shape[1], batch.source.shape[1]
        memory_BSD = self.memory(self.encode(batch.source))
        y_BTD = self.table(batch.tokens) + self.positions(batch.positions)
        hidden_BTT = torch.ones(slots, slots, dtype=torch.bool).triu(1) | (batch.segments == 0)[:, None, :]
        hidden_BTT = hidden_BTT & ~torch.eye(slots, dtype=torch.bool)  # pads see themselves: no row is empty
        masks = {"tgt_mask": hidden_BTT.repeat_interleave(HEADS, 0), "memory_mask": self.memory_mask(slots, sources)}
        for layer in self.decoder:
            y_BTD = layer(y_BTD, memory_BSD, **masks, memory_key_padding_mask=self.memory_pads(batch.source))
        return self.out(y_BTD)

    def encode(self, source: Batch) -> Tensor:
        """The encoder's output."""
        x_BSD = self.table(source.tokens) + self.positions(source.positions)
        mask_SS, pads_BS = self.source_mask(source.shape[1]), self.pads(source)
        if mask_SS is None:
            return self.encoder(x_BSD, src_key_padding_mask=pads_BS)
        hidden_BSS = (mask_SS | pads_BS[:, None, :]) & ~torch.eye(len(mask_SS), dtype=torch.bool)  # no row is empty
        return self.encoder(x_BSD, src_mask=hidden_BSS.repeat_interleave(HEADS, 0))

    def probe(self) -> TinyEncoderDecoderProbe:
        """How an audit calls this model."""
        return TinyEncoderDecoderProbe(self)


class TinyEncoderDecoderProbe(Probe):
    """Calls a :class:`TinyEncoderDecoder`."""

    capabilities: frozenset[Capability] = frozenset({"source", "padding"})
    memory_name = "encoder"

    def __init__(self, model: TinyEncoderDecoder) -> None:
        self.model, self.module, self.name = model, model, type(model).__name__
        self.vocab_size, self.max_length = model.table.num_embeddings, model.positions.num_embeddings
        self.rules: tuple[Visibility, ...] = (causal(),) * len(model.decoder)
        self.source_rules = model.source_rules

    def logits(self, batch: Batch) -> Tensor:
        return self.model(batch)

    def with_module(self, module: nn.Module) -> TinyEncoderDecoderProbe:
        assert isinstance(module, TinyEncoderDecoder)
        return TinyEncoderDecoderProbe(module)


class CrossHasTheWindow(TinyEncoderDecoder):
    """The decoder's window was inherited by cross-attention: of a long source only the last tokens are read."""

    def memory_mask(self, targets: int, sources: int) -> Tensor:
        hidden_TS = torch.zeros(targets, sources, dtype=torch.bool)
        hidden_TS[:, : sources - 3] = True
        return hidden_TS


class CrossSeesPads(TinyEncoderDecoder):
    """The encoder hides the source's padding, the decoder does not."""

    def memory_pads(self, source: Batch) -> Tensor:
        return torch.zeros_like(source.segments, dtype=torch.bool)


class EncoderSeesPads(TinyEncoderDecoder):
    """The decoder hides the source's padding, the encoder does not."""

    def pads(self, source: Batch) -> Tensor:
        return torch.zeros_like(source.segments, dtype=torch.bool)

    def memory_pads(self, source: Batch) -> Tensor:
        return source.segments == 0


class LosesTheLastSourceToken(TinyEncoderDecoder):
    """An off-by-one in the source's length hides its last token."""

    def pads(self, source: Batch) -> Tensor:
        last_BS = source.token_mask & ~torch.roll(source.token_mask, -1, 1)
        last_BS[:, -1] = source.token_mask[:, -1]
        return (source.segments == 0) | (last_BS & (source.positions > 0))


class FirstSourceForAll(TinyEncoderDecoder):
    """The memory of row 0 is read by every row, as when a cross cache is not reordered."""

    def memory(self, x_BSD: Tensor) -> Tensor:
        return x_BSD[:1].expand_as(x_BSD)


class MemoryMeansOverBatch(TinyEncoderDecoder):
    """The memory is centred over the rows of the batch."""

    def memory(self, x_BSD: Tensor) -> Tensor:
        return x_BSD - 0.2 * x_BSD.mean(0, keepdim=True)


class EncoderIsCausal(TinyEncoderDecoder):
    """The decoder's causal mask was handed to the encoder: a slot of the memory knows nothing of what follows."""

    def source_mask(self, sources: int) -> Tensor | None:
        return torch.ones(sources, sources, dtype=torch.bool).triu(1)


class EncoderSeesNeighbours(TinyEncoderDecoder):
    """The encoder's window was left at its smallest: a slot knows of the two tokens beside it."""

    def source_mask(self, sources: int) -> Tensor | None:
        places = torch.arange(sources)
        return (places[:, None] - places).abs() > 1


class StreamingPair(TinyEncoderDecoder):
    """The encoder looks two tokens ahead, as one that listens must."""

    source_rules = (lookahead(2),)
    ahead = 2

    def source_mask(self, sources: int) -> Tensor | None:
        return torch.ones(sources, sources, dtype=torch.bool).triu(self.ahead + 1)


class EncoderListensTooFar(StreamingPair):
    """An encoder with a right context of two looks three tokens ahead."""

    ahead = 3


BROKEN_MODELS = (
    *caught_by(
        "cross",
        CrossHasTheWindow,
        CrossSeesPads,
        EncoderSeesPads,
        LosesTheLastSourceToken,
        FirstSourceForAll,
        MemoryMeansOverBatch,
        EncoderIsCausal,
        EncoderSeesNeighbours,
        EncoderListensTooFar,
    ),
)
