"""Models as others write them: what an audit of such a model must say, honest ones and leaking ones side by side."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import pellucid as pl
from pellucid.audits import TinyDecoder, audit, run
from pellucid.errors import ArgumentError
from pellucid.models.probe import EncoderDecoderProbe

VOCABULARY, WIDTH = 50, 16


class OneLayer(nn.Module):
    """One of torch's layers between a table and a head, with a causal mask."""

    def __init__(self, leaks: bool = False) -> None:
        super().__init__()
        self.leaks = leaks
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.table = nn.Embedding(VOCABULARY, WIDTH)
            self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)
            self.head = nn.Linear(WIDTH, VOCABULARY)

    def mix(self, x):
        slots = x.shape[1]
        hidden = None if self.leaks else torch.ones(slots, slots, dtype=torch.bool, device=x.device).triu(1)
        return self.layer(x, src_mask=hidden)

    def forward(self, tokens):
        return self.head(self.mix(self.table(tokens)))


class EmbedsInPieces(OneLayer):
    def forward(self, tokens):
        return self.head(self.mix(torch.cat([self.table(piece) for piece in tokens.split(8, 1)], 1)))


class NoBackwardInEval(OneLayer):
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise TypeError("expected a state, but got None")

    def forward(self, tokens):
        x = self.mix(self.table(tokens))
        return self.head(x if self.training else self.Raises.apply(x))


@pytest.mark.parametrize("make", [EmbedsInPieces, NoBackwardInEval])
def test_an_extra_way_of_calling_that_raises_is_no_fault_of_the_target(make):
    report = audit(make(), checks=["future"])
    assert report.verdicts == {"future": "pass"}
    (gradient,) = [finding for finding in report.findings if finding.case == "gradient"]
    assert gradient.status == "not_applicable"
    assert audit(make(leaks=True), checks=["future"]).verdicts == {"future": "leak"}


class RightAligned(OneLayer):
    """Rotary angles from a table in float32, read from its right end: other angles, the same distances."""

    def __init__(self, leaks: bool = False) -> None:
        super().__init__(leaks)
        rates = 10000 ** -(torch.arange(0, 16, 2) / 16)
        angles = torch.arange(64.0)[:, None] * rates
        self.register_buffer("angles", torch.cat([angles, angles], -1))

    def mix(self, x):
        slots = x.shape[1]
        angles = self.angles[-slots:].to(x)

        def rotate(u):
            return u * angles.cos() + torch.cat([-u[..., 8:], u[..., :8]], -1) * angles.sin()

        scores = rotate(x) @ rotate(x).mT / 4
        if not self.leaks:
            scores = scores.masked_fill(torch.ones(slots, slots, dtype=torch.bool).triu(1), -1e9)
        return x + scores.softmax(-1) @ x


class CountsSlots(OneLayer):
    """A thousandth of the row's length is added: far above the rounding of any table."""

    def mix(self, x):
        return super().mix(x) + 1e-7 * x.shape[1]


def test_the_rounding_of_a_table_is_no_news_of_the_rows_length():
    assert audit(RightAligned(), checks=["future"]).verdicts == {"future": "pass"}
    assert audit(RightAligned(leaks=True), checks=["future"]).verdicts == {"future": "leak"}
    counts = CountsSlots()
    counts.register_buffer("table_of_angles", torch.rand(8))
    assert audit(counts, checks=["future"]).verdicts == {"future": "leak"}


class ZeroInitialized(nn.Module):
    """The output projections of all blocks are 0 at first, as in many recipes of GPT; the last block has no mask."""

    class Block(nn.Module):
        def __init__(self, causal):
            super().__init__()
            self.causal, self.qkv, self.projection = causal, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            nn.init.zeros_(self.projection.weight)
            nn.init.zeros_(self.projection.bias)

        def forward(self, x):
            q, k, v = self.qkv(functional.layer_norm(x, (WIDTH,))).chunk(3, -1)
            return x + self.projection(functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal))

    def __init__(self, leaks: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.table, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
            self.shift = nn.Conv1d(WIDTH, WIDTH, 2)
            self.blocks = nn.ModuleList([self.Block(True), self.Block(not leaks)])

    def forward(self, tokens):
        x = self.shift(functional.pad(self.table(tokens).mT, (1, 0))).mT
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_paths_behind_weights_that_are_still_zero_are_tested_too():
    report = audit(ZeroInitialized(leaks=True), checks=["future"])
    assert report.verdicts == {"future": "leak"}
    assert next(f for f in report.findings if f.failed).case.startswith("with blocks.0.projection.weight and 1 more")
    assert audit(ZeroInitialized(), checks=["future"]).verdicts == {"future": "pass"}


class HoleInAList(OneLayer):
    """A ``ModuleList`` that holds None, and a wrapper that hides its children."""

    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def __getattr__(self, name):
            if name == "inner":
                return super().__getattr__(name)
            return getattr(self.inner, name)

        def forward(self, x):
            return self.inner(x)

    def __init__(self, leaks: bool = False) -> None:
        super().__init__(leaks)
        self.norms = nn.ModuleList([self.Wrapper(nn.LayerNorm(WIDTH)), None])

    def mix(self, x):
        return super().mix(self.norms[0](x))


def test_modules_that_cannot_be_reached_by_name_do_not_undo_a_verdict():
    assert audit(HoleInAList(leaks=True), checks=["future", "polarity"]).verdicts["future"] == "leak"
    assert "error" not in audit(HoleInAList(), checks=["future", "window", "polarity"]).verdicts.values()


def test_an_explanation_that_raises_does_not_undo_a_verdict(monkeypatch):
    def raises(*_):
        raise RuntimeError("no layers today")

    monkeypatch.setattr("pellucid.audits.checks.future.first_broken_layer", raises)
    monkeypatch.setattr("pellucid.audits.engine.perturbation.Perturbations.moves_alone", raises)
    assert audit(OneLayer(leaks=True), checks=["future"]).verdicts == {"future": "leak"}


@pytest.mark.parametrize(("file", "own"), [("engine/made_up.py", True), ("engine/target_run.py", False)])
def test_the_audits_own_failure_is_not_reported_as_the_targets(file, own):
    path = Path(run.__file__).parent / file
    with pytest.raises(KeyError) as caught:
        exec(compile("raise KeyError(1)", path, "exec"), {})
    error = caught.value.with_traceback(caught.value.__traceback__.tb_next)  # without the frame of this test
    assert ("the audit itself failed" in run._raised(error)) is own


class DropsItsMask(OneLayer):
    """Given a padding mask it forgets the causal one."""

    def forward(self, tokens, attention_mask=None):
        slots = tokens.shape[1]
        hidden = torch.ones(slots, slots, dtype=torch.bool).triu(1) if attention_mask is None else None
        pads = None if attention_mask is None else attention_mask == 0
        return self.head(self.layer(self.table(tokens), src_mask=hidden, src_key_padding_mask=pads))


def test_what_moved_an_output_beside_padding_is_looked_for_everywhere():
    finding = next(f for f in audit(DropsItsMask(), checks=["padding"]).findings if f.case == "right")
    assert (finding.status, finding.where.key) == ("leak", 1)
    assert "token 1 of its own document, which its rule hides, moves it" in finding.message


class Smoothed(TinyDecoder):
    """Labels are smoothed, as in translation and vision."""

    def loss(self, batch):
        logits_BTV, scored_BT = self(batch)[:, :-1], batch.loss_mask[:, 1:]
        losses = functional.cross_entropy(
            logits_BTV.flatten(0, 1), batch.tokens[:, 1:].flatten(), reduction="none", label_smoothing=0.1
        )
        return torch.where(scored_BT, losses.view(scored_BT.shape), 0.0).sum(), scored_BT.sum()


class Weighted(TinyDecoder):
    """Every second class counts twice."""

    def loss(self, batch):
        total, count = super().loss(batch)
        even_BT = batch.loss_mask & (batch.tokens % 2 == 0)
        return total + super().loss(batch.replace(target_mask=even_BT))[0], count


class SmoothedMean(Smoothed):
    def loss(self, batch):
        total, count = super().loss(batch)
        return total / batch.shape[0], count


def test_a_smoothed_loss_is_recognized_and_another_loss_is_no_leak():
    report = audit(Smoothed(), checks=["loss"])
    assert report.verdicts == {"loss": "pass"}
    assert "smoothed by 0.1" in report.findings[0].message
    report = audit(Weighted(), checks=["loss"])
    assert report.verdicts == {"loss": "fragile"}
    assert "no plain cross-entropy" in report.findings[0].message
    assert audit(SmoothedMean(), checks=["loss"]).verdicts == {"loss": "leak"}


class PutsItselfToEval(TinyDecoder):
    def final_hidden(self, x_BTD, queries):
        self.drop.eval()
        return x_BTD


class AddsToItsStateDict(TinyDecoder):
    def final_hidden(self, x_BTD, queries):
        if "scratch" not in dict(self.named_buffers()):
            self.register_buffer("scratch", torch.zeros(3))
        return x_BTD


def test_what_the_first_use_or_train_mode_changes_is_a_trace():
    report = audit(PutsItselfToEval(), checks=["trace"])
    assert next(f for f in report.findings if f.status == "leak").case == "train mode"
    report = audit(AddsToItsStateDict(), checks=["trace"])
    assert "adds scratch to the state dict" in next(f for f in report.findings if f.case == "state dict").message


class Eights(OneLayer):
    """Takes multiples of 8 tokens."""

    def forward(self, tokens):
        assert tokens.shape[1] % 8 == 0, "the length must be divisible by 8"
        return super().forward(tokens)


class OneLength(OneLayer):
    """Takes 16 tokens, no more and no fewer."""

    def forward(self, tokens):
        if tokens.shape[1] != 16:
            raise ValueError("16 tokens are wanted")
        return super().forward(tokens)


@pytest.mark.parametrize("make", [Eights, OneLength])
def test_targets_that_take_some_lengths_only_are_audited_in_these(make):
    report = audit(make())
    assert set(report.verdicts.values()) == {"pass", "not_applicable"}
    for check in ("future", "batch", "dropout", "determinism", "modes", "trace"):
        assert report.verdicts[check] == "pass", check
    assert audit(make(leaks=True), checks=["future"]).verdicts == {"future": "leak"}

    class Drops(make):
        def forward(self, tokens):
            return functional.dropout(super().forward(tokens), 0.5, True)

    class Mixes(make):
        def forward(self, tokens):
            logits = super().forward(tokens)
            return logits - logits.mean(0, keepdim=True) / 2

    assert audit(Drops(), checks=["dropout"]).verdicts == {"dropout": "leak"}
    assert audit(Mixes(), checks=["batch"]).verdicts == {"batch": "leak"}


def test_a_refusal_is_recognized_without_its_source():
    code = """
class Typed(Eights):
    def forward(self, tokens):
        if tokens.shape[1] % 8:
            raise ValueError("multiples of 8 only")
        return super().forward(tokens)
"""
    scope = {"Eights": Eights}
    exec(code, scope)
    assert audit(scope["Typed"]()).passed


class MaskOfEights(OneLayer):
    """Multiples of 8, and a padding mask that the layer obeys (or not)."""

    def forward(self, tokens, attention_mask=None):
        if tokens.shape[1] % 8:
            raise ValueError("multiples of 8 only")
        slots = tokens.shape[1]
        hidden_BTT = torch.ones(slots, slots, dtype=torch.bool).triu(1).expand(len(tokens), -1, -1)
        if attention_mask is not None and not self.leaks:
            hidden_BTT = hidden_BTT | (attention_mask == 0)[:, None, :]
        hidden_BTT = hidden_BTT & ~torch.eye(slots, dtype=torch.bool)
        return self.head(self.layer(self.table(tokens), src_mask=hidden_BTT.repeat_interleave(2, 0)))


def test_padding_of_targets_that_take_some_lengths_only_is_tested():
    assert audit(MaskOfEights(), checks=["padding", "mask_ignored", "polarity"]).passed
    verdicts = audit(MaskOfEights(leaks=True), checks=["padding", "mask_ignored"]).verdicts
    assert verdicts["padding"] == verdicts["mask_ignored"] == "leak"


def test_a_maximum_over_the_row_is_found_whatever_the_seed():
    model = OneLayer()

    def scaled(tokens):
        logits = model(tokens)
        return logits / logits.abs().amax((1, 2), keepdim=True)

    assert {audit(scaled, checks=["future"], seed=seed).verdicts["future"] for seed in range(6)} == {"leak"}


class Series(OneLayer):
    """Numbers in, one number for each step out."""

    def __init__(self, leaks: bool = False) -> None:
        super().__init__(leaks)
        self.input, self.output = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.output(self.mix(self.input(x))).squeeze(-1)


def test_a_model_of_numbers_is_audited_as_it_is():
    report = audit(Series())
    assert report.verdicts["future"] == "pass"
    assert set(report.verdicts.values()) == {"pass", "not_applicable"}
    assert "vectors of 3 numbers" in report.called
    assert audit(Series(leaks=True), checks=["future"]).verdicts == {"future": "leak"}
    scores = OneLayer()
    scores.head = nn.Sequential(nn.Linear(WIDTH, 1), nn.Flatten(1))  # [B, T]: a number for each token
    assert audit(scores, checks=["future"]).verdicts == {"future": "pass"}


class Forecaster(Series):
    """A whole row in, eight numbers out: who sees whom within it cannot be told."""

    def forward(self, x):
        return super().forward(x)[:, -1:] * torch.arange(1.0, 9.0).to(x)


def test_one_output_of_a_row_of_numbers_is_not_taken_for_one_a_token():
    with pytest.raises(ArgumentError):
        audit(Forecaster())


def test_a_mask_in_a_buffer_is_no_table():
    class Counts(OneLayer):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.ones(64, 64).tril())

        def mix(self, x):
            slots = x.shape[1]
            scores = (x @ x.mT).masked_fill(self.mask[:slots, :slots] != 1, float("-inf"))
            return scores.softmax(-1) @ x + 1e-6 * slots

    assert audit(Counts(), checks=["future"]).verdicts == {"future": "leak"}


def test_variants_keep_to_the_budget_and_the_order_of_checks_decides_nothing():
    report = audit(ZeroInitialized(leaks=True), budget=0.001)
    assert report.not_run

    class Noise(OneLayer):
        def mix(self, x):
            return super().mix(x) + 0.1 * torch.randn(1, 1, WIDTH).to(x)

    for checks in (["future"], ["dropout", "future"], ["future", "trace", "future"]):
        report = audit(Noise(leaks=True), checks=checks)
        assert report.of("future")[0].status == "leak"
        assert "float64" in report.of("future")[0].decided


def test_modules_that_a_function_calls_are_in_eval_mode_meanwhile():
    model = OneLayer().train()
    assert audit(lambda ids: model(ids), checks=["future", "determinism"]).passed
    assert model.training


class NeedsTarget(OneLayer):
    def forward(self, source, target):
        return super().forward(target)


class TakesADict(OneLayer):
    def forward(self, batch):
        return super().forward(batch["input_ids"])


@pytest.mark.parametrize(
    ("target", "advice"),
    [(NeedsTarget(), "lambda ids: model(ids, target)"), (TakesADict(), "lambda ids: model({'input_ids': ids})")],
)
def test_the_advice_follows_what_was_raised(target, advice):
    with pytest.raises(ArgumentError, match=re.escape(advice)):
        audit(target)


def test_the_advice_works():
    model = TakesADict()
    assert audit(lambda ids: model({"input_ids": ids}), checks=["future"]).passed
    pair = NeedsTarget()
    assert audit(lambda ids: pair(ids, ids), checks=["future"]).passed


class Classifier(OneLayer):
    """One output for a whole row: the mean over its tokens."""

    def __init__(self, leaks: bool = False, classes: int = 3) -> None:
        super().__init__()
        self.over_pads, self.head = leaks, nn.Linear(WIDTH, classes)

    def forward(self, tokens, attention_mask=None):
        mask_BT = torch.ones_like(tokens) if attention_mask is None else attention_mask
        x = torch.where(mask_BT[..., None] == 1, self.table(tokens), 0.0)
        hidden_BT = (mask_BT == 0) & (mask_BT.sum(1, keepdim=True) > 0)  # a row without tokens sees its padding
        x = self.layer(x, src_key_padding_mask=hidden_BT)
        if self.over_pads:
            return self.head(x.mean(1))
        x = torch.where(mask_BT[..., None] == 1, x, 0.0)
        return self.head(x.sum(1) / mask_BT.sum(1, keepdim=True).clamp(min=1))


@pytest.mark.parametrize("classes", [2, 3, 8])
def test_a_classifier_is_audited_by_its_one_output_for_each_row(classes):
    checks = ["future", "padding", "batch", "mask_ignored", "polarity", "hidden_rows", "dropout", "determinism"]
    report = audit(Classifier(classes=classes), checks=checks)
    assert report.passed
    assert report.verdicts["future"] == "not_applicable"
    assert report.verdicts["padding"] == report.verdicts["batch"] == report.verdicts["determinism"] == "pass"
    assert "one output for each row" in report.called
    report = audit(Classifier(leaks=True, classes=classes), checks=checks)
    assert report.verdicts["padding"] == "leak"


class MaskOfThirtyTwo(OneLayer):
    """The causal mask was made for 32 tokens: what comes later sees everything."""

    def mix(self, x):
        slots = x.shape[1]
        hidden = torch.ones(slots, slots, dtype=torch.bool).triu(1)
        hidden[:, 32:] &= self.leaks is False
        hidden[32:] &= self.leaks is False
        return self.layer(x, src_mask=hidden)


def test_a_fault_that_begins_at_some_length_is_found():
    report = audit(MaskOfThirtyTwo(leaks=True), checks=["future"])
    assert [f.case for f in report.findings if f.failed] == ["rows of 33", "rows of 65", "rows of 129"]
    assert audit(MaskOfThirtyTwo(), checks=["future"]).verdicts == {"future": "pass"}


class WindowLostInLongRows(TinyDecoder):
    def __init__(self, lost: bool = True) -> None:
        super().__init__(window=3, layers=1, max_length=256)
        self.lost = lost

    def visible(self, queries, keys, layer):
        if self.lost and queries.positions.shape[1] > 24:
            return queries.same_document(keys) & (queries.distance(keys) >= 0)
        return super().visible(queries, keys, layer)


def test_a_window_that_is_lost_in_long_rows_is_found():
    assert audit(WindowLostInLongRows(), checks=["window"]).verdicts == {"window": "leak"}
    assert audit(WindowLostInLongRows(lost=False), checks=["window"]).verdicts == {"window": "pass"}


def test_more_equal_tokens_than_an_expert_takes_show_its_capacity():
    class Capacity(TinyDecoder):
        """A token counts only while there is room: as experts with a capacity drop those that come last."""

        def final_hidden(self, x_BTD, queries):
            room = x_BTD.shape[0] * x_BTD.shape[1] // 2 + 4
            kept = torch.arange(x_BTD.shape[0] * x_BTD.shape[1]).view(x_BTD.shape[:2]) < room
            return torch.where(kept[..., None], x_BTD, 0.0)

    report = audit(Capacity(), checks=["batch"])
    assert next(f for f in report.findings if f.case == "many equal rows").status == "leak"


def test_a_cross_cache_that_is_not_reordered_is_found():
    model = pl.build(pl.ModelConfig(preset="tiny-encoder-decoder", vocab_size=40), seed=0)

    class Forgets(EncoderDecoderProbe):
        def new_cache(self, rows, capacity):
            cache = super().new_cache(rows, capacity)
            inner = cache.cache

            class Unordered(type(cache)):
                def reorder(self, index_B):
                    before, crossed = inner.encoder_coords, [layer.cross for layer in inner.layers]
                    super().reorder(index_B)
                    inner.encoder_coords = before
                    for layer, cross in zip(inner.layers, crossed, strict=True):
                        layer.cross = cross

            return Unordered(inner)

    assert audit(probe=EncoderDecoderProbe(model), checks=["cache"]).verdicts == {"cache": "pass"}
    report = audit(probe=Forgets(model), checks=["cache"])
    assert [f.case for f in report.findings if f.failed] == ["reorder"]


class ShiftsBesideAMask(OneLayer):
    """Given a mask it counts positions by it, one too many: rows with an all-ones mask stand elsewhere than without."""

    def __init__(self, leaks: bool = False) -> None:
        super().__init__()
        self.shifted, self.positions = leaks, nn.Embedding(128, WIDTH)

    def forward(self, tokens, attention_mask=None):
        mask_BT = torch.ones_like(tokens) if attention_mask is None else attention_mask
        positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
        if self.shifted and attention_mask is not None and bool(mask_BT.all()):
            positions_BT = positions_BT + 1
        x = self.table(tokens) + self.positions(positions_BT)
        slots = tokens.shape[1]
        hidden_BTT = torch.ones(slots, slots, dtype=torch.bool).triu(1) | (mask_BT == 0)[:, None, :]
        hidden_BTT = hidden_BTT & ~torch.eye(slots, dtype=torch.bool)  # padding sees itself
        return self.head(self.layer(x, src_mask=hidden_BTT.repeat_interleave(2, 0)))


def test_padding_is_tested_in_every_way_of_calling():
    assert audit(ShiftsBesideAMask(), checks=["padding"]).passed
    report = audit(ShiftsBesideAMask(leaks=True), checks=["padding"])
    failed = [finding.case for finding in report.findings if finding.failed]
    assert failed
    assert all(case.startswith("with an all-ones mask, ") for case in failed)
