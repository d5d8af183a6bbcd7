"""Whole families beside transformers' tiny random models on copied weights, in float64."""

from functools import cache

import pytest
import torch

pytest.importorskip("transformers")

from helpers.from_transformers import exact, pair_of_models
from helpers.transformers_families import FAMILIES
from pellucid.data import Batch

ROWS = [[5, 9, 3, 11, 20, 7, 8, 31, 4], [12, 6, 30, 4], [8, 22, 15, 33, 9, 10, 3]]
SOURCES = [[7, 21, 4, 9], [3, 5, 8, 16, 25, 6, 30, 12], [17, 29, 9]]
DECODERS = [name for name in FAMILIES if name != "bert"]


@cache
def models(name):
    return pair_of_models(FAMILIES[name])


pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def agree(got, expected):
    """1e-10 of the largest logit: both sides compute in float64 throughout."""
    size = float((got - expected).detach().abs().max())
    assert size <= 1e-10 * (1 + float(expected.detach().abs().max())), f"differs by {size:.3g}"
    assert float(expected.detach().std()) > 0.1


def asked(name, batch, **more):
    """What theirs is called with for ``batch``."""
    family, real = FAMILIES[name], batch.segments != 0
    if family.pairs:
        source = batch.source
        words = {"input_ids": source.tokens, "attention_mask": (source.segments != 0).long()}
        return words | {"decoder_input_ids": batch.tokens, **more}
    words = {"input_ids": batch.tokens, "attention_mask": real.long()}
    return words | ({"position_ids": batch.positions} if family.positions else {}) | more


def ran(theirs, words):
    with exact(), torch.no_grad():
        return theirs(**words)


def made(name, side="right", rows=ROWS):
    if FAMILIES[name].pairs:
        return Batch.from_pairs(SOURCES[: len(rows)], rows, side=side)
    return Batch.from_rows(rows, side=side)


@pytest.mark.parametrize("name", FAMILIES)
def test_one_row(name):
    theirs, ours = models(name)
    batch = made(name, rows=ROWS[:1])
    agree(ours(batch).logits, ran(theirs, asked(name, batch)).logits)


@pytest.mark.parametrize(("name", "side"), [(name, side) for name in FAMILIES for side in FAMILIES[name].sides])
def test_padded_rows(name, side):
    theirs, ours = models(name)
    batch = made(name, side)
    if FAMILIES[name].pairs:  # their decoders are not told of padding on the left
        batch = Batch.from_pairs(SOURCES, [ROWS[0], ROWS[0][::-1], [*ROWS[0][1:], 2]], side=side)
    real = batch.segments != 0
    agree(ours(batch).logits[real], ran(theirs, asked(name, batch)).logits[real])


@pytest.mark.parametrize("name", DECODERS)
def test_through_a_cache(name):
    """Chunks of 4, 1, 1 and 3: theirs through its cache, ours through ours, and neither knows of the other's."""
    theirs, ours = models(name)
    family = FAMILIES[name]
    rows = [ROWS[0], ROWS[0][::-1]]
    batch = made(name, rows=rows)
    whole = ran(theirs, asked(name, batch, use_cache=False)).logits
    cache, past, outputs, start = ours.new_cache(2, 9), None, [], 0
    for size in (4, 1, 1, 3):
        part = Batch.from_rows([row[start : start + size] for row in rows])
        if family.pairs:
            words = {"decoder_input_ids": part.tokens} | {
                n: v for n, v in asked(name, batch).items() if "decoder" not in n
            }
            part = Batch.from_pairs(SOURCES[:2], [row[:size] for row in rows]) if start == 0 else part
        else:
            words = {"input_ids": part.tokens, "attention_mask": torch.ones(2, start + size, dtype=torch.long)}
            words |= {"position_ids": part.positions + start} if family.positions else {}
        found = ran(theirs, words | {"past_key_values": past, "use_cache": True})
        past = found.past_key_values
        outputs.append(ours(part, cache=cache).logits)
        agree(outputs[-1], found.logits)
        start += size
    agree(torch.cat(outputs, 1), whole)


@pytest.mark.parametrize(
    "name", [name for name in DECODERS if "left" in FAMILIES[name].sides and not FAMILIES[name].pairs]
)
def test_left_padded_rows_through_our_cache(name):
    theirs, ours = models(name)
    batch = made(name, "left")
    real = batch.segments != 0
    expected = ran(theirs, asked(name, batch)).logits
    cache, outputs = ours.new_cache(3, 9), []
    first = Batch.from_rows([row[:-2] for row in ROWS], side="left")
    steps = [Batch.from_rows([[row[place]] for row in ROWS]) for place in (-2, -1)]
    outputs = [ours(part, cache=cache).logits for part in (first, *steps)]
    agree(torch.cat(outputs, 1)[real], expected[real])


def test_token_types():
    theirs, ours = models("bert")
    batch = made("bert", "left")
    types = torch.arange(9).remainder(2).expand(3, -1) * (batch.segments != 0)
    got = ours(Batch(batch.tokens, batch.positions, batch.segments, types=types)).logits
    real = batch.segments != 0
    agree(got[real], ran(theirs, asked("bert", batch, token_type_ids=types)).logits[real])
    assert float((got - ours(batch).logits)[real].detach().abs().max()) > 0.1
