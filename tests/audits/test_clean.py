"""No leak is reported on an honest model, in any style and precision."""

import pytest
import torch
from torch import nn

from helpers.plain_model import Convolution, Experts, HalfPrecise, PlainModel, PlainProbe, Recurrent
from pellucid.audits import CHECKS, TinyDecoder, TokensProbe, audit
from pellucid.visibility import causal, full, window


@pytest.mark.parametrize(
    ("how", "dtype"),
    [({}, torch.float32), ({}, torch.float64), ({"rotary": True, "window": 4}, torch.float32)],
    ids=str,
)
def test_tiny_decoder_passes_everything(how, dtype):
    report = audit(TinyDecoder(**how).to(dtype))
    silent = {"cross", "prefix"} | (set() if "window" in how else {"window"})
    assert report.verdicts == dict.fromkeys(CHECKS, "pass") | dict.fromkeys(silent, "not_applicable")
    strict = ("future", "packing", "batch", "padding")
    hidden = [f for f in report.findings if f.check in strict and ("changed" in f.case or "pads" in f.case)]
    assert len(hidden) > 10
    assert all(finding.size == 0.0 for finding in hidden)  # bit for bit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_stock_layers_pass(dtype):
    report = audit(probe=PlainProbe(PlainModel().to(dtype)))
    silent = ("cache", "cross", "kernels", "prefix")
    assert report.verdicts == dict.fromkeys(CHECKS, "pass") | dict.fromkeys(silent, "not_applicable")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [Recurrent, Experts], ids=lambda make: make.__name__)
def test_tokens_only_modules_pass(make, dtype):
    report = audit(make().to(dtype))
    assert report.passed
    assert report.verdicts["future"] == report.verdicts["batch"] == report.verdicts["trace"] == "pass"
    assert report.verdicts["padding"] == report.verdicts["loss"] == "not_applicable"


def test_convolution_is_audited_against_the_window_it_declares():
    """Two layers of kernel 3 reach four tokens back, and no more."""
    wide = TokensProbe(Convolution(), rules=[causal() & window(3)] * 2)
    assert audit(probe=wide, checks=["future", "window"]).verdicts == {"future": "pass", "window": "pass"}
    narrow = audit(probe=TokensProbe(Convolution(), rules=[causal() & window(2)] * 2), checks=["window"])
    assert (narrow.findings[0].status, str(narrow.findings[0].where)) == ("leak", "row 0, query 3, key 0")
    leaking = audit(Convolution(ahead=True), checks=["future"])
    assert (leaking.findings[0].status, str(leaking.findings[0].where)) == ("leak", "row 0, query 0, key 1")


def test_rounding_that_hidden_content_causes_is_not_a_leak():
    """What precedes, computed as the whole minus what follows: honest, but for the last bits."""

    class Subtracts(Recurrent):
        def forward(self, tokens):
            x = self.table(tokens)
            after = x.flip(1).cumsum(1).flip(1) - x
            return self.out(x.sum(1, keepdim=True) - after)

    found = audit(Subtracts(), checks=["future"]).findings[0]
    assert found.status == "pass"
    assert 0 < found.size < 1e-5
    assert found.decided.endswith("rounding")
    assert audit(Subtracts().double(), checks=["future"]).findings[0].status == "pass"


def test_a_module_that_casts_to_float32_inside_is_not_accused():
    assert audit(HalfPrecise()).passed
    assert audit(HalfPrecise().double()).passed


def test_nothing_to_hide_is_not_applicable():
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9))
    report = audit(probe=TokensProbe(model, rules=[full()]), checks=["future"])
    assert report.verdicts == {"future": "not_applicable"}
    assert "full()" in report.findings[0].message
