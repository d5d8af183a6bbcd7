"""Models written in everyday styles: what they return, what they refuse, and masks that they accept and drop."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional

from pellucid.audits import TokensProbe, audit
from pellucid.audits.run import probe_for
from pellucid.errors import InputError
from pellucid.visibility import causal, full


class Plain(nn.Module):
    """Causal attention over tokens and learned places; ``fill`` is what hidden scores become."""

    fault = ""

    def __init__(self, layers=1, places=64):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.table, self.places = nn.Embedding(29, 16), nn.Embedding(places, 16)
            self.layers = nn.ModuleList(Attention(self.fault) for _ in range(layers))
            self.head = nn.Linear(16, 29)

    def scores(self, tokens, mask=None):
        slots = tokens.shape[1]
        assert slots <= self.places.num_embeddings, "too long"
        visible = torch.ones(slots, slots, dtype=torch.bool).tril()[None]
        if mask is not None and self.fault != "ignores the mask":
            visible = visible & mask.bool()[:, None]
        x = self.table(tokens) + self.places(self.counted(tokens, mask))
        for layer in self.layers:
            x = layer(x, visible)
        return self.head(x)

    def counted(self, tokens, mask):
        return torch.arange(tokens.shape[1])[None]

    def forward(self, tokens):
        return self.scores(tokens)


class Attention(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.qkv, self.fault = nn.Linear(16, 48), fault

    def forward(self, x, visible):
        if self.fault.startswith("upside down"):
            visible = ~visible
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + (q @ k.mT / 4).masked_fill(~visible, -1e9).softmax(-1) @ v


class Masked(Plain):
    def forward(self, tokens, attention_mask=None):
        return self.scores(tokens, attention_mask)


class CountsByMask(Masked):
    def counted(self, tokens, mask):
        return super().counted(tokens, mask) if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)


class Ignores(Masked):
    fault = "ignores the mask"


class Refuses(Masked):
    def forward(self, tokens, attention_mask=None):
        if attention_mask is not None and not attention_mask.all():
            raise ValueError("padding is not supported")
        return self.scores(tokens)


def cases(report, check):
    return {finding.case: finding for finding in report.of(check)}


# -------------------------------------------------------------------------------------------------------- padding


def test_a_mask_that_is_ignored_is_not_excused_by_the_wrong_answers_it_gives():
    report = audit(Ignores(), checks=["mask_ignored", "padding"])
    assert report.verdicts == {"mask_ignored": "leak", "padding": "leak"}
    assert "the mask is accepted and ignored" in cases(report, "mask_ignored")["a hole"].message


def test_left_padding_that_shifts_positions_is_a_leak_unless_positions_are_taken_it_is_refused_or_declared():
    report = audit(Masked(), checks=["padding", "mask_ignored", "polarity"])
    assert report.verdicts == {"padding": "leak", "mask_ignored": "pass", "polarity": "pass"}
    assert [f.case for f in report.findings if f.failed] == ["left", "with an all-ones mask, left"]
    assert "left padding shifts its positions" in cases(report, "padding")["left"].message
    assert not any(f.failed for f in audit(CountsByMask(), checks=["padding", "mask_ignored"]).findings)
    declared = Masked()
    declared.padding_side = "right"
    report = audit(declared, checks=["padding"])
    assert not any(f.failed for f in report.findings)
    assert "is not padded on these sides: left, both" in cases(report, "padding")["left and both"].message


def test_an_encoder_that_counts_slots_is_padded_on_the_right():
    probe = probe_for(Masked())
    probe.shift_allowed = True
    finding = cases(audit(probe=probe, checks=["padding"]), "padding")["left"]
    assert (finding.status, finding.message.endswith("pad on the right")) == ("fragile", True)


def test_a_refusal_is_reported_and_nothing_else_suffers():
    report = audit(Refuses(), checks=["future", "batch", "padding", "mask_ignored"])
    assert list(report.verdicts.values()) == ["pass", "pass", "not_applicable", "not_applicable"]
    assert "it raises ValueError: padding is not supported" in report.of("padding")[0].message
    assert audit(Masked(places=3), checks=["future"]).passed


# --------------------------------------------------------------------------------------------------- upside down


@pytest.mark.parametrize("layers", [1, 2])
def test_an_upside_down_mask_is_named_though_its_last_row_averages_everything(layers):
    class UpsideDown(Plain):
        fault = "upside down"

    finding = cases(audit(UpsideDown(layers), checks=["polarity"]), "polarity")["rules"]
    assert finding.status == "leak"
    assert "upside down" in finding.message
    assert finding.where.key > finding.where.query
    assert audit(Plain(layers), checks=["polarity"]).verdicts == {"polarity": "pass"}


# -------------------------------------------------------------------------------------------------------- outputs


@dataclass
class Answer:
    loss: object
    logits: torch.Tensor


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: (x, None),
        lambda x: [x],
        lambda x: {"logits": x},
        lambda x: Answer(None, x),
        lambda x: (torch.tensor(1.0), (x,)),
    ],
)
def test_logits_are_found_in_what_is_returned(wrap):
    class Wrapped(Plain):
        def forward(self, tokens):
            return wrap(self.scores(tokens))

    assert audit(Wrapped(), checks=["future"]).passed


class Learns(Plain):
    """``targets`` are each slot's next token; without them only the last slot is scored."""

    divisor = None

    def forward(self, tokens, targets=None):
        logits = self.scores(tokens)
        if targets is None:
            return logits[:, [-1]], None
        if self.divisor is None:
            return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
        return logits, total / targets.numel()


class Shifts(Plain):
    def forward(self, tokens, labels=None):
        logits = self.scores(tokens)
        if labels is None:
            return {"logits": logits}
        return {
            "loss": functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()),
            "logits": logits,
        }


def test_the_convention_of_a_loss_is_found():
    report = audit(Learns(), checks=["future", "loss"])
    assert report.verdicts == {"future": "pass", "loss": "pass"}
    assert "its targets are taken to be each slot's next token" in report.called
    report = audit(Shifts(), checks=["loss"])
    assert report.verdicts == {"loss": "pass"}
    assert "the tokens themselves, which it shifts" in report.called
    wrong = Learns()
    wrong.divisor = "all slots"
    assert audit(wrong, checks=["loss"]).verdicts == {"loss": "leak"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model, tokens: model(tokens).transpose(1, 2), r"return logits.transpose\(1, 2\)"),
        (lambda model, tokens: model(tokens).transpose(0, 1), r"return logits.transpose\(0, 1\)"),
        (lambda model, tokens: model(tokens)[:, -1], "scores one slot of a row only"),
        (lambda model, tokens: model(tokens.T).transpose(0, 1), r"seems to read \[slots, rows\]"),
        (lambda model, tokens: model, "it makes a model: call it"),
    ],
)
def test_axes_in_another_order_are_one_clear_error(call, message):
    model = Plain()
    with pytest.raises(InputError, match=message):
        audit(lambda tokens: call(model, tokens))


def test_a_factory_is_no_model(no_leaks):
    def make():
        return Plain()

    with pytest.raises(InputError, match=r"make takes no tokens; it is a factory, perhaps: call it"):
        no_leaks(make)


# ---------------------------------------------------------------------------------------------------- torch layers


class Stack(nn.TransformerEncoder):
    drops = False

    def __init__(self):
        super().__init__(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False)

    def forward(self, src, mask=None, src_key_padding_mask=None, is_causal=None):
        return super().forward(src, None if self.drops else mask, src_key_padding_mask)


class DropsItsMask(Stack):
    drops = True


def test_an_encoder_that_drops_the_mask_it_is_handed_is_caught():
    assert audit(Stack(), checks=["future"]).verdicts == {"future": "pass"}
    report = audit(DropsItsMask(), checks=["future"])
    assert report.verdicts == {"future": "leak"}
    assert any(f.failed and f.case.startswith("with a causal mask") for f in report.findings)


# ----------------------------------------------------------------------------------------------------------- told


def test_rules_that_look_ahead_offer_no_loss_of_the_next_token():
    assert "loss" in TokensProbe(Shifts(), rules=[causal()]).capabilities
    assert "loss" not in TokensProbe(Shifts(), rules=[full()]).capabilities
