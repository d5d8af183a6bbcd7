"""The shared probes over decoders of every kind, on every backend by name and in both precisions."""

from dataclasses import replace

import pytest
import torch

from helpers.tiny import KINDS, VOCABULARY, assert_agree, tiny_model
from pellucid.data import Batch, objectives

BACKENDS = ["reference", "sdpa", "varlen", "auto"]
ROWS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12], [13, 14, 15, 16, 17]]
CHUNKS = [[9], [4, 5], [1] * 9, [3, 1, 5], [8, 1]]

pytestmark = pytest.mark.slow
each_kind = pytest.mark.parametrize("kind", KINDS)
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def with_embeddings(model, batch, embeddings_BTD, **settings):
    """A forward pass whose token vectors are these."""
    handle = model.embed_tokens.register_forward_hook(lambda *_: embeddings_BTD)
    try:
        return model(batch, **settings)
    finally:
        handle.remove()


def alone(model, rows):
    return [model(Batch.from_rows([row])).logits[0] for row in rows]


@each_kind
@each_backend
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_p_causal(kind, backend, dtype):
    """Whatever stands later, NaN too, changes nothing before it: bit for bit."""
    model = tiny_model(kind, backend=backend, dtype=dtype)
    batch = Batch.from_rows(ROWS)
    x_BTD = model.embed_tokens(batch.tokens).detach()
    with torch.no_grad():
        base = model(batch).logits
        for j in range(1, 9):
            tokens = batch.tokens.clone()
            tokens[:, j:] = (tokens[:, j:] + 7) % VOCABULARY
            assert torch.equal(model(replace(batch, tokens=tokens)).logits[:, :j], base[:, :j])
            for content in (1e4, float("nan")):
                dirty = x_BTD.clone()
                dirty[:, j:] = content
                assert torch.equal(with_embeddings(model, batch, dirty).logits[:, :j], base[:, :j])
    assert not torch.equal(model(replace(batch, tokens=batch.tokens.flip(1))).logits, base)


@each_kind
@pytest.mark.parametrize("checkpointing", [False, True])
def test_p_causal_by_gradient(kind, checkpointing):
    model = tiny_model(kind).train()
    model.gradient_checkpointing = checkpointing
    batch = Batch.from_rows([ROWS[1]])
    x_BTD = model.embed_tokens(batch.tokens).detach().requires_grad_()
    out = with_embeddings(model, batch, x_BTD).logits
    for i in range(9):
        (gradient,) = torch.autograd.grad(out[0, i].sum(), x_BTD, retain_graph=True)
        assert (gradient[0, i + 1 :] == 0).all()
        assert (gradient[0, i] != 0).any()


@each_kind
@each_backend
def test_p_pad(kind, backend):
    """Padding right, left, on both sides and to 12; whatever the pads hold; gradients to them exactly 0."""
    model = tiny_model(kind, backend=backend)
    expected = alone(model, ROWS)
    for side in ("right", "left", "both"):
        batch = Batch.from_rows(ROWS, side=side, length=12)
        real = batch.segments != 0
        x_BTD = model.embed_tokens(batch.tokens).detach()
        base = model(batch).logits
        for row, logits in enumerate(expected):
            assert_agree(base[row][real[row]], logits, f"{side} row {row}")
        for content in (1e4, float("nan"), float("inf")):
            dirty = x_BTD.masked_fill(~real[..., None], content).requires_grad_()
            logits = with_embeddings(model, batch, dirty).logits[real]
            assert torch.equal(logits, base[real])
            (gradient,) = torch.autograd.grad(logits.sum(), dirty)
            assert (gradient[~real] == 0).all()
            assert torch.isfinite(gradient).all()


@each_kind
@each_backend
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_p_cache(kind, backend, side, chunks):
    """Chunk by chunk equals all at once, at every position, rows of different lengths, unused slots full of NaN."""
    model = tiny_model(kind, backend=backend)
    rows = [list(range(1, 10)), list(range(20, 28)), list(range(30, 37))]
    expected = alone(model, rows)
    cache = model.new_cache(3, 20)
    for layer in cache.layers:
        for tensor in layer.tensors:
            tensor.fill_(float("nan"))
    taken, got = [0, 0, 0], [[], [], []]
    for number, size in enumerate(chunks):
        # rows 1 and 2 are shorter: they miss one and two tokens of the first chunk that has room to spare
        sizes = [min(size, len(row) - done) for row, done in zip(rows, taken, strict=True)]
        if number == 0:
            sizes = [size, max(size - 1, 0), max(size - 2, 0)]
        batch = Batch.from_rows(
            [row[done : done + n] for row, done, n in zip(rows, taken, sizes, strict=True)], side=side, length=size
        )
        logits = model(batch, cache=cache).logits
        for row in range(3):
            got[row].append(logits[row][batch.segments[row] != 0])
            taken[row] += sizes[row]
    assert cache.sequence_lengths == taken
    for row in range(3):
        pieces = torch.cat(got[row])
        assert_agree(pieces, expected[row][: taken[row]], f"row {row}")
        assert taken[row] >= len(rows[row]) - 2


@each_kind
@each_backend
@pytest.mark.parametrize("checkpointing", [False, True])
def test_p_pack(kind, backend, checkpointing):
    """Packed = separate, for logits, loss and every gradient; a change in one document leaves the others' bits."""
    model = tiny_model(kind, backend=backend).train()
    model.gradient_checkpointing = checkpointing
    documents = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    packed = objectives.causal(Batch.packed(documents, length=16))
    assert packed.positions[0].tolist()[:9] == [0, 1, 2, 0, 1, 2, 3, 4, 0]
    loss = model(packed, want="loss").loss
    loss.total.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    total, count = 0.0, 0
    for document in documents:
        part = model(objectives.causal(Batch.from_rows([document])), want="loss").loss
        part.total.backward()
        total, count = total + part.total.item(), count + part.count.item()
    assert (count, loss.count.item()) == (6, 6)
    assert loss.total.item() == pytest.approx(total, abs=1e-10)
    for name, parameter in model.named_parameters():
        assert_agree(gradients[name], parameter.grad, name)
    with torch.no_grad():
        base = model(packed).logits[0]
        for number, logits in enumerate(alone(model, documents), 1):
            assert_agree(base[packed.segments[0] == number], logits, f"document {number}")
        tokens = packed.tokens.clone()
        tokens[0, 1] = 40
        changed = model(replace(packed, tokens=tokens)).logits[0]
        assert torch.equal(changed[3:9], base[3:9])
        assert not torch.equal(changed[:3], base[:3])


@each_kind
@each_backend
def test_p_batch(kind, backend):
    """Batch mates change nothing beyond rounding; their content changes no bit."""
    model = tiny_model(kind, backend=backend, dtype=torch.float32)
    expected = alone(model, ROWS)
    batch = Batch.from_rows(ROWS)
    together = model(batch).logits
    for row, logits in enumerate(expected):
        assert_agree(together[row, : len(ROWS[row])], logits, f"row {row}")
    mates = batch.tokens.clone()
    mates[1:] = (mates[1:] + 11) % VOCABULARY
    assert torch.equal(model(replace(batch, tokens=mates)).logits[0], together[0])


@each_kind
def test_p_sweep(kind):
    """All backends give one answer, on every layout."""
    models = {name: tiny_model(kind, backend=name) for name in BACKENDS}
    batches = [
        Batch.from_rows(ROWS),
        Batch.from_rows(ROWS, side="left", length=11),
        Batch.packed(ROWS, length=20),
        Batch.from_documents([[[1, 2], [], [3]], [[4]], [[]]]),
        Batch.from_rows([[5] * 20]),
    ]
    for batch in batches:
        real = batch.segments != 0
        expected = models["reference"](batch).logits[real]
        for name in BACKENDS[1:]:
            assert_agree(models[name](batch).logits[real], expected, name)


@each_kind
@each_backend
def test_rows_that_see_nothing_stay_finite_through_all_layers(kind, backend):
    """B23, two layers deep: an all-padding row, and gradients of everything."""
    model = tiny_model(kind, backend=backend).train()
    batch = objectives.causal(Batch.from_rows([[1, 2, 3], [], [4]]))
    out = model(batch, want="loss")
    out.loss.total.backward()
    assert torch.isfinite(out.hidden).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    layer = model.layers[0].attention
    silent = torch.zeros(3, 3, 32, dtype=torch.float64)
    attended = layer(silent, batch.coordinates(), batch.coordinates())
    if layer.o_proj.bias is None:
        assert (attended[1] == 0).all()


@each_kind
def test_modes_agree(kind):
    """B32: training without dropout, eval, no_grad and inference_mode give the same."""
    model = tiny_model(kind)
    batch = Batch.from_rows(ROWS)
    expected = model.eval()(batch).logits
    model.train()
    assert torch.equal(model(batch).logits, expected)
    model.gradient_checkpointing = True
    assert torch.equal(model(batch).logits, expected)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(model(batch).logits, expected)
