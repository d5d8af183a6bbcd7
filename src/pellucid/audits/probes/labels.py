"""A loss that a plain module gives when it is handed labels: by which name, for which slot, over how many."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pellucid.audits.probes.outputs import loss_in
from pellucid.batch import Batch

NAMES = ("labels", "targets", "target", "y")
_IGNORED = (-100, -1)


@dataclass(frozen=True)
class Labels:
    """``shifts``: the target shifts them. ``ignored`` is the label of what is not learnt. ``sums``: a sum, no mean."""

    name: str
    shifts: bool
    ignored: int
    sums: bool = False

    def of(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """What is handed over, and how many tokens of it count."""
        labels_BT = torch.where(batch.loss_mask, batch.tokens, self.ignored)
        if not self.shifts:
            labels_BT = _next(labels_BT, self.ignored)
        return labels_BT, batch.loss_mask[:, 1:].sum()

    def total(self, loss: Tensor, expected: Tensor) -> Tensor:
        """The sum; the mean over nothing is no number, which says nothing."""
        if self.sums:
            return loss
        return loss * expected if int(expected) else loss.nan_to_num(0.0) * 0.0

    def describe(self) -> str:
        whose = (
            "the tokens themselves, which it shifts" if self.shifts else "each slot's next token, for it shifts nothing"
        )
        return f"its {self.name} are taken to be {whose}"


def label_argument(parameters: dict[str, inspect.Parameter]) -> str | None:
    """By which name labels are handed over: an argument that may be left out, or, with no doubt about it, must not."""
    for name in NAMES:
        found = parameters.get(name)
        if found is not None and (found.default is None or (found.default is found.empty and name != "target")):
            return name
    return None


def labels_of(
    name: str, call: Callable[[Tensor, dict[str, Tensor]], Any], logits: Callable[[Tensor], Tensor], tokens_BT: Tensor
) -> Labels | None:
    """How a loss comes: its value is compared with that of every known way. None where none comes.

    Where no way explains it, what the name says is believed: ``labels`` are shifted inside, as transformers has it,
    ``targets`` are not. Then the loss is what is wrong.
    """
    scores_BTV = logits(tokens_BT)
    for ignored in _IGNORED:
        holed_BT = tokens_BT.clone()
        holed_BT[0, 1] = ignored
        own_BT, next_BT = holed_BT, _next(holed_BT, ignored)
        try:
            losses = [loss_in(call(tokens_BT, {name: labels_BT.clone()})) for labels_BT in (own_BT, next_BT)]
        except Exception:  # noqa: BLE001 (anybody's code; it may know another label to be ignored)
            continue
        if any(loss is None or not bool(loss.isfinite().all()) for loss in losses):
            continue
        for shifts, sums in ((name == "labels", False), (name != "labels", False), (True, True), (False, True)):
            wanted = [_loss(scores_BTV, labels_BT, shifts, ignored, sums) for labels_BT in (own_BT, next_BT)]
            if all(_near(got, want) for got, want in zip(losses, wanted, strict=True)):
                return Labels(name, shifts, ignored, sums)
        return Labels(name, name == "labels", ignored)
    return None


def _next(labels_BT: Tensor, ignored: int) -> Tensor:
    return torch.cat([labels_BT[:, 1:], torch.full_like(labels_BT[:, :1], ignored)], 1)


def _loss(scores_BTV: Tensor, labels_BT: Tensor, shifts: bool, ignored: int, sums: bool) -> Tensor:
    if shifts:
        scores_BTV, labels_BT = scores_BTV[:, :-1], labels_BT[:, 1:]
    how = "sum" if sums else "mean"
    return functional.cross_entropy(
        scores_BTV.flatten(0, 1).float(), labels_BT.flatten(), ignore_index=ignored, reduction=how
    )


def _near(got: Tensor | None, want: Tensor) -> bool:
    coarse = got is not None and got.dtype in (torch.float16, torch.bfloat16)
    return got is not None and bool(
        torch.allclose(got.float().reshape(()), want, rtol=0.03 if coarse else 1e-4, atol=1e-4)
    )
