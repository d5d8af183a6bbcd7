"""How rounding is told from a leak."""

import pytest
import torch
from torch import nn

from pellucid.audits import audit
from pellucid.audits.engine.compare import judge
from pellucid.audits.engine.context import AuditContext
from pellucid.audits.engine.target_run import Deviation
from pellucid.audits.probes.tokens_probe import TokensProbe


class Kernel(nn.Module):
    """Adds ``size`` of the next token in float32 only, as a kernel chosen by dtype might."""

    def __init__(self, size, dtype=torch.float32):
        super().__init__()
        self.table, self.out = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.size, self.leaks = size, dtype

    def forward(self, tokens):
        x = self.table(tokens)
        past = x.cumsum(1)
        if x.dtype == self.leaks:
            past = past + self.size * nn.functional.pad(x[:, 1:], (0, 0, 0, 1))
        return self.out(past)


@pytest.mark.parametrize(
    ("size", "status", "said"),
    [
        (1.0, "leak", "the two precisions run different code"),
        (3e-4, "fragile", "that float32 should need"),
        (1e-6, "pass", "rounding"),
        (0.0, "pass", "equal bit for bit in float32"),
    ],
)
def test_a_move_in_float32_alone(size, status, said):
    found = audit(Kernel(size), checks=["future"]).findings[0]
    assert found.status == status
    assert said in found.decided


def test_the_reason_for_deciding_without_float64_is_given():
    class Uncopied(Kernel):
        def __deepcopy__(self, memo):
            raise RuntimeError("no copies of this\nplease")

    found = audit(Uncopied(0.1), checks=["future"]).findings[0]
    assert found.status == "leak"
    assert found.decided.endswith("(no float64 copy: no copies of this please)")

    class Stubborn(Kernel):
        def forward(self, tokens):
            return super().forward(tokens).float()

    context = AuditContext(TokensProbe(Stubborn(0.0)))
    assert context.exact is None
    assert context.exact_reason == "its float64 copy answers in float32"


def test_the_first_wrong_entry_is_the_first_beyond_the_limit():
    context = AuditContext(TokensProbe(Kernel(0.0)))
    native, exact = context.runs
    sizes = torch.tensor([[0.0, 1e-14], [0.5, 0.9]], dtype=torch.float64)
    verdict = judge(context, [Deviation(native, sizes, 2.0), Deviation(exact, sizes, 2.0)], bits=True)
    assert (verdict.status, verdict.first, verdict.size) == ("leak", (1, 0), 0.9)
