"""``Examples``: tokenized documents together with the labels of each, or of each of their tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from pellucid.batch import IGNORED
from pellucid.data.packing import concat_ranges
from pellucid.data.token_store import TokenStore
from pellucid.errors import DataError

COLUMNS = ("labels", "groups", "types")


@dataclass(frozen=True, eq=False)
class Examples:
    """Documents with labels; a :class:`~pellucid.data.Loader` keeps each label with its document.

    ``columns`` (any of labels, groups, types) have one entry a token of ``store``. ``targets`` has one a document,
    as in :class:`~pellucid.data.Batch`. ``source`` has the encoder's input, document for document. ``together``
    neighbours always share a row. Only documents that are not ``whole`` may be cut into pieces. ``classes`` names
    the classes, in order.
    """

    store: TokenStore
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    targets: np.ndarray | None = None
    source: TokenStore | None = None
    together: int = 1
    whole: bool = True
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        documents, tokens = len(self.store), len(self.store.tokens)
        for name, column in self.columns.items():
            if name not in COLUMNS:
                raise DataError(f"there is no column {name!r}; choose from {', '.join(COLUMNS)}")
            if column.shape != (tokens,):
                raise DataError(f"{name} has shape {list(column.shape)}, but there are {tokens} tokens; give one each")
        for name, given in (("targets", self.targets), ("source", self.source)):
            if given is not None and len(given) != documents:
                raise DataError(f"{name} has {len(given)} entries, but there are {documents} documents; give one each")
        if documents % self.together:
            raise DataError(f"{documents} documents do not make groups of {self.together}; leave none out")
        if not self.whole and (self.targets is not None or self.source is not None or self.together > 1):
            raise DataError("documents with targets, a source or partners cannot be cut into pieces; set whole")
        if self.whole and not self.store.lengths.all():
            number = int((self.store.lengths == 0).argmax())
            raise DataError(f"document {self.store.name(number)!r} holds no token; leave it out with its label")

    def __len__(self) -> int:
        return len(self.store)

    def digest(self) -> str:
        """SHA-256 over ids, columns, targets and sources."""
        parts = [self.store.digest(), f"{self.together} {self.whole}"]
        arrays = {**self.columns, **({} if self.targets is None else {"targets": self.targets})}
        for name, array in sorted(arrays.items()):
            kind = "<f8" if array.dtype.kind == "f" else "<i8"
            data = hashlib.sha256(array.astype(kind).tobytes()).hexdigest()
            parts.append(f"{name} {kind} {list(array.shape)} {data}")
        parts.append("" if self.source is None else self.source.digest())
        return hashlib.sha256("\n".join(["pellucid examples 1", *parts]).encode()).hexdigest()

    def cut(self, length: int, source_length: int | None = None) -> Examples:
        """Each document down to its first ``length`` tokens, and each source to ``source_length``.

        A span (``targets`` ``[C, 2]``) that is no longer complete becomes :data:`IGNORED`, twice.
        Groups share a row, so each of their documents gets its part of ``length``.
        """
        store, index = _truncated(self.store, length // self.together)
        source = self.source
        if source is not None and source_length is not None:
            source, _ = _truncated(source, source_length)
        targets = self.targets
        if targets is not None and targets.dtype.kind == "i" and targets.ndim == 2:
            lost = targets[:, 1] >= store.lengths
            targets = np.where(lost[:, None], IGNORED, targets)
        columns = {name: column[index] for name, column in self.columns.items()}
        return replace(self, store=store, columns=columns, targets=targets, source=source)


def _truncated(store: TokenStore, length: int) -> tuple[TokenStore, np.ndarray]:
    """The store with documents of at most ``length`` tokens, and which of its tokens are left."""
    if length < 1:
        raise DataError(f"documents cannot be cut to {length} tokens; keep 1 or more")
    sizes = np.minimum(store.lengths, length)
    index, _ = concat_ranges(store.bounds[:-1], sizes)
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    return replace(store, tokens=store.tokens[index], bounds=bounds), index
