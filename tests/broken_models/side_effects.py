"""Models that leave something behind: attributes, hooks, flags, switches, gradients, buffers."""

from __future__ import annotations

import functools
from typing import ClassVar

import torch
from torch import Tensor

from broken_models.catalog import caught_by
from broken_models.hf_style import HFStyleDecoder
from broken_models.train_eval import Recurrent
from pellucid.audits.broken.tiny_decoder import Slots, TinyDecoder
from pellucid.batch import Batch


class KeepsTheLast(Recurrent):
    """The last hidden stream is kept in an attribute: someone's text lies around until the next request."""

    last: Tensor

    def mixed(self, x_BTD: Tensor) -> Tensor:
        self.last = x_BTD.detach()
        return x_BTD


class GrowsAList(HFStyleDecoder):
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


class AddsHooks(HFStyleDecoder):
    """Each request registers a hook and nobody takes it away."""

    def entry(self, x_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        self.head.register_forward_hook(_nothing)
        return x_BTD


def _nothing(*_: object) -> None:
    """A hook that looks on."""


class OverwritesTargets(TinyDecoder):
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


class CountsCalls(TinyDecoder):
    """A buffer counts the calls."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def entry(self, x_BTD: Tensor, queries: Slots, batch: Batch) -> Tensor:
        self.calls += 1
        return super().entry(x_BTD, queries, batch)


class DrawsNumbers(TinyDecoder):
    """Random numbers are drawn and not used: the caller's generator still moves."""

    def mixed(self, x_BTD: Tensor, queries: Slots) -> Tensor:
        return x_BTD + 0 * torch.rand(())


class WritesIntoTokens(TinyDecoder):
    """Padding is overwritten in place, in the caller's own tensor."""

    def entry(self, x_BTD: Tensor, queries: Slots, batch: Batch) -> Tensor:
        batch.tokens[batch.segments == 0] = 1
        return super().entry(x_BTD, queries, batch)


class WritesIntoTheMask(HFStyleDecoder):
    """The caller's mask is inverted in place on its way to a bias."""

    def leave(self, x_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        mask_BT.sub_(1)
        return x_BTD


class GrowsItsTable(TinyDecoder):
    """Places are looked up in a table that the first request builds; a longer one grows it from one too far."""

    def __init__(self) -> None:
        super().__init__()
        self.known = torch.zeros(0, dtype=torch.int64)

    def counted_positions(self, queries: Slots) -> Tensor:
        have, need = len(self.known), int(queries.positions.max()) + 1
        if need > have:
            more = torch.arange(have, need) + (have > 0)
            self.known = torch.cat([self.known, more.clamp(max=self.max_length - 1)])
        return self.known[queries.positions]


class RemembersTheLast(TinyDecoder):
    """Something of the last request, kept in an attribute, tints the next answer."""

    _last: float = 0.0

    def mixed(self, x_BTD: Tensor, queries: Slots) -> Tensor:
        before, self._last = self._last, float(x_BTD[0, 0, 0].detach())
        return x_BTD + before * torch.linspace(-1, 1, x_BTD.shape[-1]).to(x_BTD)


BROKEN_MODELS = (
    *caught_by(
        "trace",
        AddsHooks,
        OverwritesTargets,
        WakesUp,
        SwitchesGradientsOff,
        SwitchesTheDefaultDtype,
        LeavesGradients,
        ReusesItsAnswer,
        CalibratesByLength,
        MovesAverages,
        CountsCalls,
        WritesIntoTokens,
        WritesIntoTheMask,
        RemembersTheLast,
    ),
    *caught_by(
        "trace", KeepsTheLast, GrowsAList, SharedMemory, KeepsPrompts, CachesByContent, DrawsNumbers, verdict="fragile"
    ),
    *caught_by("determinism", GrowsItsTable),
)
