"""Models of an encoder–decoder: sources that are cut, hidden, mixed up or padded. Stock layers of torch."""

from __future__ import annotations

import torch
from torch import Tensor

from broken_models.catalog import caught_by
from pellucid.audits.broken import TinyEncoderDecoder
from pellucid.batch import Batch
from pellucid.visibility import lookahead


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
