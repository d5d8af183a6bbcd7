"""What the checks of modes, dropout, determinism and traces can tell apart."""

import collections
import functools
import random

import pytest
import torch
from torch import nn
from torch.nn import functional

import broken_models
from broken_models.hf_style import HFStyleDecoder
from broken_models.train_eval import Recurrent
from pellucid.audits import TinyDecoder, TokensProbe, audit
from pellucid.audits.engine.argument_mutation import watched
from pellucid.audits.engine.attributes import snapshot_attributes
from pellucid.audits.engine.dropout_probabilities import NoDropout, probabilities, set_dropout
from pellucid.audits.engine.state import Snapshot, random_states, restore_switches, shallow_weight_copy, switches
from pellucid.audits.engine.target_run import TargetRun, deep_copy
from pellucid.errors import UnsupportedError

pytestmark = pytest.mark.usefixtures("our_checks_only")  # the checker of annotations draws random numbers


def found(target, check, **how):
    return {finding.case: finding for finding in audit(target, checks=[check], **how).findings}


# ------------------------------------------------------------------------------------------------------ dropout


class Config:
    def __init__(self):
        self.resid_pdrop, self.hidden_size, self.tie_dropout = 0.1, 16, True


class Many(nn.Module):
    keep_prob = 0.75

    def __init__(self):
        super().__init__()
        self.config, self.drop_path = Config(), 0.2
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3)
        self.rnn, self.drop = nn.GRU(8, 8, 2, dropout=0.4), nn.Dropout(0.5)


def test_probabilities_are_found_wherever_they_are_and_set():
    module = Many()
    held = {place.path: place.drops for place in probabilities(module)}
    assert held == {
        "keep_prob": 0.25,
        "config.resid_pdrop": 0.1,
        "drop_path": 0.2,
        "attention.dropout": 0.3,
        "rnn.dropout": 0.4,
        "drop.p": 0.5,
    }
    assert set_dropout(module, 0.0) == 6
    assert (module.keep_prob, module.config.resid_pdrop, module.attention.dropout, module.drop.p) == (1.0, 0, 0, 0)
    assert (module.config.hidden_size, module.config.tie_dropout, Many.keep_prob) == (16, True, 0.75)
    assert all(place.drops == 0 for place in probabilities(module))


def test_functional_dropout_gives_its_input_back_inside():
    x = torch.ones(50)
    q = torch.randn(1, 2, 4, 8)
    want = functional.scaled_dot_product_attention(q, q, q, None, 0.0, True)
    with NoDropout():
        assert torch.equal(functional.dropout(x, 0.9), x)
        assert torch.equal(functional.alpha_dropout(x, p=0.9, training=True), x)
        assert torch.equal(functional.scaled_dot_product_attention(q, q, q, None, 0.9, True), want)
    assert not torch.equal(functional.dropout(x, 0.9), x)


def test_a_copy_is_refused_where_there_is_none():
    with pytest.raises(UnsupportedError, match="not a module that could be copied"):
        deep_copy(TargetRun(TokensProbe(lambda tokens: functional.one_hot(tokens, 7).float())))

    class Uncopied(Recurrent):
        def __deepcopy__(self, memo):
            raise RuntimeError("no copies\nof this")

    with pytest.raises(UnsupportedError, match=r"it cannot be copied: no copies of this$"):
        deep_copy(TargetRun(Uncopied().probe()))
    assert found(Uncopied(), "dropout")["set to 0"].status == "not_applicable"


def test_the_target_keeps_its_probabilities():
    model = TinyDecoder(dropout=0.3).train()
    audit(model, checks=["dropout", "modes", "determinism", "kernels"])
    assert model.drop.p == 0.3
    assert all(part.training for part in model.modules())
    assert model.kernel == "plain"
    assert not model.checkpointing


def test_no_dropout_at_all_is_not_applicable_in_train_mode():
    cases = found(TinyDecoder(dropout=0.0), "dropout")
    assert (cases["eval mode"].status, cases["train mode"].status) == ("pass", "not_applicable")
    assert cases["raised to 0.5"].status == "pass"


def test_a_state_is_not_taken_for_dropout():
    case = found(broken_models.CarriesItsState(), "dropout")["eval mode"]
    assert case.status == "not_applicable"
    assert "see determinism" in case.message


# -------------------------------------------------------------------------------------------------------- modes


def test_a_model_that_wants_labels_in_train_mode_is_not_accused():
    class WantsLabels(Recurrent):
        def forward(self, tokens):
            if self.training:
                raise ValueError("labels are needed")
            return super().forward(tokens)

    case = found(WantsLabels(), "modes")["train, full rows"]
    assert case.status == "not_applicable"
    assert "in train mode it raises ValueError: labels are needed" in case.message


def test_a_model_without_a_backward_pass_is_not_accused():
    class InPlace(Recurrent):
        def forward(self, tokens):
            self.out.weight.mul_(1.0)
            return super().forward(tokens)

    report = audit(InPlace(), checks=["modes", "trace"])
    assert report.verdicts == {"modes": "not_applicable", "trace": "pass"}
    assert "cannot run with gradients on" in report.findings[0].message


def test_a_fault_beside_batch_statistics_is_still_a_leak():
    class Both(broken_models.NormalisesOverTheBatch):
        def run(self, x):
            return super().run(x) * (2 if self.training else 1)

    assert found(Both(), "modes")["train, full rows"].status == "leak"


def test_inference_mode_leaves_no_inference_tensor_in_the_target():
    class Lazy(Recurrent):
        table_of = None

        def final_hidden(self, x):
            if self.table_of is None or len(self.table_of) < x.shape[1]:
                self.table_of = torch.ones(x.shape[1])
            return x * self.table_of[: x.shape[1], None].to(x)

    module = Lazy()
    assert audit(module, checks=["modes"]).passed
    module(torch.tensor([[1, 2, 3, 4]])).sum().backward()


# --------------------------------------------------------------------------------------------------- determinism


def test_rounding_that_varies_is_fragile():
    class Varies(Recurrent):
        calls = 0

        def final_hidden(self, x):
            self.calls += 1
            return x * (1 + self.calls % 2 * 1e-7)

    assert audit(Varies(), checks=["determinism"]).verdicts == {"determinism": "fragile"}


def test_a_longer_request_that_is_refused_is_no_fault():
    class Short(Recurrent):
        def forward(self, tokens):
            if tokens.shape[1] > 24:
                raise IndexError("too long")
            return super().forward(tokens)

    assert audit(Short(), checks=["determinism"]).verdicts == {"determinism": "pass"}


# --------------------------------------------------------------------------------------------------------- trace


class Holder:
    __slots__ = ("deep",)

    def __init__(self):
        self.deep = {"list": [1.0, torch.zeros(2)]}


class Holds(nn.Module):
    def __init__(self):
        super().__init__()
        self.numbers, self.ring = [1, 2], collections.deque([3])
        self.holder, self.loose = Holder(), (nn.Linear(2, 2),)
        self.own = random.Random(0)
        self.generator = torch.Generator().manual_seed(0)
        self.cache = functools.lru_cache(lambda value: value)
        self.numbers.append(self.numbers)  # a cycle


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda m: m.numbers.append(4), "len(numbers)"),
        (lambda m: m.ring.__setitem__(0, 4), "ring[0]"),
        (lambda m: m.holder.deep["list"][1].add_(1), "holder.deep['list'][1]"),
        (lambda m: m.holder.deep.update(more=1), "len(holder.deep)"),
        (lambda m: m.loose[0].weight.data.add_(1), "loose[0].weight"),
        (lambda m: m.own.random(), "own"),
        (lambda m: torch.rand(1, generator=m.generator), "generator"),
        (lambda m: m.cache(1), "entries of cache"),
        (lambda m: setattr(m, "new", float("nan")), "new"),
    ],
)
def test_what_a_module_holds_is_seen_to_change(change, name):
    module = Holds()
    before = Snapshot(module, attributes=snapshot_attributes(module))
    assert before.diff(Snapshot(module, attributes=snapshot_attributes(module)), "attributes") == []
    change(module)
    assert before.diff(Snapshot(module, attributes=snapshot_attributes(module)), "attributes")[0] == name


def test_looking_has_bounds_and_survives_anything():
    class Hostile(dict):
        def items(self):
            raise RuntimeError("do not look")

    class Big(nn.Module):
        def __init__(self):
            super().__init__()
            self.hostile, self.many = Hostile(a=1), [[0] * 300 for _ in range(300)]

    leaves = snapshot_attributes(Big())
    assert 1000 < len(leaves) <= 4000
    assert snapshot_attributes(None) == {}


def test_hooks_are_counted():
    module = nn.Sequential(nn.Linear(2, 2))
    assert not any(Snapshot(module).hooks.values())
    module[0].register_forward_hook(lambda *_: None)
    assert Snapshot(module).hooks["0_forward_hooks"] == 1
    assert Snapshot(None).hooks == {}


def test_switches_are_put_back():
    kept = switches()
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("high")
    assert restore_switches(kept) == ["the default dtype", "the precision of float32 products"]
    assert switches() == kept
    assert restore_switches(kept) == []


def test_random_states_are_comparable():
    before = random_states()
    assert before == random_states()
    random.random()
    assert [name for name, state in random_states().items() if state != before[name]] == ["Python's random"]


@pytest.mark.parametrize(
    "make", [broken_models.SwitchesTheDefaultDtype, broken_models.SwitchesGradientsOff, broken_models.LeavesGradients]
)
def test_an_audit_cleans_up_after_its_target(make):
    target, kept = make(), switches()
    audit(target, checks=["trace"])
    assert switches() == kept
    assert all(parameter.grad is None for parameter in target.parameters())


@pytest.mark.parametrize(
    ("make", "case", "message"),
    [
        (broken_models.KeepsTheLast, "logits", "last keeps something of the last request"),
        (broken_models.GrowsAList, "logits", "every request changes len(statistics['means'])"),
        (broken_models.AddsHooks, "logits", "every answer adds a hook to head_forward_hooks"),
        (broken_models.WakesUp, "logits", "answering changes training of drop"),
        (broken_models.ReusesItsAnswer, "returned answer", "both are one tensor"),
        (broken_models.LeavesGradients, "with gradients", "leaves a gradient on table.weight"),
        (broken_models.DrawsNumbers, "logits", "and uses none"),
        (broken_models.RandomFeatures, "logits", "and the answer depends on them"),
    ],
)
def test_a_trace_is_explained(make, case, message):
    assert message in found(make(), "trace")[case].message


def test_gradients_that_were_there_stay():
    model = HFStyleDecoder()
    model(torch.tensor([[1, 2]])).logits.sum().backward()
    before = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert audit(model, checks=["trace", "modes", "kernels"]).passed
    assert all(parameter.grad is before[name] for name, parameter in model.named_parameters())


# ------------------------------------------------------------------------------------ what is handed over, tables


class _Told(nn.Module):
    """Writes into one of its arguments."""

    def __init__(self, into):
        super().__init__()
        self.table, self.into = nn.Embedding(7, 7), into

    def forward(self, ids, notes=None, cache=None, labels=None):
        if self.into == "notes":
            notes["seen"].append(1)
        if self.into == "cache":
            cache.append(1)
        if self.into == "labels":
            labels.clamp_(min=0)
        return self.table(ids)


@pytest.mark.parametrize(
    ("into", "written"), [("", []), ("notes", ["notes['seen']"]), ("cache", []), ("labels", ["labels"])]
)
def test_arguments_that_are_written_into_are_named_and_caches_are_not(into, written):
    module = _Told(into)
    with watched(module) as names:
        module(torch.tensor([[1, 2]]), {"seen": [0]}, cache=[], labels=torch.tensor([[-100, 2]]))
    assert list(names) == written
    assert not module._forward_hooks
    assert not module._forward_pre_hooks


class _GrowsRightly(TinyDecoder):
    def __init__(self):
        super().__init__()
        self.known = torch.zeros(0, dtype=torch.int64)

    def position_ids(self, queries):
        self.known = torch.arange(max(len(self.known), int(queries.positions.max()) + 1))
        return self.known[queries.positions]


def test_a_table_that_is_grown_rightly_is_no_fault():
    assert found(_GrowsRightly(), "determinism")["shorter and longer"].status == "pass"
    wrong = found(broken_models.GrowsItsTable(), "determinism")["shorter and longer"]
    assert (wrong.status, wrong.where.query) == ("leak", 3)


def test_the_copy_that_is_kept_shares_the_weights_and_nothing_else():
    module = broken_models.GrowsItsTable()
    kept = shallow_weight_copy(module)
    module.known = torch.arange(5)
    assert len(kept.known) == 0
    assert kept.head.weight is module.head.weight
    assert shallow_weight_copy(len) is None
