"""``torch.compile``: the same answers, and graphs for new sizes only where they are documented."""

import subprocess
import sys
from pathlib import Path

import pytest

SIX = ["llama", "gpt2", "gemma2", "deepseek", "bert", "t5"]

SCRIPT = """
import sys, warnings
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from helpers.spread import SPREAD, answer, asked, spread_model
from helpers.tiny import assert_agree

warnings.simplefilter("ignore")
torch.set_num_threads(1)
torch._dynamo.config.recompile_limit = 64
model = spread_model(SPREAD[sys.argv[1]])
counter = CompileCounterWithBackend("aot_eager")
compiled = torch.compile(model, backend=counter)


def run(rows, **how):
    batch = asked(model, rows, **how)
    with torch.no_grad():
        found = compiled(batch)
        assert_agree(found.logits, model(batch).logits, str(rows))


def row(length, start=1):
    return [(start + i) % 50 for i in range(length)]


# the first size, then a second length, a second number of rows, padding on either side, and packed documents
run([row(5), row(5, 9)])
run([row(7), row(7, 9)])
run([row(9), row(9, 9), row(9, 3)])
run([row(3), row(8)])
run([row(4), row(9)], side="left")
run([row(3), row(5), row(2)], packed=True)
run([row(4), row(5), row(2)], packed=True)  # a single row is a size of its own to torch, so two lengths of it
run([row(4), row(5), row(3), row(6)])
known = counter.frame_count
assert known > 3
for rows, how in (
    ([row(6), row(6, 9)], {}),
    ([row(11), row(11, 9)], {}),
    ([row(13), row(13, 2), row(13, 9), row(13, 30)], {}),
    ([row(2), row(14)], {}),
    ([row(10), row(3), row(12)], {"side": "left"}),
    ([row(4), row(6), row(5)], {"packed": True}),
):
    run(rows, **how)
    assert counter.frame_count == known, (rows, counter.frame_count, known)
"""


WHOLE = """
import sys

import torch
from torch._dynamo.testing import CompileCounterWithBackend

import pellucid as pl
from pellucid.data.objectives import causal
from pellucid.errors import ShapeError
from pellucid.models.build import build

want = sys.argv[1]
torch.set_num_threads(1)
config = {
    "vocab_size": 50, "hidden_size": 16, "layers": ["causal", "causal & window(3)"],
    "attention": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "ffn": {"kind": "gated", "intermediate_size": 24},
}
model = build(pl.ModelConfig(**config), seed=0, dtype=torch.float64)
counter = CompileCounterWithBackend("aot_eager")
compiled = torch.compile(model, fullgraph=True, backend=counter)


def outcome(function, batch):
    model.zero_grad()
    if want == "loss":
        loss = function(causal(batch), want="loss").loss
        (loss.total * 0.7).backward()
        found = [loss.total.detach(), loss.count]
    else:
        found = [function(batch).logits]
        found[0].square().sum().backward()
    return [*found, *(parameter.grad.clone() for parameter in model.parameters())]


plain = [[[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 3, 4, 5, 6], [5, 6, 7, 8, 9, 1]], [[1, 2, 3]] * 3]
others = [[[3] * 9] * 5, [[1, 2], [3, 4, 5, 6]], [[1], [2, 3, 4, 5, 6, 7, 8]]]
for number, rows in enumerate(plain + others, 1):
    batch = pl.Batch.from_rows(rows)
    for got, expected in zip(outcome(compiled, batch), outcome(model, batch), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-10, rtol=0)
    assert counter.frame_count == min(number, 3), (rows, counter.frame_count)
if want == "loss":
    wrong = pl.Batch.from_rows([[1, 2, 3]]).with_labels(torch.tensor([[2, 50, -100]]))
    for function in (model, compiled):
        try:
            function(wrong, want="loss")
        except ShapeError as error:
            assert "label 50 is outside the vocabulary of 50" in str(error)
        else:
            raise AssertionError("a label outside the vocabulary was taken")
"""


@pytest.mark.parametrize("want", ["logits", pytest.param("loss", marks=pytest.mark.slow)])
def test_a_decoder_is_one_graph_forwards_and_backwards(want):
    """``fullgraph=True``: one graph for the first size, one for lengths, one for rows; padding brings no other."""
    place = Path(__file__).parents[1]
    command = [sys.executable, "-c", WHOLE, want]
    run = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("name", SIX)
def test_compiled_models_agree_and_settle(name):
    """In a process of its own, because the checks of shapes that tests run under cannot be traced."""
    command = [sys.executable, "-c", SCRIPT, name]
    place = Path(__file__).parents[1]
    run = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=900, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
