"""The encoder–decoder Transformer: a decoder whose layers also read what an encoder made of the source."""

from __future__ import annotations

from typing import Any

from pellucid.batch import Batch
from pellucid.errors import InputError
from pellucid.models.decoder import Decoder
from pellucid.models.encoder import Encoder
from pellucid.models.model import Model
from pellucid.nn.attention import EncoderOutput
from pellucid.nn.cache import ContiguousCache
from pellucid.nn.moe import LoadBalanceStats


class EncoderDecoder(Decoder):
    """``batch.source`` through the encoder, ``batch`` through the decoder that reads it, document by document.

    With a cache, the source comes with the first chunk; what the decoder needs of it the cache remembers.
    """

    def __init__(self, *arguments: Any, encoder: Encoder, **parts: Any) -> None:
        super().__init__(*arguments, **parts)
        self.encoder = encoder

    @property
    def stacks(self) -> tuple[Model, ...]:
        return self.encoder, self

    def remembered(
        self, batch: Batch, cache: ContiguousCache | None
    ) -> tuple[EncoderOutput | None, tuple[LoadBalanceStats, ...]]:
        """The encoder's last hidden states, or the cache's memory of them."""
        if cache is not None and batch.source is not None and cache.length:
            raise InputError("the cache remembers a source already; leave source out, or begin a new cache")
        if cache is not None and cache.memory is not None and batch.source is None:
            return EncoderOutput(None, cache.memory), ()
        if batch.source is None:
            raise InputError("the batch has no source to read; make one with Batch.from_pairs([[5, 8]], [[7, 2]])")
        if batch.source.shape[0] != batch.shape[0]:
            raise InputError(
                f"the source has {batch.source.shape[0]} rows and the batch {batch.shape[0]}; give one each"
            )
        self.encoder.gradient_checkpointing = self.gradient_checkpointing
        read = self.encoder(batch.source, want="hidden")
        places = batch.source.coordinates()
        if cache is not None:
            cache.set_encoder_output(places)
        return EncoderOutput(read.hidden, places), read.routing

    @property
    def max_source_length(self) -> int | None:
        """The longest source that may be read (None: any length)."""
        return self.encoder.max_length
