"""The three families: an encoder, a decoder, and a decoder that reads an encoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pellucid.batch import Batch
from pellucid.errors import ArgumentError, UnsupportedError
from pellucid.models.model import Model
from pellucid.nn.attention import EncoderOutput
from pellucid.nn.cache import ContiguousCache
from pellucid.nn.moe import LoadBalanceStats
from pellucid.nn.positions import Rotary
from pellucid.visibility import Coordinates


class Encoder(Model):
    """Encoder-only: every token of a document is made from all of them."""

    def resolve_coordinates(self, batch: Batch, cache: ContiguousCache | None) -> tuple[Coordinates, Coordinates]:
        if cache is not None:
            raise UnsupportedError("an encoder sees its whole document at once and keeps no cache; leave cache out")
        return super().resolve_coordinates(batch, None)


class Decoder(Model):
    """Decoder-only: tokens in, a distribution over the next token out, for every position at once."""

    def new_cache(self, rows: int, capacity: int) -> ContiguousCache:
        """An empty cache for ``rows`` rows of up to ``capacity`` slots (padding takes slots too)."""
        return ContiguousCache(
            shapes=[block.attention.cache_shapes for block in self.layers],  # type: ignore[union-attr, misc]
            rows=rows,
            capacity=capacity,
            dtype=self.dtype,
            device=self.device,
            crosses=self.changes_angles,
        )

    @property
    def changes_angles(self) -> Callable[[int, int], bool] | None:
        """Whether a document that grows from one length to another changes the angles of cached keys.

        None: whatever the lengths, it does not.
        """
        rotaries = [part for part in self.layers.modules() if isinstance(part, Rotary) and part.scaling.by_length]
        if not rotaries:
            return None
        return lambda before, after: any(part.changes_angles(before, after) for part in rotaries)


class EncoderDecoder(Decoder):
    """``batch.source`` through the encoder, ``batch`` through the decoder that reads it, document by document.

    With a cache, the source comes with the first chunk; the cache keeps what the decoder needs of it.
    """

    def __init__(self, *arguments: Any, encoder: Encoder, **parts: Any) -> None:
        super().__init__(*arguments, **parts)
        self.encoder = encoder

    @property
    def stacks(self) -> tuple[Model, ...]:
        return self.encoder, self

    def encode_source(
        self, batch: Batch, cache: ContiguousCache | None
    ) -> tuple[EncoderOutput | None, tuple[LoadBalanceStats, ...]]:
        """The encoder's last hidden states, or the coordinates of those whose keys and values the cache holds."""
        if cache is not None and batch.source is not None and cache.length:
            raise ArgumentError("the cache holds a source already; leave source out, or start a new cache")
        if cache is not None and cache.memory is not None and batch.source is None:
            return EncoderOutput(None, cache.memory), ()
        if batch.source is None:
            raise ArgumentError("the batch has no source to read; make one with Batch.from_pairs([[5, 8]], [[7, 2]])")
        if batch.source.shape[0] != batch.shape[0]:
            raise ArgumentError(
                f"the source has {batch.source.shape[0]} rows and the batch {batch.shape[0]}; give one each"
            )
        self.encoder.gradient_checkpointing = self.gradient_checkpointing
        encoded = self.encoder(batch.source, want="hidden")
        coords = batch.source.coordinates()
        if cache is not None:
            cache.set_encoder_output(coords)
        return EncoderOutput(encoded.hidden, coords), encoded.routing

    @property
    def max_source_length(self) -> int | None:
        """The longest source that may be read (None: any length)."""
        return self.encoder.max_length
