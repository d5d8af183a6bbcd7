"""How targets are called that are no models of transformers, and models that give no logits."""

import warnings

import pytest
import torch
from torch import nn

from broken_models.hf_style import HFStyleDecoder
from broken_models.masks import DiscardsTheFill
from broken_models.positions import IgnoresPositions
from pellucid.audits import audit
from pellucid.audits.probes.keyword_probe import KeywordProbe
from pellucid.audits.resolve_target import from_text
from pellucid.audits.run import probe_for
from pellucid.errors import InputError


def bare(kind):
    """The same class, telling nobody how it is called."""
    return type(kind.__name__, (kind,), {"probe": None})()


class Mean(nn.Module):
    """Takes a mask, counts nothing: a running mean over what is real."""

    def __init__(self, over_slots=False):
        super().__init__()
        self.table, self.head, self.over_slots = nn.Embedding(50, 16), nn.Linear(16, 50), over_slots

    def forward(self, input_ids, attention_mask=None, labels=None):
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        x = torch.where(real[..., None].bool(), self.table(input_ids), 0.0)
        count = torch.ones_like(real).cumsum(1) if self.over_slots else real.cumsum(1).clamp(min=1)
        return self.head(x.cumsum(1) / count[..., None])


def test_a_forward_like_that_of_transformers_is_audited_with_padding_and_positions():
    probe = probe_for(bare(HFStyleDecoder))
    assert isinstance(probe, KeywordProbe)
    assert probe.capabilities == {"embeddings", "padding", "positions"}
    assert probe.call_modes == ("with an all-ones mask",)
    report = audit(bare(HFStyleDecoder), checks=["padding", "positions", "mask_ignored", "future"])
    assert not any(finding.failed for finding in report.findings)
    assert "with an all-ones mask" in {finding.case for finding in report.findings}
    assert report.called.startswith("called by KeywordProbe (embeddings, padding, positions)")
    assert audit(bare(DiscardsTheFill), checks=["mask_ignored"]).verdicts == {"mask_ignored": "leak"}
    assert audit(bare(IgnoresPositions), checks=["positions"]).verdicts == {"positions": "leak"}


def test_it_is_padded_on_the_left_only_where_it_can_be():
    torch.manual_seed(0)
    assert probe_for(Mean()).sides == ("right", "left", "both")
    slots = probe_for(Mean(over_slots=True))
    assert (slots.sides, slots.position_shifting_sides) == (
        ("right",),
        ("left", "both"),
    )  # its answers depend on them, and nothing tells
    assert audit(Mean(), checks=["padding", "batch", "polarity"]).passed


def test_what_needs_more_than_is_known_is_called_with_tokens_alone():
    class More(Mean):
        def forward(self, input_ids, types, attention_mask=None):
            return super().forward(input_ids + types, attention_mask)

    with pytest.raises(
        InputError, match=r"it needs more than tokens: audit a function, lambda ids: model\(ids, types\)"
    ):
        probe_for(More())
    with pytest.raises(InputError, match="takes neither attention_mask nor position_ids"):
        KeywordProbe(nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["BertModel", "GPT2Model"])
def test_models_without_a_head_are_compared_by_their_hidden_states(name):
    pytest.importorskip("transformers")
    report = audit(from_text(f"transformers:{name}"), checks=["future", "batch", "loss"])
    assert report.verdicts["batch"] == "pass"
    assert report.verdicts["loss"] == "not_applicable"
    assert "its hidden states compared, for it returns no logits" in report.called


def test_what_gives_neither_logits_nor_hidden_states_is_refused_in_words():
    transformers = pytest.importorskip("transformers")
    model = from_text("transformers:BertModel")

    class Other(transformers.BertPreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            self.inner = transformers.BertModel(config)

        def forward(self, input_ids, attention_mask=None):
            return {"pooled": self.inner(input_ids, attention_mask).pooler_output}

        def get_input_embeddings(self):
            return self.inner.get_input_embeddings()

    with pytest.raises(InputError, match="Other returns pooled, but neither logits nor last_hidden_state"):
        probe_for(Other(model.config))


def test_nan_beside_left_padding_is_no_fault_of_positions_or_polarity():
    """``nn.Transformer`` answers NaN at queries that see nothing, which one layer on is everywhere."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        report = audit(nn.Transformer(16, 2, 1, 2, 32, batch_first=True), checks=["positions", "polarity", "padding"])
    assert {f.status for f in report.of("positions")} == {"not_applicable"}
    assert not any(f.failed for f in report.of("polarity"))
    assert report.verdicts["padding"] == "leak"  # where it belongs


def test_dropout_that_zero_weights_hide_is_no_fault():
    """Low-rank adapters begin with a second factor of 0."""

    class Adapted(Mean):
        def __init__(self):
            super().__init__()
            self.down, self.up, self.drop = nn.Linear(16, 4), nn.Linear(4, 50, bias=False), nn.Dropout(0.1)
            nn.init.zeros_(self.up.weight)

        def forward(self, tokens):
            return super().forward(tokens) + self.up(self.down(self.drop(self.table(tokens))))

    model = Adapted()
    found = {finding.case: finding for finding in audit(model, checks=["dropout"]).findings}
    assert found["train mode"].status == "pass"
    assert "once up.weight is no longer all 0" in found["train mode"].message
    assert not bool(model.up.weight.any())


REMEMBERED = None


class Store:
    """Beside the model, in its file."""

    held = None


def test_what_is_remembered_in_the_model_s_file_is_found():
    class InAGlobal(Mean):
        def forward(self, tokens):
            globals()["REMEMBERED"] = tokens.clone()
            return super().forward(tokens)

    class InAnotherClass(Mean):
        def forward(self, tokens):
            Store.held = tokens.clone()
            return super().forward(tokens)

    for make, name in ((InAGlobal, "REMEMBERED"), (InAnotherClass, "Store.held")):
        report = audit(make(), checks=["trace"])
        assert report.verdicts == {"trace": "fragile"}
        assert f"{name} keeps something of the first request" in report.of("trace")[0].message
