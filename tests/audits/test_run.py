"""``audit``: what it reports, what it refuses, and that it leaves everything as it was."""

import json
import random

import numpy as np
import pytest
import torch
from torch import nn

import broken_models
from pellucid.audits import CHECKS, TinyDecoder, audit
from pellucid.batch import Batch
from pellucid.errors import InputError
from pellucid.probe import Probe
from pellucid.visibility import causal, window


class Raises(nn.Module):
    def forward(self, tokens):
        if tokens.shape[1] > 2:
            raise RuntimeError("boom\nand more")
        return nn.functional.one_hot(tokens, 7).float()


def test_a_report_is_json_and_a_table():
    report = audit(broken_models.SeesOneAhead(), checks=["future", "trace"])
    told = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert (told["target"], told["passed"]) == ("SeesOneAhead", False)
    assert told["verdicts"] == {"future": "leak", "trace": "pass"}
    assert told["findings"][0]["where"] == {"row": 0, "query": 0, "key": 1, "key_row": None}
    table = report.table()
    assert table.columns == ("check", "verdict", "case", "where", "what was seen")
    assert [row[:2] for row in table.rows] == [("future", "leak"), ("trace", "pass")]
    assert table.rows[0][3] == "row 0, query 0, key 1"


def test_infinite_sizes_are_json_too():
    report = audit(broken_models.PoisonedByPads(), checks=["padding"])
    assert '"size": "inf"' in json.dumps(report.to_dict(), allow_nan=False)


def test_checks_run_in_order_once_and_are_announced():
    heard = []
    audit(TinyDecoder(), checks=["trace", "batch", "trace"], progress=heard.append)
    assert heard == ["trace", "batch"]


def test_a_target_that_raises_is_an_error_of_each_check():
    report = audit(Raises())
    assert not report.passed
    assert report.verdicts["future"] == "error"
    assert report.of("future")[0].message.startswith("RuntimeError: boom and more (test_run.py:")


def test_a_result_of_the_wrong_shape_is_explained():
    with pytest.raises(
        InputError, match=r"returned \(1, 4, 5\) for 1 row of 2 tokens, but an audit needs \[1, 2, vocab"
    ):
        audit(lambda tokens: torch.zeros(tokens.shape[0], 4, 5), checks=["future"])


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda: audit(TinyDecoder(), checks=["futur"]),
            "there is no check 'futur'; did you mean 'future'? there are future,",
        ),
        (lambda: audit(TinyDecoder(), checks=["xyz"]), "there is no check 'xyz'; there are future, window"),
        (lambda: audit(3), "int cannot be called"),
        (lambda: audit(TinyDecoder(), length=1), "length is 1"),
        (lambda: audit(probe=TinyDecoder()), "TinyDecoder is no probe: it lacks name, vocab_size, rules"),
        (lambda: audit(TinyDecoder(vocab_size=1)), "the vocabulary has 1 tokens"),
        (
            lambda: audit(lambda tokens: "text"),
            "<lambda> cannot be called with token ids [1, 2]: it raised ShapeError: <lambda> returned str",
        ),
    ],
)
def test_bad_requests_get_one_line(ask, message):
    with pytest.raises(InputError) as caught:
        ask()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_target_and_all_random_states_are_left_as_they_were():
    class Sloppy(broken_models.CountsCalls):
        """Counts calls, moves its weights, and swaps a buffer for another tensor."""

        def first_hidden(self, x, queries, batch):
            self.calls = self.calls + 1
            with torch.no_grad():
                self.head.bias += 0.01
            return super().first_hidden(x, queries, batch)

    model = Sloppy().train()
    model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert audit(model).verdicts["trace"] == "leak"
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]


def test_training_mode_and_no_grad_do_not_change_the_answer():
    model = TinyDecoder().train()
    with torch.no_grad():
        inside = audit(model, checks=["future", "packing"])
    with torch.inference_mode():
        deeper = audit(model, checks=["future", "packing"])
    assert inside.verdicts == deeper.verdicts == {"future": "pass", "packing": "pass"}


def test_frozen_weights_are_no_obstacle():
    model = TinyDecoder().requires_grad_(False)
    report = audit(model)
    assert set(report.verdicts.values()) == {"pass", "not_applicable"}
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_target_that_draws_random_numbers_is_compared_in_one_shape_under_one_seed():
    report = audit(broken_models.DropsOutInEval())
    assert report.verdicts["trace"] == report.verdicts["determinism"] == report.verdicts["dropout"] == "leak"
    steady = {report.verdicts[name] for name, check in CHECKS.items() if check.steady}
    assert steady == {"pass", "not_applicable"}
    assert report.verdicts["future"] == "pass"
    assert "draws random numbers" in report.of("padding")[0].message


def test_a_random_target_that_leaks_is_caught():
    class Leaks(broken_models.SeesOneAhead):
        def final_hidden(self, x_BTD, queries):
            return x_BTD + 0.1 * torch.randn(1, 1, x_BTD.shape[-1]).to(x_BTD)

    report = audit(Leaks(), checks=["future", "determinism"])
    assert report.verdicts == {"future": "leak", "determinism": "leak"}


def test_a_target_that_counts_its_calls_is_not_compared():
    class Counts(TinyDecoder):
        calls = 0

        def final_hidden(self, x_BTD, queries):
            self.calls += 1
            return x_BTD + self.calls * torch.linspace(0, 1, x_BTD.shape[-1]).to(x_BTD)

    report = audit(Counts(), checks=["future"])
    assert report.verdicts == {"future": "not_applicable"}
    assert "see determinism" in report.of("future")[0].message


def test_what_a_cache_refuses_is_not_applicable_and_the_rest_goes_on():
    class NoCrop(Probe):
        capabilities = frozenset({"cache", "crop", "snapshot"})

        def __init__(self):
            model = TinyDecoder()
            self.inner, self.name = model.probe(), "no crop"
            self.vocab_size, self.rules = self.inner.vocab_size, self.inner.rules

        def logits(self, batch):
            return self.inner.logits(batch)

        def extend(self, batch, cache):
            return self.inner.extend(batch, cache)

        def new_cache(self, rows, capacity):
            cache = self.inner.new_cache(rows, capacity)

            def crop(keep):
                raise NotImplementedError("this cache cannot go back")

            cache.crop = crop
            return cache

    report = audit(probe=NoCrop(), checks=["cache"])
    statuses = {finding.case: finding.status for finding in report.findings}
    assert statuses["crop to 5"] == "not_applicable"
    assert statuses["snapshot"] == statuses["chunks 4 + 5"] == "pass"
    assert report.passed


def test_methods_that_a_probe_lacks_say_so():
    class Bare(Probe):
        name, vocab_size, rules = "bare", 3, ()

    batch = Batch.from_rows([[1]])
    for ask in (
        Bare().embed,
        Bare().loss,
        lambda r: Bare().new_cache(1, 1),
        lambda r: Bare().extend(r, None),
    ):
        with pytest.raises(InputError, match="bare has no"):
            ask(batch)


@pytest.mark.parametrize("nothing", [[], "", "future"])
def test_an_audit_of_nothing_is_bad_input(nothing):
    with pytest.raises(InputError, match="a list of names is needed: one or more of future"):
        audit(lambda tokens: tokens, checks=nothing)


def test_other_rules_can_be_expected():
    model = TinyDecoder(layers=2)
    for expect in ("causal & window(3)", causal() & window(3), ["causal & window(3)", causal() & window(3)]):
        assert audit(model, checks=["window"], expect=expect).verdicts == {"window": "leak"}
    assert audit(model, checks=["window"], expect="causal").verdicts == audit(model, checks=["window"]).verdicts
    with pytest.raises(InputError, match="expect lists 3 rules, but TinyDecoder has 2 layers; give 1 or 2"):
        audit(model, expect=["causal"] * 3)


def test_a_report_prints_as_its_table():
    text = str(audit(broken_models.SeesOneAhead(), checks=["future", "packing"]))
    first, future, packing = text.splitlines()
    assert first.startswith("audit of SeesOneAhead: failed (")
    assert future.startswith("future        leak            the output at 0 moves")
    assert future.endswith("[tokens, row 0, query 0, key 1]")
    assert packing.startswith("packing       pass")
