"""What the check of the future can tell apart."""

import pytest
import torch
from torch import nn

import broken_models
from pellucid.audits import TinyDecoder, TokensProbe, audit, expected_flow
from pellucid.audits.checks.future import no_gradient
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.influence import flow_of, later
from pellucid.audits.engine.perturbation import informative_cuts
from pellucid.audits.engine.target_run import Deviation
from pellucid.batch import Batch
from pellucid.visibility import causal, full, window


class Leaky(nn.Module):
    """Averages the past, and adds a little of the next token; ``only`` when that token is this one."""

    def __init__(self, size, only=None):
        super().__init__()
        self.table, self.out = nn.Embedding(40, 16), nn.Linear(16, 40)
        self.size, self.only = size, only

    def forward(self, tokens):
        x = self.table(tokens)
        ahead = nn.functional.pad(x[:, 1:], (0, 0, 0, 1))
        if self.only is not None:
            ahead = ahead * nn.functional.pad(tokens[:, 1:] == self.only, (0, 1))[..., None]
        return self.out(x.cumsum(1) / 10 + self.size * ahead)


def first(target, **how):
    return audit(target, checks=["future"], **how).findings[0]


def test_composed_flow_is_written_out():
    batch = Batch.from_documents([[[1, 2, 3, 4], [5, 6]]], length=7)
    flow = expected_flow([causal() & window(2)] * 2, batch)[0]
    assert flow.int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [0, 1, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 0],
    ]
    assert expected_flow([causal(), full()], batch)[0, :4, :4].all()


def test_a_mask_that_breaks_its_own_bounds_is_not_believed():
    """A rule says in two ways how far it looks; a faulty mask must not excuse the model that obeys it."""

    class Wrong(type(causal())):
        def visible(self, queries, keys):
            return keys.positions[:, None, :] <= queries.positions[:, :, None] + 1

    batch = Batch.from_rows([[1, 2, 3]])
    assert expected_flow([Wrong(0)] * 2, batch)[0].int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-6, 1e-9])
def test_leaks_far_below_float32_are_found_by_float64(size):
    found = first(Leaky(size))
    assert found.status == "leak"
    assert (found.where.query, found.where.key) == (0, 1)
    assert size / 100 < found.size < size * 100


def test_a_plain_function_is_decided_in_its_own_precision():
    """Nobody can copy a function into float64: a small move is fragile, a large one a leak."""
    honest, small, large = Leaky(0.0), Leaky(3e-7), Leaky(0.1)
    with torch.no_grad():
        assert first(lambda tokens: honest(tokens)).status == "pass"
        assert first(lambda tokens: small(tokens)).status == "fragile"
        assert first(lambda tokens: large(tokens)).status == "leak"


@pytest.mark.parametrize("only", [0, 39])
def test_special_tokens_are_tried(only):
    """A leak that depends on one token id at an end of the vocabulary."""
    assert first(Leaky(0.1, only=only)).status == "leak"


def test_a_target_that_ignores_its_input_proves_nothing():
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9))
    nn.init.zeros_(model[1].weight)
    report = audit(model, checks=["future"])
    assert report.verdicts == {"future": "error"}
    assert not report.passed
    assert "ignores its input" in report.findings[1].message
    assert report.findings[-1].case.startswith("with 1.weight no longer 0")


def test_a_target_that_sees_less_than_it_declares_is_fragile():
    model = TinyDecoder(layers=1)
    probe = model.probe()
    model.window = 3
    report = audit(probe=probe, checks=["future"])
    assert [f.status for f in report.findings[:2]] == ["pass", "fragile"]
    assert str(report.findings[1].where) == "row 0, query 3, key 0"


def test_mixing_rows_is_not_mistaken_for_seeing_the_future():
    found = first(broken_models.CentredOverBatch())
    assert found.status == "fragile"
    assert "see batch" in found.message


def test_a_gradient_without_a_move_is_fragile():
    """Straight-through tricks can carry gradients where no output moves."""

    class Through(Leaky):
        def forward(self, tokens):
            x = self.table(tokens)
            ahead = nn.functional.pad(x[:, 1:], (0, 0, 0, 1))
            return self.out(x.cumsum(1) / 10 + (ahead - ahead.detach()))

    report = audit(Through(0.0), checks=["future"])
    gradient = report.findings[-1]
    assert (report.findings[0].status, gradient.case, gradient.status) == ("pass", "gradient", "fragile")
    assert (gradient.where.query, gradient.where.key) == (0, 1)


def test_long_sequences_are_sampled_and_say_so():
    def asked(tokens, honest=Leaky(0.0)):  # noqa: B008 (what a function costs cannot be told)
        with torch.no_grad():
            return honest(tokens)

    found = first(asked, length=200)
    assert found.status == "pass"
    assert "3 of 200 tokens changed" in found.message
    assert first(Leaky(0.1), length=200).where.key == 1


def test_of_a_small_model_more_is_looked_at():
    """Few weights cost little: every token of a middling row is changed, and many of a long one."""
    assert "every token changed" in first(Leaky(0.0), length=128).message
    cases = {finding.case: finding for finding in audit(Leaky(0.0), checks=["future"], length=200).findings}
    assert "79 of 200 tokens changed" in cases["tokens"].message
    assert "cut behind 39 of 199 tokens" in cases["whole tails"].message


class LeaksAtOneBorder(Leaky):
    """One slot sees the next, and only where the row goes on behind it."""

    def __init__(self, border, width=16):
        super().__init__(0.0)
        self.border, self.wide = border, nn.Linear(width, width)

    def forward(self, tokens):
        x = self.table(tokens)
        logits = self.out(x.cumsum(1) / 10)
        if tokens.shape[1] <= self.border:
            return logits
        told = self.out(self.wide(x[:, self.border : self.border + 1]))
        return logits + nn.functional.pad(told, (0, 0, self.border - 1, tokens.shape[1] - self.border))


@pytest.mark.parametrize(("border", "length"), [(40, 64), (33, 48), (101, 128), (96, 128)])
def test_one_border_in_a_longer_row_is_found(border, length):
    found = first(LeaksAtOneBorder(border), length=length)
    assert (found.status, found.where.query, found.where.key) == ("leak", border - 1, border)


def test_cuts_are_at_borders_and_between_them():
    assert informative_cuts(9, 8) == list(range(8))
    assert informative_cuts(128, 4) == [31, 42, 63, 84]
    assert {63, 191, 319, 447, 31, 95} <= set(informative_cuts(512, 24))


def test_a_gradient_whose_token_moves_something_is_a_leak_and_says_so():
    """Between the tokens that a sample changes: what the gradient finds is changed then."""
    context = AuditContext(TokensProbe(LeaksAtOneBorder(32)), length=64)
    flow = flow_of(context)
    flow.readings[:] = [Deviation(r.run, torch.zeros_like(r.sizes), r.scale) for r in flow.readings]
    found = no_gradient(context, "gradient", flow, later(flow.may))
    assert (found.status, found.where.key) == ("leak", 32)
    assert "and changing it moves the output at 31" in found.message


def test_a_short_table_bounds_the_length():
    model = TinyDecoder(max_length=5)
    report = audit(model)
    assert report.passed
    assert report.verdicts["cache"] == "not_applicable"
    assert "needs 9 tokens in a row" in report.of("cache")[0].message
    assert report.verdicts["future"] == "pass"


def test_vocabulary_is_read_off_the_target():
    """A larger table of positions must not be taken for the vocabulary, nor padded rows of the head."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.places, self.table, self.out = nn.Embedding(90, 8), nn.Embedding(11, 8), nn.Linear(8, 16)

        def forward(self, tokens):
            return self.out(self.table(tokens) + self.places(torch.arange(tokens.shape[1])))

    probe = TokensProbe(Both())
    assert probe.vocab_size == 11
    assert probe.capabilities == {"embeddings"}


class LooksAcross(nn.Module):
    """One output reads one token far ahead: between the tokens that a sample would change."""

    def __init__(self, blind=False):
        super().__init__()
        self.table, self.out, self.blind = nn.Embedding(500, 8), nn.Linear(8, 500), blind

    def forward(self, tokens):
        x = self.table(tokens)
        y = x.cumsum(1)
        if tokens.shape[1] > 233:
            ahead = 0.1 * x[:, 233]
            y = y + nn.functional.pad(
                (ahead.detach() if self.blind else ahead)[:, None], (0, 0, 100, tokens.shape[1] - 101)
            )
        return self.out(y)


@pytest.mark.parametrize("blind", [False, True])
def test_one_pair_in_a_long_sequence_is_found(blind):
    report = audit(LooksAcross(blind), checks=["future"], length=300)
    assert not report.passed


@pytest.mark.parametrize("how", ["length", "positions from the end", "largest id"])
def test_what_follows_must_not_be_felt_in_any_way(how):
    class Feels(LooksAcross):
        def forward(self, tokens):
            x = self.table(tokens).cumsum(1)
            if how == "length":
                x = x / tokens.shape[1]
            elif how == "positions from the end":
                x = x + torch.arange(tokens.shape[1]).flip(0)[:, None]
            else:
                x = x / (1 + tokens.max(1).values[:, None, None])
            return self.out(x)

    assert [audit(Feels(), checks=["future"], seed=seed).passed for seed in range(3)] == [False] * 3


def test_a_convolution_that_casts_inside_is_not_accused():
    class Casts(LooksAcross):
        def forward(self, tokens):
            x, slots = self.table(tokens), tokens.shape[1]
            kernel = torch.linspace(1, 0, 64)[:slots, None].expand(slots, 8)
            mixed = torch.fft.irfft(
                torch.fft.rfft(x.float(), 2 * slots, 1) * torch.fft.rfft(kernel, 2 * slots, 0), 2 * slots, 1
            )
            return self.out(mixed[:, :slots].to(x.dtype))

    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert audit(Casts().to(dtype), checks=["future"]).passed


def test_what_is_hidden_behind_is_no_matter_of_the_future():
    """A gradient to a token that lies too far back is the window's to tell, by its own name."""

    class Through(Leaky):
        def forward(self, tokens):
            x = self.table(tokens)
            near = x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
            far = nn.functional.pad(x, (0, 0, 5, 0))[:, :-5]
            return self.out(near + (far - far.detach()))

    report = audit(probe=TokensProbe(Through(0.0), rules=[causal() & window(2)]), checks=["future", "window"])
    cases = {(finding.check, finding.case): finding for finding in report.findings}
    assert cases["future", "gradient"].status == "pass"
    assert cases["window", "tokens"].status == "pass"
    assert cases["window", "gradient"].status == "fragile"
    assert "although changing it moved nothing" in cases["window", "gradient"].message
