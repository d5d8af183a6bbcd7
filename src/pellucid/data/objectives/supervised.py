"""Objectives whose answers come with the data: checked here, so that no loss meets an impossible one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pellucid.batch import IGNORED, Batch
from pellucid.errors import ArgumentError, DataError
from pellucid.shapes import Tensor


@dataclass(frozen=True)
class Classification:
    """Each document has one of ``num_labels`` classes: ``targets`` int64 ``[C]``, :data:`IGNORED` where unknown."""

    num_labels: int
    overlap = 0

    def __post_init__(self) -> None:
        _check_num_labels(self.num_labels)

    def __call__(self, batch: Batch, generator: torch.Generator | None = None) -> Batch:
        targets = _targets(batch, "Classification", "int64 [C]")
        if targets.dtype != torch.int64 or targets.dim() != 1:
            raise _unlike(targets, "Classification", "int64 [C]")
        _check_labels(targets, self.num_labels)
        return batch


@dataclass(frozen=True)
class Regression:
    """Each document has ``num_outputs`` finite numbers: ``targets`` floating ``[C, num_outputs]``, one also ``[C]``."""

    num_outputs: int = 1
    overlap = 0

    def __post_init__(self) -> None:
        if self.num_outputs < 1:
            raise ArgumentError(f"num_outputs is {self.num_outputs}; a document has 1 or more")

    def __call__(self, batch: Batch, generator: torch.Generator | None = None) -> Batch:
        wanted = "floating [C]" if self.num_outputs == 1 else f"floating [C, {self.num_outputs}]"
        targets = _targets(batch, "Regression", wanted)
        shapes: list[tuple[int, ...]] = [(self.num_outputs,), ()] if self.num_outputs == 1 else [(self.num_outputs,)]
        if not targets.is_floating_point() or targets.shape[1:] not in shapes:
            raise _unlike(targets, "Regression", wanted)
        if not targets.isfinite().all():
            document = int((~targets.isfinite()).reshape(len(targets), -1).any(1).nonzero()[0])
            raise DataError(f"the target of document {document} is {targets[document].tolist()}; give finite numbers")
        return batch


@dataclass(frozen=True)
class Span:
    """An answer in each document: ``targets`` int64 ``[C, 2]``, its first and last position, both :data:`IGNORED`
    where there is none."""

    overlap = 0

    def __call__(self, batch: Batch, generator: torch.Generator | None = None) -> Batch:
        targets = _targets(batch, "Span", "int64 [C, 2]")
        if targets.dtype != torch.int64 or targets.shape[1:] != (2,):
            raise _unlike(targets, "Span", "int64 [C, 2]")
        lengths = [length for row in batch.document_lengths for length in row.values()]
        for document, ((first, last), length) in enumerate(zip(targets.tolist(), lengths, strict=True)):
            if not (0 <= first <= last < length or first == last == IGNORED):
                raise DataError(
                    f"the answer of document {document} goes from position {first} to {last}, but the document has "
                    f"positions 0 … {length - 1}; give first <= last inside it, or {IGNORED} twice for no answer"
                )
        return batch


@dataclass(frozen=True)
class TokenClassification:
    """Each token has one of ``num_labels`` classes: ``labels`` in place, without a shift."""

    num_labels: int
    overlap = 0

    def __post_init__(self) -> None:
        _check_num_labels(self.num_labels)

    def __call__(self, batch: Batch, generator: torch.Generator | None = None) -> Batch:
        if batch.labels is None:
            raise DataError("TokenClassification needs batch.labels, and it is None; give each token's class there")
        _check_labels(batch.labels.flatten(), self.num_labels)
        return batch


@dataclass(frozen=True)
class Contrastive:
    """Documents 2i and 2i+1 are a pair, all others negatives: ``targets`` becomes each document's partner, ``[C]``.

    >>> Contrastive()(Batch.packed([[5], [6], [7], [8]])).targets.tolist()
    [1, 0, 3, 2]
    """

    overlap = 0

    def __call__(self, batch: Batch, generator: torch.Generator | None = None) -> Batch:
        if batch.documents % 2:
            raise DataError(
                f"Contrastive pairs documents 2i and 2i+1, but the batch has {batch.documents}; keep pairs together"
            )
        partners = torch.arange(batch.documents, device=batch.tokens.device) ^ 1
        if batch.targets is not None and not batch.targets.equal(partners):
            raise DataError(
                f"Contrastive makes the targets itself, but the batch has some of shape {tuple(batch.targets.shape)}; "
                "leave them out"
            )
        return replace(batch, targets=partners)


def _targets(batch: Batch, objective: str, wanted: str) -> Tensor:
    if batch.targets is None:
        raise DataError(f"{objective} needs batch.targets ({wanted}), and it is None; give one entry a document")
    return batch.targets


def _unlike(targets: Tensor, objective: str, wanted: str) -> DataError:
    kind = str(targets.dtype).removeprefix("torch.")
    return DataError(f"{objective} needs targets {wanted}, but they are {kind} {list(targets.shape)}; convert them")


def _check_num_labels(num_labels: int) -> None:
    if num_labels < 2:
        raise ArgumentError(f"num_labels is {num_labels}; a choice needs 2 or more")


def _check_labels(found: Tensor, num_labels: int) -> None:
    wrong = (found != IGNORED) & ((found < 0) | (found >= num_labels))
    if wrong.any():
        raise DataError(
            f"class {int(found[wrong][0])} was found, but there are {num_labels} classes (0 … {num_labels - 1}); "
            f"raise num_labels, or write {IGNORED} for what is not known"
        )
