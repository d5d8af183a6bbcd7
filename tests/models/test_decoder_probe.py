"""The whole audit on our own decoder: every kind of model, every backend, both precisions."""

import pytest
import torch
from helpers.tiny import KINDS, tiny_model

from pellucid.audits import CHECKS, audit
from pellucid.models.probe import DecoderProbe
from pellucid.visibility import causal, window

ALL_PASS = dict.fromkeys(CHECKS, "pass")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_decoder_passes(kind):
    report = audit(probe=DecoderProbe(tiny_model(kind, dtype=torch.float32)))
    assert report.verdicts == ALL_PASS
    hidden = [f for f in report.findings if "changed" in f.case or "pads" in f.case or "NaN" in f.case]
    assert len(hidden) > 10
    assert all(finding.size == 0.0 for finding in hidden)  # hidden content matters not, bit for bit


@pytest.mark.parametrize("backend", ["reference", "sdpa", "ragged"])
def test_every_backend_passes(backend):
    model = tiny_model("local-global-interleaved", dtype=torch.float32, backend=backend)
    assert audit(probe=DecoderProbe(model)).verdicts == ALL_PASS


def test_float64_passes():
    assert audit(probe=DecoderProbe(tiny_model("learned-dense-ln"))).verdicts == ALL_PASS


def test_rules_that_look_ahead_are_held_to_what_they_declare():
    """A prefix sees itself; what its cache refuses is not applicable."""
    report = audit(probe=DecoderProbe(tiny_model(rule="causal | prefix(3)")))
    assert report.passed
    assert report.verdicts["future"] == "pass"
    refused = [f for f in report.of("cache") if f.status == "not_applicable"]
    assert refused
    assert all("refuses" in finding.message for finding in refused)


@pytest.mark.parametrize(
    ("declared", "built", "where"),
    [
        (causal(), "everything", "row 0, query 0, key 1"),
        (causal(), "causal | prefix(3)", "row 0, query 0, key 1"),
        (causal() & window(3), "causal & window(4)", "row 0, query 5, key 0"),
    ],
    ids=str,
)
def test_a_decoder_that_is_not_what_it_declares_is_caught(declared, built, where):
    model = tiny_model(rule=built)
    probe = DecoderProbe(model)
    probe.rules = (declared,) * 2
    found = audit(probe=probe, checks=["future"]).findings[0]
    assert (found.status, str(found.where)) == ("leak", where)
