"""What a plain module returns: where the logits and the loss are, and how it takes labels."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pellucid.batch import Batch

LABEL_NAMES = ("labels", "targets", "target", "y")
_IGNORED = (-100, -1)


def logits_in(result: object, shape: tuple[int, ...]) -> Tensor | None:
    """What is called ``logits``; else the first tensor of three dimensions, of ``shape`` ``[B, T]`` if there is one."""
    if isinstance(result, Tensor):
        return result
    named = dict(_fields(result))
    if isinstance(named.get("logits"), Tensor):
        return named["logits"]
    tensors = [each for each in _flat(named.values()) if each.is_floating_point() and each.dim() == 3]
    return next((each for each in tensors if each.shape[:2] == shape), tensors[0] if tensors else None)


def loss_in(result: object) -> Tensor | None:
    """What is called ``loss``; else the first single number."""
    named = dict(_fields(result))
    if isinstance(named.get("loss"), Tensor):
        return named["loss"] if named["loss"].numel() == 1 else None
    given = [result] if isinstance(result, Tensor) else _flat(named.values())
    return next((each for each in given if each.is_floating_point() and each.numel() == 1 and each.dim() < 2), None)


def describe_output(result: object) -> str:
    """The type and the tensors of a result."""
    shapes = [f"{name} {tuple(value.shape)}" for name, value in _fields(result) if isinstance(value, Tensor)]
    kind = type(result).__name__
    return f"{kind} ({', '.join(shapes)})" if shapes else kind


def shape_hint(shape: tuple[int, ...], rows: int, slots: int) -> str:
    """What a wrong shape looks like, and the way out; empty where it looks like nothing known."""
    if len(shape) == 3 and rows != slots and tuple(shape[:2]) == (slots, rows):
        return "slots stand before rows: return logits.transpose(0, 1)"
    if len(shape) == 3 and shape[0] == rows and shape[2] == slots:
        return "the vocabulary stands before the slots: return logits.transpose(1, 2)"
    if (len(shape) == 3 and tuple(shape[:2]) == (rows, 1)) or (len(shape) == 2 and shape[0] == rows):
        return "it scores one slot of a row only, the last perhaps: return the logits of every slot"
    if len(shape) == 2 and shape[0] == rows * slots:
        return f"rows and slots are flattened: return logits.view({rows}, {slots}, -1)"
    return ""


_MAPPING = re.compile(r"indices must be|not subscriptable|no attribute '(items|keys|get|\w+_ids)'|too many indices")


def call_hint(error: Exception) -> str:
    """The way out where a target cannot be called with token ids alone, by what it raised."""
    text = str(error)
    missing = re.findall(r"'(\w+)'", text) if "required positional argument" in text else []
    if missing:
        return f"it needs more than tokens: audit a function, lambda ids: model(ids, {', '.join(missing)})"
    if isinstance(error, KeyError) or _MAPPING.search(text):
        return "it takes no plain tensor: audit a function, lambda ids: model({'input_ids': ids})"
    if re.search(r"dtype|scalar type|type Float|Long", text):
        return "it takes numbers, not ids: put a table before it, nn.Sequential(nn.Embedding(50, features), model)"
    return "wrap the call in a function of token ids, or write a probe (pellucid audit TARGET --write-probe probe.py)"


def factory_hint(result: object) -> str:
    """For what returns a model in place of logits."""
    return "; it makes a model: call it, and audit what it made" if isinstance(result, nn.Module) else ""


def _fields(result: object) -> Iterator[tuple[str, Any]]:
    if isinstance(result, Mapping):
        yield from ((str(name), value) for name, value in result.items())
    elif is_dataclass(result) and not isinstance(result, type):
        yield from ((field.name, getattr(result, field.name, None)) for field in fields(result))
    elif isinstance(result, tuple | list):
        names = getattr(result, "_fields", range(len(result)))
        yield from ((str(name), value) for name, value in zip(names, result, strict=True))
    elif not isinstance(result, Tensor):
        known = ((name, getattr(result, name, None)) for name in ("logits", "loss"))
        yield from ((name, value) for name, value in known if value is not None)


def _flat(values: Iterable[Any]) -> list[Tensor]:
    """The tensors, those in tuples and lists too."""
    found: list[Tensor] = []
    for value in values:
        found += [value] if isinstance(value, Tensor) else _flat(value) if isinstance(value, tuple | list) else []
    return found


@dataclass(frozen=True)
class LabelConvention:
    """How a target takes labels.

    ``shifts``: it shifts them itself. ``ignored`` is the label of tokens without a loss. ``sums``: it returns a sum, no
    mean.
    """

    name: str
    shifts: bool
    ignored: int
    sums: bool = False

    def labels(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """``[B, T]`` labels, and how many tokens of the batch count."""
        labels_BT = torch.where(batch.loss_mask, batch.tokens, self.ignored)
        return labels_BT if self.shifts else _next(labels_BT, self.ignored), batch.loss_mask[:, 1:].sum()

    def total(self, loss: Tensor, expected: Tensor) -> Tensor:
        """The sum; the mean over nothing is no number, and counts as 0."""
        if self.sums:
            return loss
        return loss * expected if int(expected) else loss.nan_to_num(0.0) * 0.0

    def describe(self) -> str:
        ours, theirs = "the tokens themselves, which it shifts", "each slot's next token, for it shifts nothing"
        return f"its {self.name} are taken to be {ours if self.shifts else theirs}"


def label_argument(parameters: dict[str, inspect.Parameter]) -> str | None:
    """The argument for labels: one that may be left out or, where the name leaves no doubt, must be given."""
    for name in LABEL_NAMES:
        found = parameters.get(name)
        if found is not None and (found.default is None or (found.default is found.empty and name != "target")):
            return name
    return None


def find_label_convention(
    name: str, call: Callable[[Tensor, dict[str, Tensor]], Any], logits: Callable[[Tensor], Tensor], tokens_BT: Tensor
) -> LabelConvention | None:
    """The convention by which a target's loss comes out, compared with that of every known one; None where it has none.

    Where none explains it, the name decides: ``labels`` are shifted inside, as in transformers, ``targets`` are not.
    Then it is the loss that is wrong.
    """
    scores_BTV = logits(tokens_BT)
    for ignored in _IGNORED:
        own_BT = tokens_BT.clone()
        own_BT[0, 1] = ignored
        next_BT = _next(own_BT, ignored)
        try:
            losses = [loss_in(call(tokens_BT, {name: labels_BT.clone()})) for labels_BT in (own_BT, next_BT)]
        except Exception:  # noqa: BLE001 (anybody's code; it may ignore another label)
            continue
        if any(loss is None or not bool(loss.isfinite().all()) for loss in losses):
            continue
        for shifts, sums in ((name == "labels", False), (name != "labels", False), (True, True), (False, True)):
            wanted = [_loss(scores_BTV, labels_BT, shifts, ignored, sums) for labels_BT in (own_BT, next_BT)]
            if all(_near(got, want) for got, want in zip(losses, wanted, strict=True)):
                return LabelConvention(name, shifts, ignored, sums)
        return LabelConvention(name, name == "labels", ignored)
    return None


def _next(labels_BT: Tensor, ignored: int) -> Tensor:
    return torch.cat([labels_BT[:, 1:], torch.full_like(labels_BT[:, :1], ignored)], 1)


def _loss(scores_BTV: Tensor, labels_BT: Tensor, shifts: bool, ignored: int, sums: bool) -> Tensor:
    if shifts:
        scores_BTV, labels_BT = scores_BTV[:, :-1], labels_BT[:, 1:]
    scores_CV, labels_C = scores_BTV.flatten(0, 1).float(), labels_BT.flatten()
    return functional.cross_entropy(scores_CV, labels_C, ignore_index=ignored, reduction="sum" if sums else "mean")


def _near(got: Tensor | None, want: Tensor) -> bool:
    assert got is not None
    rtol = 0.03 if got.dtype in (torch.float16, torch.bfloat16) else 1e-4
    return torch.allclose(got.float().reshape(()), want, rtol=rtol, atol=1e-4)
