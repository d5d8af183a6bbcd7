"""Windows, prefixes and sources: honest models pass, and what is wrong is found in the layer where it is."""

import pytest
import torch
from torch import nn

import broken_models
from broken_models.encoder_decoder import StreamingPair, TinyEncoderDecoder
from broken_models.layers import BothWays, PlainStack, PrefixStack, RightContext, SinksStack, Stack
from pellucid.audits import TokensProbe, audit
from pellucid.audits.probes.torch_layers_probe import TorchLayersProbe
from pellucid.errors import InputError
from pellucid.visibility import causal, full, window

FLOW = ["future", "window", "prefix", "batch", "cross"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "make",
    [Stack, PrefixStack, RightContext, SinksStack, PlainStack, BothWays, TinyEncoderDecoder, StreamingPair],
    ids=lambda make: make.__name__,
)
def test_honest_models_pass(make, dtype):
    report = audit(make().to(dtype), checks=FLOW)
    assert report.passed
    assert {finding.status for finding in report.findings} <= {"pass", "not_applicable"}


def test_layers_are_distinguished_where_the_whole_is_right():
    """Local and global layers in the wrong order: end to end the same tokens are reached."""
    report = audit(broken_models.WindowsSwapped(), checks=FLOW)
    assert report.verdicts["future"] == "pass"
    cases = {finding.case: finding for finding in report.of("window")}
    assert cases["tokens"].status == "pass"
    assert cases["edge of 3"].status == "leak"
    assert cases["edge of 3"].message.startswith("blocks.0 lets token 0 through to query 3")


def test_the_first_broken_layer_is_named():
    class LastOpen(Stack):
        def visible(self, back_TT, layer):
            return super().visible(back_TT, layer) | ((layer == 2) & (back_TT == -1))

    (found, *_) = audit(LastOpen(), checks=["future"]).findings
    assert found.status == "leak"
    assert "the first layer to break its rule is blocks.2, at query 0, key 1" in found.message

    class Before(Stack):
        def forward(self, tokens):
            return super().forward(tokens) + 0.1 * self.out(self.table(tokens)).mean(1, keepdim=True)

    (found, *_) = audit(Before(), checks=["future"]).findings
    assert "each layer keeps to its rule" in found.message


def test_hooks_are_gone_afterwards():
    stack = Stack()
    audit(stack, checks=["window"])
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in stack.modules())


def test_a_long_window_is_looked_at_on_a_longer_sequence():
    class Wide(Stack):
        rules = (causal() & window(30),) * 2

        def visible(self, back_TT, layer):
            return (back_TT >= 0) & (back_TT < self.width)

        width = 30

    assert {f.status for f in audit(Wide(), checks=["window"]).findings} == {"pass"}
    for width in (29, 31):
        wrong = Wide()
        wrong.width = width
        assert audit(wrong, checks=["window"]).findings[-1].status == "leak"


def test_a_window_longer_than_what_is_looked_at_says_so():
    class Endless(Stack):
        rules = (causal() & window(600),) * 3

        def visible(self, back_TT, layer):
            return back_TT >= 0

    found = audit(Endless(positions=1024), checks=["window"]).findings[-1]
    assert found.status == "not_applicable"
    assert "raise length" in found.message


@pytest.mark.parametrize("rows_first", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda how: nn.TransformerEncoderLayer(16, 2, 32, **how),
        lambda how: nn.TransformerDecoderLayer(16, 2, 32, **how),
        lambda how: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, **how), 2, enable_nested_tensor=False),
        lambda how: nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, **how), 2),
    ],
    ids=["encoder layer", "decoder layer", "encoder", "decoder"],
)
def test_torchs_own_layers_are_called_as_they_are_documented(make, rows_first):
    module = make({"batch_first": rows_first, "norm_first": True})
    report = audit(module, checks=["future", "batch", "cross"])
    assert report.passed
    reads = isinstance(module, nn.TransformerDecoder | nn.TransformerDecoderLayer)
    assert report.verdicts["future"] == "pass"  # an encoder where it is given a causal mask
    assert report.verdicts["cross"] == ("pass" if reads else "not_applicable")
    assert audit(probe=TorchLayersProbe(module, causal=True), checks=["future"]).passed


def test_a_causal_mask_that_a_stock_layer_is_not_given_is_found():
    """``is_causal`` alone is a hint that does nothing there: what a user believes is held against what happens."""
    module = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True)
    probe = TorchLayersProbe(module, causal=False)
    probe.rules = (causal(),)
    assert audit(probe=probe, checks=["future"]).verdicts == {"future": "leak"}


def test_other_modules_are_no_stock_layers():
    with pytest.raises(InputError, match="Linear is none of torch's Transformer layers"):
        TorchLayersProbe(nn.Linear(2, 2))


def test_what_must_be_seen_is_required_only_where_it_was_declared():
    class Narrow(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.out = nn.Embedding(9, 8), nn.Linear(8, 9)

        def forward(self, tokens):
            return self.out(self.table(tokens))

    assumed = audit(Narrow(), checks=["future"])
    assert assumed.verdicts == {"future": "pass"}
    assert "no rule was declared" in assumed.findings[1].message
    declared = audit(probe=TokensProbe(Narrow(), rules=[causal()]), checks=["future"])
    assert declared.verdicts == {"future": "fragile"}
    whole = audit(probe=TokensProbe(Narrow(), rules=[full()]), checks=["future", "prefix"])
    assert not whole.passed


class InPlace(Stack):
    """Honest, but every block writes into what it is given, and the model into what a block gave."""

    class Writes(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, x_BTD, hidden_TT):
            x_BTD += self.block(x_BTD.clone(), hidden_TT)
            return x_BTD

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Writes(block) for block in self.blocks)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1])
        x_BTD = self.table(tokens) + self.places(places)
        for layer, block in enumerate(self.blocks):
            x_BTD = block(x_BTD, ~self.visible(places[:, None] - places, layer)).mul_(0.5)
        return self.out(x_BTD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_layers_that_write_in_place_are_not_accused(dtype):
    report = audit(InPlace().to(dtype), checks=FLOW)
    assert report.passed
    assert (report.verdicts["future"], report.verdicts["window"]) == ("pass", "pass")


def test_a_target_without_gradients_is_no_leak():
    class NoGradient(Stack):
        def forward(self, tokens):
            logits = super().forward(tokens)
            return torch.exp(logits).mul_(2).log() + 0 * logits  # exp keeps its result for the way back

    cases = {finding.case: finding for finding in audit(NoGradient(), checks=["future"]).findings}
    assert cases["tokens"].status == "pass"
    assert cases["gradient"].status == "not_applicable"
    assert "no gradient can be taken" in cases["gradient"].message


def test_hooks_are_gone_after_an_exception_too():
    class Raises(Stack):
        calls = 0

        def forward(self, tokens):
            self.calls += 1
            logits = super().forward(tokens)
            if self.calls > 12:
                raise RuntimeError("enough")
            return logits

    stack = Raises()
    assert audit(stack, checks=["window"]).verdicts == {"window": "error"}
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in stack.modules())


def test_one_rule_stands_for_all_layers_that_can_be_found():
    class Local(Stack):
        def visible(self, back_TT, layer):
            return (back_TT >= 0) & (back_TT < 3)

        probe = None  # as somebody's own module, which says nothing

    probe = TokensProbe(Local(), rules=[causal() & window(3)])
    assert len(probe.rules) == 3
    report = audit(probe=probe, checks=["future", "window"])
    assert report.verdicts == {"future": "pass", "window": "pass"}
    wrong = audit(probe=TokensProbe(Local(), rules=[causal() & window(2)]), checks=["window"])
    assert wrong.verdicts == {"window": "leak"}
