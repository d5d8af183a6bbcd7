"""Twins that leave something behind: attributes, hooks, flags, switches, gradients, buffers."""

from __future__ import annotations

import functools
from typing import ClassVar

import torch
from torch import Tensor

from pellucid.audits.twins.lm import Lm
from pellucid.audits.twins.modes import Recurrent
from pellucid.audits.twins.state import DrawsNumbers
from pellucid.audits.twins.toy import Toy
from pellucid.audits.twins.twin import Twin
from pellucid.batch import Batch


class KeepsTheLast(Recurrent):
    """The last hidden stream is kept in an attribute: someone's text lies around until the next request."""

    last: Tensor

    def mixed(self, x_BTD: Tensor) -> Tensor:
        self.last = x_BTD.detach()
        return x_BTD


class GrowsAList(Lm):
    """A statistic of every request is appended to a list in a nested object."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics: dict[str, list[float]] = {"means": []}

    def leave(self, x_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        self.statistics["means"].append(float(x_BTD.detach().mean()))
        return x_BTD


class SharedMemory(Recurrent):
    """A memo on the class remembers every prompt of every user."""

    seen: ClassVar[dict[tuple[int, ...], int]] = {}

    def forward(self, tokens: Tensor) -> Tensor:
        for row in tokens.tolist():
            self.seen[tuple(row)] = len(self.seen)
        return super().forward(tokens)


_PROMPTS: dict[tuple[int, ...], int] = {}


class KeepsPrompts(Recurrent):
    """Prompts are counted in a dictionary beside the class."""

    def forward(self, tokens: Tensor) -> Tensor:
        for row in tokens.tolist():
            _PROMPTS[tuple(row)] = _PROMPTS.get(tuple(row), 0) + 1
        return super().forward(tokens)


class CachesByContent(Recurrent):
    """``lru_cache`` around what depends on the text: every prompt stays in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.known = functools.lru_cache(maxsize=None)(_known)

    def forward(self, tokens: Tensor) -> Tensor:
        scale_B11 = torch.tensor([self.known(tuple(row)) for row in tokens.tolist()])[:, None, None]
        return super().forward(tokens) * scale_B11


def _known(row: tuple[int, ...]) -> float:
    return 1.0 + len(set(row)) / 100


class AddsHooks(Lm):
    """Each request registers a hook and nobody takes it away."""

    def entry(self, x_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        self.head.register_forward_hook(_nothing)
        return x_BTD


def _nothing(*_: object) -> None:
    """A hook that looks on."""


class OverwritesTargets(Toy):
    """The loss writes into the caller's choice of what is to be learnt."""

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        result = super().loss(batch)
        if batch.target_mask is not None:
            batch.target_mask[:, -1] = False
        return result


class WakesUp(Recurrent):
    """A part is put into train mode and left there."""

    def mixed(self, x_BTD: Tensor) -> Tensor:
        self.drop.train()
        return x_BTD


class SwitchesGradientsOff(Recurrent):
    """Gradients are switched off for everyone, where a ``with`` was meant."""

    def mixed(self, x_BTD: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        return x_BTD


class SwitchesTheDefaultDtype(Recurrent):
    """Torch's default dtype is changed for everyone."""

    def mixed(self, x_BTD: Tensor) -> Tensor:
        other = torch.bfloat16 if torch.get_default_dtype() == torch.float32 else torch.float32
        torch.set_default_dtype(other)
        return x_BTD


class LeavesGradients(Recurrent):
    """A measure of sensitivity is taken by ``backward``, which leaves gradients on every weight."""

    def mixed(self, x_BTD: Tensor) -> Tensor:
        if x_BTD.requires_grad:
            self.out(x_BTD).square().sum().backward(retain_graph=True)
        return x_BTD


class ReusesItsAnswer(Recurrent):
    """Answers are written into one tensor that is handed out again and again."""

    def forward(self, tokens: Tensor) -> Tensor:
        answer = super().forward(tokens)
        if torch.is_grad_enabled():
            return answer
        held = getattr(self, "_held", None)
        if held is None or held.shape != answer.shape or held.dtype != answer.dtype:
            self._held = answer.clone()
        return self._held.copy_(answer)


class CalibratesByLength(Recurrent):
    """The first request of each length sets a scale for all later ones of that length."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, float] = {}

    def mixed(self, x_BTD: Tensor) -> Tensor:
        return x_BTD / self.sizes.setdefault(x_BTD.shape[1], float(x_BTD.detach().abs().max()))


class MovesAverages(Recurrent):
    """A running mean goes on moving in eval mode."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(12))

    def mixed(self, x_BTD: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x_BTD.mean((0, 1)).to(self.mean), 0.1)
        return x_BTD


TWINS = (
    *(
        Twin(make, "trace")
        for make in (
            AddsHooks,
            OverwritesTargets,
            WakesUp,
            SwitchesGradientsOff,
            SwitchesTheDefaultDtype,
            LeavesGradients,
            ReusesItsAnswer,
            CalibratesByLength,
            MovesAverages,
        )
    ),
    *(
        Twin(make, "trace", "fragile")
        for make in (KeepsTheLast, GrowsAList, SharedMemory, KeepsPrompts, CachesByContent, DrawsNumbers)
    ),
)
