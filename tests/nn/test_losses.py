"""The loss is a sum and a count, over counted positions only, and holds no large logits."""

import pytest
import torch
from torch.nn import functional as F

from pellucid.errors import ShapeError
from pellucid.nn import Loss, linear_cross_entropy

IGNORED = -100


def inputs(rows=3, slots=7, size=6, vocabulary=11, dtype=torch.float64):
    hidden = torch.randn(rows, slots, size, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, size, dtype=dtype, requires_grad=True)
    bias = torch.randn(vocabulary, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, vocabulary, (rows, slots))
    labels[0, 2:5] = IGNORED
    labels[1] = IGNORED
    return hidden, weight, bias, labels


@pytest.mark.parametrize("chunk", [1, 3, 8, 1000])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("multiplier", [1.0, 0.3])
def test_value_and_gradients_equal_the_plain_formula(chunk, smoothing, softcap, multiplier):
    """Logits are multiplied before they are bent, and with their bias."""
    hidden, weight, bias, labels = inputs()
    settings = {"chunk_size": chunk, "label_smoothing": smoothing, "softcap": softcap, "multiplier": multiplier}
    loss = linear_cross_entropy(hidden, weight, labels, bias_V=bias, **settings)
    (loss.total * 0.7).backward()
    got = [x.grad.clone() for x in (hidden, weight, bias)]
    for x in (hidden, weight, bias):
        x.grad = None
    logits = multiplier * (hidden @ weight.T + bias)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    plain = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=smoothing)
    (plain * 0.7).backward()
    assert loss.count.item() == int((labels != IGNORED).sum()) == 11
    torch.testing.assert_close(loss.total, plain)
    for mine, x in zip(got, (hidden, weight, bias), strict=True):
        torch.testing.assert_close(mine, x.grad, atol=1e-12, rtol=1e-10)
    assert (hidden.grad[1] == 0).all()


def test_float32_and_autocast_are_near_float64():
    hidden, weight, _, labels = inputs(slots=64)
    exact = linear_cross_entropy(hidden, weight, labels).total.item()
    single = linear_cross_entropy(hidden.detach().float().requires_grad_(), weight.detach().float(), labels)
    assert single.total.item() == pytest.approx(exact, rel=1e-5)
    assert single.total.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        low = linear_cross_entropy(hidden.detach().float(), weight.detach().float().requires_grad_(), labels)
    low.total.backward()
    assert low.total.item() == pytest.approx(exact, rel=2e-2)
    assert low.total.dtype == torch.float32


@pytest.mark.parametrize("height", [-3e4, 3e4])
def test_logits_of_any_size_do_not_overflow(height):
    """Only differences count: rows as high, or as low, as float32 can tell them apart."""
    hidden, weight, bias, labels = inputs(dtype=torch.float32)
    found = linear_cross_entropy(hidden, weight, labels, bias_V=bias + height).total
    found.backward()
    logits = (hidden @ weight.T + (bias + height)).flatten(0, 1)
    torch.testing.assert_close(found, F.cross_entropy(logits, labels.flatten(), reduction="sum"), rtol=1e-5, atol=1e-3)
    assert all(torch.isfinite(x.grad).all() for x in (hidden, weight))


def test_nothing_counted_is_zero_and_harmless():
    """B79: no 0/0; the loss is 0, the count 0, every gradient exactly 0."""
    hidden, weight, bias, labels = inputs()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, IGNORED), bias_V=bias)
    assert (loss.total.item(), loss.count.item(), loss.mean().item()) == (0, 0, 0)
    loss.total.backward()
    assert all((x.grad == 0).all() for x in (hidden, weight, bias))


def test_counting_is_by_the_ignored_value_alone():
    """B83: token id 0 counts; the ignored value can be chosen and is honoured."""
    hidden, weight, _, labels = inputs()
    labels[:] = 0
    labels[0, :3] = 7
    assert linear_cross_entropy(hidden, weight, labels).count.item() == 21
    assert linear_cross_entropy(hidden, weight, labels, ignore_index=7).count.item() == 18
    assert linear_cross_entropy(hidden, weight, labels, ignore_index=0).count.item() == 3


def test_sums_add_up_and_means_are_taken_once():
    """B73: 1 token of loss 4 and 3 tokens of loss 1 are 1.75 a token, not 2.5."""
    parts = [Loss(torch.tensor(4.0), torch.tensor(1)), Loss(torch.tensor(3.0), torch.tensor(3))]
    assert parts[0].plus(parts[1]).mean().item() == 1.75


def test_no_large_logits_are_held():
    """4096 positions of a vocabulary of 4096 would be 64 MiB of logits; no tensor on the way is nearly so large."""
    sizes = []

    class Largest(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                sizes.append(out.numel())
            return out

    hidden = torch.randn(1, 4096, 8, requires_grad=True)
    weight = torch.randn(4096, 8, requires_grad=True)
    with Largest():
        linear_cross_entropy(hidden, weight, torch.zeros(1, 4096, dtype=torch.long), chunk_size=128).total.backward()
    assert max(sizes) <= 128 * 4096


@pytest.mark.parametrize("learning", [(h, w, b) for h in (0, 1) for w in (0, 1) for b in (0, 1, None)], ids=str)
def test_whoever_learns_learns_alone(learning):
    """Hidden states, weight and bias, each learnt, kept, or (the bias) not there: the same value, its own gradient."""
    hidden, weight, bias, labels = inputs()
    everyone = [hidden, weight, bias if learning[2] is not None else None]
    expected = linear_cross_entropy(everyone[0], everyone[1], labels, bias_V=everyone[2])
    expected.total.backward()
    few = [
        x if x is None else x.detach().clone().requires_grad_(bool(r)) for x, r in zip(everyone, learning, strict=True)
    ]
    got = linear_cross_entropy(few[0], few[1], labels, bias_V=few[2])
    assert torch.equal(got.total, expected.total)
    assert got.total.requires_grad == any(learning)
    if any(learning):
        kept = [gradient is not None for gradient in got.total.grad_fn.saved_tensors]
        assert kept == [bool(learns) for learns in learning], "a gradient for nobody is memory for nothing"
        got.total.backward()
    for x, whole in zip(few, everyone, strict=True):
        assert x is None or (x.grad is None if not x.requires_grad else torch.equal(x.grad, whole.grad))


@pytest.mark.parametrize("with_bias", [True, False])
def test_nothing_is_derived_for_nobody(with_bias):
    """Under ``no_grad`` leaves that would learn get the value alone: no gradient of the logits is even begun."""
    hidden, weight, bias, labels = inputs()
    words = {"bias_V": bias} if with_bias else {}
    called = []

    class Calls(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            called.append(getattr(function, "__name__", ""))
            return function(*args, **(kwargs or {}))

    with Calls():
        expected = linear_cross_entropy(hidden, weight, labels, **words)
        assert "scatter_add_" in called
        called.clear()
        with torch.no_grad():
            got = linear_cross_entropy(hidden, weight, labels, **words)
        assert "scatter_add_" not in called
    assert torch.equal(got.total, expected.total)
    assert not got.total.requires_grad


def test_float64_stays_float64_under_autocast():
    hidden, weight, bias, labels = inputs()
    exact = linear_cross_entropy(hidden, weight, labels, bias_V=bias).total
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear_cross_entropy(hidden, weight, labels, bias_V=bias).total, exact)


def test_told_positions_are_believed_and_no_number_is_asked_of_the_device(monkeypatch):
    hidden, weight, _, labels = inputs()
    told = (labels.flatten() != IGNORED).nonzero()[:, 0]
    some = linear_cross_entropy(hidden, weight, labels, label_indices=told[:4])
    assert some.count.item() == 4
    alone = torch.full_like(labels, IGNORED)
    alone.flatten()[told[:4]] = labels.flatten()[told[:4]]
    torch.testing.assert_close(some.total, linear_cross_entropy(hidden, weight, alone).total)
    # labels without numbers, in front of a kernel that is not for them
    monkeypatch.setattr("pellucid.nn.losses._LinearCrossEntropy.apply", lambda hidden_CD, *_: hidden_CD.sum())
    loss = linear_cross_entropy(
        *(x.detach().to("meta") for x in (hidden, weight, labels)), label_indices=told.to("meta")
    )
    assert loss.total.device.type == "meta"


def test_sixteen_bits_learn_in_their_own_type():
    """The sum is float32, each gradient has the type of its leaf."""
    hidden, weight, bias, labels = inputs(dtype=torch.float32)
    low = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight, bias)]
    loss = linear_cross_entropy(low[0], low[1], labels, bias_V=low[2])
    (loss.total / 3).backward()
    assert loss.total.dtype == torch.float32
    (linear_cross_entropy(hidden, weight, labels, bias_V=bias).total / 3).backward()
    for mine, exact in zip(low, (hidden, weight, bias), strict=True):
        assert mine.grad.dtype == torch.bfloat16
        torch.testing.assert_close(mine.grad.float(), exact.grad, atol=0.05, rtol=0.05)


@pytest.mark.usefixtures("our_checks_only")
@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.zeros(3, 6, dtype=torch.long), r"labels are \(3, 6\), but hidden states are \(3, 7\)"),
        (torch.full((3, 7), 11), "label 11 is outside the vocabulary of 11"),
        (torch.full((3, 7), -1), "label -1 is outside"),
    ],
)
def test_labels_that_do_not_fit(labels, message):
    hidden, weight, _, _ = inputs()
    with pytest.raises(ShapeError, match=message):
        linear_cross_entropy(hidden, weight, labels)


@pytest.mark.parametrize("size", [1, 4])
def test_a_bias_is_not_spread_over_classes(size, our_checks_only):
    hidden, weight, labels = torch.zeros(1, 2, 3), torch.zeros(5, 3), torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(ShapeError, match=rf"the bias has shape \({size},\), but the weight \(5, 3\)"):
        linear_cross_entropy(hidden, weight, labels, bias_V=torch.zeros(size))
