"""The forward pass of all families: tokens in, hidden states through the layers, a head's output out.

An encoder, a decoder and the two together differ in who may see whom (rules), in whether layers read an encoder's
output, and in the head; the forward pass is one, and fits on this screen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pellucid.batch import Batch
from pellucid.errors import ArgumentError, LengthError, ShapeError, UnsupportedError
from pellucid.models.config import TransformerConfig
from pellucid.models.heads import Head
from pellucid.nn.attention import EncoderOutput, LayerContext
from pellucid.nn.cache import ContiguousCache
from pellucid.nn.embedding import zero_padding
from pellucid.nn.losses import Loss
from pellucid.nn.moe import LoadBalanceStats
from pellucid.nn.positions import Rotary
from pellucid.probe import Probe
from pellucid.shapes import Float, Tensor
from pellucid.visibility import Coordinates

Want = Literal["logits", "loss", "hidden"]
WANTS: tuple[str, ...] = get_args(Want)


@dataclass(frozen=True, eq=False)
class Output:
    """The results of a forward pass; what was not wanted is None.

    ``hidden`` are the states after the final norm. ``logits`` are ``[B, T, V]`` for heads over tokens, and one row a
    document for heads over documents, in the order of ``Batch.targets``. ``routing`` has the load-balance statistics of
    each mixture of experts in this pass, an encoder's first.
    """

    hidden: Float[Tensor, "B T D"]
    logits: Float[Tensor, "..."] | None = None
    loss: Loss | None = None
    cache: ContiguousCache | None = None
    routing: tuple[LoadBalanceStats, ...] = ()


class Model(nn.Module):
    """Embedding, layers, final norm and head; the base of ``Encoder``, ``Decoder`` and ``EncoderDecoder``."""

    make_probe: ClassVar[Callable[[Model], Probe]]
    """Makes the probe of a model; set where the room is put together."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        embed_tokens: nn.Embedding,
        embed_project: nn.Module,
        token_types: nn.Module | None,
        positions: nn.Module | None,
        embedding_norm: nn.Module,
        position_biases: Sequence[nn.Module],
        bias_of: Sequence[int | None],
        layers: Sequence[nn.Module],
        norm: nn.Module,
        head: Head | None,
    ) -> None:
        """``bias_of`` names each layer's entry of ``position_biases``, if it has one. An encoder that a decoder reads
        has no ``head``."""
        super().__init__()
        self.config = config
        self.embed_tokens = embed_tokens
        self.embed_project = embed_project
        self.token_types = token_types
        self.positions = positions
        self.embedding_norm = embedding_norm
        self.embedding_dropout = nn.Dropout(config.dropout.embedding)
        self.position_biases = nn.ModuleList(position_biases)
        self.bias_of = tuple(bias_of)
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.head_name = None if head is None else head.name
        if head is not None:
            self.add_module(head.name, head)
        self.rules = config.rules
        self.gradient_checkpointing = False
        self.label_smoothing = 0.0

    def forward(self, batch: Batch, *, cache: ContiguousCache | None = None, want: Want = "logits") -> Output:
        """Run ``batch``; with a ``cache``, its rows continue the cached ones.

        ``want="loss"`` returns ``Output.loss`` = (total, count) over the batch's labels or targets, without all logits
        of a vocabulary in memory at once; ``want="hidden"`` stops before the head. Raises an InputError or LengthError
        for a batch that the model cannot read.
        """
        self._check(batch, cache, want)
        encoder_output, routing = self.encode_source(batch, cache)
        # a cache and a limit need the host, which is no part of a graph
        on_host = cache is not None or self.config.max_position_embeddings is not None
        compiling = torch.compiler.is_compiling() and on_host
        resolve = torch.compiler.disable(self.resolve_coordinates) if compiling else self.resolve_coordinates
        q_coords, k_coords = resolve(batch, cache)
        x_BTD = self.embed(batch, q_coords)
        biases = [bias(q_coords, k_coords) for bias in self.position_biases]
        stats: list[list[LoadBalanceStats]] = [[] for _ in self.layers]
        caches = [None] * len(stats) if cache is None else cache.layers
        for block, number, layer_cache, own in zip(self.layers, self.bias_of, caches, stats, strict=True):
            bias = None if number is None else biases[number]
            ctx = LayerContext(q_coords, k_coords, encoder_output, layer_cache, bias, own)
            if self.gradient_checkpointing and self.training and cache is None:
                x_BTD = checkpoint(block, x_BTD, ctx, use_reentrant=False)
            else:
                x_BTD = block(x_BTD, ctx)
        x_BTD = self.norm(x_BTD).to(self.dtype)  # a wide stream ends here
        if cache is not None:
            cache.commit()
        routing += tuple(sums for own in stats for sums in own)
        match want:
            case "hidden":
                return Output(x_BTD, cache=cache, routing=routing)
            case "loss":
                return Output(x_BTD, loss=self.loss(x_BTD, batch), cache=cache, routing=routing)
        return Output(x_BTD, logits=self.head(x_BTD, q_coords), cache=cache, routing=routing)

    def encode_source(
        self, batch: Batch, cache: ContiguousCache | None
    ) -> tuple[EncoderOutput | None, tuple[LoadBalanceStats, ...]]:
        """The encoder's output that the layers read, and the statistics of its mixtures of experts."""
        if batch.source is not None:
            raise ArgumentError(f"the batch has a source, but {type(self).__name__} reads none; leave source out")
        return None, ()

    def resolve_coordinates(self, batch: Batch, cache: ContiguousCache | None) -> tuple[Coordinates, Coordinates]:
        """The coordinates of queries and keys.

        Raises:
            LengthError: a document is longer than ``config.max_position_embeddings``.
        """
        chunk = batch.coordinates()
        q_coords, k_coords = (chunk, chunk) if cache is None else cache.begin_append(chunk, self.rules)
        most = self.config.max_position_embeddings
        layout = None if most is None else q_coords.read_layout()
        if most is not None and layout is not None and layout.max_position >= most:
            raise LengthError(
                f"a document has {layout.max_position + 1} tokens, but max_position_embeddings is {most}; shorten it, "
                "or leave max_position_embeddings out of the config where its positions can extrapolate"
            )
        return q_coords, k_coords

    def embed(self, batch: Batch, coords: Coordinates) -> Float[Tensor, "B T D"]:
        """The input of the first layer: exactly 0, and gradient 0, where there is no token."""
        x_BTD = self.embed_tokens(batch.tokens) if batch.inputs_embeds is None else batch.inputs_embeds
        x_BTD = self.embed_project(zero_padding(x_BTD, coords))
        if self.config.embedding_multiplier != 1.0:
            x_BTD = x_BTD * self.config.embedding_multiplier
        if self.token_types is not None:
            x_BTD = self.token_types(x_BTD, batch.types, coords)
        if self.positions is not None:
            x_BTD = self.positions(x_BTD, coords)
        x_BTD = self.embedding_norm(x_BTD)
        entered: Tensor = self.embedding_dropout(zero_padding(x_BTD, coords))
        return entered

    @property
    def head(self) -> nn.Module:
        """What turns hidden states into the model's answer."""
        if self.head_name is None:
            raise UnsupportedError("this encoder is read by a decoder and has no head; use want='hidden'")
        found: nn.Module = getattr(self, self.head_name)
        return found

    def loss(self, hidden_BTD: Float[Tensor, "B T D"], batch: Batch) -> Loss:
        """The head's ``(total, count)`` over the batch's labels or targets; labels are smoothed in training only."""
        loss: Loss = self.head.loss(hidden_BTD, batch, self.label_smoothing if self.training else 0.0)  # type: ignore[operator]
        return loss

    def probe(self) -> Probe:
        """The probe by which audits call this model."""
        return type(self).make_probe(self)

    @property
    def stacks(self) -> tuple[Model, ...]:
        """The models in it that have layers, in the order in which they run."""
        return (self,)

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    @property
    def max_length(self) -> int | None:
        """The longest document that may be read (None: any length)."""
        return self.config.max_length

    def _check(self, batch: Batch, cache: ContiguousCache | None, want: str) -> None:
        if not isinstance(batch, Batch):
            raise ArgumentError(
                f"a model takes a Batch, not {type(batch).__name__}; make one with Batch.from_rows([[5, 8, 2], [7]])"
            )
        if want not in WANTS:
            raise ArgumentError(f"want is {want!r}; choose logits, loss or hidden")
        if batch.types is not None and self.token_types is None:
            raise ArgumentError("the batch has token types, but the config has no type_vocab_size; leave types out")
        width = self.embed_tokens.embedding_dim
        if batch.inputs_embeds is not None and batch.inputs_embeds.shape[-1] != width:
            raise ShapeError(
                f"inputs_embeds has width {batch.inputs_embeds.shape[-1]}, but embed_tokens gives {width}; "
                "give embeddings of that width"
            )
        if cache is None:
            return
        if len(cache.layers) != len(self.layers):
            raise ArgumentError(
                f"the cache has {len(cache.layers)} layers, but the model {len(self.layers)}; make one with new_cache"
            )
        if want != "hidden" and cache.length and getattr(self.head, "pooling", "last") != "last":
            raise UnsupportedError(
                "a cached chunk has only the end of a document, and this head pools all of it; run it "
                "at once, or choose pooling 'last'"
            )


class Encoder(Model):
    """Encoder-only: every token of a document is made from all of them."""

    def resolve_coordinates(self, batch: Batch, cache: ContiguousCache | None) -> tuple[Coordinates, Coordinates]:
        if cache is not None:
            raise UnsupportedError("an encoder sees its whole document at once and has no cache; leave cache out")
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
            changes_angles=self.changes_angles,
        )

    @property
    def changes_angles(self) -> Callable[[int, int], bool] | None:
        """Whether a document that grows from one length to another changes the angles of cached keys.

        None: whatever the lengths, it does not.
        """
        rotaries = [part for part in self.layers.modules() if isinstance(part, Rotary) and part.scaling.by_length]
        if not rotaries:
            return None
        return lambda before, after: any(part.scaling.changes_angles(before, after) for part in rotaries)


class EncoderDecoder(Decoder):
    """``batch.source`` through the encoder, ``batch`` through the decoder that reads it, document by document.

    With a cache, the source comes with the first chunk; the cache stores what the decoder needs of it.
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
        """The encoder's last hidden states, or the coordinates of those whose keys and values are cached."""
        if cache is not None and batch.source is not None and cache.length:
            raise ArgumentError("the cache has a source already; leave source out, or start a new cache")
        if cache is not None and cache.encoder_coords is not None and batch.source is None:
            return EncoderOutput(None, cache.encoder_coords), ()
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
