"""The shared probes, each a function of a model of any family (P-CAUSAL, P-PAD, P-CACHE, P-PACK, P-BATCH, P-SWEEP)."""

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from helpers.spread import answer, asked, documents, labelled, speaks
from helpers.tiny import VOCABULARY, assert_agree
from pellucid.errors import UnsupportedError
from pellucid.models import EncoderDecoder
from pellucid.models.configs import MoEConfig, SentenceEmbeddingHeadConfig
from pellucid.nn.attend import BACKENDS

ROWS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12], [13, 14, 15, 16, 17]]
LONG = [list(range(1, 10)), list(range(20, 28)), list(range(30, 37))]
CHUNKS = {"right": [[9], [4, 5], [8, 1]], "left": [[1] * 9, [3, 1, 5], [5, 4]]}


@contextmanager
def embedded(model, batch, embeddings_BTD, source_BSD=None):
    """While inside, these are the token vectors of ``batch`` (and of its source)."""

    def replaced(_, arguments, found):
        if arguments[0] is batch.tokens:
            return embeddings_BTD
        return source_BSD if batch.source is not None and arguments[0] is batch.source.tokens else None

    tables = {model.embed_tokens} | ({model.encoder.embed_tokens} if isinstance(model, EncoderDecoder) else set())
    with ExitStack() as hooks:
        for table in tables:
            hooks.callback(table.register_forward_hook(replaced).remove)
        yield


def routes(model):
    stacks = [model.config, *([model.config.encoder] if isinstance(model, EncoderDecoder) else [])]
    return any(isinstance(layer.ffn or stack.ffn, MoEConfig) for stack in stacks for layer in stack.each_layer)


def same(model, got, expected, message=""):
    """Bit for bit; to 1e-12 where experts take tokens by the batch, whose products have other shapes."""
    if routes(model) or model.dtype != torch.float64:
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12 if model.dtype == torch.float64 else 1e-5)
    else:
        assert torch.equal(got, expected), message


def may_reach(model, places):
    """``Bool[B, T, T]``: from which tokens something can come to each token through all layers."""
    reach_BTT = torch.eye(places.shape[1], dtype=torch.bool).expand(places.shape[0], -1, -1)
    for rule in model.rules:
        seen_BTT = rule.mask(places, places)[:, 0]
        reach_BTT = reach_BTT | (seen_BTT.long() @ reach_BTT.long() > 0)
    return reach_BTT


@torch.no_grad()
def p_causal(model):
    """What no layer lets through changes nothing, whatever it is; what one does, changes something."""
    row = ROWS[1]
    batch = asked(model, [row] * len(row))
    may_TT = may_reach(model, batch.coordinates())[0]
    tokens = batch.tokens.clone()
    for j in range(len(row)):
        tokens[j, j] = (tokens[j, j] + 7) % VOCABULARY
    base, out = answer(model, batch), answer(model, replace(batch, tokens=tokens))
    dirty = model.embed_tokens(batch.tokens).clone()
    for j in range(len(row)):
        dirty[j, j] = float("nan")
    with embedded(model, batch, dirty):
        with_nan = answer(model, batch)
    for j in range(len(row)):
        hidden = ~may_TT[:, j]
        same(model, out[j, hidden], base[j, hidden], f"token {j}")
        same(model, with_nan[j, hidden], base[j, hidden], f"NaN at token {j}")
        assert not torch.equal(out[j, ~hidden], base[j, ~hidden])
        assert with_nan[j, ~hidden].isnan().any()


def p_causal_by_gradient(model):
    """With and without checkpointing; every token that may be seen has some weight."""
    batch = asked(model, [ROWS[1]])
    may_TT = may_reach(model, batch.coordinates())[0]
    found = []
    for checkpointing in (False, True):
        model.train().gradient_checkpointing = checkpointing
        x_BTD = model.embed_tokens(batch.tokens).detach().requires_grad_()
        with embedded(model, batch, x_BTD):
            out = answer(model, batch)
        weight_T = torch.linspace(0.5, 1.5, out.shape[-1], dtype=out.dtype)
        gradients = [torch.autograd.grad((out[0, i] * weight_T).sum(), x_BTD, retain_graph=True)[0] for i in (0, 4, 8)]
        for i, gradient in zip((0, 4, 8), gradients, strict=True):
            assert torch.equal((gradient[0] != 0).any(-1) & ~may_TT[i], torch.zeros(9, dtype=torch.bool))
            assert (gradient[0, i] != 0).any()
        found.append(torch.stack(gradients))
    model.eval().gradient_checkpointing = False
    assert torch.equal(*found)


def p_pad(model):
    """Padding right, left, on both sides and to 12; whatever pads hold; gradients to them exactly 0."""
    expected = [answer(model, asked(model, [row]))[0].detach() for row in ROWS]
    for side in ("right", "left", "both"):
        batch = asked(model, ROWS, side=side, length=12)
        real = batch.segments != 0
        base = answer(model, batch).detach()
        for row, alone in enumerate(expected):
            assert_agree(base[row][real[row]], alone, f"{side} row {row}")
        x_BTD = model.embed_tokens(batch.tokens).detach()
        source_BSD = None
        if batch.source is not None:
            source_BSD = model.encoder.embed_tokens(batch.source.tokens).detach()
            source_BSD[batch.source.segments == 0] = float("nan")
        for content in (float("nan"), *([1e4] if side == "both" else [])):
            dirty = x_BTD.masked_fill(~real[..., None], content).requires_grad_()
            with embedded(model, batch, dirty, source_BSD):
                out = answer(model, batch)[real]
            same(model, out.detach(), base[real], f"{content} in pads, {side}")
            (gradient,) = torch.autograd.grad(out.sum(), dirty)
            assert (gradient[~real] == 0).all()
            assert torch.isfinite(gradient).all()


@torch.no_grad()
def p_pad_documents(model):
    """What a head says about a document does not depend on its padding, nor on its row."""
    expected = torch.cat([model(asked(model, [row])).logits for row in ROWS])
    for batch in (
        *(asked(model, ROWS, side=side, length=12) for side in ("right", "left", "both")),
        asked(model, ROWS, packed=True, length=20),
    ):
        assert_agree(model(batch).logits, expected)


@torch.no_grad()
def p_cache(model):
    """Chunk by chunk as all at once, at every position, rows of different lengths, unused slots full of NaN."""
    if any(rule.lookahead != 0 for rule in model.rules if rule.positional):
        pytest.fail("a fixed look-ahead has no cached form: leave this config to the other probes")
    by_groups = any(not rule.positional for rule in model.rules)
    expected = [answer(model, asked(model, [row]))[0] for row in LONG]
    crosses, checked = model.changes_angles, 0
    for side, ways in CHUNKS.items():
        for chunks in ways:
            if by_groups and chunks[0] < 4:  # the whole prefix of each row has to be in the first chunk
                continue
            ends = [sum(chunks[: place + 1]) for place in range(len(chunks))]
            pairs = [(a - lag, b - lag) for lag in (0, 1, 2) for a, b in pairwise(ends)]
            if crosses is not None and any(a > 0 and crosses(a, b) for a, b in pairs):
                with pytest.raises(UnsupportedError, match="rotated by other angles"):
                    _through_a_cache(model, chunks, side)
                continue
            for got, row in zip(_through_a_cache(model, chunks, side), expected, strict=True):
                assert len(got) >= len(row) - 2
                assert_agree(got, row[: len(got)], f"{chunks} {side}")
            checked += 1
    assert checked >= (2 if crosses is None else 1)


def _through_a_cache(model, chunks, side):
    cache = model.new_cache(3, 12)
    for layer in cache.layers:
        for tensor in layer.tensors:
            tensor.fill_(float("nan"))
    taken, got = [0, 0, 0], [[], [], []]
    for number, size in enumerate(chunks):
        sizes = [min(size, len(row) - done) for row, done in zip(LONG, taken, strict=True)]
        if number == 0:  # rows 1 and 2 miss one and two tokens of the first chunk
            sizes = [size, max(size - 1, 0), max(size - 2, 0)]
        parts = [row[done : done + n] for row, done, n in zip(LONG, taken, sizes, strict=True)]
        batch = asked(model, LONG)
        chunk = asked(model, parts, side=side, length=size)
        if number:  # what comes later is no prefix
            chunk = replace(chunk, groups=None)
        if isinstance(model, EncoderDecoder):
            chunk = replace(chunk, source=batch.source if number == 0 else None)
        out = answer(model, chunk, cache=cache)
        for row in range(3):
            got[row].append(out[row][chunk.segments[row] != 0])
            taken[row] += sizes[row]
    assert cache.sequence_lengths == taken
    return [torch.cat(pieces) for pieces in got]


def p_pack(model):
    """Packed = a document a row = alone: answers, loss and every gradient; a change in one leaves the others."""
    rows = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [10, 3]]
    packed = labelled(model, asked(model, rows, packed=True, length=16))
    apart = labelled(model, asked(model, rows))
    singles = [labelled(model, asked(model, [row])) for row in rows]
    base = answer(model, packed).detach()
    for row, places in zip(rows, documents(packed), strict=True):
        assert_agree(base[places], answer(model, asked(model, [row]))[0].detach(), f"document {row}")
    one, many = _learnt(model, [packed]), _learnt(model, [apart])
    together = isinstance(model.config.head, SentenceEmbeddingHeadConfig)  # a document's loss is about all others
    for other in (many, *([] if together else [_learnt(model, singles)])):
        assert one[1] == other[1] > 0
        assert_agree(one[0], other[0], "loss")
        for name, gradient in one[2].items():
            assert_agree(gradient, other[2][name], name)
    tokens = packed.tokens.clone()
    tokens[0, 1] = 40
    changed = answer(model, replace(packed, tokens=tokens)).detach()
    same(model, changed[0, 3:11], base[0, 3:11])
    assert not torch.equal(changed[0, :3], base[0, :3])


def _learnt(model, batches):
    """The loss of all batches, what counted, and the gradients of every parameter."""
    model.zero_grad()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for batch in batches:
        loss = model(batch, want="loss").loss
        loss.total.backward()
        total, count = total + loss.total.detach(), count + int(loss.count)
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    answers = not speaks(model)  # a head about documents asks no table for logits
    assert all("experts" in name or "lm_head" in name or answers for name in missing), missing
    return total, count, gradients


@torch.no_grad()
def p_batch(model):
    """Batch mates change nothing beyond rounding; what they hold changes no bit."""
    batch = asked(model, ROWS)
    together = answer(model, batch)
    for row, tokens in enumerate(ROWS):
        assert_agree(together[row, : len(tokens)], answer(model, asked(model, [tokens]))[0], f"row {row}")
    mates = batch.tokens.clone()
    mates[1:] = (mates[1:] + 11) % VOCABULARY
    same(model, answer(model, replace(batch, tokens=mates))[0, :3], together[0, :3])


@torch.no_grad()
def p_sweep(model):
    """All backends give one answer on every layout, or say that they cannot."""
    probe, able = model.probe(), set()
    ways = [{"side": "left", "length": 11}, {"packed": True, "length": 20}]
    for batch in (asked(model, ROWS, **how) for how in ways):
        real = batch.segments != 0
        with probe.kernel("reference"):
            expected = answer(model, batch)[real]
        for name in BACKENDS:
            with probe.kernel(name):
                try:
                    got = answer(model, batch)[real]
                except UnsupportedError:
                    continue
            able.add(name)
            assert_agree(got, expected, name)
    assert {"auto", "reference"} <= able


def p_modes(model):
    """Training without dropout, with and without checkpointing, eval and inference give the same; so do gradients."""
    batch = labelled(model, asked(model, [*ROWS, ROWS[0][::-1]]))
    expected = answer(model.eval(), batch).detach()
    losses = []
    for checkpointing in (False, True):
        model.train().gradient_checkpointing = checkpointing
        assert torch.equal(answer(model, batch).detach(), expected)
        losses.append(_learnt(model, [batch]))
    model.eval().gradient_checkpointing = False
    assert torch.equal(losses[0][0], losses[1][0])
    assert all(torch.equal(gradient, losses[1][2][name]) for name, gradient in losses[0][2].items())
    with torch.inference_mode():  # a learned bias of scores takes another kernel where gradients are wanted
        assert_agree(answer(model, batch), expected)


@torch.no_grad()
def p_source(model):
    """B14: every token of the source reaches every token of its target, and no other document."""
    batch = asked(model, ROWS[:2])
    base = answer(model, batch)
    for slot in range(int((batch.source.segments[0] != 0).sum())):
        tokens = batch.source.tokens.clone()
        tokens[0, slot] = (tokens[0, slot] + 7) % VOCABULARY
        out = answer(model, replace(batch, source=replace(batch.source, tokens=tokens)))
        moved_BT = (out != base).any(-1)
        assert moved_BT[0, :3].all()
        if not routes(model):
            assert not moved_BT[1].any()
