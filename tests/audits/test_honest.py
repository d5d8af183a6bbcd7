"""No check accuses an honest model, in whatever style it is written."""

import warnings

import pytest
import torch

from broken_models.hf_style import HFStyleDecoder
from broken_models.masks import Encoder
from helpers.honest_models import (
    MASKED,
    TOKENS_ONLY,
    WINDOWED,
    BatchNormalised,
    FiniteMinimum,
    HeldState,
    LongConvolution,
    MaskedProbe,
    Parametrised,
    Scripted,
    SharedHeads,
)
from pellucid.audits import TokensProbe, audit

pytestmark = pytest.mark.usefixtures("our_checks_only")  # the checker of annotations draws random numbers
named = {"ids": lambda value: getattr(value, "__name__", str(value)).removeprefix("torch.")}


def accused(report):
    return [(f.check, f.status, f.case, f.message) for f in report.findings if f.failed]


def probe_of(make, dtype):
    module = make().to(dtype)
    if make in MASKED:
        return MaskedProbe(module)
    if make in (HFStyleDecoder, Encoder):
        return module.probe()
    return TokensProbe(module, rules=WINDOWED.get(make, TokensProbe(module).rules))


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)], **named)
@pytest.mark.parametrize("make", [*TOKENS_ONLY, *MASKED, HFStyleDecoder, Encoder], **named)
def test_nobody_honest_is_accused(make, dtype):
    report = audit(probe=probe_of(make, dtype), length=12)
    assert accused(report) == []
    assert report.passed
    for check in ("determinism", "trace", "dropout"):
        assert report.verdicts[check] == "pass", report.of(check)


@pytest.mark.parametrize(
    "make", [FiniteMinimum, SharedHeads, LongConvolution, HeldState, HFStyleDecoder, Encoder], **named
)
def test_nobody_honest_is_accused_in_bfloat16(make):
    assert accused(audit(probe=probe_of(make, torch.bfloat16), length=12)) == []


def test_scripted_and_traced_modules_can_be_audited():
    """What cannot be looked at is not looked at."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is no longer recommended
        scripted = torch.jit.script(Scripted().eval())
        traced = torch.jit.trace(Scripted().eval(), torch.tensor([[1, 2, 3]]))
        for module in (scripted, traced):
            report = audit(module, length=12)
            assert accused(report) == []
            assert report.verdicts["trace"] == report.verdicts["future"] == "pass"
        (train,) = (finding for finding in audit(scripted, checks=["modes"]).findings if "train" in finding.case)
    assert "random numbers that no probability of 0 switches off" in train.message


def test_batch_statistics_and_power_iterations_are_fragile_in_train_mode():
    for make, said in (
        (BatchNormalised, "takes its statistics over the batch"),
        (Parametrised, "every request changes"),
    ):
        found = [f for f in audit(make(), checks=["modes"]).findings if f.status != "pass"]
        assert [finding.status for finding in found] == ["fragile"]
        assert said in found[0].message
