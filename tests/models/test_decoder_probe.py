"""The whole audit on our own decoder: every kind of model, every backend, both precisions."""

import pytest
import torch

from helpers.tiny import KINDS, tiny_model
from pellucid.audits import audit
from pellucid.batch import Batch
from pellucid.errors import ShapeError
from pellucid.models import probe as probe_module
from pellucid.models.probe import DecoderProbe
from pellucid.nn import cache as cache_module
from pellucid.visibility import causal, window

# No encoder is read, and by the rules of KINDS nobody looks ahead; not all of them have a window.
SILENT = {"cross", "prefix", "window"}


pytestmark = pytest.mark.usefixtures("our_checks_only")  # the checker of annotations draws random numbers


def assert_passes(model):
    report = audit(probe=DecoderProbe(model))
    assert {name for name, verdict in report.verdicts.items() if verdict != "pass"} <= SILENT
    assert set(report.verdicts.values()) <= {"pass", "not_applicable"}
    hidden = [f for f in report.findings if "changed" in f.case or "pads" in f.case or "NaN" in f.case]
    assert len(hidden) > 10
    assert all(finding.size == 0.0 for finding in hidden)  # hidden content does not matter, bit for bit


@pytest.mark.parametrize(
    ("kind", "backend"),
    [("learned-dense-ln", "auto"), ("local-global-interleaved", "varlen")],
)
def test_decoders_pass(kind, backend):
    assert_passes(tiny_model(kind, dtype=torch.float32, backend=backend))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("backend", ["auto", "reference", "sdpa", "varlen"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_decoder_passes_on_every_backend(kind, backend, dtype):
    assert_passes(tiny_model(kind, dtype=dtype, backend=backend))


def test_rules_that_look_ahead_are_held_to_what_they_declare():
    """A prefix sees itself; what its cache refuses is not applicable."""
    report = audit(probe=DecoderProbe(tiny_model(rule="causal | prefix(3)")), checks=["future", "cache"])
    assert report.passed
    assert report.verdicts["future"] == "pass"
    refused = [f for f in report.of("cache") if f.status == "not_applicable"]
    assert refused
    assert all("refuses" in finding.message for finding in refused)


@pytest.mark.parametrize(
    ("check", "declared", "built", "where"),
    [
        ("future", causal(), "full", "row 0, query 0, key 1"),
        ("future", causal(), "causal | prefix(3)", "row 0, query 0, key 1"),
        ("window", causal() & window(3), "causal & window(4)", "row 0, query 5, key 0"),
    ],
    ids=str,
)
def test_a_decoder_that_is_not_what_it_declares_is_caught(check, declared, built, where):
    model = tiny_model(rule=built)
    probe = DecoderProbe(model)
    probe.rules = (declared,) * 2
    found = audit(probe=probe, checks=[check]).findings[0]
    assert (found.status, str(found.where)) == ("leak", where)


def test_a_cache_that_counts_all_rows_alike_is_caught(monkeypatch):
    """B16: one counter for all rows of a padded batch. The probe must not tell the cache where rows ended."""
    right = cache_module.ends

    def shared(runs, rows):
        ends = right(runs, rows)
        return [(1, max(end for _, end in ends))] * rows

    monkeypatch.setattr(cache_module, "ends", shared)
    found = audit(probe=DecoderProbe(tiny_model("learned-dense-ln")), checks=["cache"])
    wrong = [finding.case for finding in found.findings if finding.failed]
    assert "left padded, 4 + 5" in wrong
    assert "reorder" in wrong


def test_an_objective_that_crosses_borders_is_caught(monkeypatch):
    """B44: the objective is audited together with the model."""

    def crossing(batch):
        labels = torch.roll(batch.tokens, -1, 1)
        return batch.with_labels(torch.where(batch.segments != 0, labels, -100))

    monkeypatch.setattr(probe_module, "causal", crossing)
    report = audit(probe=DecoderProbe(tiny_model()), checks=["packing", "loss"])
    assert report.verdicts == {"packing": "leak", "loss": "leak"}


def test_embeddings_replace_those_of_the_tokens():
    """The tokens' own give the same, bit for bit; others give other logits; another width is refused."""
    model = tiny_model("learned-dense-ln")
    batch = Batch.from_rows([[5, 8, 2], [7, 1]])
    embeds = model.embed_tokens(batch.tokens).detach()
    want = model(batch).logits
    assert torch.equal(model(batch.replace(inputs_embeds=embeds)).logits, want)
    assert not torch.equal(model(batch.replace(inputs_embeds=embeds.flip(1))).logits, want)
    with pytest.raises(ShapeError, match="inputs_embeds has width 3, but embed_tokens gives"):
        model(batch.replace(inputs_embeds=embeds[..., :3]))
