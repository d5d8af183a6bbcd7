"""Output heads: over tokens, or over whole documents.

Called, a head gives logits (or numbers, or vectors); ``loss`` gives ``(total, count)`` over a batch's labels or
targets. ``name`` is what its weights are called in a model.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from pellucid.batch import IGNORED, Batch
from pellucid.errors import ArgumentError, ShapeError
from pellucid.nn.ffn import Activation
from pellucid.nn.losses import Loss, linear_cross_entropy
from pellucid.nn.norms import at_least_float32
from pellucid.nn.pooling import Documents, Pooling, documents_of, pooled
from pellucid.shapes import Float, Tensor
from pellucid.visibility import Coordinates


class LanguageModelHead(nn.Linear):
    """Logits of the next token: ``softcap(multiplier · (W x + b))``. A token table of another size is led to first."""

    name: ClassVar[str] = "lm_head"

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        bias: bool,
        embedding_size: int | None = None,
        logit_multiplier: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        table = hidden_size if embedding_size is None else embedding_size
        super().__init__(table, vocab_size, bias=bias)
        self.logit_multiplier = logit_multiplier
        self.softcap = softcap
        self.project: nn.Module = nn.Identity() if table == hidden_size else nn.Linear(hidden_size, table, bias=False)

    def features(self, hidden_BTD: Tensor) -> Float[Tensor, "... E"]:
        """What the token table is multiplied by."""
        projected: Tensor = self.project(hidden_BTD)
        return projected

    def forward(self, hidden_BTD: Float[Tensor, "B T D"], coords: Coordinates | None = None) -> Float[Tensor, "B T V"]:
        logits = super().forward(self.features(hidden_BTD))
        if self.logit_multiplier != 1.0:
            logits = logits * self.logit_multiplier
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def loss(self, hidden_BTD: Float[Tensor, "B T D"], batch: Batch, label_smoothing: float = 0.0) -> Loss:
        """Summed cross-entropy in nats over the positions that ``batch.labels`` counts; never holds all logits."""
        return linear_cross_entropy(
            self.features(hidden_BTD),
            self.weight,
            _labels(batch),
            bias_V=self.bias,
            label_indices=None if torch.compiler.is_compiling() else batch.label_indices,
            softcap=self.softcap,
            multiplier=self.logit_multiplier,
            label_smoothing=label_smoothing,
        )


class MaskedLMHead(LanguageModelHead):
    """The same of ``norm(act(W x + b))`` (Devlin et al. 2019's code)."""

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        activation: str,
        dense_bias: bool,
        norm: nn.Module,
        embedding_size: int | None = None,
        bias: bool,
        logit_multiplier: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        table = hidden_size if embedding_size is None else embedding_size
        super().__init__(table, vocab_size, bias=bias, logit_multiplier=logit_multiplier, softcap=softcap)
        self.dense = nn.Linear(hidden_size, table, bias=dense_bias)
        self.activation = Activation(activation)
        self.norm = norm

    def features(self, hidden_BTD: Tensor) -> Float[Tensor, "... E"]:
        normed: Tensor = self.norm(self.activation(self.dense(hidden_BTD)))
        return normed


class TokenClassifier(nn.Linear):
    """One of ``labels`` classes for each token: ``W dropout(x) + b``."""

    name: ClassVar[str] = "token_classifier"

    def __init__(self, hidden_size: int, num_labels: int, *, bias: bool, dropout: float) -> None:
        super().__init__(hidden_size, num_labels, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_BTD: Float[Tensor, "B T D"], coords: Coordinates | None = None) -> Float[Tensor, "B T C"]:
        return super().forward(self.dropout(hidden_BTD))

    def loss(self, hidden_BTD: Float[Tensor, "B T D"], batch: Batch, label_smoothing: float = 0.0) -> Loss:
        """Summed cross-entropy over the tokens that have a label."""
        return linear_cross_entropy(
            self.dropout(hidden_BTD),
            self.weight,
            _labels(batch),
            bias_V=self.bias,
            label_indices=None if torch.compiler.is_compiling() else batch.label_indices,
            label_smoothing=label_smoothing,
        )


class SpanHead(nn.Linear):
    """Two numbers a token: how likely an answer begins there, and ends there (Devlin et al. 2019 §4.2)."""

    name: ClassVar[str] = "span_head"

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 2)

    def forward(self, hidden_BTD: Float[Tensor, "B T D"], coords: Coordinates | None = None) -> Float[Tensor, "B T 2"]:
        return super().forward(hidden_BTD)

    def loss(self, hidden_BTD: Float[Tensor, "B T D"], batch: Batch, label_smoothing: float = 0.0) -> Loss:
        """The mean of both ends' cross-entropies among the tokens of the document, summed over answered documents."""
        _refuse_smoothing(label_smoothing)
        documents = documents_of(batch.coordinates())
        targets_C2 = _targets(batch, documents, (2,))
        scores_P2 = at_least_float32(self(hidden_BTD)).flatten(0, 1)[documents.slots]
        total_C2 = documents.logsumexp(scores_P2) - _chosen(scores_P2, documents, targets_C2)
        answered = (targets_C2 != IGNORED).all(1)
        return Loss(torch.where(answered[:, None], total_C2, 0.0).sum() / 2, answered.sum())


class DocumentHead(nn.Module):
    """What heads about whole documents share: one vector each, perhaps through a dense layer with an activation."""

    name: ClassVar[str] = "document_head"
    out_proj: nn.Module

    def __init__(self, hidden_size: int, *, pooling: Pooling, pooler: str, dropout: float) -> None:
        super().__init__()
        self.pooling: Pooling = pooling
        self.dense: nn.Module = nn.Identity() if pooler == "none" else nn.Linear(hidden_size, hidden_size)
        self.activation: nn.Module = nn.Identity() if pooler == "none" else Activation(pooler)
        self.dropout = nn.Dropout(dropout)

    def vectors(self, hidden_BTD: Tensor, coords: Coordinates) -> Float[Tensor, "C D"]:
        """One vector for each document, in the order of ``Batch.targets``."""
        vectors: Tensor = self.dropout(self.activation(self.dense(pooled(hidden_BTD, coords, self.pooling))))
        return vectors

    def forward(self, hidden_BTD: Float[Tensor, "B T D"], coords: Coordinates) -> Float[Tensor, "C L"]:
        out: Tensor = self.out_proj(self.vectors(hidden_BTD, coords))
        return out


class SequenceClassifier(DocumentHead):
    """One of ``labels`` classes for each document."""

    name: ClassVar[str] = "classifier"

    def __init__(
        self,
        hidden_size: int,
        num_labels: int,
        *,
        pooling: Pooling,
        pooler: str,
        dropout: float,
        bias: bool,
    ) -> None:
        super().__init__(hidden_size, pooling=pooling, pooler=pooler, dropout=dropout)
        self.out_proj = nn.Linear(hidden_size, num_labels, bias=bias)

    def loss(self, hidden_BTD: Float[Tensor, "B T D"], batch: Batch, label_smoothing: float = 0.0) -> Loss:
        """Summed cross-entropy over the documents that have a class."""
        coords = batch.coordinates()
        targets_C = _targets(batch, documents_of(coords), ())
        logits = at_least_float32(self(hidden_BTD, coords))
        _refuse_outside(targets_C, logits.shape[1])
        total = F.cross_entropy(
            logits, targets_C, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing
        )
        return Loss(total, (targets_C != IGNORED).sum())


class RegressionHead(DocumentHead):
    """``outputs`` numbers for each document."""

    name: ClassVar[str] = "regressor"

    def __init__(self, hidden_size: int, num_outputs: int, *, pooling: Pooling, pooler: str, dropout: float) -> None:
        super().__init__(hidden_size, pooling=pooling, pooler=pooler, dropout=dropout)
        self.out_proj = nn.Linear(hidden_size, num_outputs)

    def loss(self, hidden_BTD: Float[Tensor, "B T D"], batch: Batch, label_smoothing: float = 0.0) -> Loss:
        """Summed squared error, a document's numbers averaged; NaN targets do not count."""
        _refuse_smoothing(label_smoothing)
        coords = batch.coordinates()
        numbers = at_least_float32(self(hidden_BTD, coords))
        wanted = _targets(batch, documents_of(coords), None).to(numbers.dtype).view(len(numbers), -1)
        if wanted.shape != numbers.shape:
            raise ShapeError(
                f"targets hold {wanted.shape[1]} numbers a document, but the head gives {numbers.shape[1]}"
            )
        known = ~wanted.isnan().any(1)
        error = torch.where(known[:, None], numbers - torch.where(known[:, None], wanted, 0.0), 0.0)
        return Loss(error.square().mean(1).sum(), known.sum())


class EmbeddingHead(DocumentHead):
    """A vector for each document; documents 2i and 2i + 1 of a batch are a pair (Reimers & Gurevych 2019; SimCSE)."""

    name: ClassVar[str] = "embedder"

    def __init__(
        self, hidden_size: int, *, pooling: Pooling, projection_dim: int | None, normalize: bool, temperature: float
    ) -> None:
        super().__init__(hidden_size, pooling=pooling, pooler="none", dropout=0.0)
        self.out_proj: nn.Module = (
            nn.Identity() if projection_dim is None else nn.Linear(hidden_size, projection_dim, bias=False)
        )
        self.normalize = normalize
        self.temperature = temperature

    def forward(self, hidden_BTD: Float[Tensor, "B T D"], coords: Coordinates) -> Float[Tensor, "C L"]:
        vectors = super().forward(hidden_BTD, coords)
        return F.normalize(vectors, dim=-1) if self.normalize else vectors

    def loss(self, hidden_BTD: Float[Tensor, "B T D"], batch: Batch, label_smoothing: float = 0.0) -> Loss:
        """Each document must find its pair among all others of the batch (InfoNCE; van den Oord et al. 2018 eq. 4)."""
        _refuse_smoothing(label_smoothing)
        vectors = at_least_float32(self(hidden_BTD, batch.coordinates()))
        count = len(vectors)
        if count % 2:
            raise ArgumentError(
                f"a batch of pairs has an even number of documents, not {count}; give documents two by two"
            )
        with torch.autocast(vectors.device.type, enabled=False):  # near vectors differ by less than 16 bits tell
            scores_CC = (vectors @ vectors.T) / self.temperature
        itself = torch.eye(count, dtype=torch.bool, device=vectors.device)
        pair_C = torch.arange(count, device=vectors.device) ^ 1
        total = F.cross_entropy(scores_CC.masked_fill(itself, -torch.inf), pair_C, reduction="sum")
        return Loss(total, torch.tensor(count, device=vectors.device))


Head = LanguageModelHead | TokenClassifier | SpanHead | SequenceClassifier | RegressionHead | EmbeddingHead


def _labels(batch: Batch) -> Tensor:
    if batch.labels is None:
        raise ArgumentError(
            "want='loss' needs labels; make them with an objective, pellucid.data.objectives.causal(batch) for example"
        )
    return batch.labels


def _targets(batch: Batch, documents: Documents, shape: tuple[int, ...] | None) -> Tensor:
    """``batch.targets``, checked: one entry a document, of this shape (None: any)."""
    count = len(documents.first)
    if batch.targets is None:
        raise ArgumentError(
            f"want='loss' needs targets, one for each of the batch's {count} documents; give Batch.targets"
        )
    found = tuple(batch.targets.shape)
    if found[:1] != (count,) or (shape is not None and found[1:] != shape):
        raise ShapeError(
            f"targets have shape {found}, but the batch has {count} documents, row by row; give one entry for each"
        )
    return batch.targets


def _refuse_smoothing(label_smoothing: float) -> None:
    if label_smoothing:
        raise ArgumentError(
            f"label_smoothing is {label_smoothing}, but this head has no labels to smooth; leave it at 0"
        )


def _refuse_outside(targets_C: Tensor, classes: int) -> None:
    """Seen on a CPU, where looking costs nothing."""
    if targets_C.device.type != "cpu":
        return
    wrong = targets_C[(targets_C != IGNORED) & ((targets_C < 0) | (targets_C >= classes))]
    if len(wrong):
        raise ArgumentError(f"a target is {int(wrong[0])}, but there are {classes} classes; count from 0")


def _chosen(scores_P2: Tensor, documents: Documents, targets_C2: Tensor) -> Tensor:
    """``[C, 2]``: the scores at both ends of each answer (those of the first token where there is none)."""
    sizes_C = torch.bincount(documents.owners, minlength=len(documents.first))
    wrong = (targets_C2 != IGNORED) & ((targets_C2 < 0) | (targets_C2 >= sizes_C[:, None]))
    if targets_C2.device.type == "cpu" and bool(wrong.any()):
        value = int(targets_C2[wrong][0])
        raise ArgumentError(f"an answer's end is {value}, which is outside its document; count its tokens from 0")
    begins_C = sizes_C.cumsum(0) - sizes_C
    coords_C2 = begins_C[:, None] + torch.where(targets_C2 == IGNORED, 0, targets_C2)
    return scores_P2.gather(0, coords_C2)
