"""What the checks of positions, masks, hidden rows and kernels can tell apart."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import broken_models
from broken_models.hf_style import HFStyleDecoder, HFStyleProbe
from broken_models.masks import Encoder, EncoderProbe
from broken_models.train_eval import Recurrent
from pellucid.audits import TinyDecoder, TokensProbe, audit
from pellucid.errors import UnsupportedError
from pellucid.visibility import causal, chunk, full


def found(target, check, **how):
    probe = target if hasattr(target, "logits") else target.probe()
    return {finding.case: finding for finding in audit(probe=probe, checks=[check], **how).findings}


# ----------------------------------------------------------------------------------------------------- positions


def test_every_way_of_giving_positions_is_asked():
    assert list(found(TinyDecoder(), "positions")) == [
        "left padded",
        "packed",
        "left padded, through a cache",
        "other positions",
        "rows of other positions",
        "positions of pads",
        "a position past the end",
        "past the end",
        "past the end through a cache",
    ]
    shifts = [case for case in found(HFStyleDecoder(), "positions") if case.startswith("shifted")]
    assert shifts == ["shifted by 1", "shifted by 7", "shifted by 100", "shifted by 1000"]
    assert [case for case in found(TinyDecoder(rotary=True), "positions") if "shifted" in case] == shifts[
        :2
    ]  # 64 positions


def test_shifts_that_change_the_declared_masks_are_not_asked():
    probe = HFStyleDecoder().probe()
    probe.rules = (causal() & chunk(4),) * 2
    assert [case for case in found(probe, "positions") if "shifted" in case] == ["shifted by 100", "shifted by 1000"]


def test_a_position_that_is_refused_ends_the_shifts():
    class Bounded(HFStyleDecoder):
        def angles(self, position_ids):
            assert position_ids.max() < 60
            return super().angles(position_ids)

    cases = found(Bounded(), "positions")
    assert cases["shifted by 7"].status == "pass"
    assert cases["shifted by 100"].status == "not_applicable"
    assert "position 104 is refused: AssertionError" in cases["shifted by 100"].message


@pytest.mark.parametrize(
    ("twin", "case", "where"),
    [
        (broken_models.SumsAngles, "rows of other positions", "row 0, query 1"),
        (broken_models.IgnoresPositions, "other positions", "row 0, query 1"),
        (broken_models.DocumentsStartLate, "packed", "row 0, query 3"),
        (broken_models.OneCounterForAllRows, "left padded, through a cache", "row 1, query 6"),
    ],
)
def test_a_wrong_position_is_named(twin, case, where):
    finding = found(twin(), "positions")[case]
    assert (finding.status, str(finding.where)) == ("leak", where)


def test_what_other_tokens_do_is_not_blamed_on_positions():
    for twin, case in ((broken_models.SeesPads, "left padded"), (broken_models.NoIsolation, "packed")):
        finding = found(twin(), "positions")[case]
        assert finding.status == "not_applicable"
        assert "not by their positions only" in finding.message


class Table(nn.Module):
    """A table of positions that is read modulo its length."""

    def __init__(self, name="position_table"):
        super().__init__()
        self.words, self.out = nn.Embedding(9, 8), nn.Linear(8, 9)
        setattr(self, name, nn.Embedding(12, 8))
        self.name = name

    def forward(self, tokens):
        places = getattr(self, self.name)(torch.arange(tokens.shape[1]) % 12)
        return self.out((self.words(tokens) + places).cumsum(1))


def test_a_silent_answer_past_the_end_is_a_leak_where_a_table_ends_there():
    leaking = found(TokensProbe(Table(), max_length=12), "positions")["past the end"]
    assert (leaking.status, str(leaking.where)) == ("leak", "row 0, query 12")
    assert "position_table has 12 rows" in leaking.message
    no_table = found(TokensProbe(Recurrent(), max_length=12), "positions")["past the end"]
    assert no_table.status == "fragile"  # it goes on, which is no fault of its positions


def test_distances_that_no_longer_matter_are_not_taken_for_clamped_ones():
    """Buckets that are all alike far away, as in T5."""

    class Saturates(HFStyleDecoder):
        def angles(self, position_ids):
            return super().angles(position_ids.clamp(max=5))

    class Probe(HFStyleProbe):
        max_length = 20

        def with_module(self, module):
            return Probe(module)

    assert found(Probe(Saturates()), "positions")["a position past the end"].status == "fragile"


def test_too_many_positions_are_not_tried_out_without_explicit_ones():
    finding = found(TokensProbe(Recurrent(), max_length=100_000), "positions")["past the end"]
    assert (finding.status, "too many to try out" in finding.message) == ("not_applicable", True)
    assert found(TokensProbe(Recurrent()), "positions")[""].status == "not_applicable"


# --------------------------------------------------------------------------------------------------------- masks


def test_a_mask_that_does_nothing_is_named_as_that():
    for twin in (broken_models.DiscardsTheFill, broken_models.NoLayerMasked):
        cases = found(twin(), "mask_ignored")
        assert cases["a hole"].message.endswith("changes nothing: the mask is accepted and ignored")
    half = found(broken_models.SecondLayerUnmasked(), "mask_ignored")["a hole"]
    assert (half.status, half.message) == ("leak", "the token in slot 0 moves with a hidden token")


def test_a_model_that_ignores_its_input_shows_nothing_about_masks():
    class Deaf(HFStyleDecoder):
        def mix(self, layer, q, k, v, visible):
            return torch.zeros_like(q)

    assert {finding.status for finding in found(Deaf(), "mask_ignored").values()} == {"fragile", "not_applicable"}
    cases = found(Deaf(), "polarity")
    assert [cases[case].status for case in ("rules", "left padding", "right padding")] == ["fragile"] * 3


def test_sides_that_a_target_does_not_claim_are_not_asked():
    class RightOnly(EncoderProbe):
        sides = ("right",)

        def with_module(self, module):
            return RightOnly(module)

    probe = RightOnly(Encoder())
    assert list(found(probe, "mask_ignored")) == ["from the right"]
    assert list(found(probe, "polarity")) == ["rules", "right padding"]
    assert all(case.startswith("right") for case in found(probe, "hidden_rows"))
    assert found(probe, "positions")["past the end"].status == "pass"
    assert "left padded" not in found(probe, "positions")


def test_upside_down_is_told_from_a_leak():
    for twin in (broken_models.OnesWereHidden, broken_models.PaddingUpsideDown):
        assert "The mask is read upside down" in found(twin(), "polarity")["left padding"].message
    assert "The mask is read upside down" in found(broken_models.TriangleUpsideDown(), "polarity")["rules"].message
    for twin, case, other in (
        (broken_models.SeesOneAhead, "rules", "future"),
        (broken_models.SeesPads, "right padding", "padding"),
    ):
        finding = found(twin(), "polarity")[case]
        assert (finding.status, f"see {other}" in finding.message) == ("not_applicable", True)


def test_rules_without_a_direction_are_not_applicable():
    probe = TokensProbe(nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9)), rules=[full()])
    assert found(probe, "polarity")["rules"].status == "not_applicable"


# --------------------------------------------------------------------------------------------------- hidden rows


def test_what_hidden_rows_spoil_is_named():
    left = found(broken_models.SoftmaxOverNothing(), "hidden_rows")
    assert left["left padding, real rows"].status == "leak"
    assert "is NaN or infinite beside a row that is all padding" in left["left padding, real rows"].message
    forward = found(broken_models.CleansNaNForward(), "hidden_rows")
    assert forward["left padding, real rows"].status == "pass"
    assert "the gradient of table.weight is not finite" in forward["left padding, gradients"].message
    pads = found(broken_models.MeanOfNothing(), "hidden_rows")
    assert pads["right padding, hidden slots"].status == pads["left padding, hidden slots"].status == "fragile"
    assert pads["right padding, gradients"].status == "pass"


def test_rows_that_differ_beside_full_rows_too_are_another_matter():
    finding = found(broken_models.ScaledByBatch(), "hidden_rows")["right padding, real rows"]
    assert (finding.status, "see padding and batch" in finding.message) == ("not_applicable", True)


def test_a_row_without_tokens_may_be_refused():
    class Refuses(Encoder):
        def forward(self, tokens, places, real):
            if not real.any(1).all():
                raise ValueError("a row without tokens")
            return super().forward(tokens, places, real)

    cases = found(Refuses(), "hidden_rows")
    assert {case: finding.status for case, finding in cases.items()} == {
        "right padding": "not_applicable",
        "left padding": "not_applicable",
    }


# ------------------------------------------------------------------------------------------------------- kernels


def test_a_kernel_may_refuse_and_says_why():
    class Picky(TinyDecoder):
        def mix(self, q, k, v, sees):
            if self.kernel == "torch" and sees.shape[0] == 3:
                raise UnsupportedError("no padding here")
            return super().mix(q, k, v, sees)

    cases = found(Picky(), "kernels")
    assert cases["torch, full rows"].status == "pass"
    assert cases["torch, left padding"].message == "torch refuses: no padding here"
    assert cases["left padding"].message == "1 implementation(s) answer left padding"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("No available kernel"), "not_applicable"),
        (ImportError("flash_attn"), "not_applicable"),
        (ValueError("head size 5 is not supported"), "not_applicable"),
        (RuntimeError("shapes do not match"), "error"),
    ],
)
def test_only_a_refusal_counts_as_one(error, status):
    class Raises(HFStyleDecoder):
        def mix(self, layer, q, k, v, visible):
            if self.implementation == "sdpa":
                raise error
            return super().mix(layer, q, k, v, visible)

    assert audit(Raises(), checks=["kernels"]).verdicts == {"kernels": status}


def test_a_kernel_of_one_precision_is_compared_in_it():
    class HalfOnly(HFStyleDecoder):
        def mix(self, layer, q, k, v, visible):
            if self.implementation == "sdpa" and q.dtype == torch.float64:
                raise NotImplementedError("float32 at most")
            return super().mix(layer, q, k, v, visible)

    cases = found(HalfOnly(), "kernels")
    assert cases["sdpa, full rows"].status == "pass"
    assert cases["sdpa, full rows"].decided.count("moves by") <= 1


def test_a_kernel_without_a_backward_pass_is_no_leak():
    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return x.clone()

        @staticmethod
        def backward(_, grad):
            raise NotImplementedError("forward only")

    class NoBackward(HFStyleDecoder):
        def mix(self, layer, q, k, v, visible):
            mixed = super().mix(layer, q, k, v, visible)
            return Forward.apply(mixed) if self.implementation == "sdpa" else mixed

    assert audit(NoBackward(), checks=["kernels"]).verdicts == {"kernels": "pass"}


def test_a_lost_cap_shows_with_large_weights_only():
    """At the size of new weights a cap of 1000 bends scores by less than rounding."""

    class Cap(broken_models.CapLostByOneKernel):
        def hide(self, scores, visible):
            return HFStyleDecoder.hide(self, 1000 * (scores / 1000).tanh(), visible)

        def mix(self, layer, q, k, v, visible):
            q = q / 20  # as small as scores of tiny new weights are
            if self.implementation == "sdpa":
                return functional.scaled_dot_product_attention(q, k, v, visible, scale=self.scale())
            return super().mix(layer, q, k, v, visible)

    cases = {finding.case: finding for finding in audit(Cap(), checks=["kernels"]).findings}
    assert cases["sdpa, large weights"].status == "leak"


def test_one_kernel_is_nothing_to_compare():
    class One(HFStyleDecoder):
        kernels = ("eager",)

    assert audit(One(), checks=["kernels"]).verdicts == {"kernels": "not_applicable"}
