"""Blocks run as a model runs them, whole or in chunks through a cache, without a model."""

import torch

from pellucid.nn import AttentionOptions, ContiguousCache, EncoderOutput, zero_padding
from pellucid.nn.attention import LayerContext
from pellucid.visibility import Coordinates

CHUNKS = ([9], [4, 5], [1] * 9, [3, 1, 5], [8, 1])


def laid_out(lengths, starts, slots):
    """Rows of these lengths that begin at these slots; padding says positions that no token has."""
    positions = torch.full((len(lengths), slots), 5)
    segments = torch.zeros(len(lengths), slots, dtype=torch.long)
    for i, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        positions[i, start : start + length] = torch.arange(length)
        segments[i, start : start + length] = 1
    return Coordinates(positions, segments)


def packed(*lengths):
    """One row of documents 1, 2, …"""
    positions = torch.cat([torch.arange(length) for length in lengths])
    segments = torch.cat([torch.full((length,), i + 1) for i, length in enumerate(lengths)])
    return Coordinates(positions[None], segments[None])


def piece(whole, start, stop):
    """Slots ``start … stop-1`` as a chunk that counts from 0, as callers of a cache have it."""
    real = whole.real[:, start:stop]
    positions = (real.cumsum(1) - 1).clamp(min=0)
    groups = None if whole.groups is None else whole.groups[:, start:stop]
    return Coordinates(positions, real.long(), groups)


def with_options(words):
    """Words of an attention part, those about scores and kernels gathered in its ``options``."""
    own = {name: value for name, value in words.items() if name not in ("scale", "softcap", "dropout", "backend")}
    return own | {"options": AttentionOptions(**{name: words[name] for name in words.keys() - own.keys()})}


def new_cache(blocks, rows, capacity, dtype=torch.float64, **words):
    shapes = [block.attention.cache_shapes for block in blocks]
    return ContiguousCache(shapes=shapes, rows=rows, capacity=capacity, dtype=dtype, **words)


def run(blocks, x, chunk, cache=None, memory=None, bias=None):
    """``x`` through ``blocks``; with a cache it goes on from what the cache holds, and a memory is told once."""
    queries, keys = (chunk, chunk)
    if cache is not None:
        queries, keys = cache.begin_append(chunk, [block.attention.rule for block in blocks])
        if memory is not None:
            cache.set_encoder_output(memory.coordinates)
        elif cache.encoder_coords is not None:
            memory = EncoderOutput(None, cache.encoder_coords)
    x = zero_padding(x, queries)
    for i, block in enumerate(blocks):
        added = None if bias is None else bias(queries, keys)
        layer_cache = None if cache is None else cache.layers[i]
        x = block(x, LayerContext(queries, keys, encoder_output=memory, cache=layer_cache, bias=added))
    if cache is not None:
        cache.commit()
    return x


def in_chunks(blocks, x, whole, chunks, cache=None, memory=None, bias=None):
    """The same slots, chunk by chunk; a memory is given with the first."""
    cache = new_cache(blocks, len(x), sum(chunks) + 2) if cache is None else cache
    outs, done = [], 0
    for length in chunks:
        told = memory if done == 0 else None
        outs.append(run(blocks, x[:, done : done + length], piece(whole, done, done + length), cache, told, bias))
        done += length
    return torch.cat(outs, 1)


def assert_unread_slots_never_matter(blocks, x, bad, atol):
    """What unused and padded slots of a cache hold: outputs and gradients as if it were 0, for two rows of nine."""
    whole = laid_out((9, 7), (0, 2), 9)

    def with_padding_of(value, append):
        def appended(*new):
            padding = torch.zeros(2, new[0].shape[1], dtype=torch.bool)
            padding[1, : 2 if new[0].shape[1] == 4 else 0] = True
            return append(*(tensor.masked_fill(padding.view(2, -1, *[1] * (tensor.ndim - 2)), value) for tensor in new))

        return appended

    def outcome(value):
        cache = new_cache(blocks, 2, 12)
        for layer in cache.layers:
            layer.append = with_padding_of(value, layer.append)
        in_chunks(blocks, x, whole, [4], cache)
        for layer in cache.layers:
            for tensor in layer.tensors:
                tensor[:, cache.length :] = value
        out = in_chunks(blocks, x[:, 4:], laid_out((5, 5), (0, 0), 5), [5], cache)
        parameters = [p for block in blocks for p in block.parameters()]
        return [out, *torch.autograd.grad(out.square().sum(), parameters)]

    for got, expected in zip(outcome(bad), outcome(0.0), strict=True):
        torch.testing.assert_close(got, expected, atol=atol, rtol=0)


def assert_chunks_agree(blocks, x, whole, chunks, memory=None, bias=None):
    """P-CACHE: at every real token what one pass gives."""
    expected = run(blocks, x, whole, memory=memory, bias=bias)[whole.real]
    got = in_chunks(blocks, x, whole, chunks, memory=memory, bias=bias)[whole.real]
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=0)
