"""Our Muon is torch's, without the rounding; its products do to singular values what the polynomial says."""

from typing import Any

import pytest
import torch
from torch import nn

from pellucid.training.optim import Muon, orthogonalised

SHAPES = [(6, 4), (4, 6), (5, 5), (6, 4), (4, 6), (1, 3)]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
def test_products_do_to_singular_values_what_the_polynomial_says(shape: tuple[int, int]) -> None:
    """Slow and readable: decompose, apply the polynomial to each singular value, put together again."""
    g = random(3, *shape)
    u, s, vt = torch.linalg.svd(g / torch.linalg.matrix_norm(g, keepdim=True), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    torch.testing.assert_close(orthogonalised(g), u @ torch.diag_embed(s) @ vt, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", [(3, 5, 5), (2, 4, 9), (2, 9, 4)])
def test_singular_values_come_near_one(shape: tuple[int, int, int]) -> None:
    found = torch.linalg.svdvals(orthogonalised(random(*shape), steps=6))
    assert found.min() > 0.5
    assert found.max() < 1.3


def stepped(kind: type[torch.optim.Muon], **settings: Any) -> tuple[list[nn.Parameter], torch.optim.Muon]:
    parameters = [nn.Parameter(random(*shape, seed=n).float()) for n, shape in enumerate([*SHAPES, (2, 2)])]
    optimizer = kind(parameters, lr=0.1, **settings)
    for step in range(3):
        for n, parameter in enumerate(parameters[:-1]):  # the last one has no gradient
            parameter.grad = random(*parameter.shape, seed=100 + 10 * step + n).float()
        optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_torchs_muon(adjust: str, nesterov: bool, decay: float, dtype: torch.dtype) -> None:
    """Equal but for the rounding of bfloat16, in which torch's always works; what is remembered is equal."""
    settings = {"adjust_lr_fn": adjust, "nesterov": nesterov, "weight_decay": decay, "momentum": 0.8}
    started = [random(*shape, seed=n).float() for n, shape in enumerate([*SHAPES, (2, 2)])]
    theirs, their = stepped(torch.optim.Muon, **settings)
    ours, our = stepped(Muon, dtype=dtype, **settings)
    for before, mine, other in zip(started, ours, theirs, strict=True):
        moved, apart = (other - before).norm(), (mine - other).norm()
        assert apart <= 0.03 * moved
        assert our.state[mine].keys() == their.state[other].keys()
        for what, value in our.state[mine].items():
            torch.testing.assert_close(value, their.state[other][what])
    assert torch.equal(ours[-1], started[-1])


def test_float32_is_closer_to_the_exact_step() -> None:
    g = random(1, 30, 20)
    errors = [
        (orthogonalised(g.to(dtype)).double() - orthogonalised(g)).abs().max().item()
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert errors[0] < 1e-5 < errors[1] < 0.1


def test_a_gradient_of_zero_changes_nothing() -> None:
    parameter = nn.Parameter(torch.ones(3, 3))
    parameter.grad = torch.zeros(3, 3)
    Muon([parameter], lr=0.1, weight_decay=0.0).step()
    assert (parameter == 1).all()


def test_a_stack_is_as_many_matrices() -> None:
    """Experts ``[E, M, N]``: each changed as if it were a parameter of its own."""
    stack, other = nn.Parameter(random(3, 6, 4).float()), nn.Parameter(random(2, 2, seed=5).float())
    apart = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    together, single = Muon([stack, other], lr=0.1, weight_decay=0.3), Muon(apart, lr=0.1, weight_decay=0.3)
    for step in range(3):
        stack.grad = random(3, 6, 4, seed=step).float()
        for number, matrix in enumerate(apart):
            matrix.grad = stack.grad[number].clone()
        together.step()
        single.step()
    torch.testing.assert_close(stack.detach(), torch.stack([matrix.detach() for matrix in apart]))
    assert together.state[stack]["momentum_buffer"].shape == (3, 6, 4)
